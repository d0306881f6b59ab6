"""Symmetric memory and sums over NCCL: training as without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2.config.placement import Communication
from composer_fsdp2.shard.communication import METHODS, missing_for, nccl_version
from tests.support.models import TinyLM, batches, lm_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason="needs a CUDA device for each of two ranks"
    ),
]

SWITCHES: dict[str, dict[str, Any]] = {
    "sums": {"sum_reductions": True},
    "gathers": {"symmetric_memory": True},
    "both": {"symmetric_memory": True, "sum_reductions": True},
}


def _trained(communication: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    model = TinyLM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare_fully_shard(model, optimizer, {"communication": communication}, precision="fp32")
    losses = []
    for ids, targets in batches(5, 8):
        loss = lm_loss(model(ids.cuda()), targets.cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.world_size(2, backend="nccl")
@pytest.mark.parametrize("switches", SWITCHES)
def test_trains_as_without(switches: str):
    asked = SWITCHES[switches]
    for name in asked:
        if not hasattr(FSDPModule, METHODS[name]):
            pytest.skip(f"torch has no {METHODS[name]}")
    if any(one.needed for one in missing_for(Communication(**asked), {}, nccl_version())):
        pytest.skip("torch has no NCCL with symmetric memory")
    assert _trained(asked) == pytest.approx(_trained({}), rel=1e-5)
