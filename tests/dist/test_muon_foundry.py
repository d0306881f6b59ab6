"""Muon in LLM Foundry: from a YAML, which names it and hands it parameters without names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from composer_fsdp2.foundry.registered import register
from tests.support.foundry import FSDP2, PRELOAD, Told, run_of, tell, write_assets

pytest.importorskip("llmfoundry", reason="needs the extra foundry")
__all__ = ["PRELOAD"]

MUON: dict[str, Any] = {
    "optimizer": {
        "name": "muon",
        "lr": 3e-3,
        "adamw_lr": 1e-3,
        "adamw_eps": 1e-4,
        "iteration_dtype": "fp32",
        "param_groups": [{"param_str_match": "norm|bias", "weight_decay": 0.0}],
    }
}


def train(assets: Path) -> Told:
    register()
    return tell(run_of(assets, FSDP2, MUON))


@pytest.mark.matrix
def test_a_run_from_a_yaml(tmp_path: Path, ranks: Any):
    write_assets(tmp_path)
    alone, found = (ranks(count, train, tmp_path)[0] for count in (1, 2))
    assert found.sharded
    assert found.losses == pytest.approx(alone.losses, rel=1e-6)
    far = {name: (found.weights[name] - value).abs().max() for name, value in alone.weights.items()}
    assert max(far.values()) <= 1e-6, far
    assert found.losses[-1] < found.losses[0]
