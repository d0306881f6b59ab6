"""Adapters on a base that bitsandbytes packs in 4 bits: replicated, and sharded."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from composer import Trainer
from composer.models import HuggingFaceModel
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2 import ModelWeights, PlanError, prepare_fully_shard
from composer_fsdp2.plan.module_tree import ModuleTree, is_packed
from composer_fsdp2.shard.packed_weights import prepare_packed_weights
from composer_fsdp2.torch_private.units import gathers_integers
from tests.dist.test_adapters import FORMATS, lora, losses_in_bf16, trained
from tests.dist.test_adapters import run as run_with_adapters
from tests.support.parity import OPTIMIZERS, Recipe, full, train_together
from tests.support.training import largest_difference

bnb: Any = pytest.importorskip("bitsandbytes.nn", reason="needs the extra qlora")
dequantize_4bit: Any = pytest.importorskip("bitsandbytes.functional").dequantize_4bit

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.utils.checkpoint")
needs_integers = pytest.mark.skipif(
    not gathers_integers(), reason="torch has no gather of integers as they are"
)

PRELOAD = ("bitsandbytes",)
STORAGES = [torch.uint8, torch.bfloat16, torch.float32]
REPLICATE = {"frozen": "replicate"}
FROZEN = ["replicate", "shard"] if gathers_integers() else ["replicate"]
BESIDE: dict[str, dict[str, Any]] = {
    "replicated": REPLICATE | {"activation_checkpointing": True},
    "hsdp": {"data_parallel_replicate_degree": 2},
    "recomputed": {"activation_checkpointing": True, "reshard_after_forward": False},
    "resharded": {"reshard_after_forward": 2, "forward_prefetch": 2},
    "evaluation": {"eval_reshard_after_forward": False},
}


def packed(base: nn.Module, storage: torch.dtype = torch.uint8, nested: bool = True) -> None:
    """Packs the linear layers of a model's blocks, as transformers does on a GPU."""
    base.is_loaded_in_4bit = True
    for name, layer in [*base.named_modules()]:
        if isinstance(layer, nn.Linear) and "layers" in name:
            sizes = layer.in_features, layer.out_features, layer.bias is not None
            kinds = {"quant_type": "nf4", "compress_statistics": nested, "quant_storage": storage}
            new = bnb.Linear4bit(*sizes, compute_dtype=layer.weight.dtype, **kinds)
            new.load_state_dict(layer.state_dict())
            base.set_submodule(name, new.to("cpu"))


def qlora(
    storage: torch.dtype = torch.uint8, nested: bool = True, **kwargs: Any
) -> HuggingFaceModel:
    return lora(prepare_base=lambda base: packed(base, storage, nested), **kwargs)


def oracle_of(**kwargs: Any) -> HuggingFaceModel:
    """Without the packed weights in its state dict, and not packed anew for an evaluation."""
    model = qlora(**kwargs)
    prepare_packed_weights(ModuleTree.read(model), (), torch.device("cpu"))
    return model


def check(config: dict[str, Any], recipe: Recipe, **kwargs: Any) -> HuggingFaceModel:
    oracle, model = oracle_of(**kwargs), qlora(**kwargs)
    pair = [OPTIMIZERS["adamw"](trained(each)) for each in (oracle, model)]
    prepare_fully_shard(model, pair[1], config)
    train_together(oracle.model, pair[0], model.model, pair[1], recipe)
    return model


@pytest.mark.world_size(2)
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_a_replicated_base_trains_like_one_process(storage: torch.dtype):
    model = check(REPLICATE, Recipe(steps=5, evaluate=True), storage=storage)
    kinds = {type(param).__name__ for param in model.parameters() if is_packed(param)}
    assert kinds == {"Params4bit"}


@needs_integers
@pytest.mark.world_size(2)
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_a_sharded_base_trains_like_one_process(storage: torch.dtype):
    model = check({}, Recipe(steps=5, evaluate=True), storage=storage)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    sharded = [param for param in model.parameters() if param.dtype is torch.uint8]
    assert len(sharded) == 14


@pytest.mark.matrix
@pytest.mark.world_size(4)
@pytest.mark.parametrize("name", BESIDE if gathers_integers() else ["replicated"])
def test_beside_other_settings(name: str):
    check(BESIDE[name], Recipe(steps=3, microbatches=2, clip_norm=1.0, evaluate=True), nested=False)


@needs_integers
@pytest.mark.world_size(2)
@pytest.mark.parametrize("storage", [torch.uint8, torch.float32], ids=str)
def test_bytes_are_not_cast_in_mixed_precision(storage: torch.dtype):
    sharded, replicated = (
        losses_in_bf16(qlora(storage, dtype=torch.bfloat16), frozen)
        for frozen in ("shard", "replicate")
    )
    assert sharded == replicated
    assert sharded[0] != sharded[-1]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("frozen", FROZEN)
def test_every_rank_has_the_base_of_rank_0(frozen: str):
    oracle, model = oracle_of(), qlora()
    if dist.get_rank():
        for layer in model.modules():
            if isinstance(layer, bnb.Linear4bit):
                layer.weight.data.zero_()
                layer.quant_state.offset.zero_()
                layer.quant_state.absmax.zero_()
                layer.quant_state.state2.absmax.zero_()
    pair = [OPTIMIZERS["sgd"](trained(each)) for each in (oracle, model)]
    prepare_fully_shard(model, pair[1], {"frozen": frozen})
    train_together(oracle.model, pair[0], model.model, pair[1], Recipe(steps=2))


