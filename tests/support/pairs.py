"""Few cases of many: every two values of different settings meet, or every value has its turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

__all__ = ["covering", "pairs_of", "parametrize_by_turns", "parametrize_pairs"]

Case = dict[str, Any]


def parametrize_pairs(**settings: Iterable[Any]) -> pytest.MarkDecorator:
    """As `pytest.mark.parametrize` of each would, but for `covering` cases instead of all."""
    cases = covering(settings)
    return pytest.mark.parametrize(tuple(settings), [tuple(case.values()) for case in cases])


def parametrize_by_turns(**settings: Iterable[Any]) -> pytest.MarkDecorator:
    """Each value of the first setting once, with the values of the others by turns."""
    first, *others = settings.values()
    cases = zip(first, *map(itertools.cycle, others), strict=False)
    return pytest.mark.parametrize(tuple(settings), list(cases))


def covering(
    settings: Mapping[str, Iterable[Any]], allowed: Callable[[Case], bool] = lambda _case: True
) -> list[Case]:
    """Allowed cases that hold every pair of values some allowed case holds.

    Greedy: each case is the one with most pairs that are new, so the same input gives the same.
    """
    names = list(settings)
    every = [
        dict(zip(names, values, strict=True)) for values in itertools.product(*settings.values())
    ]
    pairs = {index: pairs_of(case) for index, case in enumerate(every) if allowed(case)}
    left = set[Any]().union(*pairs.values())
    chosen = []
    while left:
        best = max(pairs, key=lambda index: len(pairs[index] & left))
        left -= pairs[best]
        chosen.append(every[best])
    return chosen


def pairs_of(case: Case) -> frozenset[Any]:
    """Every two settings of a case with their values."""
    return frozenset(itertools.combinations(case.items(), 2))
