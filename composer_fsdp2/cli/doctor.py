"""`composer-fsdp2 doctor`: what is installed, what a run would do with it, and what to do first."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from composer_fsdp2.cli.console import print_line, reported
from composer_fsdp2.cli.exit_codes import ExitCode
from composer_fsdp2.cli.options import AsJson, GpusPerNode, Overrides, RanksOfRun
from composer_fsdp2.errors import CheckpointError, ConfigError, PatchError, PlanError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from composer_fsdp2.plan.wrap_plan import WrapPlan
    from composer_fsdp2.tools.doctor import Finding, Machine, Run

__all__ = ["HELP", "Report", "diagnose", "doctor", "print_report"]

HELP = """Show what would make CONFIG fail; without CONFIG, what is installed.

CONFIG is a training YAML of LLM Foundry, read as `composer-fsdp2 train` reads it. doctor goes
through what the run goes through before its first batch: it imports `code_paths`, applies config
transforms (which may write data), builds everything that has a name, the model on meta, looks for
every folder, and plans the units. No process is started and nothing is downloaded.

- `composer-fsdp2 doctor run.yaml`

- `composer-fsdp2 doctor run.yaml --ranks 64 --gpus-per-node 8`: for a cluster this machine is not

- `composer-fsdp2 doctor --verbose`: for a bug report, with everything replaced in Composer

Problems come first, then warnings, then the run.

