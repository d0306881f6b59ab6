"""A sharded run equals the unsharded one: fp32, 20 steps, parameters within 1e-6."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2 import prepare_fully_shard
from tests.support.models import (
    TIES,
    AcrossChildren,
    Block,
    Grandchild,
    TinyComposer,
    TinyLM,
    TwoNames,
    batches,
)
from tests.support.pairs import parametrize_by_turns, parametrize_pairs
from tests.support.parity import OPTIMIZERS, Recipe, check_parity, gathered, model_loss

# Newer torch says so of every `nn.Linear` that is a unit by itself; nothing here adds in place.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

Short = functools.partial(TinyLM, layers=2)
"""for what does not depend on a block between the first and the last"""

RECIPES = {
    "plain": Recipe(),
    "accumulation": Recipe(microbatches=2),
    "norm clipping": Recipe(clip_norm=0.5),
    "value clipping": Recipe(clip_value=0.01),
    "evaluation": Recipe(evaluate=True),
}

# Units that cut through the ties of the models.
CUT = {"wrap_policy": {"embeddings": True, "classes": ["Block", "Linear"]}}
CUT_SHARED = {"wrap_policy": {"embeddings": True, "classes": ["SharedBlock", "Linear"]}}

FROZEN = {
    "first block": "blocks.0.",
    "middle block": "blocks.1.",
    "beginning": ("embed", "blocks.0.", "blocks.1."),
    "one weight": "blocks.1.up.weight",
    "everything but the head": ("embed", "blocks", "norm"),
}

both_optimizers = pytest.mark.parametrize("optimizer", OPTIMIZERS)


@pytest.mark.table("norm clipping-sgd")
@pytest.mark.world_size(2)
@parametrize_by_turns(recipe=RECIPES, optimizer=OPTIMIZERS)
def test_recipe(recipe: str, optimizer: str):
    check_parity(Short, {}, optimizer, RECIPES[recipe])


@pytest.mark.table("True-sgd")
@pytest.mark.world_size(2)
@parametrize_by_turns(reshard=[True, False, "auto"], optimizer=OPTIMIZERS)
def test_reshard(reshard: Any, optimizer: str):
    check_parity(TinyLM, {"reshard_after_forward": reshard}, optimizer)


@pytest.mark.table("storage-True-adamw")
@pytest.mark.world_size(2)
@parametrize_by_turns(tie=TIES, cut=(False, True, True, False), optimizer=OPTIMIZERS)
def test_ties(tie: str, cut: bool, optimizer: str):
    _check_tie(tie, _cut(tie) if cut else {}, optimizer)


@pytest.mark.table
@pytest.mark.world_size(2)
@parametrize_pairs(
    kind=(TinyComposer, AcrossChildren, Grandchild), cut=(False, True), optimizer=OPTIMIZERS
)
def test_composer_models(kind: type[nn.Module], cut: bool, optimizer: str):
    check_parity(kind, CUT if cut else {}, optimizer)


@pytest.mark.table("everything but the head-sgd")
@pytest.mark.world_size(2)
@parametrize_by_turns(part=FROZEN, optimizer=OPTIMIZERS)
def test_frozen(part: str, optimizer: str):
    model = check_parity(functools.partial(_frozen, FROZEN[part]), {}, optimizer)
    fresh = gathered(_seeded(TinyLM))
    kept = [name for name, value in gathered(model).items() if torch.equal(value, fresh[name])]
    assert kept == [name for name in fresh if name.startswith(FROZEN[part])]


@pytest.mark.table
@pytest.mark.world_size(2)
@both_optimizers
def test_a_frozen_block_may_run_without_and_with_gradients_through_it(optimizer: str):
    def make() -> TinyLM:
        model = TinyLM("module registered twice")  # the first block runs again at the end
        for module in (model.embed, model.blocks[0]):
            module.requires_grad_(False)
        return model

    check_parity(make, {}, optimizer)


@dataclass
class Box:
    inside: torch.Tensor


class Boxing(Block):
    """Hands its output over in an object torch does not look into."""

    def forward(self, x: torch.Tensor) -> Any:
        return Box(super().forward(x))


class Unboxing(Block):
    def forward(self, x: Any) -> torch.Tensor:
        return super().forward(x.inside)


@pytest.mark.world_size(2)
def test_a_frozen_block_may_hide_its_output():
    if not hasattr(FSDPModule, "set_reshard_after_forward"):
        pytest.skip("torch has no set_reshard_after_forward: it loses such a gradient by hand too")

    def make() -> TinyLM:
        model = TinyLM()
        model.blocks = nn.ModuleList([Block(), Boxing().requires_grad_(False), Unboxing()])
        return model

    check_parity(make, {})


@pytest.mark.table
@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    "config", [{"reshard_after_forward": 2}, {"data_parallel_replicate_degree": 2}]
)
@pytest.mark.parametrize("part", ["beginning", "middle block"])
def test_frozen_on_four_ranks(part: str, config: dict[str, Any]):
    config = {**config, "wrap_policy": {"embeddings": True, "classes": ["Block"]}}
    check_parity(functools.partial(_frozen, FROZEN[part]), config)


class ReusedEmbedding(nn.Embedding):
    """Looks ids up, and turns vectors into logits with the same weight."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value @ self.weight.T if value.is_floating_point() else super().forward(value)


