"""Odd models in three wrappings: trained like an unsharded copy, or refused with a sentence."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.support.odd_models import WRAPPINGS, Odd, Result, kind_of, kinds, run_kind

PRELOAD = ["tests.support.odd_models"]

KINDS = [name for group in kinds().values() for name in group]


@pytest.mark.table("scripted", "batch_norm")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", KINDS)
def test_trains_or_is_refused(name: str):
    found = run_kind(name)
    assert {w: text for w, result in found.items() if (text := _fault(name, w, result))} == {}
    everyone: list[dict[str, Result]] = [found] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    assert all(other == found for other in everyone)


def _fault(name: str, wrapping: str, result: Result) -> str:
    kind = kind_of(name)
    depends = wrapping in kind.depends and result.outcome == "refused"
    words = kind.refused if depends else kind.words(wrapping)
    if not words:
        return "" if result.outcome == "equal" else f"{result.outcome}: {result.text}"
    told = result.outcome == "refused" and words in result.text and result.text.endswith((".", ")"))
    return "" if told else f"not refused with {words!r}: {result}"


def test_the_table_is_large():
    assert len(KINDS) >= 120
    assert len(WRAPPINGS) == 3


def _refused() -> list[Odd]:
    return [kind for group in kinds().values() for kind in group.values() if kind.refused]


def test_every_refusal_says_what_to_write_instead():
    assert [kind.says for kind in _refused() if not kind.instead] == []
