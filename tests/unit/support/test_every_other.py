"""`--every-other` leaves out half of the rows of tests marked `table`, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import pytest_collection_modifyitems

ROWS = 5


@pytest.mark.table
@pytest.mark.parametrize("row", range(ROWS))
def test_rows_that_are_counted_below(row: int):
    assert row < ROWS


class _Options:
    """Collects as a session does, with the option or without it."""

    def __init__(self, every_other: bool) -> None:
        self.every_other, self.left_out = every_other, list[pytest.Item]()
        self.hook = self

    def getoption(self, name: str) -> bool:
        assert name == "--every-other"
        return self.every_other

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.left_out += items


@pytest.fixture
def rows(request: pytest.FixtureRequest) -> Callable[[bool], tuple[list[str], int]]:
    """Names that are left of this file's tests, and how many are told to be left out."""

    def left(every_other: bool) -> tuple[list[str], int]:
        module = request.node.getparent(pytest.Module)
        items = [item for item in module.collect() if isinstance(item, pytest.Item)]
        options = _Options(every_other)
        pytest_collection_modifyitems(options, items)  # type: ignore[arg-type]
        return [item.name for item in items], len(options.left_out)

    return left


def test_it_leaves_out_half(rows: Callable[[bool], tuple[list[str], int]]):
    whole, none = rows(False)
    half, told = rows(True)
    assert none == 0
    assert told == len(whole) - len(half) == ROWS // 2
    name = test_rows_that_are_counted_below.__name__
    gone = {f"{name}[{row}]" for row in (1, 3)}
    assert half == [one for one in whole if one not in gone]


def test_ci_gives_it_to_the_newest_torch_alone():
    run = Path(__file__).parents[3].joinpath(".ci", "run").read_text()
    assert run.count("--every-other") == 1
    assert ".venv-latest/bin/python -m pytest --every-other" in run
