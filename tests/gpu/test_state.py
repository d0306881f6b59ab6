"""State in CPU memory while parameters are on the GPU: pinned, the same bits."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2.optim.codec import Stored
from composer_fsdp2.optim.state import KeptState
from tests.support.models import TinyLM, batches, lm_loss
from tests.support.parity import full

pytestmark = pytest.mark.gpu


def trained(policy: dict[str, Any], steps: int = 6) -> tuple[TinyLM, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = TinyLM(width=200)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prepare_fully_shard(model, optimizer, {"optimizer_state": policy}, precision="fp32")
    for ids, targets in batches(steps, 8):
        lm_loss(model(ids.cuda()), targets.cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def everything(model: TinyLM, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found: dict[str, Any] = dict(model.named_parameters())
    for name, param in model.named_parameters():
        state = optimizer.state[param]
        found |= {f"{name} {key}": state[key] for key in ("exp_avg", "exp_avg_sq")}
    return {name: full(value).detach() for name, value in found.items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.world_size(1, backend="nccl")
@pytest.mark.parametrize("form", [{}, {"dtype": "bf16"}, {"bits": 8}], ids=str)
def test_the_device_of_state_changes_no_bit(form: dict[str, Any]):
    assert_equal(everything(*trained(form)), everything(*trained({**form, "device": "cpu"})))


@pytest.mark.world_size(1, backend="nccl")
def test_state_is_pinned_and_nothing_of_it_stays_on_the_gpu():
    model, optimizer = trained({"device": "cpu"})
    for param in model.parameters():
        assert param.device.type == "cuda"
        state = optimizer.state[param]
        assert isinstance(state, KeptState)
        moments = [one for one in state.data.values() if isinstance(one, Stored)]
        assert len(moments) == 2
        assert all(one.values.is_pinned() and not one.values.is_cuda for one in moments)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    del model, optimizer, param, state, moments
    gc.collect()
    own = trained({})
    torch.cuda.synchronize()
    moments = sum(2 * 4 * param.numel() for param in own[0].parameters())
    assert torch.cuda.memory_allocated() - held > 0.8 * moments


@pytest.mark.world_size(1, backend="nccl")
@pytest.mark.parametrize("policy", [{"device": "cpu"}, {"bits": 8}], ids=str)
def test_state_that_is_loaded_goes_on(policy: dict[str, Any]):
    model, optimizer = trained(policy)
    saved, before = optimizer.state_dict(), everything(model, optimizer)
    optimizer.load_state_dict(saved)
    assert_equal(before, everything(model, optimizer))


@pytest.mark.world_size(1, backend="nccl")
def test_codes_are_those_of_the_cpu():
    """Rounding is integer arithmetic, so that a run may go on on another device."""
    from composer_fsdp2.optim.codec import ShardPosition, encode

    value, place = torch.randn(70, 300).exp(), ShardPosition(70, 300, 7, 300)
    for form in ("bf16", "signed", "unsigned"):
        made = []
        for device in ("cpu", "cuda"):
            stored = encode(form, value.to(device), place, 3, "exp_avg")
            made.append([stored.values.cpu(), stored.exponents.cpu()])
        assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
