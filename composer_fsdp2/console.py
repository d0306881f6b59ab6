"""What every command says to its user, on standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape

from composer_fsdp2.errors import CheckpointError, ConfigError, PatchError, PlanError

__all__ = ["reported", "say"]

_USER_ERRORS = (CheckpointError, ConfigError, PatchError, PlanError)


@contextmanager
def reported() -> Iterator[None]:
    """What the user can correct becomes one message and exit code 2, without a traceback."""
    from composer_fsdp2.launch import RankError

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
