"""The command `composer-fsdp2`. Each command imports what it needs, so that `--help` is quick."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape

from composer_fsdp2 import __version__
from composer_fsdp2.cli import checkpoint, launch
from composer_fsdp2.cli.console import EXIT_CODES, ExitCode, reported, say
from composer_fsdp2.cli.doctor import diagnose, doctor, installed_versions, print_report
from composer_fsdp2.cli.init import init, quickstart
from composer_fsdp2.cli.migrate import migrate
from composer_fsdp2.cli.options import Processes
from composer_fsdp2.cli.parity import parity
from composer_fsdp2.cli.plan import plan
from composer_fsdp2.config.messages import raise_errors
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.foundry import run_file
from composer_fsdp2.foundry.cluster import LAUNCHED
from composer_fsdp2.foundry.transform import requests_fsdp2
from composer_fsdp2.pins import text_of

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["app", "main"]

# Beginnings of warnings that packages raise about themselves in every run.
_NOISE = (
    "FSDP2 Config/APIs are experimental",
    "To copy construct from a tensor",
    "TypedStorage is deprecated",
    "pkg_resources is deprecated as an API",
)

_CONSOLE = "COMPOSER_FSDP2_CONSOLE"


_Run = Annotated[Path, typer.Argument(help="A run of LLM Foundry.", metavar="RUN.yaml")]
_Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Replaces a setting; dots lead into blocks.", metavar="key=value"),
]
_LogDir = Annotated[
    Path | None,
    typer.Option(help="Output of ranks above 0; default a new temporary folder."),
]

app = typer.Typer(
    name="composer-fsdp2",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
    # Its tracebacks are pages long and hide the error.
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(checkpoint.app, name="checkpoint")
for _command in (init, migrate, doctor, plan, parity, quickstart):
    app.command()(_command)


def main() -> None:
    """Runs the console script."""
    app()


def show_versions(show: bool) -> None:
    """Prints one line a package, read without importing it, and ends the command, if `show`."""
    if show:
        beside = {name: installed_versions(name) for name in ("torch", "mosaicml", "llm-foundry")}
        for name, version in {"composer-fsdp2": __version__, **beside}.items():
            if version:
                typer.echo(f"{name} {version}")
        raise typer.Exit


@app.callback()
def _about(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=show_versions,
            is_eager=True,
            help="Show the versions of this package, torch, Composer and LLM Foundry.",
        ),
    ] = False,
) -> None:
    """PyTorch FSDP2 for MosaicML Composer and LLM Foundry."""


@app.command()
def pins(
    row: Annotated[str, typer.Argument(help="stable, newest or latest.", metavar="ROW")] = "stable",
) -> None:
    """Show every version of a tested row, for `pip install --no-deps -r`.

    - `composer-fsdp2 pins newest > pins.txt && pip install --no-deps -r pins.txt`
    - `python -m composer_fsdp2.pins newest`: the same before anything is installed
    """
    typer.echo(text_of(row))


@app.command(
    help="""Train what RUN.yaml describes, with FSDP2 where it says so.

`parallelism_config: {fsdp2: {}}` in the YAML asks for FSDP2. All other keys, and the overrides,
are those of `llmfoundry train`.

- `composer-fsdp2 train yamls/quickstart.yaml`

- `composer-fsdp2 train run.yaml max_duration=100ba parallelism_config.fsdp2.state_dict_type=full`

- `composer-fsdp2 train run.yaml --dry-run`: what doctor finds and the plan; nothing is started

A problem that doctor finds stops the run before its ranks start; `--no-check` starts it all the
same. Under torchrun rank 0 asks doctor, and the others wait for it.

With `log_to_console: true`, which is the default, rank 0 prints one line every
`console_log_interval`: loss, speed, MFU, memory and time left. `progress_bar: true` shows a bar on
a terminal, and lines elsewhere. `--console full` is Composer's own console with every metric.
`python_log_level` is `warning` unless RUN.yaml has it; `debug`, the default of LLM Foundry, writes
many lines a batch.

