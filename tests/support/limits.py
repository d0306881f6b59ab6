"""Limits of time are for hangs: they grow with how long a process takes to start here and now."""

from __future__ import annotations

import os
import subprocess
import sys
import time

NORMAL_START_SECONDS = 0.1
"""Of the process that `measure` starts, on an idle core of the slowest machine we know."""
VARIABLE = "COMPOSER_FSDP2_TESTS_SLOWNESS"
"""The session's measure, for its ranks and the commands it starts."""


def measure() -> float:
    """Returns how many times as long as normally a process takes to start; at least 1."""
    begun = time.monotonic()
    subprocess.run([sys.executable, "-S", "-c", "import asyncio"], check=True)
    return max(1.0, (time.monotonic() - begun) / NORMAL_START_SECONDS)


def scaled(seconds: float) -> float:
    """Returns a limit for what starts now, by the measure at the start of the session."""
    return seconds * float(os.environ.get(VARIABLE, "1"))


class Limit:
    """A limit that measures anew before it gives up, for a machine that became slow meanwhile."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._begun = time.monotonic()
        self._ends = self._begun + scaled(seconds)

    def left(self) -> float:
        """Returns the seconds that are left; 0 when the time is over."""
        if time.monotonic() >= self._ends:
            self._ends = max(self._ends, self._begun + self._seconds * measure())
        return max(0.0, self._ends - time.monotonic())

    def end_within(self, seconds: float) -> None:
        """Shortens what is left to a limit that is scaled as this one is."""
        self._seconds = 0.0
        self._ends = min(self._ends, time.monotonic() + scaled(seconds))
