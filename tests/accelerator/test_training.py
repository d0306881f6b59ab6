"""Training on the pretend accelerator is that of an unsharded copy on the CPU."""

from __future__ import annotations

import datetime
import re
import time
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from composer_fsdp2 import PlanError, prepare_fully_shard, summon_full_params
from composer_fsdp2.optim.codec import Stored
from composer_fsdp2.optim.state import KeptState
from tests.accelerator import device
from tests.accelerator.device import BACKEND, NAME
from tests.accelerator.training import Peak, Pretend, trained_beside_a_copy
from tests.dist.test_order_check import TIMEOUT_SECONDS, Turned
from tests.support.models import TinyLM
from tests.support.parity import full
from tests.support.pool import WorkerPool

# Torch 2.7 says so of its own offloading, on any device.
pytestmark = pytest.mark.filterwarnings("ignore:The argument 'device' of Tensor.")

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefetch": {"forward_prefetch": 2, "backward_prefetch": 2},
    "kept gathered": {"reshard_after_forward": False},
    "last gradients": {"gradient_sync": "last"},
    "order always": {"order_check": "always"},
    "unused": {"unused_parameters": True},
    "recomputed": {"activation_checkpointing": True},
    "activations on the CPU": {"activation_cpu_offload": True},
    "shards on the CPU": {"cpu_offload": True},
    "shards in pageable memory": {"cpu_offload": {"pin_memory": False}},
    "state on the CPU": {"optimizer_state": {"device": "cpu"}},
}


@pytest.mark.world_size(2, backend=BACKEND)
@pytest.mark.filterwarnings("ignore:gradient_sync is 'last'")
@pytest.mark.parametrize(("optimizer", "microbatches"), [("sgd", 1), ("adamw", 2)])
@pytest.mark.parametrize("name", SETTINGS)
def test_trains_as_an_unsharded_copy(name: str, optimizer: str, microbatches: int):
    trained_beside_a_copy(SETTINGS[name], optimizer, microbatches)


@pytest.mark.world_size(2, backend=BACKEND)
@pytest.mark.parametrize("name", ["plain", "activations on the CPU", "shards on the CPU"])
def test_trains_in_bf16_as_an_unsharded_copy_does_under_autocast(name: str):
    trained_beside_a_copy(SETTINGS[name], precision="amp_bf16")


@pytest.mark.world_size(4, backend=BACKEND)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", ["plain", "shards on the CPU"])
def test_hsdp_trains_as_an_unsharded_copy(name: str, microbatches: int):
    settings = {"data_parallel_replicate_degree": 2, **SETTINGS[name]}
    trained_beside_a_copy(settings, microbatches=microbatches)


@pytest.mark.world_size(2, backend=BACKEND)
@pytest.mark.parametrize("name", ["plain", "shards on the CPU"])
def test_summoned_parameters_are_whole_and_written_back(name: str):
    oracle, model, _ = trained_beside_a_copy(SETTINGS[name])
    with summon_full_params(model, writeback=True):
        for (key, own), whole in zip(model.named_parameters(), oracle.parameters(), strict=True):
            assert (own.detach().cpu() - whole.detach()).abs().max() <= 1e-6, key
            own.detach().add_(1)
    for own, whole in zip(model.parameters(), oracle.parameters(), strict=True):
        assert (full(own) - whole.detach() - 1).abs().max() <= 1e-6


class Chain(nn.Module):
    """Twelve layers, each of which saves an activation for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x).tanh()
        return x


@pytest.mark.world_size(2, backend=BACKEND)
def test_few_activations_of_a_block_are_under_way_at_a_time():
    """Each copy to or from the CPU takes memory on the device until the device has made it."""
    model = nn.Sequential(Chain(), Chain())
    settings = {"wrap_policy": {"classes": ["Chain"]}, "activation_cpu_offload": True}
    prepare_fully_shard(model, None, settings, precision="fp32", device=Pretend())
    x = torch.ones(4096, 16, device=NAME)
    before = device.held()
    with Peak() as peak:
        loss = model(x).sum()
    assert peak.bytes - before < 8 * x.nbytes
    with device.waits() as found:
        loss.backward()
    assert any(name.startswith("synchronize an event in ") for name in found), found


@pytest.mark.world_size(2, backend=BACKEND)
def test_state_on_the_cpu_is_pinned():
    _, model, optimizer = trained_beside_a_copy(SETTINGS["state on the CPU"])
    for param in model.parameters():
        state = optimizer.state[param]
        assert isinstance(state, KeptState)
        moments = [one for one in state.data.values() if isinstance(one, Stored)]
        assert len(moments) == 2
        assert all(one.values.is_pinned() and one.values.device.type == "cpu" for one in moments)


def turned() -> Turned:
    model = Turned()
    settings = {"wrap_policy": {"classes": ["Linear"]}}
    prepare_fully_shard(model, None, settings, device=Pretend())
    return model


@pytest.mark.world_size(2, backend=BACKEND)
def test_another_order_is_an_error_on_both_ranks():
    model = turned()
    if dist.get_rank() == 1:
        model.order = (1, 0)
    with pytest.raises(PlanError, match="The next collective is gather '0' on rank 0"):
        model(torch.ones(1, 4, device=NAME)).sum().backward()


def late_on_rank_1() -> str:
    # Newer torch renamed it and warns about the old name.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(datetime.timedelta(seconds=TIMEOUT_SECONDS))
    model = turned()
    if dist.get_rank() == 1:
        time.sleep(TIMEOUT_SECONDS)
    with pytest.raises((PlanError, RuntimeError)) as caught:
        model(torch.ones(1, 4, device=NAME)).sum().backward()
    return str(caught.value)


def test_a_rank_that_does_not_come_is_missed_before_the_timeout():
    pool = WorkerPool(2, BACKEND)  # its process group is of no use afterwards
    try:
        said, _ = pool.run(late_on_rank_1)
    finally:
        pool.close()
    assert re.search(r"another rank did not come to it in \d+ s", said)
    assert "The last unit each rank entered:\n  ranks 0-1: no unit yet\n" in said


@pytest.mark.world_size(2, backend=BACKEND)
def test_meta_starts_on_the_device():
    with torch.device("meta"):
        model = TinyLM("two modules")
    torch.manual_seed(1234)
    before = torch.pretend.get_rng_state()
    prepare_fully_shard(model, None, {}, precision="fp32", device=Pretend())
    assert {param.device.type for param in model.parameters()} == {NAME}
    assert all(full(param).isfinite().all() for param in model.parameters())
    assert model.head.weight is model.embed.weight
    assert torch.equal(torch.pretend.get_rng_state(), before)
