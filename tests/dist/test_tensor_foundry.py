"""LLM Foundry's runs with tensor parallelism, against the same run on one rank without sharding."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.utils.parallelism import TPConfig
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.trainer.config import parse_parallelism_config
from tests.dist.test_foundry import (
    evaluated,
    evaluation,
    icl,
    same,
    same_weights,
    tell_in,
)
from tests.dist.test_tensor_parallel import global_batches, loss_of, mpt
from tests.support.foundry import (
    PRELOAD,
    llama,
    loader_of,
    run_of,
    tell,
    trained,
    write_assets,
)
from tests.support.parity import full

pytest.importorskip("llmfoundry", reason="needs the extra foundry")
__all__ = ["PRELOAD", "evaluation"]

TOLERANCE = 1e-6
# The bias of keys has a gradient that is zero but for rounding, which Adam would make steps of.
STEADY = {"optimizer.eps": 1e-2}
TP: dict[str, Any] = {"parallelism_config": {"tp": {"degree": 2}, "fsdp2": {}}}
FORMS: dict[str, dict[str, Any]] = {
    "tp": TP,
    "in fsdp2": {"parallelism_config": {"fsdp2": {"tensor_parallel": 2}}},
    "tp_config": {
        "tp_config": {"tensor_parallel_degree": 2, "layer_plan": {"*.ffn.*": "whole"}},
        "fsdp_config": {"version": 2},
    },
}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    write_assets(folder)
    return folder


# --- What is trained on. ---


@pytest.mark.table
@pytest.mark.parametrize("form", FORMS)
def test_every_form_trains_as_without_sharding(form: str, ranks: Any, assets: Path):
    """The MDS loader, whose `replication` is set; a batch that four ranks could not share."""
    batch: dict[str, Any] = {"global_train_batch_size": 6 if form == "tp" else 8}
    if form == "in fsdp2":
        batch["model.init_device"] = "mixed"
    (alone,) = ranks(1, tell, run_of(assets, STEADY, batch, {"model.init_device": "cpu"}))
    for found in ranks(4, tell, run_of(assets, STEADY, FORMS[form], batch)):
        assert found.sharded
        same(found, alone)


@pytest.mark.table
@pytest.mark.parametrize("copies", [None, 2])
def test_a_sampler_deals_to_groups(copies: int | None, ranks: Any, assets: Path):
    """Fine-tuning data, which is no streaming dataset; microbatches weigh by their tokens."""
    change = {**STEADY, "accumulate_train_batch_on_tokens": True}
    fsdp2 = {"data_parallel_replicate_degree": copies}
    both = {"parallelism_config": {"tp": {"degree": 2}, "fsdp2": fsdp2}}
    (alone,) = ranks(1, tell, run_of(assets, change, loader="finetuning"))
    for found in ranks(4, tell, run_of(assets, both, change, loader="finetuning")):
        same(found, alone)


SPEED = {"callbacks": {"speed_monitor": {"window_size": 1}}}


@pytest.mark.table
@pytest.mark.parametrize("duration", ["24sp", "400tok"])
def test_samples_and_tokens_count_once(duration: str, ranks: Any, assets: Path):
    change = {"max_duration": duration, "scheduler.t_warmup": f"0{duration.lstrip('0123456789')}"}
    (alone,) = ranks(1, tell, run_of(assets, change, STEADY, SPEED))
    found, *_ = ranks(2, tell, run_of(assets, TP, change, STEADY, SPEED))
    assert found.batches == alone.batches > 2
    same(found, alone)
    counted = {key: value for key, value in alone.logged.items() if key in COUNTED}
    assert counted.keys() == COUNTED
    assert {key: found.logged[key] for key in counted} == counted


COUNTED = {"time/token", "time/sample"}


def per_second(cfg: dict[str, Any]) -> tuple[float, float]:
    """Operations of a batch as this rank counts them, and samples of the rank's batch."""
    trainer = trained(cfg)
    model, batch = trainer.state.model, next(iter(trainer.state.train_dataloader))
    found = float(model.flops_per_batch(batch)), float(len(batch["input_ids"]))
    trainer.close()
    return found


def test_operations_count_once(ranks: Any, assets: Path):
    ((whole, samples),) = ranks(1, per_second, run_of(assets, {"max_duration": "1ba"}))
    for part, size in ranks(4, per_second, run_of(assets, TP, {"max_duration": "1ba"})):
        assert (4 * part, 2 * size) == (whole, samples)


# --- Evaluation. ---


