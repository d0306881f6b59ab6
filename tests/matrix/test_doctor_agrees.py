"""A mistake that `doctor` finds is one at which the run stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import foundry, run_mistakes
from tests.support.pool import RankError

pytest.importorskip("llmfoundry", reason="needs the extra foundry")

PRELOAD = foundry.PRELOAD


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    foundry.write_assets(folder)
    return folder


def run(settings: dict[str, Any]) -> None:
    foundry.trained(settings).close()


@pytest.mark.table("text")
@pytest.mark.parametrize("loader", ["finetuning", "text"])
def test_the_run_without_a_mistake_does_not(ranks, assets: Path, loader: str):
    ranks(2, run, run_mistakes.good(assets, loader))


@pytest.mark.table("top-level key")
@pytest.mark.parametrize("wrong", run_mistakes.TRIED)
def test_the_run_stops(ranks, assets: Path, wrong: str):
    """Of some mistakes one rank alone learns, and the others would wait for it.

    A launcher ends them then, and so does the pool: every run has ranks of its own.
    """
    with pytest.raises(RankError) as caught:
        ranks(2, run, run_mistakes.mistaken(assets, wrong))
    # The ranks that failed come first. No other one may have failed for the loss of a rank only.
    failed = str(caught.value).partition(" was still busy ")[0]
    assert " failed\n" in failed
    assert run_mistakes.TRIED[wrong] in failed.partition(" failed\n")[2]
