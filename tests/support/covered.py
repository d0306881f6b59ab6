"""Records which lines of the package each test runs, in pytest's process and on the ranks.

Needs Python 3.12, whose `sys.monitoring` does not report a line again before `start` asks it to.
Commands that a test starts as processes of their own are not seen.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterable
from pathlib import Path
from types import CodeType

PACKAGE = f"{Path(__file__).parents[2] / 'composer_fsdp2'}/"

Line = tuple[str, int]
"""A file, below the package, and the number of a line in it."""

_TOOL = "covered"
_lines: set[Line] = set()


def is_on() -> bool:
    """Whether lines are recorded in this process."""
    return (
        sys.version_info >= (3, 12) and sys.monitoring.get_tool(sys.monitoring.COVERAGE_ID) == _TOOL
    )


def add(lines: Iterable[Line]) -> None:
    """Adds lines that ran on ranks to the record."""
    _lines.update(lines)


def start() -> None:
    """Begins a record; the first call in a process switches monitoring on."""
    monitoring = sys.monitoring
    tool = monitoring.COVERAGE_ID
    if monitoring.get_tool(tool) is None:
        monitoring.use_tool_id(tool, _TOOL)
        monitoring.register_callback(tool, monitoring.events.PY_START, _record_start)
        monitoring.register_callback(tool, monitoring.events.LINE, _record_line)
        monitoring.set_events(tool, monitoring.events.PY_START)
        atexit.register(_stop)
    _lines.clear()
    monitoring.restart_events()


def _stop() -> None:
    monitoring = sys.monitoring
    for event in (monitoring.events.PY_START, monitoring.events.LINE):
        monitoring.register_callback(monitoring.COVERAGE_ID, event, None)


def take() -> list[Line]:
    """Returns the lines that ran since `start`."""
    return sorted(_lines)


def _record_start(code: CodeType, _offset: int) -> object:
    monitoring = sys.monitoring
    if code.co_filename.startswith(PACKAGE):
        monitoring.set_local_events(monitoring.COVERAGE_ID, code, monitoring.events.LINE)
    return monitoring.DISABLE


def _record_line(code: CodeType, line: int) -> object:
    _lines.add((code.co_filename.removeprefix(PACKAGE), line))
    return sys.monitoring.DISABLE
