"""Which tests run when: the tiers `default`, `matrix` and `slow`, chosen by `pytest -m`.

Long tables are of the matrix: all tests in `tests/matrix/` and `tests/accelerator/`, and those
marked `table` beside other tests of their subject. `table("row", "other row")` names the rows that
are of the default tier all the same, which shows each mechanism once or twice.
The last lines name tests of the default tier that took over `MOST_SECONDS`. No session fails for
them: a machine may have other work.
`tests/conftest.py` registers this plugin.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.limits import measure

MATRIX = tuple(Path(__file__).parents[1] / name for name in ("accelerator", "matrix"))
OTHER_TIERS = ("gpu", "matrix", "slow")
MOST_SECONDS = 20.0
"""For the call of a test, by the measure of `limits`, without the start of its ranks."""

TOO_SLOW = pytest.StashKey[list[str]]()


def in_default_tier(item: pytest.Item) -> bool:
    """Whether plain `pytest` runs a test."""
    return not any(item.get_closest_marker(name) for name in OTHER_TIERS)


def pytest_configure(config: pytest.Config) -> None:
    """Makes the list of tests that are too slow."""
    config.stash[TOO_SLOW] = []


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks rows of the matrix, before `-m` chooses."""
    table = item.get_closest_marker("table")
    is_table = table is not None or any(folder in item.path.parents for folder in MATRIX)
    if is_table and (table is None or _row(item) not in table.args):
        item.add_marker(pytest.mark.matrix)


def _row(item: pytest.Item) -> str:
    """The part of a test's name in brackets."""
    return item.name.partition("[")[2].removesuffix("]")


def check_seconds(item: pytest.Item, seconds: float) -> None:
    """Remembers a test of the default tier that took too long, however slow the machine is."""
    if seconds > MOST_SECONDS and in_default_tier(item) and seconds > MOST_SECONDS * measure():
        item.config.stash[TOO_SLOW].append(f"{item.nodeid}: {seconds:.0f} s")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names tests that are too slow."""
    for found in terminalreporter.config.stash[TOO_SLOW]:
        terminalreporter.write_line(
            f"TOO SLOW for the default tier (over {MOST_SECONDS:g} s): {found}. Make it smaller, "
            "mark it 'slow', or move it to tests/matrix."
        )