@pytest.mark.matrix
@pytest.mark.world_size(2)
def test_what_is_kept_in_fp32_is_float64_in_a_model_of_float64():
    config = {"keep_fp32": ["norm"], "mixed_precision": "FULL"}
    check_parity(lambda: TinyLM().double(), config)


@pytest.mark.matrix
@pytest.mark.world_size(2)
def test_an_embedding_may_also_make_the_logits():
    def make() -> TinyLM:
        model = TinyLM()
        model.embed = model.head = ReusedEmbedding(*model.embed.weight.shape)
        return model

    check_parity(make, {"wrap_policy": {"embeddings": True, "classes": ["Block"]}})


@pytest.mark.table
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "policy",
    [{"min_num_params": 150}, {"names": ["blocks.*", "blocks.1.up"]}],
    ids=["by size", "nested"],
)
@both_optimizers
def test_wrap_policy(policy: dict[str, Any], optimizer: str):
    check_parity(TinyLM, {"wrap_policy": policy}, optimizer)


@pytest.mark.table
@pytest.mark.world_size(2)
@pytest.mark.parametrize("config", [{}, CUT], ids=["blocks", "cut"])
@both_optimizers
def test_recompute_changes_nothing(config: dict[str, Any], optimizer: str):
    kept = _train(config, optimizer)
    recomputed = _train({**config, "activation_checkpointing": True}, optimizer)
    assert kept.keys() == recomputed.keys()
    assert max((kept[name] - recomputed[name]).abs().max().item() for name in kept) == 0.0


@pytest.mark.matrix
@pytest.mark.world_size(2)
def test_a_checkpointed_module_may_hold_a_tie_itself():
    def make() -> TinyLM:
        model = TinyLM("inside one module")
        model.activation_checkpointing_fn = lambda module: isinstance(module, TwoNames)
        return model

    check_parity(make, {"activation_checkpointing": True})


@pytest.mark.table
@pytest.mark.world_size(2)
@pytest.mark.parametrize(("recompute", "optimizer"), [(False, "sgd"), (True, "adamw")])
def test_offloaded_activations(recompute: bool, optimizer: str):
    config = {"activation_cpu_offload": True, "activation_checkpointing": recompute}
    check_parity(TinyLM, config, optimizer)


@pytest.mark.table("4-plain-adamw")
@pytest.mark.world_size(4)
@parametrize_pairs(
    replicate=(2, 4), recipe=("plain", "accumulation", "norm clipping"), optimizer=OPTIMIZERS
)
def test_hsdp(replicate: int, recipe: str, optimizer: str):
    config = {"data_parallel_replicate_degree": replicate}
    check_parity(Short, config, optimizer, RECIPES[recipe])


@pytest.mark.table
@pytest.mark.world_size(4)
@pytest.mark.parametrize("tie", ["two modules", "storage"])
def test_hsdp_with_ties(tie: str):
    """Without one: `test_hsdp`."""
    _check_tie(tie, {**_cut(tie), "data_parallel_replicate_degree": 2}, "adamw")


@pytest.mark.table
@pytest.mark.world_size(4)
@pytest.mark.parametrize(("tie", "optimizer"), [("none", "sgd"), ("two modules", "adamw")])
def test_reshard_to_two_of_four_ranks(tie: str, optimizer: str):
    check_parity(functools.partial(TinyLM, tie), {"reshard_after_forward": 2}, optimizer)


@pytest.mark.table("norm clipping-adamw")
@pytest.mark.world_size(4)
@parametrize_by_turns(recipe=["accumulation", "norm clipping", "evaluation"], optimizer=OPTIMIZERS)
def test_recipe_on_four_ranks(recipe: str, optimizer: str):
    check_parity(Short, {"activation_checkpointing": True}, optimizer, RECIPES[recipe])


@pytest.mark.table
@pytest.mark.world_size(4)
@pytest.mark.parametrize("tie", TIES)
def test_ties_on_four_ranks(tie: str):
    _check_tie(tie, {}, "sgd")


def _cut(tie: str) -> dict[str, Any]:
    return CUT_SHARED if tie == "all layers" else CUT


def _check_tie(tie: str, config: dict[str, Any], optimizer: str) -> None:
    """Two parameters over one memory become one: what the model with a plain tie does."""
    oracle = "two modules" if tie == "storage" else tie
    with warnings.catch_warnings():
        if tie == "storage":
            warnings.filterwarnings("ignore", message="Two parameters of shape")
        make, make_oracle = functools.partial(Short, tie), functools.partial(Short, oracle)
        check_parity(make, config, optimizer, make_oracle=make_oracle)


def _frozen(prefixes: str | tuple[str, ...]) -> TinyLM:
    model = TinyLM()
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(prefixes))
    return model


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def _train(config: dict[str, Any], optimizer: str) -> dict[str, torch.Tensor]:
    """What a sharded model holds after 20 steps, every rank on the same batches."""
    model = _seeded(TinyLM)
    stepped = OPTIMIZERS[optimizer](model.parameters())
    prepare_fully_shard(model, stepped, config)
    for batch in batches(20, 4):
        model_loss(model, batch).backward()
        stepped.step()
        stepped.zero_grad()
    return gathered(model)
