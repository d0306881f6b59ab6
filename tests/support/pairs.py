"""Few cases of many: every two values of different settings meet, or every value has its turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

__all__ = ["covering", "fewest", "pairs_of", "parametrize_by_turns", "parametrize_pairs"]

Case = dict[str, Any]
T = TypeVar("T")


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
    every = [
        dict(zip(settings, values, strict=True)) for values in itertools.product(*settings.values())
    ]
    return fewest([case for case in every if allowed(case)], pairs_of)


def fewest(cases: Sequence[T], pairs: Callable[[T], frozenset[Any]]) -> list[T]:
    """Returns cases that have every pair that any case has, greedily chosen.

    Args:
        cases: to choose from.
        pairs: of a case.
    """
    found = dict(enumerate(map(pairs, cases)))
    left, chosen = set[Any]().union(*found.values()), list[T]()
    while left:
        best = max(found, key=lambda index: len(found[index] & left))
        left -= found[best]
        chosen.append(cases[best])
    return chosen


def pairs_of(case: Case) -> frozenset[Any]:
    """Every two settings of a case with their values."""
    return frozenset(itertools.combinations(case.items(), 2))
