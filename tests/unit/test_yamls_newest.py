"""The runs of `yamls/newest` say truly what they need, where transformers has their models."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("llmfoundry", reason="needs the extra foundry")

from tests.support import yaml_memory, yaml_models
from tests.support.yaml_memory import NEWEST, ROOT, commands_of, memory_of, runs_of

pytestmark = [
    pytest.mark.skipif(
        not yaml_memory.has_newest(), reason="transformers has no GptOss, Qwen3_5 and Gemma4"
    ),
    pytest.mark.parametrize("path", NEWEST, ids=lambda path: path.stem),
]
PAGE = ROOT / "docs" / "recipes" / "one-node.md"


def test_its_comment_is_true(path: Path):
    assert yaml_memory.with_table(path) == path.read_text()
    for command in commands_of(path)[:2]:
        assert f"yamls/newest/{path.name}" in command
    for run in runs_of(path):
        memory = memory_of(run).together
        assert memory <= 0.8 * run.gpu_gb * yaml_memory.GB
        assert run.mesh.shard == 8
        assert run.gpus == 8 * (run.mesh.replicate or 1)
        (row,) = (line for line in PAGE.read_text().splitlines() if f"`{path.name}`" in line)
        assert f" {memory / 1e9:.1f} " in row


def test_its_model_has_the_published_size_and_a_unit_for_each_layer(path: Path):
    run = runs_of(path)[0]
    config = run.model.config
    elements = sum(unit.numel for unit in run.plan.units)
    name = run.config.variables.model
    assert elements == pytest.approx(yaml_models.PARAMETERS[name], rel=0.005)
    layers = [unit for unit in run.plan.units if unit.reason == "fsdp_wrap_fn"]
    assert len(layers) == config.num_hidden_layers