# --- What is refused. ---


@pytest.mark.world_size(2)
@pytest.mark.parametrize("frozen", FROZEN)
def test_a_base_that_is_not_packed_yet(frozen: str):
    """As on the ranks of `init_device: mixed`, or before it is moved to a device."""
    model = qlora()
    if dist.get_rank():
        layer = model.model.base_model.model.model.layers[0].self_attn.q_proj
        layer.base_layer.weight = bnb.Params4bit(torch.empty(16, 16, device="meta"))
    with pytest.raises(PlanError, match=r"q_proj.*not yet.* on every rank"):
        prepare_fully_shard(model, None, {"frozen": frozen})


@pytest.mark.world_size(2)
def test_a_base_that_is_packed_otherwise():
    model = qlora(nested=bool(dist.get_rank()))
    with pytest.raises(PlanError, match="set of parameters and buffers"):
        prepare_fully_shard(model, None, {"frozen": "replicate"})


@needs_integers
@pytest.mark.world_size(2)
def test_layers_that_are_divided():
    with pytest.raises(PlanError, match="not a plain LoRA of a linear layer"):
        prepare_fully_shard(qlora(), None, {"tensor_parallel": 2})


@pytest.mark.world_size(2)
def test_a_base_that_is_to_be_trained():
    model = qlora(torch.float32)
    model.requires_grad_(True)
    with pytest.raises(PlanError, match="Freeze it, and train adapters"):
        prepare_fully_shard(model, None, {})


@pytest.mark.skipif(gathers_integers(), reason="torch has no other gather of integers")
@pytest.mark.world_size(2)
def test_a_sharded_base_where_torch_would_cast_its_bytes():
    model = qlora()
    with pytest.raises(PlanError, match=r"packed in 4 bits .* `frozen: replicate`"):
        prepare_fully_shard(model, None, {})


# --- Checkpoints. ---


def run(folder: str, kind: str, frozen: str, adapters_only: bool, **kwargs: Any) -> Trainer:
    model = qlora(seed=1 if "load_path" in kwargs else 0)
    model.should_save_peft_only = adapters_only
    return run_with_adapters(Path(folder), kind, model, frozen, **kwargs)


def adapters_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    named = trainer.state.model.named_parameters()
    return {name: full(param).clone() for name, param in named if param.requires_grad}


def _saved(folder: str, kind: str, frozen: str, adapters_only: bool) -> dict[str, torch.Tensor]:
    return adapters_of(run(f"{folder}/first", kind, frozen, adapters_only))


def _resumed(folder: str, kind: str, adapters_only: bool) -> list[dict[str, torch.Tensor]]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*RNG state")
        warnings.filterwarnings("ignore", message=".*world size")
        return [
            adapters_of(
                run(
                    f"{folder}/{frozen}",
                    kind,
                    frozen,
                    adapters_only,
                    load_path=f"{folder}/first/{FORMATS[kind]}",
                    batch=8 // dist.get_world_size(),
                )
            )
            for frozen in FROZEN
        ]


@pytest.mark.table("sharded-2-1-only adapters")
@pytest.mark.parametrize("adapters_only", [True, False], ids=["only adapters", "all"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4), (2, 2)])
@pytest.mark.parametrize("kind", FORMATS)
def test_resumes_on_other_ranks(
    kind: str, before: int, after: int, adapters_only: bool, tmp_path: Path, ranks: Any
):
    for frozen in FROZEN:
        folder = str(tmp_path / frozen)
        whole = ranks(before, _saved, folder, kind, frozen, adapters_only)[0]
        for found in ranks(after, _resumed, folder, kind, adapters_only)[0]:
            assert largest_difference(found, whole) <= 1e-6


# --- Weights for an engine. ---


def as_packed(base: nn.Module) -> None:
    """Gives the layers that would be packed the values that they would compute with."""
    copied = copy.deepcopy(base)
    packed(copied)
    for name, layer in copied.named_modules():
        if isinstance(layer, bnb.Linear4bit):
            values = dequantize_4bit(layer.weight, layer.quant_state)
            base.get_submodule(name).weight.data.copy_(values)


# The base has no name, by which PEFT would look its vocabulary up.
@pytest.mark.filterwarnings("ignore:Could not find a config file")
@pytest.mark.table("shard-merged" if "shard" in FROZEN else "replicate-merged")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("adapters", ["merged", "only"])
@pytest.mark.parametrize("frozen", FROZEN)
def test_weights_are_handed_out_unpacked(frozen: str, adapters: Any):
    plain, model = lora(prepare_base=as_packed), qlora(torch.float32)
    prepare_fully_shard(model, None, {"frozen": frozen})
    weights = ModelWeights(model, adapters=adapters, every_rank=True)
    if adapters == "only":
        expected = peft.get_peft_model_state_dict(plain.model)
    else:
        expected = plain.model.merge_and_unload().state_dict()
        expected.pop("lm_head.weight")  # tied
    found = dict(weights)
    assert [(n, w.dtype, w.shape) for n, w in found.items()] == [
        (info.name, info.dtype, info.shape) for info in weights.metadata()
    ]
    assert found.keys() == expected.keys()
    assert largest_difference(found, expected) <= 1e-7


@pytest.mark.world_size(2)
def test_adapters_that_cannot_be_merged_into_packed_weights():
    model = qlora(use_dora=True)
    prepare_fully_shard(model, None, {"frozen": "replicate"})
    with pytest.raises(PlanError, match=r"adds more than a product .* Write adapters='only'"):
        ModelWeights(model)
