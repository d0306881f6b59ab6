"""Weights of a model that tensor parallelism divides: made on meta, or read from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2.checkpoint.pretrained import PretrainedWeights
from tests.dist.test_tensor_parallel import FAMILIES, loss_of, of_this_group
from tests.dist.test_tensor_uneven import ODD_FAMILIES, odd_batches
from tests.support.parity import full

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
]
MAKE = FAMILIES | {f"{name}, odd": make for name, make in ODD_FAMILIES.items()}
EVERY = ["Llama, tied", "Qwen3", "Phi-3", "GPT-2", "MPT, grouped"]
EVERY += ["Phi-3, odd", "GPT-2, odd", "Llama, tied, odd"]
STARTS = [(family, "meta") for family in EVERY]
STARTS += [("Phi-3", "mixed"), ("Llama, tied, odd", "mixed"), ("GPT-2", "real")]


def on_meta(family: str) -> nn.Module:
    """As LLM Foundry's `init_empty_weights`: masks and tables are made by constructors alone."""
    model = MAKE[family]()
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = nn.Parameter(param.to("meta"))
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    return model


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(value).clone() for name, value in model.state_dict().items()}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


@pytest.mark.table("Phi-3")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("family", EVERY)
def test_a_model_on_meta_starts_from_the_weights_of_a_run_without(family: str):
    made: list[dict[str, torch.Tensor]] = []
    for settings in ({}, {"tensor_parallel": 2}):
        torch.manual_seed(3)
        model = on_meta(family)
        prepare_fully_shard(model, None, settings, precision="fp32")
        made.append(weights(model))
    assert not any(value.isnan().any() for value in made[0].values())
    assert differing(*made) == []
    parts = [param for param in model.parameters() if isinstance(param, DTensor)]
    assert any(len(param.placements) == 2 for param in parts)
    loss_of(model, of_this_group(odd_batches(1)[0])).backward()


@pytest.mark.table("Phi-3-meta", "GPT-2, odd-meta")
@pytest.mark.world_size(4)
@pytest.mark.parametrize(("family", "start"), STARTS)
def test_a_folder_is_read_into_two_dimensions(family: str, start: str, tmp_path: Path):
    torch.manual_seed(0)
    expected = MAKE[family]()
    with torch.no_grad():
        for param in expected.parameters():
            param.add_(torch.randn_like(param) / 50)
    if dist.get_rank() == 0:
        expected.save_pretrained(tmp_path, max_shard_size=4_000)
    dist.barrier()
    torch.manual_seed(dist.get_rank() + 5)
    real = start == "real" or (start == "mixed" and dist.get_rank() == 0)
    model: Any = MAKE[family]() if real else on_meta(family)
    settings = {"pretrained_weights": str(tmp_path), "tensor_parallel": 2}
    read: list[int] = []
    usual = PretrainedWeights.read_into

    def counting(source: Any, target: torch.Tensor, name: str, offsets: Any) -> None:
        read.append(target.numel())
        usual(source, target, name, offsets)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PretrainedWeights, "read_into", counting)
        prepare_fully_shard(model, None, settings, precision="fp32")
    held = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
    # No rank reads more than it holds, of which some is padding; GPT-2's masks are no weights.
    assert sum(read) == held if "odd" not in family else sum(read) <= held
    assert held < 0.75 * sum(param.numel() for param in expected.parameters())
    assert differing(weights(expected), weights(model)) == []
    ids = odd_batches(1)[0]
    with torch.no_grad():
        found, wanted = model(ids).logits, expected(ids).logits
    assert torch.allclose(found, wanted, atol=1e-5)
