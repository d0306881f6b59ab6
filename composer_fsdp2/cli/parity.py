"""`composer-fsdp2 parity`: the old configuration and the new one, trained and compared."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from composer_fsdp2.cli.console import progress, reported, say
from composer_fsdp2.cli.exit_codes import ExitCode
from composer_fsdp2.cli.options import AsJson, Processes
from composer_fsdp2.errors import ConfigError

if TYPE_CHECKING:
    from composer_fsdp2.tools.parity.compare import Comparison, Step
    from composer_fsdp2.tools.parity.jobs import Job

__all__ = ["HELP", "parity"]

HELP = """Train OLD and NEW for some steps, and compare loss and gradient norm.

OLD is a training run of LLM Foundry with FSDP1, NEW the same with `parallelism_config.fsdp2`, as
`composer-fsdp2 migrate OLD -o NEW` writes it. Both train from the same seed on the same data, one
after the other, for a few steps; they save nothing. Without CUDA, OLD trains as DDP.

- `composer-fsdp2 parity old.yaml new.yaml`

- `composer-fsdp2 parity old.yaml new.yaml --steps 50 -n 4 --out parity model.n_layers=2`

The exit code is 0 within the tolerance, 1 beyond it or when a run fails, 2 for a mistake.
"""

_POLL_SECONDS = 0.2


def parity(
    old: Annotated[Path, typer.Argument(help="The run as it was.", metavar="OLD")],
    new: Annotated[Path, typer.Argument(help="The run with FSDP2.", metavar="NEW")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Replaces a setting in both.", metavar="key=value"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each run.")] = 10,
    ranks: Processes = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, help="Largest relative difference; default by precision."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="For values, picture and logs; default a new temporary folder."),
    ] = None,
    allow_different: Annotated[
        bool, typer.Option("--allow-different", help="Compare also what are different jobs.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Prints the comparison to standard output and all else to standard error."""
    with reported():
        jobs, notes, ranks = _prepare(
            (old, new), overrides or [], ranks=ranks, allow_different=allow_different
        )
        limit, source = _limit(jobs, tolerance)
        folder = _folder(out)
        _announce((old, new), jobs, notes, f"{_steps(steps)} on {ranks} ranks")
        files = [_write_run(job, folder, steps) for job in jobs]
        recorded = [_train(job, file, ranks, steps) for job, file in zip(jobs, files, strict=True)]
        comparison = _compare(recorded[0], recorded[1], steps, limit)
        written = _write(comparison, folder, jobs)
        _print(comparison, source, written, notes, as_json=as_json)
        raise typer.Exit(ExitCode.OK if comparison.within else ExitCode.FAILED)


# --- Before a process starts. ---


def _prepare(
    paths: tuple[Path, Path], overrides: list[str], *, ranks: int | None, allow_different: bool
) -> tuple[tuple[Job, Job], list[str], int]:
    """Reads both configurations, refuses what cannot be compared, and makes them comparable."""
    import torch

    from composer_fsdp2.cli.launch import default_ranks, under_launcher
    from composer_fsdp2.foundry.run_file import check_installed, check_ranks, read_parallelism
    from composer_fsdp2.tools.parity.jobs import (
        check_room,
        check_same,
        describe_differences,
        differences,
        plan_jobs,
    )

    if under_launcher():
        raise ConfigError(
            "A launcher has started this command as one of several ranks. It starts the ranks of "
            "both runs itself, on this node. Call it without the launcher."
        )
    ranks = ranks or default_ranks()
    check_room(ranks, torch.cuda.device_count(), os.cpu_count() or 1)
    check_installed()
    _check_overrides(paths, overrides)
    jobs = _job("old", paths[0], overrides), _job("new", paths[1], overrides)
    notes = []
    if allow_different:
        found = differences(jobs[0].config, jobs[1].config)
        if found:
            notes.append(f"OLD and NEW are different jobs:\n{describe_differences(found)}")
    else:
        check_same(jobs[0].config, jobs[1].config)
    notes += plan_jobs(*jobs, cuda=torch.cuda.is_available(), ranks=ranks)
    for job in jobs:
        check_ranks(read_parallelism(job.config), ranks)
    return jobs, notes, ranks


def _check_overrides(paths: tuple[Path, Path], overrides: list[str]) -> None:
    """Refuses an override of a sharding block that neither configuration has."""
    from composer_fsdp2.foundry.run_file import read_yaml
    from composer_fsdp2.tools.parity.jobs import overrides_for

    used = [item for path in paths for item in overrides_for(read_yaml(path), overrides)]
    for item in overrides:
        if item not in used:
            raise ConfigError(
                f"The override '{item}' is of a block that neither OLD nor NEW has. It would "
                "change what is compared. Write the block into one of them."
            )


def _job(name: str, path: Path, overrides: list[str]) -> Job:
    from composer_fsdp2.foundry.run_file import merge, read_parallelism, read_yaml
    from composer_fsdp2.foundry.transform import requests_fsdp2
    from composer_fsdp2.tools.foreign import check_is_run
    from composer_fsdp2.tools.parity.jobs import Job, overrides_for

    config = read_yaml(path)
    check_is_run(path, config)
    config = merge(config, overrides_for(config, overrides))
    parsed = read_parallelism(config)
    if requests_fsdp2(parsed):
        block = "parallelism_config.fsdp2" if "parallelism_config" in config else "fsdp_config"
        return Job(name, config, "FSDP2", block)
    return Job(name, config, "DDP" if parsed.get("fsdp_config") is None else "FSDP1")


