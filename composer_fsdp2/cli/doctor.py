"""`composer-fsdp2 doctor`: what is installed, what a run would do with it, and what to do first."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from composer_fsdp2.cli.console import reported
from composer_fsdp2.errors import CheckpointError, ConfigError, PatchError, PlanError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from composer_fsdp2.tools.doctor import Finding, Machine, Run

__all__ = ["HELP", "doctor"]

HELP = """Show versions, GPUs and what is replaced in Composer; with CONFIG also what the run does.

CONFIG is a training YAML of LLM Foundry, read as `composer-fsdp2 train` reads it. doctor goes
through what the run goes through before its first batch: it imports `code_paths`, applies config
transforms (which may write data), builds everything that has a name, the model on meta, looks for
every folder, and plans the units. No process is started and nothing is downloaded. Exit code 1 if
something would make the run fail, 2 for a command line that cannot be.

- `composer-fsdp2 doctor run.yaml`

- `composer-fsdp2 doctor run.yaml --ranks 64 --gpus-per-node 8`: for a cluster this machine is not
"""

_PACKAGES = ("composer-fsdp2", "torch", "mosaicml", "llm-foundry", "transformers")
_VARIABLES = ("FSDP_VERSION", "RANK", "WORLD_SIZE")
_LABEL, _WIDTH = 17, 100


def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="A training run of LLM Foundry.", metavar="[CONFIG]")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Replaces a setting, as for train.", metavar="[key=value]"),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-n", min=1, help="Of the run; default one per GPU, 2 without."),
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="Of the nodes the run is for; default those of this machine."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output.")
    ] = False,
) -> None:
    """Prints to standard output, for a bug report."""
    from composer_fsdp2.tools.doctor import examine

    with reported():
        machine = _read_machine()
        if not as_json:
            _print_machine(machine, whole=config is None)
        try:
            numbers = _check_command_line(config, overrides or [], machine, ranks, gpus_per_node)
        except ConfigError as error:
            if as_json:
                _print_json(machine, None, [], str(error))
            raise
        run, rehearsed = None, []
        if config is not None:
            is_here = gpus_per_node is None
            run, rehearsed = _try_run(config, overrides or [], machine, numbers, is_here=is_here)
        findings = examine(machine, run, rehearsed)
        if as_json:
            _print_json(machine, run, findings)
        else:
            _print_run(run, findings)
        raise typer.Exit(1 if any(found.level == "problem" for found in findings) else 0)


# --- Facts. ---


def _read_machine() -> Machine:
    """Looks at the installation. Imports Composer, whose sources are compared."""
    import torch

    from composer_fsdp2.shard.torch_private.members import member_states
    from composer_fsdp2.tools.doctor import Gpu, Machine
    from composer_fsdp2.trainer.patches import patch_states

    count = torch.cuda.device_count()
    devices = [torch.cuda.get_device_properties(number) for number in range(count)]
    return Machine(
        versions={"python": platform.python_version(), **{p: _version(p) for p in _PACKAGES}},
        gpus=tuple(Gpu(device.name, device.total_memory) for device in devices),
        patches=patch_states(),
        members=member_states(),
        environment={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        has_pkg_resources=importlib.util.find_spec("pkg_resources") is not None,
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_command_line(
    config: Path | None,
    overrides: list[str],
    machine: Machine,
    ranks: int | None,
    gpus_per_node: int | None,
) -> tuple[int, int]:
    """Number of ranks, and how many of them share a node.

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
    return _processes(machine, ranks, gpus_per_node)


def _try_run(
    path: Path,
    overrides: list[str],
    machine: Machine,
    numbers: tuple[int, int],
    *,
    is_here: bool,
) -> tuple[Run | None, list[Finding]]:
    """Reads a run and goes through it; what `train` would refuse it for is found as well."""
    from composer_fsdp2.tools.doctor import findings_of

    try:
        cfg, run = _read_run(path, overrides, machine, numbers, is_here=is_here)
    except ConfigError as error:
        return None, list(findings_of(error))
    try:
        return _rehearse(cfg, run, machine, is_here=is_here)
    except (CheckpointError, ConfigError, PatchError, PlanError) as error:
        return run, list(findings_of(error))


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
        tensor_parallel=bool(parsed.get("tp_config")),
        ranks=number,
        ranks_per_node=per_node,
        # GPUs that are named are there, though perhaps not here.
        on_gpus=bool(machine.gpus) or not is_here,
        others={key: value for key, value in values.items() if value is not None},
    )
    return cfg, run


