"""LLM Foundry's runs with divided sequences, against the same run on one rank without sharding."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from composer_fsdp2.errors import ConfigError
from tests.dist.test_foundry import icl, same, same_weights, tell_in
from tests.support.foundry import PRELOAD, llama, loader_of, run_of, tell, trained, write_assets

pytest.importorskip("llmfoundry", reason="needs the extra foundry")
__all__ = ["PRELOAD"]

TOLERANCE = 1e-6
# The bias of keys has a gradient that is zero but for rounding, which Adam would make steps of.
STEADY = {"optimizer.eps": 1e-2}


def divided(degree: int, method: str = "auto", **fsdp2: Any) -> dict[str, Any]:
    block = {"degree": degree, "method": method}
    return {"parallelism_config": {"sequence_parallel": block, "fsdp2": fsdp2}}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    write_assets(folder)
    return folder


RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "streamed text": ("text", divided(2), {"global_train_batch_size": 6}),
    "gathered": ("text", divided(4, "gather_kv", chunked_loss={"chunks": 2}), {}),
    "prompts": ("finetuning", divided(2, "ulysses"), {"accumulate_train_batch_on_tokens": True}),
}


@pytest.mark.table
@pytest.mark.parametrize("run", RUNS)
def test_trains_as_without_sharding(run: str, ranks: Any, assets: Path):
    loader, block, change = RUNS[run]
    (alone,) = ranks(1, tell, run_of(assets, STEADY, change, loader=loader))
    for found in ranks(4, tell, run_of(assets, STEADY, change, block, loader=loader)):
        assert found.sharded
        same(found, alone)


@pytest.mark.matrix
def test_a_model_of_hugging_face_in_evaluation_too(ranks: Any, assets: Path, tmp_path: Path):
    loaders = [
        {**loader_of(assets, "val"), "label": "text"},
        {**loader_of(assets, "validation", "finetuning"), "label": "prompts", "drop_last": False},
    ]
    (tmp_path / "questions.jsonl").write_text((assets / "questions.jsonl").read_text())
    both = {"eval_loader": loaders, "eval_interval": "2ba", "eval_first": True, **icl(tmp_path)}
    both |= llama(assets, "llama-tied")
    (alone,) = ranks(1, tell_in, tmp_path, run_of(assets, STEADY, both))
    for found in ranks(4, tell_in, tmp_path, run_of(assets, STEADY, both, divided(2, "gather_kv"))):
        same(found, alone)


@pytest.mark.matrix
def test_resumes_in_the_middle_at_another_degree(ranks: Any, assets: Path, tmp_path: Path):
    saving = {"save_folder": f"{tmp_path}/saved", "save_interval": "1ba", "autoresume": True}
    (alone,) = ranks(1, tell, run_of(assets, STEADY))
    first = run_of(assets, STEADY, divided(2), saving, {"max_duration": "1ba"})
    ranks(4, tell, first)
    second = run_of(assets, STEADY, divided(2, "gather_kv"), saving, {"max_duration": "2ba"})
    ranks(2, tell, second)
    for found in ranks(2, tell, run_of(assets, STEADY, divided(1), saving)):
        assert found.batches == 4
        assert found.losses == pytest.approx(alone.losses[2:], rel=TOLERANCE)
        same_weights(found, alone)


def refusal(cfg: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        trained(cfg)
    return str(caught.value)


REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    "ranks": (3, divided(2), "sequence_parallel.degree is 2, which does not divide the world size"),
    "a batch": (4, {**divided(2), "global_train_batch_size": 7}, "is 7, which the 2 groups"),
    "replication": (
        4,
        {**divided(2), "train_loader.dataset.replication": 4},
        "train_loader.dataset.replication is 4, and 2 ranks read one batch",
    ),
    "two places": (
        2,
        {"parallelism_config": {"sequence_parallel": 2, "fsdp2": {"sequence_parallel": 2}}},
        "Both 'sequence_parallel' and 'fsdp2.sequence_parallel'",
    ),
    "alone": (2, {"parallelism_config": {"sequence_parallel": 2}}, "without 'fsdp2' as a mapping"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_on_every_rank(case: str, ranks: Any, assets: Path):
    world_size, change, expected = REFUSED[case]
    for found in ranks(world_size, refusal, run_of(assets, change)):
        assert re.search(expected, found), found
