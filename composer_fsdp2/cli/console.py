"""Messages, errors and progress of every command, on standard error."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from composer_fsdp2.cli.exit_codes import ExitCode
from composer_fsdp2.errors import CheckpointError, ConfigError, PatchError, PlanError

__all__ = ["print_line", "progress", "reported", "say"]

_USER_ERRORS = (CheckpointError, ConfigError, PatchError, PlanError)


@contextmanager
def reported() -> Generator[None]:
    """Turns an error into a message first, the cure at its end, and an exit code.

    What the user can correct has no traceback, and exit code 2. The traceback of anything else goes
    to a file that the message names, and the exit code is 1.
    """
    from composer_fsdp2.cli.launch import RankError, under_launcher, under_own_launcher

    try:
        yield
    except _USER_ERRORS as error:
        say(f"[bold red]{type(error).__name__}:[/] {_cure_apart(str(error))}")
        raise typer.Exit(ExitCode.USAGE) from None
    except RankError as error:
        say(f"\n{_cure_apart(error.headline)}")
        for text in filter(None, (error.details, error.files)):
            say(escape(text))
        raise typer.Exit(ExitCode.FAILED) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if under_own_launcher():  # which reports it
            raise
        log = _write_traceback(error)
        text = " ".join(str(error).split()) or "without a message"
        rank = f"Rank {os.environ['RANK']}: " if under_launcher() else ""
        say(f"[bold red]{rank}{type(error).__name__}:[/] [red]{escape(text)}[/]")
        say(f"This is no mistake that composer-fsdp2 knows. The traceback is in {escape(log)}")
        raise typer.Exit(ExitCode.FAILED) from None


def _cure_apart(text: str) -> str:
    """The error in red; its last sentence, which says what to write instead, stands out."""
    what, found, cure = text.rpartition(". ")
    if not found or "\n" in cure:
        return f"[red]{escape(text)}[/]"
    return f"[red]{escape(what)}.[/] [bold]{escape(cure)}[/]"


def _write_traceback(error: Exception) -> str:
    """Returns the file that holds the traceback now; the text itself where none can be written."""
    text = "".join(traceback.format_exception(error))
    try:
        handle, name = tempfile.mkstemp(prefix="composer-fsdp2-", suffix=".log", text=True)
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{' '.join(sys.argv)}\n{text}")
    except OSError as failed:
        return f"no file ({failed.strerror}):\n{text}"
    return str(Path(name))


def say(markup: str) -> None:
    """Prints one line with rich's markup; colours only on a terminal, and not with NO_COLOR."""
    # Made for each message: it keeps the stream it finds, and standard error may be replaced.
    Console(stderr=True, highlight=False, soft_wrap=True).print(markup)


def print_line(text: str, colour: str | None = None) -> None:
    """Prints one line to standard output; in colour only on a terminal, and not with NO_COLOR."""
    # `typer.echo` takes colours out where there is no terminal.
    plain = colour is None or os.environ.get("NO_COLOR")
    typer.echo(text if plain else typer.style(text, fg=colour))


@contextmanager
def progress(title: str, unit: str = "bytes") -> Generator[Callable[..., None]]:
    """Shows how far a task is, with its speed and the time left, on standard error.

    A terminal has a bar, which is gone when the task is done. A log file or a pipe has nothing: a
    bar there is a line for every step.

    Args:
        title: what is done, for example "Converting".
        unit: what is counted; bytes have units of their own.

    Yields:
        A function that takes what is done and the total, and perhaps another title.
    """
    from rich import progress as rich

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:  # where a bar of rich that is switched off writes an empty line
        yield lambda *_: None
        return
    amount = [rich.MofNCompleteColumn(), rich.TextColumn(unit), rich.TimeElapsedColumn()]
    if unit == "bytes":
        amount = [rich.DownloadColumn(), rich.TransferSpeedColumn()]
    columns: list[rich.ProgressColumn] = [
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        *amount,
        rich.TimeRemainingColumn(),
        rich.TextColumn("left"),
    ]
    with rich.Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task(title, total=None)

        def advance(done: int, total: int | None, title: str = title) -> None:
            bars.update(bar, completed=done, total=total, description=title)

        yield advance