- On several nodes, on each: `torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d
--rdzv-endpoint HOST:29400 --no-python composer-fsdp2 train run.yaml`
"""
)
def train(
    run: _Run,
    overrides: _Overrides = None,
    ranks: Processes = None,
    log_dir: _LogDir = None,
    console: Annotated[
        Literal["line", "full"],
        typer.Option(help="One line an interval, or Composer's own with every metric."),
    ] = "line",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show what doctor finds and the plan, and start nothing."),
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Whether doctor looks at the run first."),
    ] = True,
) -> None:
    """Starts the ranks, or is one when a launcher has started them."""
    if console == "full":
        os.environ[_CONSOLE] = console  # the ranks inherit it
    if not dry_run:
        _start_or_join("train", run, overrides or [], ranks, log_dir, check=check)
        return
    with reported():
        if log_dir is not None:
            raise ConfigError(
                "--log-dir is given with --dry-run. It would have no effect: no rank starts. "
                "Remove one of them."
            )
        report = diagnose(run, overrides or [], ranks, None)
        print_report(report, verbose=False)
        if report.units is not None:
            typer.echo(f"\nThe plan:\n{report.units}")
        next_step = "The run would fail: correct the problems above first."
        if report.exit_code is ExitCode.OK:
            command = ["composer-fsdp2", "train", str(run), *(overrides or [])]
            command += [] if ranks is None else ["--ranks", str(ranks)]
            next_step = f"Without --dry-run it trains: {shlex.join(command)}"
        typer.echo(f"\nNothing was started. {next_step}")
        raise typer.Exit(report.exit_code)


@app.command(
    name="eval",
    help="""Evaluate what RUN.yaml describes, with FSDP2 where it says so.

Its keys, and the overrides, are those of `llmfoundry eval`, and `parallelism_config: {fsdp2: {}}`,
which that does not know.