@pytest.mark.table
@pytest.mark.parametrize("questions", [8, 5])
def test_evaluation_is_that_of_the_unsharded_run(
    questions: int, ranks: Any, assets: Path, tmp_path: Path
):
    """Streamed text, prompts that a sampler deals, and questions that groups cannot share evenly.

    The sampler repeats one for the last group, of which both ranks leave it out.
    """
    lines = (assets / "questions.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "questions.jsonl").write_text("".join(lines[:questions]))
    loaders = [
        {**loader_of(assets, "val"), "label": "text"},
        {**loader_of(assets, "validation", "finetuning"), "label": "prompts", "drop_last": False},
    ]
    both = {"eval_loader": loaders, "eval_interval": "2ba", "eval_first": True, **icl(tmp_path)}
    (alone,) = ranks(1, tell_in, tmp_path, run_of(assets, STEADY, both))
    for name in ("questions", "text/LanguageCrossEntropy", "prompts/LanguageCrossEntropy"):
        assert any(name in key for key in alone.metrics), alone.metrics
    for found in ranks(4, tell_in, tmp_path, run_of(assets, STEADY, TP, both)):
        same(found, alone)


@pytest.mark.matrix
def test_the_evaluation_script(ranks: Any, assets: Path, tmp_path: Path, evaluation: Any):
    """Its loaders come to the Trainer when it evaluates; rank 0 alone reads the weights."""
    alone = {k: v for k, v in evaluation.items() if k not in ("parallelism_config", "code_paths")}
    ((_, expected),) = ranks(1, evaluated, alone | llama(assets, "llama-tied"), tmp_path)
    # Its attention has one head of keys and values.
    plan = {"degree": 2, "layer_plan": {"*.self_attn.*": "whole"}}
    both = {"parallelism_config": {"fsdp2": {}, "tp": plan}}
    divided = {**evaluation, **both, **llama(assets, "llama-tied", init_device="mixed")}
    for sharded, metrics in ranks(4, evaluated, divided, tmp_path):
        assert sharded
        assert metrics == pytest.approx(expected, rel=TOLERANCE)


# --- Checkpoints. ---


def degrees(tp: int, kind: str = "sharded") -> dict[str, Any]:
    tensor = {"degree": tp} if tp > 1 else None
    return {"parallelism_config": {"tp": tensor, "fsdp2": {"state_dict_type": kind}}}


@pytest.mark.table
@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [((4, 2), (4, 2), "sharded"), ((4, 2), (2, 1), "sharded"), ((2, 1), (2, 2), "full")],
)
def test_resumes_in_the_middle_at_any_degree(
    before: tuple[int, int],
    after: tuple[int, int],
    kind: str,
    ranks: Any,
    assets: Path,
    tmp_path: Path,
):
    """World sizes and degrees; the data goes on where it was, and nothing counts twice."""
    saving = {"save_folder": f"{tmp_path}/saved", "save_interval": "2ba", "autoresume": True}
    (alone,) = ranks(1, tell, run_of(assets, STEADY))
    first = run_of(assets, STEADY, degrees(before[1], kind), saving, {"max_duration": "2ba"})
    ranks(before[0], tell, first)
    for found in ranks(after[0], tell, run_of(assets, STEADY, degrees(after[1], kind), saving)):
        assert found.batches == 4
        assert found.losses == pytest.approx(alone.losses[2:], rel=TOLERANCE)
        same_weights(found, alone)


# --- What is refused. ---


def refusal(cfg: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        trained(cfg)
    return str(caught.value)


REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    "one rank": (1, TP, "tensor_parallel.degree is 2, which does not divide the world size 1"),
    "three ranks": (3, TP, "tensor_parallel.degree is 2, which does not divide the world size 3"),
    "a batch": (
        4,
        {**TP, "global_train_batch_size": 7},
        "global_train_batch_size is 7, which the 2 groups of dp_shard 2 x tp 2 cannot share",
    ),
    "replication": (
        4,
        {**TP, "train_loader.dataset.replication": 4},
        "train_loader.dataset.replication is 4, and 2 ranks read one batch",
    ),
    "two places": (
        4,
        {"parallelism_config": {"tp": {"degree": 2}, "fsdp2": {"tensor_parallel": 2}}},
        "Tensor parallelism is set twice",
    ),
    "a strategy": (
        4,
        {
            "parallelism_config": {
                "tp": {"strategy": "ffn", "tensor_parallel_degree": 2},
                "fsdp2": {},
            }
        },
        "the strategy 'ffn'.*give the ranks of a group different data.*drift apart",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_on_every_rank(case: str, ranks: Any, assets: Path):
    world_size, change, expected = REFUSED[case]
    for found in ranks(world_size, refusal, run_of(assets, change)):
        assert re.search(expected, found), found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.world_size(2)
def test_a_plan_that_a_strategy_made_is_refused():
    """As LLM Foundry hands it over: styles of torch that take parts of the batch."""
    from llmfoundry.tp.ffn_tp_strategy import ffn_tp_strategy

    made = TPConfig(tensor_parallel_degree=2, layer_plan=ffn_tp_strategy(mpt()))
    with pytest.raises(ConfigError, match=r"ffn': PrepareModuleInput is invalid. Expected colwise"):
        parse_parallelism_config({"tp": made, "fsdp2": {}})


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
@pytest.mark.world_size(4)
def test_the_strategy_ffn_lets_weights_outside_of_its_plan_drift():
    """Why it is refused: 20 steps of SGD as LLM Foundry and Composer would divide the model."""
    from llmfoundry.tp.ffn_tp_strategy import ffn_tp_strategy

    torch.manual_seed(0)
    model = mpt()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], ffn_tp_strategy(model))
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for ids in global_batches():
        loss_of(model, ids.chunk(4)[dist.get_rank()]).backward()
        optimizer.step()
        optimizer.zero_grad()
    attention = full(model.get_parameter("transformer.blocks.0.attn.Wqkv.weight")).detach()
    everyone = [torch.empty_like(attention) for _ in range(4)]
    dist.all_gather(everyone, attention.contiguous())
    assert torch.equal(everyone[0], everyone[2])  # rank 0 and 2 have the same place in a group
    assert (everyone[0] - everyone[1]).abs().max() > 1e-3
