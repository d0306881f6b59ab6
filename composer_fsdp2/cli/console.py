"""What every command says to its user, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape

from composer_fsdp2.errors import CheckpointError, ConfigError, PatchError, PlanError

__all__ = ["counting", "reported", "say"]

_USER_ERRORS = (CheckpointError, ConfigError, PatchError, PlanError)


@contextmanager
def reported() -> Generator[None]:
    """What the user can correct becomes one message and exit code 2, without a traceback."""
    from composer_fsdp2.cli.launch import RankError

    try:
        yield
    except _USER_ERRORS as error:
        say(f"[bold red]{type(error).__name__}:[/] [red]{escape(str(error))}[/]")
        raise typer.Exit(2) from None
    except RankError as error:
        say(f"\n[red]{escape(str(error))}[/]")
        raise typer.Exit(1) from None


def say(markup: str) -> None:
    """Prints one line with rich's markup."""
    # Made for each message: it keeps the stream it finds, and standard error may be replaced.
    Console(stderr=True, highlight=False, soft_wrap=True).print(markup)


@contextmanager
def counting(total: int) -> Generator[Callable[[str, int], None]]:
    """A bar with a title on standard error, if that is a terminal; gone when it is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda title, done: None
        return
    title = TextColumn("{task.description}", markup=False)
    columns = (title, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("", total=total)
        yield lambda title, done: bars.update(bar, completed=done, description=title)
