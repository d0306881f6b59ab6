"""What only an accelerator can show; one GPU is enough, as a group of one rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2.core.traffic import TrafficMeter
from composer_fsdp2.trainer.patches import watching
from composer_fsdp2.trainer.prepare import sharding_of
from tests.models import TinyLM, batches, lm_loss

pytestmark = pytest.mark.gpu


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 20) -> None:
    for ids, targets in batches(steps, 8):
        lm_loss(model(ids.cuda()), targets.cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in state.items()}


@pytest.mark.world_size(1, backend="nccl")
@pytest.mark.parametrize(
    "config", [{}, {"activation_checkpointing": True}, {"data_parallel_replicate_degree": 1}]
)
def test_trains_like_the_unsharded_copy(config: dict[str, Any]):
    oracle = TinyLM("two modules")
    model = copy.deepcopy(oracle)  # on the CPU: it is moved unit by unit
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    prepare_fully_shard(model, optimizer, config, precision="fp32")
    assert all(param.device.type == "cuda" for param in model.parameters())
    oracle.cuda()
    _train(oracle, torch.optim.SGD(oracle.parameters(), lr=0.1, momentum=0.9))
    _train(model, optimizer)
    for name, value in _whole(model).items():
        assert (value - oracle.state_dict()[name]).abs().max().item() <= 1e-5, name


@pytest.mark.world_size(1, backend="nccl")
def test_meta_starts_on_the_device():
    with torch.device("meta"):
        model = TinyLM("two modules")
    prepare_fully_shard(model, None, {}, precision="amp_bf16")
    assert all(value.isfinite().all() for value in _whole(model).values())
    assert model.head.weight is model.embed.weight
    ids, _ = batches(1, 8)[0]
    assert model(ids.cuda()).dtype == torch.bfloat16


@pytest.mark.world_size(1, backend="nccl")
def test_communication_is_exposed_for_a_part_of_the_step():
    model = TinyLM()
    prepare_fully_shard(model, None, {}, precision="fp32")
    sharding = sharding_of(model)
    assert sharding is not None
    meter = TrafficMeter(model, sharding.plan)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with meter.following(), watching(meter):
        before.record()
        _train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
        after.record()
    after.synchronize()
    exposed = meter.exposed_seconds()
    assert exposed is not None
    assert 0 < exposed < before.elapsed_time(after) / 1000
