"""How every command ends and what it says on the way: exit codes, messages, errors, progress."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from enum import IntEnum

import typer
from rich.console import Console
from rich.markup import escape

from composer_fsdp2.cli import launch
from composer_fsdp2.foundry.findings import OWN_ERRORS

__all__ = ["EXIT_CODES", "ExitCode", "progress", "reported", "say"]


class ExitCode(IntEnum):
    """Exit codes of every command.

    A process that a signal ends has 128 plus the number of the signal, as in every shell.
    """

    OK = 0
    """done, and the answer is good"""
    FAILED = 1
    """done, and the answer is bad: the run failed or would fail, the files differ or are damaged"""
    USAGE = 2
    """not begun: a mistake in the command line, the YAML or a path, which the message names"""


EXIT_CODES = (
    "Exit codes of every command: 0 if all is well; 1 if the work was done and the answer is bad "
    "(a run failed or would fail, a checkpoint is damaged, two things differ); 2 if it was not "
    "begun, because of a mistake in the command line, the YAML or a path; 128 plus the number of "
    "a signal that ended it."
)
"""the same for `--help`"""


@contextmanager
def reported() -> Generator[None]:
    """Turns an error into a message, whose cure is bold, and an exit code.

    What the user can correct has no traceback, and exit code 2. The traceback of anything else goes
    to a file that the message names, and the exit code is 1.
    """
    try:
        yield
    except OWN_ERRORS as error:
        say(f"[bold red]{type(error).__name__}:[/] {_cure_apart(str(error))}")
        raise typer.Exit(ExitCode.USAGE) from None
    except launch.RankError as error:
        say(f"\n{_cure_apart(error.headline)}")
        if error.rest:
            say(escape(error.rest))
        raise typer.Exit(ExitCode.FAILED) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if launch.under_own_launcher():  # which reports it
            raise
        trace = "".join(traceback.format_exception(error))
        try:
            handle, log_path = tempfile.mkstemp(prefix="composer-fsdp2-", suffix=".log", text=True)
            with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{' '.join(sys.argv)}\n{trace}")
        except OSError as failed:  # the text itself is shown then
            log_path = f"no file ({failed.strerror}):\n{trace}"
        text = " ".join(str(error).split()) or "without a message"
        rank = f"Rank {os.environ['RANK']}: " if launch.under_launcher() else ""
        say(f"[bold red]{rank}{type(error).__name__}:[/] [red]{escape(text)}[/]")
        say(f"This is no mistake that composer-fsdp2 knows. The traceback is in {escape(log_path)}")
        raise typer.Exit(ExitCode.FAILED) from None


def _cure_apart(text: str) -> str:
    """Marks an error red, and its last sentence, which says what to write instead, bold."""
    message, separator, cure = text.rpartition(". ")
    if not separator or "\n" in cure:
        return f"[red]{escape(text)}[/]"
    return f"[red]{escape(message)}.[/] [bold]{escape(cure)}[/]"


def say(markup: str) -> None:
    """Prints one line with rich's markup; colours only on a terminal, and not with NO_COLOR."""
    # Made for each message: it keeps the stream it finds, and standard error may be replaced.
    Console(stderr=True, highlight=False, soft_wrap=True).print(markup)


@contextmanager
def progress(title: str, unit: str = "B") -> Generator[Callable[..., None]]:
    """Shows how far a task is, with its speed and the time left, on standard error.

    A terminal has a bar, which is gone when the task is done. A log file or a pipe has nothing: a
    bar there is a line for every step.

    Args:
        title: what is done, for example "Converting".
        unit: what is counted; bytes, which are B, are shown in MB and GB.

    Yields:
        A function that takes what was done since its last call and the total, and perhaps another
        title.
    """
    from tqdm import tqdm

    with tqdm(
        desc=title,
        unit=unit,
        unit_scale=unit == "B",
        leave=False,
        disable=not sys.stderr.isatty(),
        file=sys.stderr,
    ) as bar:

        def advance(done: int, total: int | None, title: str = title) -> None:
            bar.total = total
            bar.update(done)
            bar.set_description(title)

        yield advance
