"""A terminal that keeps what is written to standard error."""

from __future__ import annotations

import io
import sys

import pytest

from composer_fsdp2 import progress

__all__ = ["Screen", "show_on"]


class Screen(io.StringIO):
    """Standard error that is a terminal, or is none."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def show_on(patch: pytest.MonkeyPatch, terminal: bool) -> Screen:
    """Puts a screen in the place of standard error; bars come at once."""
    found = Screen(terminal)
    patch.setattr(sys, "stderr", found)
    patch.setattr(progress, "_DELAY_SECONDS", 0.0)
    return found
