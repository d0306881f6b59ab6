"""`frozen: replicate`: frozen parameters on every rank, and only trained ones on the wire."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from composer import Trainer
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2 import (
    ModelWeights,
    PlanError,
    prepare_fully_shard,
    summon_full_params,
)
from composer_fsdp2.checkpoint.source import FileCheckpoint, FolderCheckpoint
from composer_fsdp2.step.run import run_of
from tests.dist.test_adapters import (
    FORMATS,
    STEPS,
    everything,
    lora,
    losses_in_bf16,
    trained,
    unsharded_names,
)
from tests.dist.test_adapters import run as run_with_adapters
from tests.support.models import VOCAB, WIDTH, TinyLM
from tests.support.parity import (
    OPTIMIZERS,
    Recipe,
    check_parity_from_here,
    full,
    train_together,
)
from tests.support.traffic import Bytes
from tests.support.training import largest_difference

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.utils.checkpoint")
REPLICATE = {"frozen": "replicate"}


def frozen_base(seed: int = 0) -> TinyLM:
    """A model of which the second block and the norm are trained."""
    torch.manual_seed(seed)
    model = TinyLM()
    model.requires_grad_(False)
    model.blocks[1].requires_grad_(True)
    model.norm.requires_grad_(True)
    return model


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"data_parallel_replicate_degree": 2},
        {"activation_checkpointing": True, "reshard_after_forward": False},
    ],
    ids=["sharded", "hsdp", "recomputed"],
)
def test_trains_like_one_process(config: dict[str, Any]):
    oracle, model = frozen_base(), frozen_base(seed=dist.get_rank())
    pair = [OPTIMIZERS["adamw"](each.parameters()) for each in (oracle, model)]
    prepare_fully_shard(model, pair[1], REPLICATE | config)
    for param in model.parameters():
        assert isinstance(param, DTensor) is param.requires_grad
    train_together(oracle, pair[0], model, pair[1], Recipe(clip_norm=1.0, evaluate=True))


BESIDE: dict[str, dict[str, Any]] = {
    "selective": {"activation_checkpointing": {"mode": "selective"}},
    "compile": {"compile": {"backend": "aot_eager"}},
    "compare": {"unused_parameters": True},
    "prefetch": {"forward_prefetch": 2, "backward_prefetch": 2},
    "torch's step": {"local_step": False},
    "resharded": {"reshard_after_forward": 2},
    "evaluation": {"eval_reshard_after_forward": False},
}


# Newer torch looks at `.grad` of every input while it compiles.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.matrix
@pytest.mark.world_size(4)
@pytest.mark.parametrize("name", BESIDE)
def test_beside_other_settings(name: str):
    oracle, model = frozen_base(), frozen_base()
    pair = [OPTIMIZERS["adamw"](each.parameters()) for each in (oracle, model)]
    prepare_fully_shard(model, pair[1], REPLICATE | BESIDE[name])
    recipe = Recipe(steps=4, microbatches=2, clip_norm=1.0, evaluate=True)
    train_together(oracle, pair[0], model, pair[1], recipe)


@pytest.mark.matrix
@pytest.mark.world_size(2)
def test_a_model_on_meta_everywhere():
    model = frozen_base().to("meta")
    prepare_fully_shard(model, None, REPLICATE)
    for param in model.parameters():
        if not isinstance(param, DTensor):
            others = param.detach().clone()
            dist.broadcast(others, 0)
            assert torch.equal(param, others)
    check_parity_from_here(model, frozen_base())


@pytest.mark.matrix
@pytest.mark.world_size(2)
def test_weights_are_handed_out_merged():
    plain, model = lora(), lora()
    prepare_fully_shard(model, None, REPLICATE)
    merged = plain.model.merge_and_unload().state_dict()
    merged.pop("lm_head.weight")  # tied
    found = dict(ModelWeights(model, adapters="merged", every_rank=True))
    assert found.keys() == merged.keys()
    assert all(torch.equal(found[name], merged[name]) for name in merged)


@pytest.mark.matrix
@pytest.mark.world_size(2)
def test_full_parameters_are_shown_and_written():
    model = frozen_base()
    prepare_fully_shard(model, None, REPLICATE)
    with summon_full_params(model, writeback=True), torch.no_grad():
        for param in model.parameters():
            param.fill_(2.0)
    assert all((full(param) == 2.0).all() for param in model.parameters())
    assert all(isinstance(p, DTensor) is p.requires_grad for p in model.parameters())


@pytest.mark.world_size(2)
@pytest.mark.parametrize("recompute", [False, True])
def test_only_adapters_are_sent(recompute: bool):
    oracle, model = lora(), lora()
    pair = [OPTIMIZERS["adamw"](trained(each)) for each in (oracle, model)]
    config = REPLICATE | {"activation_checkpointing": recompute}
    prepare_fully_shard(model, pair[1], config)
    for param in model.parameters():
        assert isinstance(param, DTensor) is param.requires_grad
    train_together(oracle.model, pair[0], model.model, pair[1], Recipe(steps=5))
    ids = torch.arange(12).reshape(2, 6)
    with Bytes() as sent:
        model({"input_ids": ids, "labels": ids})["loss"].backward()
    adapters = sum(4 * param.numel() for param in trained(model))
    assert sent.gathered == {torch.float32: 2 * adapters}  # for forward and for backward
    assert sent.reduced == {torch.float32: adapters}


@pytest.mark.world_size(2)
def test_a_base_in_bf16_computes_as_if_it_were_gathered():
    sharded, replicated = (
        losses_in_bf16(lora(dtype=torch.bfloat16), frozen) for frozen in ("shard", "replicate")
    )
    assert sharded == replicated
    assert sharded[0] != sharded[-1]


@pytest.mark.world_size(2)
def test_the_plan_says_what_it_costs_and_saves():
    model = lora(dtype=torch.bfloat16)
    size = sum(param.nbytes for param in model.parameters() if not param.requires_grad)
    prepare_fully_shard(model, None, REPLICATE)
    run = run_of(model)
    assert run is not None
    assert (run.plan.replicated_bytes, run.plan.ungathered_bytes) == (size, 2 * size)  # in fp32
    assert "frozen parameters, 7.906 KiB on every rank; " in str(run.plan)
    assert run.plan.blocks() == tuple(
        f"model.base_model.model.model.layers.{index}" for index in range(2)
    )


@pytest.mark.world_size(2)
def test_a_mixed_start_gives_every_rank_the_values_of_rank_0():
    oracle, model = frozen_base(), frozen_base()
    if dist.get_rank():
        model.to("meta")
    pair = [OPTIMIZERS["sgd"](each.parameters()) for each in (oracle, model)]
    prepare_fully_shard(model, pair[1], REPLICATE)
    assert not any(param.is_meta for param in model.parameters())
    train_together(oracle, pair[0], model, pair[1], Recipe(steps=3))


@pytest.mark.world_size(2)
def test_frozen_blocks_stay_blocks():
    """Activation checkpointing and compile go by them, and forward methods by units."""
    model = frozen_base()
    _, units = prepare_fully_shard(model, None, REPLICATE)
    assert list(units) == ["blocks.0", "blocks.1", "blocks.2", ""]


# --- Checkpoints. ---


def run(folder: Path, kind: str, frozen: str, adapters_only: bool, **kwargs: Any) -> Trainer:
    # Where a checkpoint has no base, the base comes from the model.
    model = lora(seed=1 if "load_path" in kwargs else 0)
    model.should_save_peft_only = adapters_only
    return run_with_adapters(folder, kind, model, frozen, **kwargs)


@pytest.mark.table("full-only adapters", "sharded-all")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("adapters_only", [True, False], ids=["only adapters", "all"])
@pytest.mark.parametrize("kind", FORMATS)
def test_resumes_with_and_without(kind: str, adapters_only: bool, tmp_path: Path):
    whole = run(tmp_path / "whole", kind, "replicate", adapters_only)
    path = tmp_path / "whole" / FORMATS[kind]
    saved: Any = FolderCheckpoint(path) if kind == "sharded" else FileCheckpoint(path)
    start = "state.model."
    names = {key.removeprefix(start) for key in saved.tensors if key.startswith(start)}
    params = [*lora().named_parameters(remove_duplicate=False)]
    assert {n for n, p in params if p.requires_grad or not adapters_only} == names
    for frozen, tolerance in (("replicate", 0.0), ("shard", 1e-6)):
        again = run(tmp_path / frozen, kind, frozen, adapters_only, load_path=str(path))
        assert int(again.state.timestamp.batch) == STEPS
        assert largest_difference(everything(again), everything(whole)) <= tolerance


# --- What is refused. ---


@pytest.mark.world_size(2)
def test_a_frozen_weight_that_is_tied_to_a_trained_one_is_sharded():
    model = TinyLM("two modules")
    model.blocks.requires_grad_(False)
    prepare_fully_shard(model, None, REPLICATE)
    assert isinstance(model.embed.weight, DTensor)
    assert model.embed.weight is model.head.weight
    assert all(name.startswith("blocks.") for name in unsharded_names(model))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("in_optimizer", [True, False])
def test_a_parameter_is_unfrozen_later(in_optimizer: bool):
    model = frozen_base()
    optimizer = OPTIMIZERS["sgd"](model.parameters() if in_optimizer else trained(model))
    prepare_fully_shard(model, optimizer, REPLICATE)
    ids = torch.arange(8).reshape(2, 4)
    model(ids).sum().backward()
    optimizer.step()
    weight = model.blocks[0].up.weight
    weight.requires_grad_(True)
    with torch.no_grad():
        model(ids)  # an evaluation trains nothing
    refused = r"'blocks.0.up.weight' was frozen when .* Freeze it again"
    with pytest.raises(PlanError, match=refused):
        model(ids)
    with pytest.raises(PlanError, match=refused):
        optimizer.step()
    weight.requires_grad_(False)
    model(ids).sum().backward()
    optimizer.step()


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("frozen", "word"), [(True, "every"), (False, "no")])
def test_nothing_or_everything_is_frozen(frozen: bool, word: str):
    model = TinyLM().requires_grad_(not frozen)
    with pytest.raises(PlanError, match=f"frozen is 'replicate', and {word} parameter"):
        prepare_fully_shard(model, None, REPLICATE)


@dataclasses.dataclass
class Logits:
    logits: torch.Tensor


class Head(nn.Module):
    """Computes in a method."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH) / WIDTH)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T

    def wrapped(self, x: torch.Tensor) -> Logits:
        return Logits(self.score(x))

    forward = score


