"""`composer-fsdp2 parity`: the old configuration and the new one, trained and compared."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from composer_fsdp2.cli import launch
from composer_fsdp2.cli.console import ExitCode, progress, reported, say
from composer_fsdp2.cli.options import AsJson, Processes
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.foundry import run_file
from composer_fsdp2.foundry.transform import requests_fsdp2

if TYPE_CHECKING:
    from composer_fsdp2.tools.parity import Job, RunComparison, Step

__all__ = ["parity"]

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
    """Train OLD and NEW for some steps, and compare loss, gradient norm, speed and memory.

    OLD is a training run of LLM Foundry with FSDP1, NEW the same with `parallelism_config.fsdp2`,
    as `composer-fsdp2 migrate OLD -o NEW` writes it. Both train from the same seed on the same
    data, one after the other, for a few steps; they save nothing. Without CUDA, OLD trains as DDP.

    - `composer-fsdp2 parity old.yaml new.yaml`

    - `composer-fsdp2 parity old.yaml new.yaml --steps 50 -n 4 --out parity model.n_layers=2`

    Speed leaves out the first three steps: take more than the default for it. Memory is the most
    that each rank has held: of torch's allocator on a GPU, of the whole process on a CPU.

    The exit code is 0 within the tolerance, whatever the speed; 1 beyond it or when a run fails;
    2 for a mistake.
    """
    from composer_fsdp2.tools.parity import RunComparison, read_peaks, tolerance_for

    with reported():
        jobs, notes, ranks = _prepare(
            (old, new), overrides or [], ranks=ranks, allow_different=allow_different
        )
        limit, source = tolerance, "--tolerance"
        if limit is None:
            coarser = max((job.precision for job in jobs), key=tolerance_for)
            limit, source = tolerance_for(coarser), f"the default for {coarser}"
        folder = out or Path(tempfile.mkdtemp(prefix="composer-fsdp2-parity-"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--out is '{out}', which is no folder and cannot become one: {error.strerror}. "
                "There is no place for values and logs. Give another path."
            ) from None
        precisions = " and ".join(dict.fromkeys(job.precision for job in jobs))
        say(f"Comparing {_steps(steps)} on {ranks} ranks, precision {escape(precisions)}")
        for path, job in zip((old, new), jobs, strict=True):
            say(f"  {job.name}: {job.kind:6}{escape(str(path))}")
        for note in notes:
            say(f"[yellow]{escape(note)}[/]")
        first, second = (_train(job, folder / job.name, ranks, steps) for job in jobs)
        _check_steps(first, second, steps)
        old_peaks, new_peaks = (read_peaks(folder / job.name / "memory.json") for job in jobs)
        comparison = RunComparison(first, second, limit, (old_peaks, new_peaks))
        written = _write(comparison, folder, jobs)
        if as_json:
            document = {**comparison.as_dict(), "notes": notes, "files": written}
            typer.echo(json.dumps(document, indent=2, allow_nan=False))
        else:
            lines = ["", *comparison.table(), "", *comparison.performance(), ""]
            lines += comparison.verdict(source)
            typer.echo("\n".join(lines))
            say("\n" + "\n".join(f"{kind:8} {escape(path)}" for kind, path in written.items()))
        raise typer.Exit(ExitCode.OK if comparison.within else ExitCode.FAILED)


# --- Before a process starts. ---


def _prepare(
    paths: tuple[Path, Path], overrides: list[str], *, ranks: int | None, allow_different: bool
) -> tuple[list[Job], list[str], int]:
    """Reads both configurations, refuses different jobs, and makes the runs comparable."""
    import torch

    from composer_fsdp2.tools.migrate.signs import check_is_run
    from composer_fsdp2.tools.parity import (
        Job,
        check_room,
        check_same,
        overrides_for,
        plan_jobs,
    )

    if launch.under_launcher():
        raise ConfigError(
            "A launcher has started this command as one of several ranks. It starts the ranks of "
            "both runs itself, on this node. Call it without the launcher."
        )
    ranks = ranks or launch.default_ranks()
    check_room(ranks, torch.cuda.device_count(), os.cpu_count() or 1)
    run_file.check_installed()
    read = [run_file.read_yaml(path) for path in paths]
    applied = [overrides_for(config, overrides) for config in read]
    for item in overrides:
        if not any(item in items for items in applied):
            raise ConfigError(
                f"The override '{item}' is of a block that neither OLD nor NEW has. It would "
                "change what is compared. Write the block into one of them."
            )
    jobs: Any = []
    for name, path, config, items in zip(("old", "new"), paths, read, applied, strict=True):
        check_is_run(path, config)
        config = run_file.merge(config, items)
        parsed = run_file.read_parallelism(config)
        kind, block = "DDP" if parsed.get("fsdp_config") is None else "FSDP1", None
        if requests_fsdp2(parsed):
            kind = "FSDP2"
            block = "parallelism_config.fsdp2" if "parallelism_config" in config else "fsdp_config"
        run_file.check_ranks(parsed, ranks)
        jobs.append(Job(name, config, kind, block))
    notes = check_same(jobs[0].config, jobs[1].config, allow=allow_different)
    notes += plan_jobs(*jobs, cuda=torch.cuda.is_available(), ranks=ranks)
    return jobs, notes, ranks


# --- The two runs. ---


def _train(job: Job, folder: Path, ranks: int, steps: int) -> tuple[Step, ...]:
    """Trains a run in ranks of its own, with all their output in files."""
    from omegaconf import OmegaConf

    from composer_fsdp2.tools.parity import read_steps
    from composer_fsdp2.trainer.extensions.step_record import NAME

    folder.mkdir(exist_ok=True)
    record = folder / "steps.jsonl"
    for file in (record, folder / "memory.json"):
        file.unlink(missing_ok=True)
    job.shorten(NAME, {"file": str(record.resolve()), "steps": steps})
    OmegaConf.save(job.config, folder / "run.yaml")
    command = [*launch.own_program(), "train", str(folder / "run.yaml")]
    started, done = time.monotonic(), threading.Event()
    with progress(f"  {job.name}: {job.kind}", " steps") as show:

        def follow() -> None:
            count = 0
            while not done.wait(_POLL_SECONDS):
                before, count = count, len(read_steps(record))
                starting = "" if count else ", starting"
                show(count - before, steps, f"  {job.name}: {job.kind}{starting}")

        # From a thread: this one waits for the ranks.
        thread = threading.Thread(target=follow, name="parity", daemon=True)
        thread.start()
        try:
            launch.launch_ranks(command, ranks, folder / "logs", on_console=False)
        except launch.RankError:
            say(f"\n[bold red]The {job.name} run ({job.kind}) failed.[/]")
            raise
        finally:
            done.set()
            thread.join()
    records = read_steps(record)
    say(f"  {job.name}: {_steps(len(records))} in {time.monotonic() - started:.0f} s")
    return records


# --- Afterwards. ---


def _check_steps(old: tuple[Step, ...], new: tuple[Step, ...], steps: int) -> None:
    """Exits with 1 where the runs did not take the same steps."""
    why = None
    if not old or not new:
        why = "A run took no step: its duration was over when it began, or it had no batch."
    elif [step.number for step in old] != [step.number for step in new]:
        why = (
            f"The old run took steps {old[0].number} to {old[-1].number}, the new run "
            f"{new[0].number} to {new[-1].number}. They cannot be compared."
        )
    if why is not None:
        say(f"[red]{why}[/]")
        raise typer.Exit(ExitCode.FAILED)
    if len(old) < steps:
        say(
            f"[yellow]Both runs ended after {_steps(len(old))}, before the {steps} asked for: "
            "max_duration or the data ended.[/]"
        )


def _write(comparison: RunComparison, folder: Path, jobs: Sequence[Job]) -> dict[str, str]:
    """Writes the files; returns their names by kind."""
    from composer_fsdp2.tools.pictures import comparison_picture, write_figure

    values, picture = folder / "parity.csv", folder / "parity.png"
    comparison.write_csv(values)
    written = {"values": str(values)}
    old, new = (f"{job.name}: {job.kind}" for job in jobs)
    try:
        write_figure(comparison_picture(comparison, (old, new), "Two runs"), picture)
        written["picture"] = str(picture)
    except ImportError:
        install = escape("pip install 'composer-fsdp2[plot]'")
        say(f"No picture: matplotlib is not installed. Install it with: {install}")
    return written | {"logs": str(folder / "*" / "logs")}


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