def _rehearse(
    cfg: DictConfig, run: Run, machine: Machine, *, is_here: bool
) -> tuple[Run, list[Finding]]:
    """Goes through the run; what only that shows is added to it."""
    from composer_fsdp2.tools.doctor import Finding

    if machine.versions.get("llm-foundry") is None or not machine.has_pkg_resources:
        return run, []
    from composer_fsdp2.foundry.rehearsal.notes import Cluster
    from composer_fsdp2.foundry.rehearsal.run import rehearse

    cluster = Cluster(
        ranks=run.ranks,
        ranks_per_node=run.ranks_per_node,
        on_gpus=run.on_gpus,
        is_here=is_here,
    )
    found = rehearse(cfg, cluster)
    units = None if found.units is None else len(found.units.units)
    run = dataclasses.replace(run, builds_on_meta=found.builds_on_meta, units=units)
    return run, [Finding(one.level, one.what, one.advice) for one in found.mistakes]


def _processes(machine: Machine, ranks: int | None, gpus_per_node: int | None) -> tuple[int, int]:
    from composer_fsdp2.cli.launch import default_ranks, under_launcher

    launched = os.environ["WORLD_SIZE"] if under_launcher() else ""
    number = ranks or (launched.isdecimal() and int(launched)) or gpus_per_node or default_ranks()
    per_node = min(number, gpus_per_node or len(machine.gpus) or number)
    if number % per_node:
        raise ConfigError(
            f"{number} ranks do not fill nodes of {per_node} GPUs. Launchers start the same number "
            f"on each node. Give --ranks as a multiple of {per_node}, or another --gpus-per-node."
        )
    return number, per_node


# --- Text. ---


def _print_machine(machine: Machine, *, whole: bool) -> None:
    """Versions and devices; the patch table `whole`, or only what is wrong with it."""
    from composer_fsdp2.trainer.patches import describe_patches

    for package, version in machine.versions.items():
        _print_line(package, version or "not installed")
    _print_line("GPUs", _describe_gpus(machine))
    _print_line("backend", _backend(bool(machine.gpus)))
    misfits = [patch for patch in machine.patches if patch.problem]
    count = len(machine.patches)
    if whole or misfits:
        typer.echo("\nReplaced in Composer while installed:")
        typer.echo(describe_patches(machine.patches if whole else misfits))
    else:
        _print_line("patches", f"all {count} fit ('composer-fsdp2 doctor' alone lists them)")
    _print_members(machine, whole=whole)


def _print_members(machine: Machine, *, whole: bool) -> None:
    """The private members of torch by feature, `whole`, or only those that are missing."""
    rows = [state for state in machine.members if whole or not state.found]
    if not rows:
        _print_line("torch internals", f"all {len(machine.members)} found")
        return
    typer.echo("\nPrivate members of torch, by what needs them:")
    for feature in dict.fromkeys(state.member.feature for state in rows):
        mine = [state for state in rows if state.member.feature == feature]
        names = (s.member.title if s.found else f"{s.member.title} (MISSING)" for s in mine)
        _print_line(feature, ", ".join(dict.fromkeys(names)))


def _describe_gpus(machine: Machine) -> str:
    names = [f"{gpu.name} ({gpu.memory_bytes / 2**30:.0f} GiB)" for gpu in machine.gpus]
    kinds = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    return ", ".join(kinds) or "none"


def _backend(on_gpus: bool) -> str:
    return "nccl" if on_gpus else "gloo"


def _print_run(run: Run | None, findings: list[Finding]) -> None:
    from composer_fsdp2.tools.doctor_describe import describe_run

    if run is not None:
        typer.echo("\nThe run:")
        for label, text in describe_run(run):
            _print_line(label, text)
    typer.echo("" if findings else "\nNothing to warn of.")
    for found in findings:
        _print_wrapped(f"{found.level}: ", found.what)
        _print_wrapped("  do: ", found.advice)


def _print_line(label: str, text: str) -> None:
    """The label in its column; a label longer than that has its own space."""
    _print_wrapped(f"{label:{_LABEL - 1}} ", text, indent=_LABEL)


def _print_wrapped(start: str, text: str, indent: int = 5) -> None:
    lines = textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=" " * indent,
        # A path or a setting that is broken cannot be copied.
        break_long_words=False,
        break_on_hyphens=False,
    )
    typer.echo("\n".join(lines) or start.rstrip())


def _print_json(
    machine: Machine, run: Run | None, findings: list[Finding], error: str | None = None
) -> None:
    document: dict[str, Any] = {
        "machine": {**_as_dict(machine), "backend": _backend(bool(machine.gpus))},
        "run": None if run is None else _run_as_dict(run),
        "findings": [_as_dict(found) for found in findings],
        "error": error,
    }
    typer.echo(json.dumps(document, default=str, indent=2))


def _run_as_dict(run: Run) -> dict[str, Any]:
    from composer_fsdp2.tools.doctor import mesh_of

    try:
        shape = mesh_of(run)
    except ConfigError:
        shape = None
    return {
        **_as_dict(run),
        "nodes": run.nodes,
        "backend": _backend(run.on_gpus),
        "mesh": None if shape is None else _as_dict(shape),
    }


def _as_dict(value: Any) -> dict[str, Any]:
    return dataclasses.asdict(value)