- `composer-fsdp2 eval evaluation.yaml load_path=runs/quickstart/checkpoints/latest-sharded-rank0`
""",
)
def evaluate(
    run: _Run, overrides: _Overrides = None, ranks: Processes = None, log_dir: _LogDir = None
) -> None:
    """Starts the ranks, or is one when a launcher has started them."""
    _start_or_join("eval", run, overrides or [], ranks, log_dir)


# --- Start the ranks, or be one. ---


def _start_or_join(
    command: str,
    run: Path,
    overrides: list[str],
    ranks: int | None,
    log_dir: Path | None,
    *,
    check: bool = False,
) -> None:
    from composer_fsdp2.tools.migrate.signs import check_is_run

    with reported():
        read = run_file.read_run(run, overrides, jobs=False)
        check_is_run(run, read, trains=command == "train")
        run_file.check_installed()
        if not launch.under_launcher():
            _start(command, run, overrides, ranks, log_dir, read, check=check)
            return
        cfg = run_file.read_parallelism(read)
        if ranks or log_dir:
            raise ConfigError(
                "--ranks or --log-dir is given, but a launcher has already started the ranks. "
                "It would have no effect. Remove it, and give the launcher its own option."
            )
        # The first rank alone, and not in a run that goes on after a failure.
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        begins = (os.environ["RANK"], restarts) == ("0", "0")
        if check and begins and not launch.under_own_launcher():
            # The others wait where ranks meet: `dist_timeout` at most.
            limit = run_file.read_setting(read, "dist_timeout")
            limit = limit / 2 if isinstance(limit, int | float) else 300
            _ask_doctor(run, overrides, int(os.environ["WORLD_SIZE"]), limit)
        work = _train_from_yaml if command == "train" else _evaluate_from_yaml
        _run_here(work, run, overrides, cfg)


def _start(
    command: str,
    run: Path,
    overrides: list[str],
    ranks: int | None,
    log_dir: Path | None,
    read: DictConfig,
    *,
    check: bool,
) -> None:
    """Starts the ranks of a run, and says at the end where its newest checkpoint is."""
    import torch

    from composer_fsdp2.tools.parity import check_room

    number = ranks or launch.default_ranks()
    try:
        cfg = run_file.read_parallelism(read)
        run_file.check_ranks(cfg, number)
    except ConfigError:
        if check:
            _ask_doctor(run, overrides, number)  # finds the other mistakes as well
        raise
    if ranks:
        check_room(ranks, torch.cuda.device_count(), os.cpu_count() or 1)
    if (meant := run_file.epochs_meant(read)) is not None:
        say(f"[yellow]{escape(' '.join(meant))}[/]")
    if check:
        _ask_doctor(run, overrides, number)
    if (cfg.get("fsdp_config") or {}).get("cpu_offload"):  # the optimizer steps on the CPU
        threads = max(1, len(os.sched_getaffinity(0)) // number)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    log_dir = log_dir or Path(tempfile.mkdtemp(prefix="composer-fsdp2-"))
    count = "1 rank" if number == 1 else f"{number} ranks; those above 0 write to {log_dir}"
    say(f"[dim]Starting {escape(count)}[/]")
    try:
        launch.launch_ranks([*launch.own_program(), command, str(run), *overrides], number, log_dir)
    except SystemExit:
        if (saved := run_file.newest_checkpoint(read)) is None:
            told = "Stopped, and no checkpoint was found: the same command begins anew."
        else:
            resumes = run_file.read_setting(read, "autoresume")
            told = (
                f"Stopped. The same command goes on from {saved}."
                if resumes
                else "Stopped. To go on from the newest checkpoint, add to the command: "
                f"load_path={saved}"
            )
        say(f"\n{escape(told)}")
        raise
    if command == "train" and (saved := run_file.newest_checkpoint(read)) is not None:
        say(f"[dim]Done. The newest checkpoint is {escape(str(saved))}[/]")


def _ask_doctor(
    run: Path, overrides: list[str], ranks: int, limit_seconds: float | None = None
) -> None:
    """Has doctor look at a run, in a process whose imports and memory are gone afterwards.

    A doctor that needs longer than `limit_seconds` stops no run.

    Raises:
        ConfigError: doctor finds problems.
    """
    from composer_fsdp2.config.schema import FORECAST

    command = [*launch.own_program(), "doctor", str(run), *overrides, f"--ranks={ranks}", "--json"]
    alone = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    say("[dim]Checking the run; `--no-check` leaves that out[/]")
    # What code of the user prints, a rank prints again.
    try:
        done = subprocess.run(
            [sys.executable, *command],
            env=alone,
            capture_output=True,
            text=True,
            timeout=limit_seconds,
        )
        report = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):  # no report: a mistake in doctor stops no run
        return
    if (step := report["predicted_step"]) is not None:
        os.environ[FORECAST] = json.dumps(step)  # the ranks inherit the variable
    problems = [finding for finding in report["findings"] if finding["level"] == "problem"]
    raise_errors([f"{finding['what']} {finding['advice']}" for finding in problems])


def _run_here(
    work: Callable[[Path, list[str]], None], run: Path, overrides: list[str], cfg: Mapping[str, Any]
) -> None:
    """Does the work as one rank.

    Collective: yes, every rank of the run has to come here.
    """
    import logging
    import warnings

    from torch.distributed.elastic.multiprocessing.errors import record

    # What other packages say about themselves in every run is dropped, and nothing else.
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=message)
    models = logging.getLogger("transformers.modeling_utils")
    models.addFilter(lambda record: "has generative capabilities" not in record.getMessage())
    # Threads of the tokenizer and forked data loader workers do not mix; it says so at length.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not requests_fsdp2(cfg) and os.environ["RANK"] == "0":
        used = "without FSDP" if cfg.get("fsdp_config") is None else "with FSDP1 (`fsdp_config`)"
        told = (
            f"FSDP2 is not requested: {run} has no `parallelism_config.fsdp2` and runs {used}. "
            "Write `parallelism_config: {fsdp2: {}}` for FSDP2."
        )
        say(f"[yellow]{escape(told)}[/]")
    if not launch.under_own_launcher():
        work(run, overrides)
        return
    with launch.rank_guard():
        # Leaves an exception where `launch` can read it. torchrun would print all of its traceback.
        record(work)(run, overrides)


def _train_from_yaml(run: Path, overrides: list[str]) -> None:
    from llmfoundry.command_utils import train_from_yaml

    from composer_fsdp2.foundry.registered import register, register_console, register_names

    register()
    if os.environ.get(_CONSOLE) != "full":
        register_console()
    register_names()
    train_from_yaml(str(run), overrides)


def _evaluate_from_yaml(run: Path, overrides: list[str]) -> None:
    from llmfoundry.command_utils import eval_from_yaml

    from composer_fsdp2.foundry.names import check_eval_keys
    from composer_fsdp2.foundry.registered import register
    from composer_fsdp2.patches import install

    cfg = run_file.read_run(run, overrides)
    check_eval_keys(cfg)
    if "python_log_level" not in cfg:  # debug is LLM Foundry's own default, as for training
        overrides = [*overrides, "python_log_level=warning"]
    register()
    install()  # it asks no plugin before it refuses `parallelism_config`
    eval_from_yaml(str(run), overrides)


if __name__ == "__main__":
    main()