Exit code 0 if nothing stands in the way of the run, 1 if something would make it fail, 2 for a
mistake in the command line.
"""

_PACKAGES = ("composer-fsdp2", "torch", "mosaicml", "llm-foundry", "transformers")
_VARIABLES = ("FSDP_VERSION", "RANK", "WORLD_SIZE")


def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="A training run of LLM Foundry.", metavar="CONFIG")
    ] = None,
    overrides: Overrides = None,
    ranks: RanksOfRun = None,
    gpus_per_node: GpusPerNode = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="All lines, and every place in Composer and torch relied on."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Prints to standard output, for a bug report."""
    with reported():
        try:
            _check_command_line(config, overrides or [], ranks, gpus_per_node)
            report = diagnose(config, overrides or [], ranks, gpus_per_node)
        except ConfigError as error:
            if as_json:
                _print_json(_read_machine(), None, [], str(error))
            raise
        if as_json:
            _print_json(report.machine, report.run, report.findings)
        else:
            print_report(report, verbose=verbose)
        raise typer.Exit(report.exit_code)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Facts and findings of doctor."""

    machine: Machine
    run: Run | None
    findings: list[Finding]
    units: WrapPlan | None = None

    @property
    def exit_code(self) -> ExitCode:
        """Whether the run would fail."""
        problem = any(found.level == "problem" for found in self.findings)
        return ExitCode.FAILED if problem else ExitCode.OK


def diagnose(
    config: Path | None,
    overrides: list[str],
    ranks: int | None,
    gpus_per_node: int | None,
) -> Report:
    """Looks at the machine, and at a run if one is given.

    Args:
        config: the run.
        overrides: settings replaced in it.
        ranks: of the run; `None` for what `train` would start here.
        gpus_per_node: where it would run; `None` for here.
    """
    from composer_fsdp2.tools.doctor import examine

    # LLM Foundry's own imports warn, which is no news to who asks about a run.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        machine = _read_machine()
        if config is not None:
            _import_foundry(machine)
    run, rehearsed, units = None, [], None
    if config is not None:
        numbers = _processes(machine, ranks, gpus_per_node)
        is_here = gpus_per_node is None
        run, rehearsed, units = _try_run(config, overrides, machine, numbers, is_here=is_here)
    findings = examine(machine, run, rehearsed)
    return Report(machine=machine, run=run, findings=findings, units=units)


def _import_foundry(machine: Machine) -> None:
    """Imports what a rehearsal needs; what cannot be imported, the rehearsal reports."""
    if machine.versions.get("llm-foundry") is None or not machine.has_pkg_resources:
        return
    for module in ("llmfoundry.command_utils", "composer_fsdp2.foundry.rehearsal.run"):
        importlib.import_module(module)


# --- Facts. ---


def _read_machine() -> Machine:
    """Looks at the installation. Imports Composer, whose sources are compared."""
    import torch

    from composer_fsdp2.shard.communication import nccl_version
    from composer_fsdp2.shard.nccl_environment import VARIABLES
    from composer_fsdp2.shard.torch_private.members import member_states
    from composer_fsdp2.tools.doctor import Gpu, Machine
    from composer_fsdp2.trainer.patches import patch_states

    count = torch.cuda.device_count()
    devices = [torch.cuda.get_device_properties(number) for number in range(count)]
    read = (*_VARIABLES, *VARIABLES)
    return Machine(
        versions={"python": platform.python_version(), **{p: _version(p) for p in _PACKAGES}},
        gpus=tuple(Gpu(device.name, device.total_memory) for device in devices),
        patches=patch_states(),
        members=member_states(),
        environment={name: os.environ[name] for name in read if name in os.environ},
        has_pkg_resources=importlib.util.find_spec("pkg_resources") is not None,
        nccl=nccl_version(),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_command_line(
    config: Path | None, overrides: list[str], ranks: int | None, gpus_per_node: int | None
) -> None:
    """Checks what can be checked without an import that takes seconds.

    Raises:
        ConfigError: the command line cannot be, whatever the run is.
    """
    from composer_fsdp2.foundry.run_file import check_named

    if config is not None:
        check_named(config, overrides)
    elif ranks or gpus_per_node:
        raise ConfigError(
            "--ranks or --gpus-per-node is given without CONFIG. It would have no effect. "
            "Give the training YAML they are for."
        )
    if ranks and gpus_per_node:
        _check_full_nodes(ranks, min(ranks, gpus_per_node))


def _try_run(
    path: Path,
    overrides: list[str],
    machine: Machine,
    numbers: tuple[int, int],
    *,
    is_here: bool,
) -> tuple[Run | None, list[Finding], WrapPlan | None]:
    """Reads a run and goes through it; what `train` would refuse it for is found as well."""
    from composer_fsdp2.tools.doctor import findings_of

    try:
        cfg, run = _read_run(path, overrides, machine, numbers, is_here=is_here)
    except ConfigError as error:
        return None, list(findings_of(error)), None
    try:
        return _rehearse(cfg, run, machine, is_here=is_here)
    except (CheckpointError, ConfigError, PatchError, PlanError) as error:
        return run, list(findings_of(error)), None


def _read_run(
    path: Path, overrides: list[str], machine: Machine, numbers: tuple[int, int], *, is_here: bool
) -> tuple[DictConfig, Run]:
    from composer_fsdp2.foundry.run_file import read_parallelism, read_run, read_setting
    from composer_fsdp2.foundry.transform import fsdp2_settings, requests_fsdp2
    from composer_fsdp2.tools.doctor import KEYS, Run
    from composer_fsdp2.tools.foreign import check_is_run

    cfg = read_run(path, overrides)
    check_is_run(path, cfg)
    parsed = read_parallelism(cfg)
    fsdp2 = requests_fsdp2(parsed)
    values = {key: read_setting(cfg, key) for key in KEYS}
    number, per_node = numbers
    run = Run(
        path=str(path),
        asks="FSDP2" if fsdp2 else "FSDP1" if parsed.get("fsdp_config") is not None else "neither",
        settings=fsdp2_settings(parsed) if fsdp2 else None,
        ranks=number,
        ranks_per_node=per_node,
        # GPUs that are named are there, though perhaps not here.
        on_gpus=bool(machine.gpus) or not is_here,
        others={key: value for key, value in values.items() if value is not None},
    )
    return cfg, run


def _rehearse(
    cfg: DictConfig, run: Run, machine: Machine, *, is_here: bool
) -> tuple[Run, list[Finding], WrapPlan | None]:
    """Goes through the run; what only that shows is added to it."""
    from composer_fsdp2.tools.doctor import Finding

    if machine.versions.get("llm-foundry") is None or not machine.has_pkg_resources:
        return run, [], None
    from composer_fsdp2.foundry.rehearsal.notes import Cluster
    from composer_fsdp2.foundry.rehearsal.run import rehearse
    from composer_fsdp2.foundry.run_file import epochs_meant

    cluster = Cluster(
        ranks=run.ranks,
        ranks_per_node=run.ranks_per_node,
        on_gpus=run.on_gpus,
        is_here=is_here,
    )
    found = rehearse(cfg, cluster)
    units = None if found.units is None else len(found.units.units)
    run = dataclasses.replace(run, builds_on_meta=found.builds_on_meta, units=units)
    findings = [Finding(one.level, one.what, one.advice) for one in found.mistakes]
    if (meant := epochs_meant(cfg)) is not None:
        findings.append(Finding("warning", *meant))
    return run, findings, found.units


def _processes(machine: Machine, ranks: int | None, gpus_per_node: int | None) -> tuple[int, int]:
    from composer_fsdp2.cli.launch import default_ranks, under_launcher

    launched = os.environ["WORLD_SIZE"] if under_launcher() else ""
    number = ranks or (launched.isdecimal() and int(launched)) or gpus_per_node or default_ranks()
    per_node = min(number, gpus_per_node or len(machine.gpus) or number)
    _check_full_nodes(number, per_node)
    return number, per_node


def _check_full_nodes(number: int, per_node: int) -> None:
    if number % per_node:
        raise ConfigError(
            f"{number} ranks do not fill nodes of {per_node} GPUs. Launchers start the same number "
            f"on each node. Give --ranks as a multiple of {per_node}, or another --gpus-per-node."
        )


# --- Output. ---


def print_report(report: Report, *, verbose: bool) -> None:
    """Prints a report to standard output, problems first."""
    from composer_fsdp2.cli.doctor_text import report_lines

    lines = report_lines(report.machine, report.run, report.findings, verbose=verbose)
    for line in lines:
        print_line(line.text, line.colour)


def _print_json(
    machine: Machine, run: Run | None, findings: list[Finding], error: str | None = None
) -> None:
    from composer_fsdp2.cli.doctor_text import backend_of

    document: dict[str, Any] = {
        "machine": {**_as_dict(machine), "backend": backend_of(bool(machine.gpus))},
        "run": None if run is None else _run_as_dict(run),
        "findings": [_as_dict(found) for found in findings],
        "error": error,
    }
    typer.echo(json.dumps(document, default=str, indent=2))


def _run_as_dict(run: Run) -> dict[str, Any]:
    from composer_fsdp2.cli.doctor_text import backend_of
    from composer_fsdp2.tools.doctor import mesh_of

    try:
        shape = mesh_of(run)
    except ConfigError:
        shape = None
    return {
        **_as_dict(run),
        "nodes": run.nodes,
        "backend": backend_of(run.on_gpus),
        "mesh": None if shape is None else _as_dict(shape),
    }


def _as_dict(value: Any) -> dict[str, Any]:
    return dataclasses.asdict(value)
