"""Runs drawn by chance equal one process, or are refused with a sentence.

`COMPOSER_FSDP2_TESTS_DRAWN=2000` draws more than 60. What is wrong is shown with its case, which
is drawn again by its number: `run_case(draw(17), folder)`.
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.drawn import Result, draw, run_case
from tests.support.pool import RankError

PRELOAD = ["tests.support.drawn"]

NUMBER = int(os.environ.get("COMPOSER_FSDP2_TESTS_DRAWN", "60"))
ROW = 20
CASE_SECONDS = 60.0


@pytest.mark.parametrize("first", range(0, NUMBER, ROW))
def test_equals_one_process_or_is_refused(
    first: int, request: pytest.FixtureRequest, tmp_path: Path
):
    from tests.conftest import POOLS

    pools = request.config.stash[POOLS]
    cases = [draw(number) for number in range(first, min(first + ROW, NUMBER))]
    outcomes, wrong = Counter[str](), list[str]()
    # Ranks that wait for others are stopped, and started again: not for every case.
    for case in sorted(cases, key=lambda case: case.world_size):
        call = functools.partial(run_case, case, tmp_path)
        try:
            found = pools.get(case.world_size).run(call, CASE_SECONDS)
        except RankError as error:  # also of a case that hangs
            wrong.append(f"{case}\n{error}")
            continue
        outcomes[found[0].outcome] += 1
        if fault := _fault(found):
            wrong.append(f"{case}\n{fault}")
    assert not wrong, "\n\n".join(wrong)
    assert outcomes["equal"] >= len(cases) // 2, outcomes


def _fault(found: list[Result]) -> str:
    """What is wrong with a refusal: it differs between ranks, or is no sentence."""
    first = found[0]
    if any(other != first for other in found):
        return f"ranks differ: {found}"
    is_sentence = re.match(r"[\w'`].*[.)]$", first.text, re.DOTALL)
    return "" if first.outcome == "equal" or is_sentence else f"no sentence: {first.text}"
