"""`composer-fsdp2 doctor`: what a run would do, and what is wrong with it."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import resource
import socket
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from composer_fsdp2.cli.console import ExitCode, reported
from composer_fsdp2.cli.launch import default_ranks, under_launcher
from composer_fsdp2.cli.options import AsJson, GpusPerNode, Overrides, RanksOfRun
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.foundry import run_file
from composer_fsdp2.foundry.cluster import OFFLINE, Cluster, environment, quiet
from composer_fsdp2.foundry.findings import OWN_ERRORS, Finding, findings_of
from composer_fsdp2.foundry.transform import fsdp2_settings, requests_fsdp2

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from composer_fsdp2.foundry.rehearsal import Rehearsal
    from composer_fsdp2.plan.wrap_plan import WrapPlan
    from composer_fsdp2.tools.doctor import Machine, RunFacts

__all__ = [
    "DoctorReport",
    "cluster_of",
    "diagnose",
    "doctor",
    "installed_versions",
    "print_report",
    "rehearsed",
]

_PACKAGES = ("composer-fsdp2", "torch", "mosaicml", "llm-foundry", "transformers")
_VARIABLES = ("FSDP_VERSION", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "RANK", "WORLD_SIZE")


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
    """Show what would make CONFIG fail; without CONFIG, what is installed.

    CONFIG is a training YAML of LLM Foundry, read as `composer-fsdp2 train` reads it. doctor goes
    through what the run goes through before its first batch: it imports `code_paths`, applies
    config transforms (which may write data), builds everything that has a name, a batch of local
    data and the model on meta, and plans the units. What they raise is shown with what to write
    instead. No process is started and nothing is downloaded.

    - `composer-fsdp2 doctor run.yaml`

    - `composer-fsdp2 doctor run.yaml --ranks 64 --gpus-per-node 8`: for a cluster elsewhere

    - `composer-fsdp2 doctor --verbose`: for a bug report, with everything replaced in Composer

    Problems come first, then warnings, then the run.

    Exit code 0 if nothing stands in the way of the run, 1 if something would make it fail, 2 for a
    mistake in the command line.
    """
    with reported():
        try:
            report = diagnose(config, overrides or [], ranks, gpus_per_node)
        except ConfigError as error:
            if as_json:
                _print_json(
                    DoctorReport(machine=_read_machine(), run=None, findings=[]), str(error)
                )
            raise
        if as_json:
            _print_json(report)
        else:
            print_report(report, verbose=verbose)
        raise typer.Exit(report.exit_code)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """Facts and findings of doctor."""

    machine: Machine
    run: RunFacts | None
    findings: list[Finding]
    units: WrapPlan | None = None
    predicted_step: Mapping[str, Any] | None = None
    """predicted bytes of a step; `None` where the report has no forecast"""

    @property
    def exit_code(self) -> ExitCode:
        """Returns whether the run would fail."""
        problem = any(finding.level == "problem" for finding in self.findings)
        return ExitCode.FAILED if problem else ExitCode.OK


def diagnose(
    config: Path | None, overrides: list[str], ranks: int | None, gpus_per_node: int | None
) -> DoctorReport:
    """Looks at the machine, and at a run if one is given.

    Args:
        config: path of the run's YAML.
        overrides: settings replaced in it.
        ranks: of the run; `None` for what `train` would start here.
        gpus_per_node: where it would run; `None` for here.

    Raises:
        ConfigError: the command line cannot be, whatever the run is.
    """
    from composer_fsdp2.tools.doctor import examine
    from composer_fsdp2.tools.migrate.signs import check_is_run

    if config is not None:
        run_file.check_named(config, overrides)
    elif ranks or gpus_per_node:
        raise ConfigError(
            "--ranks or --gpus-per-node is given without CONFIG. It would have no effect. "
            "Give the training YAML they are for."
        )
    cluster = cluster_of(ranks, gpus_per_node)
    machine, run, units, step = _read_machine(), None, None, None
    wrong, run_findings = list[Finding](), list[Finding]()
    if config is not None:
        try:
            cfg = run_file.read_run(config, overrides)
            check_is_run(config, cfg)
            cfg, wrong = run_file.without_mistakes(cfg)
            run = _read_facts(config, cfg, cluster)
            run_file.check_installed()
            rehearsal = rehearsed(cfg, cluster)
            run_findings, units = rehearsal.findings, rehearsal.units
            parts = rehearsal.parts
            if parts is not None and (machine.gpus or parts.settings.verbose):
                from composer_fsdp2.foundry.forecast import forecast_run
                from composer_fsdp2.tools.doctor import memory_findings

                with quiet(errors=True):
                    forecast = forecast_run(parts, cluster)
                if machine.gpus:
                    run_findings += memory_findings(forecast, machine.gpus[0])
                step = forecast.of_a_step()
            if parts is not None and run.settings is not None:
                mixed = parts.settings.mixed_precision
                settings = dataclasses.replace(run.settings, mixed_precision=mixed)
                run = dataclasses.replace(run, settings=settings)
            run = dataclasses.replace(
                run,
                builds_on_meta=rehearsal.builds_on_meta,
                units=None if units is None else len(units.units),
            )
            if (meant := run_file.epochs_meant(cfg)) is not None:
                run_findings.append(Finding("warning", *meant))
        except OWN_ERRORS as error:
            run_findings = list(findings_of(error))
    findings = examine(machine, run, [*wrong, *run_findings])
    return DoctorReport(
        machine=machine, run=run, findings=findings, units=units, predicted_step=step
    )


# --- Facts. ---


def _read_facts(config: Path, cfg: DictConfig, cluster: Cluster) -> RunFacts:
    """Reads the settings of a run.

    Raises:
        ConfigError: its block of parallelism is wrong.
    """
    from composer_fsdp2.tools.doctor import KEYS, RunFacts

    parsed = run_file.read_parallelism(cfg)
    fsdp2 = requests_fsdp2(parsed)
    other = "neither" if parsed.get("fsdp_config") is None else "FSDP1"
    values = {key: run_file.read_setting(cfg, key) for key in KEYS}
    return RunFacts(
        path=str(config),
        asks="FSDP2" if fsdp2 else other,
        settings=fsdp2_settings(parsed) if fsdp2 else None,
        written=parsed["fsdp_config"] if fsdp2 else {},
        ranks=cluster.ranks,
        ranks_per_node=cluster.ranks_per_node,
        on_gpus=cluster.on_gpus,
        others={key: value for key, value in values.items() if value is not None},
    )


def cluster_of(ranks: int | None, gpus_per_node: int | None) -> Cluster:
    """Returns the ranks of a run, by default those that `train` would start on this machine.

    Raises:
        ConfigError: the ranks do not fill nodes.
    """
    import torch

    gpus = torch.cuda.device_count()
    launched = os.environ["WORLD_SIZE"] if under_launcher() else ""
    number = ranks or (launched.isdecimal() and int(launched)) or gpus_per_node or default_ranks()
    per_node = min(number, gpus_per_node or gpus or number)
    if number % per_node:
        raise ConfigError(
            f"{number} ranks do not fill nodes of {per_node} GPUs. Launchers start the same number "
            f"on each node. Give --ranks as a multiple of {per_node}, or another --gpus-per-node."
        )
    # GPUs that are named are there, though perhaps not here.
    on_gpus = bool(gpus) or gpus_per_node is not None
    return Cluster(ranks=number, ranks_per_node=per_node, on_gpus=on_gpus)


def rehearsed(cfg: DictConfig, cluster: Cluster, *, plan_only: bool = False) -> Rehearsal:
    """Rehearses a run, without the output of libraries that are imported."""
    with environment(OFFLINE), quiet():
        from composer_fsdp2.shard.units import collector_paused

        # All that LLM Foundry imports stays: to walk through it is a fifth of the imports' time.
        with collector_paused():
            from composer_fsdp2.foundry.rehearsal import rehearse

            return rehearse(cfg, cluster, plan_only=plan_only)


def installed_versions(name: str) -> str | None:
    """Returns the version of a distribution; `None` where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _read_machine() -> Machine:
    """Looks at the installation. Imports Composer, whose sources are compared."""
    import torch

    from composer_fsdp2.patches import patch_states
    from composer_fsdp2.shard.communication import VARIABLES, nccl_version
    from composer_fsdp2.tools.doctor import LocalGpu, Machine
    from composer_fsdp2.torch_private.members import member_states

    count = torch.cuda.device_count()
    devices = [torch.cuda.get_device_properties(number) for number in range(count)]
    read = (*_VARIABLES, *VARIABLES)
    with quiet():  # warnings of imports are no news to who asks about a run
        patches = patch_states()
    return Machine(
        versions={
            "python": platform.python_version(),
            **{name: installed_versions(name) for name in _PACKAGES},
        },
        gpus=tuple(LocalGpu(gpu.name, gpu.total_memory, (gpu.major, gpu.minor)) for gpu in devices),
        built_for=tuple(torch.cuda.get_arch_list()),
        patches=patches,
        members=member_states(),
        environment={name: os.environ[name] for name in read if name in os.environ},
        nccl=nccl_version(),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


# --- Output. ---


def print_report(report: DoctorReport, *, verbose: bool) -> None:
    """Prints a report to standard output, problems first."""
    from composer_fsdp2.tools.doctor import report_lines

    for text, colour in report_lines(report.machine, report.run, report.findings, verbose=verbose):
        # `typer.echo` takes colours out where there is no terminal.
        plain = colour is None or os.environ.get("NO_COLOR")
        typer.echo(text if plain else typer.style(text, fg=colour))


def _print_json(report: DoctorReport, error: str | None = None) -> None:
    from composer_fsdp2.tools.doctor import backend_of, mesh_of

    machine, run = report.machine, report.run
    document: dict[str, Any] = {
        "machine": {**dataclasses.asdict(machine), "backend": backend_of(bool(machine.gpus))},
        "run": None,
        "findings": [dataclasses.asdict(finding) for finding in report.findings],
        "predicted_step": report.predicted_step,
        "error": error,
    }
    if run is not None:
        shape = mesh_of(run)
        document["run"] = {
            **dataclasses.asdict(run),
            "nodes": run.nodes,
            "backend": backend_of(run.on_gpus),
            "mesh": shape and dataclasses.asdict(shape),
        }
    typer.echo(json.dumps(document, default=str, indent=2))
