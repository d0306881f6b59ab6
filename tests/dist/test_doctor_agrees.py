"""A mistake that `doctor` finds is one at which the run stops."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import foundry, run_mistakes

pytest.importorskip("llmfoundry", reason="needs the extra foundry")

PRELOAD = foundry.PRELOAD


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    foundry.write_assets(folder)
    return folder


@pytest.mark.world_size(2)
def test_the_run_without_a_mistake_does_not(assets: Path):
    foundry.trained(run_mistakes.good(assets)).close()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("wrong", run_mistakes.TRIED)
def test_the_run_stops(assets: Path, wrong: str):
    settings = run_mistakes.mistaken(assets, wrong)
    with pytest.raises((Exception, SystemExit)) as caught:
        foundry.trained(settings)
    # Nor did a rank wait for another one that had stopped.
    assert "pair closure" not in str(caught.value)
    assert "onnection closed" not in str(caught.value)