class Scores(TinyLM):
    def __init__(self, method: str, trained: bool) -> None:
        super().__init__()
        self.method, self.norm = method, nn.Identity()
        self.head = Head().requires_grad_(trained)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        scores = getattr(self.head, self.method)(x)
        return scores.logits if self.method == "wrapped" else scores


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("method", "is_trained"), [("score", False), ("wrapped", True)])
def test_a_method_of_a_unit_that_backward_comes_to(method: str, is_trained: bool):
    """A frozen unit gathers once a gradient passes through it; torch 2.7 sees no dataclasses."""
    torch.manual_seed(0)
    oracle = Scores(method, is_trained)
    model = copy.deepcopy(oracle)
    pair = [OPTIMIZERS["sgd"](each.parameters()) for each in (oracle, model)]
    config = {"wrap_policy": {"names": ["head"]}, "forward_methods": [f"head.{method}"]}
    prepare_fully_shard(model, pair[1], config)
    train_together(oracle, pair[0], model, pair[1], Recipe(steps=3))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("holder", ["optimizer", "model"])
def test_freezing_between_forwards_lasts(holder: str):
    """An optimizer holds the shards, and a module its gathered parameters after a forward."""
    model = TinyLM()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    prepare_fully_shard(model, optimizer, {})
    head = optimizer.param_groups[0]["params"][-1]
    assert head is model.head.weight
    ids = torch.arange(8).reshape(2, 4)
    for is_trained in (False, True, False):
        model(ids)  # leaves the root unit gathered
        held = head if holder == "optimizer" else model.head.weight
        held.requires_grad_(is_trained)
        model(ids).sum().backward()
        assert head.requires_grad is is_trained
        assert (head.grad is not None) is is_trained
        optimizer.zero_grad()
