"""A step waits for the device no more often than Composer's own: torch says where a host waits."""

from __future__ import annotations

import contextlib
import statistics
import warnings
from collections.abc import Generator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from composer.core import Callback, State

from composer_fsdp2 import installed, prepare_fully_shard
from composer_fsdp2.step.agreement import Agreement, agreement_of
from tests.support.models import TinyComposer, TinyLM, batches, lm_loss
from tests.support.training import built, samples_of, trainer_for

pytestmark = [
    pytest.mark.gpu,
    # torch says so of `set_sync_debug_mode` once in each process.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

CUDA = torch.device("cuda")


@contextlib.contextmanager
def no_host_may_wait() -> Generator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.world_size(1, backend="nccl")
def test_a_read_of_the_device_is_noticed():
    value = torch.ones(1, device="cuda")
    with no_host_may_wait(), pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        value.item()


@pytest.mark.world_size(1, backend="nccl")
@pytest.mark.parametrize(
    "config", [{}, {"activation_checkpointing": True}, {"gradient_sync": "last"}], ids=str
)
@pytest.mark.filterwarnings("ignore:gradient_sync is 'last'")
def test_forward_and_backward_wait_for_nothing(config: dict[str, Any]):
    model = TinyLM("two modules")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare_fully_shard(model, optimizer, config, precision="fp32")
    given = [(ids.cuda(), targets.cuda()) for ids, targets in batches(6, 8)]
    for step, (ids, targets) in enumerate(given):
        # What is checked once is checked in the first steps, and reads what it compares.
        with no_host_may_wait() if step > 2 else contextlib.nullcontext():
            lm_loss(model(ids), targets).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.world_size(1, backend="nccl")
def test_agreements_wait_for_nothing():
    """Their group is gloo's, and they are told so: alone, a rank asks nobody."""
    found, busy = Agreement([dist.new_group(backend="gloo")]), torch.ones(4096, 4096, device="cuda")
    with pytest.MonkeyPatch.context() as patch, no_host_may_wait():
        patch.setattr(dist, "get_world_size", lambda group=None: 2)
        for _ in range(20):
            busy = busy @ busy
        assert found.min_max(3) == (3, 3)
        assert found.total([1, 2]) == [1, 2]
        assert not found.any_rank(False)
        assert found.of_rank0("text") == "text"
    assert found.collectives == 4


class Waits(Callback):
    """Warnings of torch about hosts that wait, in each batch."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen, self.batches = seen, list[int]()

    def batch_end(self, state: State, logger: Any) -> None:
        self.batches.append(sum("synchronizing CUDA" in str(one.message) for one in self.seen))
        self.seen.clear()


def waits_of(parallelism: Any, **kwargs: Any) -> float:
    model = built(TinyComposer).cuda()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        waits = Waits(seen)
        with installed():
            trainer = trainer_for(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                samples_of(8, 8),
                device="gpu",
                parallelism_config=parallelism,
                callbacks=[waits],
                **kwargs,
            )
            torch.cuda.set_sync_debug_mode("warn")
            try:
                trainer.fit()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            trainer.close()
    return statistics.median(waits.batches[3:])


@pytest.mark.world_size(1, backend="nccl")
@pytest.mark.parametrize("size", [4, 1], ids=["one microbatch", "four"])
def test_a_batch_of_the_trainer_waits_no_more_often_than_composers(size: int):
    composers = waits_of(None, device_train_microbatch_size=size)
    assert composers > 0
    assert waits_of({"fsdp2": {}}, device_train_microbatch_size=size) <= composers


@pytest.mark.world_size(1, backend="nccl")
def test_one_rank_makes_no_group():
    assert agreement_of(CUDA).groups == ()
