"""Forwards that are given containers, and ways out of a unit, drawn by chance.

What is wrong is shown with its case, which can be pasted into `tests/dist/test_containers.py`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.containers import draw_given, draw_way, run_given, run_way
from tests.support.pool import RankError

PRELOAD = ["tests.support.containers"]

CASE_SECONDS = 30.0


def wrong_cases(
    request: pytest.FixtureRequest, cases: list[Any], run: Callable[[Any], Any]
) -> tuple[list[str], int]:
    """Runs cases on two ranks; returns what is wrong, and how many are refused."""
    from tests.conftest import POOLS

    wrong, refused = list[str](), 0
    for case in cases:
        pool = request.config.stash[POOLS].get(2)
        try:
            first, second = pool.run(functools.partial(run, case), CASE_SECONDS)
        except RankError as error:
            wrong.append(f"{case}\n{error}")
            continue
        refused += first.outcome == "refused"
        if first != second:
            wrong.append(f"{case}\nranks differ: {first}, {second}")
        elif first.text and not re.match(r"[\w'`].*[.)]$", first.text, re.DOTALL):
            wrong.append(f"{case}\nno sentence: {first.text}")
    return wrong, refused


@pytest.mark.parametrize("first", range(0, 150, 50))
def test_forwards_that_are_given_containers(first: int, request: pytest.FixtureRequest):
    cases = [draw_given(number) for number in range(first, first + 50)]
    wrong, refused = wrong_cases(request, cases, run_given)
    assert not wrong, "\n\n".join(wrong)
    assert not refused


@pytest.mark.parametrize("first", range(0, 100, 50))
def test_ways_out_of_a_unit(first: int, request: pytest.FixtureRequest):
    cases = [draw_way(number) for number in range(first, first + 50)]
    wrong, refused = wrong_cases(request, cases, run_way)
    assert not wrong, "\n\n".join(wrong)
    assert refused <= 5