def _limit(jobs: tuple[Job, Job], tolerance: float | None) -> tuple[float, str]:
    """The tolerance, and where it is from."""
    from composer_fsdp2.tools.parity.compare import tolerance_for

    if tolerance is not None:
        return tolerance, "--tolerance"
    limits = {job.precision: tolerance_for(job.precision) for job in jobs}
    coarsest = max(limits, key=lambda precision: limits[precision])
    return limits[coarsest], f"the default for {coarsest}"


def _folder(out: Path | None) -> Path:
    if out is None:
        return Path(tempfile.mkdtemp(prefix="composer-fsdp2-parity-"))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out is '{out}', which is no folder and cannot become one: {error.strerror}. "
            "There is no place for values and logs. Give another path."
        ) from None
    return out


def _announce(paths: tuple[Path, Path], jobs: tuple[Job, Job], notes: list[str], what: str) -> None:
    say(f"Comparing {what}, precision {escape(' and '.join({j.precision: 0 for j in jobs}))}")
    for path, job in zip(paths, jobs, strict=True):
        say(f"  {job.name}: {job.kind:6}{escape(str(path))}")
    for note in notes:
        say(f"[yellow]{escape(note)}[/]")


# --- The two runs. ---


def _write_run(job: Job, folder: Path, steps: int) -> Path:
    """Writes the configuration that runs, as it runs, and clears what an earlier one recorded."""
    from omegaconf import OmegaConf

    from composer_fsdp2.trainer.step_record import NAME

    place = folder / job.name
    place.mkdir(exist_ok=True)
    _recorded(place).unlink(missing_ok=True)
    job.shorten(NAME, {"file": str(_recorded(place).resolve()), "steps": steps})
    OmegaConf.save(job.config, place / "run.yaml")
    return place


def _recorded(place: Path) -> Path:
    return place / "steps.jsonl"


def _train(job: Job, place: Path, ranks: int, steps: int) -> tuple[Step, ...]:
    """Trains in ranks of its own, with all their output in files."""
    from composer_fsdp2.cli.launch import RankError, launch_ranks, own_program
    from composer_fsdp2.tools.parity.compare import read_steps

    command = [*own_program(), "train", str(place / "run.yaml")]
    started = time.monotonic()
    try:
        with _shown(job, place, steps):
            launch_ranks(command, ranks, place / "logs", on_console=False)
    except RankError:
        say(f"\n[bold red]The {job.name} run ({job.kind}) failed.[/]")
        raise
    found = read_steps(_recorded(place))
    say(f"  {job.name}: {_steps(len(found))} in {time.monotonic() - started:.0f} s")
    return found


@contextmanager
def _shown(job: Job, place: Path, steps: int) -> Generator[None]:
    """Follows the file that a run writes, from a thread: this one waits for the ranks."""
    from composer_fsdp2.tools.parity.compare import read_steps

    done = threading.Event()
    with progress(f"  {job.name}: {job.kind}", "steps") as show:

        def follow() -> None:
            while not done.wait(_POLL_SECONDS):
                count = len(read_steps(_recorded(place)))
                starting = "" if count else ", starting"
                show(count, steps, f"  {job.name}: {job.kind}{starting}")

        thread = threading.Thread(target=follow, name="parity", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


# --- Afterwards. ---


def _compare(
    old: tuple[Step, ...], new: tuple[Step, ...], steps: int, tolerance: float
) -> Comparison:
    """Exits with 1 where the runs did not take the same steps."""
    from composer_fsdp2.tools.parity.compare import Comparison

    if not old or not new:
        _give_up("A run took no step: its duration was over when it began, or it had no batch.")
    if [step.number for step in old] != [step.number for step in new]:
        _give_up(
            f"The old run took steps {old[0].number} to {old[-1].number}, the new run "
            f"{new[0].number} to {new[-1].number}. They cannot be compared."
        )
    if len(old) < steps:
        say(
            f"[yellow]Both runs ended after {_steps(len(old))}, before the {steps} asked for: "
            "max_duration or the data ended.[/]"
        )
    return Comparison(old, new, tolerance)


def _give_up(why: str) -> None:
    say(f"[red]{why}[/]")
    raise typer.Exit(ExitCode.FAILED)


def _write(comparison: Comparison, folder: Path, jobs: tuple[Job, Job]) -> dict[str, str]:
    """Writes the files; returns their names by kind."""
    from composer_fsdp2.tools.parity.show import write_csv, write_picture

    values, picture = folder / "parity.csv", folder / "parity.png"
    write_csv(comparison, values)
    written = {"values": str(values)}
    names = tuple(f"{job.name}: {job.kind}" for job in jobs)
    if write_picture(comparison, picture, (names[0], names[1])):
        written["picture"] = str(picture)
    else:
        install = escape("pip install 'composer-fsdp2[plot]'")
        say(f"No picture: matplotlib is not installed. Install it with: {install}")
    return written | {"logs": str(folder / "*" / "logs")}


def _print(
    comparison: Comparison,
    source: str,
    written: dict[str, str],
    notes: list[str],
    *,
    as_json: bool,
) -> None:
    from composer_fsdp2.tools.parity.show import as_dict, describe, describe_verdict

    if as_json:
        document: dict[str, Any] = {**as_dict(comparison), "notes": notes, "files": written}
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
        return
    typer.echo("\n".join(["", *describe(comparison), "", *describe_verdict(comparison, source)]))
    say("\n" + "\n".join(f"{kind:8} {escape(path)}" for kind, path in written.items()))


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
