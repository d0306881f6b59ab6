"""What was tried to break a run and what came of it: a table at the end of the test output.

A test marked `fault("what happens", "survived")` or `fault("...", "reported")` is a row when it
passes, and lost or hung when it does not. One that tries several, or knows better how long its
report took, is marked `fault` alone and calls `record` for each when it has held.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

__all__ = ["RAN_OUT", "VARIABLE", "lines", "record", "seconds_of"]

Outcome = Literal["survived", "reported", "lost", "hung"]

VARIABLE = "COMPOSER_FSDP2_FAULTS"
"""Environment variable: the file of this session, which its ranks and programs inherit."""
RAN_OUT = ("was still busy after", "TimeoutExpired", "TimeoutError")
"""What the report of a test says that did not end by itself."""


def record(fault: str, outcome: Outcome, seconds: float = 0.0, times: int = 1) -> None:
    """Adds rows, from any process of the session; of the ranks of a pool, the first one speaks."""
    path = os.environ.get(VARIABLE)
    if path is None or os.environ.get("RANK", "0") != "0":
        return
    line = json.dumps([fault, outcome, seconds, times]) + "\n"
    with Path(path).open("a") as file:  # one write, so that lines of two processes stay whole
        file.write(line)


def seconds_of(call: Callable[[], Any]) -> Callable[[], float]:
    """The same call, which can be pickled, returning how long it took."""
    return functools.partial(_measured, call)


def _measured(call: Callable[[], Any]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


def lines(path: Path) -> Iterator[str]:
    """The table; nothing where no fault was tried."""
    times: dict[str, Counter[str]] = {}
    slowest: dict[str, float] = {}
    for line in path.read_text().splitlines():
        fault, outcome, seconds, count = json.loads(line)
        times.setdefault(fault, Counter())[outcome] += count
        if outcome == "reported":
            slowest[fault] = max(slowest.get(fault, 0.0), seconds)
    if not times:
        return
    yield f"{'tried':>6} {'survived':>9} {'reported':>9} {'slowest':>9}"
    for fault, counts in sorted(times.items()):
        yield _row(counts, slowest.get(fault), fault)
    total = sum(times.values(), Counter[str]())
    yield _row(total, None, "in all")
    longest = max(slowest.values(), default=0.0)
    yield f"lost {total['lost']}, hung {total['hung']}; slowest report after {longest:.1f} s"


def _row(counts: Counter[str], seconds: float | None, name: str) -> str:
    took = "" if seconds is None else f"{seconds:.1f} s"
    tried = sum(counts.values())
    return f"{tried:>6} {counts['survived']:>9} {counts['reported']:>9} {took:>9}  {name}"
