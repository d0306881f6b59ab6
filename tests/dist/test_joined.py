"""A rank joins collectives that others have entered: the same operation, in little memory."""

from __future__ import annotations

import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from composer.core import Callback, State
from torch.utils._python_dispatch import TorchDispatchMode

from composer_fsdp2 import installed
from composer_fsdp2.guards.leaving import joint_exit
from composer_fsdp2.torch_private.collectives import Joined, around_collectives, join
from composer_fsdp2.trainer.loop.attempts import Attempt
from tests.support.models import TinyComposer
from tests.support.training import built, samples_of, trainer_for


def recorded(*calls: Any) -> list[Joined]:
    """What `JointExit` keeps of collectives, which are not made."""
    found: list[Joined] = []
    with around_collectives(lambda collective: found.append(collective.described())):
        for call in calls:
            call()
    return pickle.loads(pickle.dumps(found))  # through the store


class Made(TorchDispatchMode):
    """Counts the bytes of new tensors."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "zeros" in str(func) or "empty" in str(func):
            self.total += result.numel() * result.element_size()
        return result


@pytest.mark.world_size(2)
def test_the_operation_is_that_of_the_others():
    value = torch.tensor([-3.0])
    least = recorded(lambda: dist.all_reduce(value, op=dist.ReduceOp.MIN))
    if dist.get_rank() == 0:
        dist.all_reduce(value, op=dist.ReduceOp.MIN)
        assert value.item() == -3.0
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        assert value.item() == 0.0
    else:
        most = recorded(lambda: dist.all_reduce(value, op=dist.ReduceOp.MAX))
        assert dist.group.WORLD is not None
        join([*least, *most], dist.group.WORLD)


@pytest.mark.world_size(2)
def test_a_factor_of_the_operation_goes_with_it():
    operation = dist._make_nccl_premul_sum(0.25)
    ((_, others),) = recorded(lambda: dist.all_reduce(torch.ones(1), op=operation))
    assert pickle.dumps(others["op"]) == pickle.dumps(operation)


@pytest.mark.world_size(2)
def test_many_are_joined_in_the_memory_of_the_largest():
    size = 2**18
    whole, part, other = torch.ones(2 * size), torch.ones(size), torch.ones(size // 4)
    records = recorded(
        *[lambda: dist.all_gather_into_tensor(whole, part), lambda: dist.all_reduce(other)] * 8
    )
    assert dist.group.WORLD is not None
    with Made() as made:
        join(records, dist.group.WORLD)
    assert 4 * 3 * size <= made.total < 1.01 * 4 * 3 * size


class Fails(Callback):
    """Runs out of memory on one rank, with the graph of a microbatch in the state."""

    outputs: weakref.ref[torch.Tensor] | None = None
    loss: weakref.ref[torch.Tensor] | None = None

    def after_loss(self, state: State, logger: Any) -> None:
        if dist.get_rank() == 1 and len(state.outputs) > 2:
            assert isinstance(state.outputs, torch.Tensor)
            assert isinstance(state.loss, torch.Tensor)
            self.outputs, self.loss = weakref.ref(state.outputs), weakref.ref(state.loss)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


@pytest.mark.world_size(2, timeout=60)
@pytest.mark.filterwarnings("ignore:CUDA out of memory or excessive")
def test_a_rank_has_let_go_of_its_graph_before_it_joins():
    model, fails, alive = built(TinyComposer), Fails(), []
    join_the_rest = joint_exit.JointExit._join_the_rest

    def note(*args: Any) -> None:  # whether or not the others have entered more by then
        alive.extend(one() is not None for one in (fails.outputs, fails.loss) if one is not None)
        join_the_rest(*args)

    with installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint_exit.JointExit, "_join_the_rest", note)
        trainer = trainer_for(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            samples_of(2, 8),
            device_train_microbatch_size="auto",
            callbacks=[fails],
        )
        trainer.fit()
        trainer.close()
    assert not any(alive)
    assert bool(alive) == (dist.get_rank() == 1)


@pytest.mark.world_size(2, timeout=60)
@pytest.mark.filterwarnings("ignore:CUDA out of memory or excessive")
def test_an_attempt_is_gone_when_the_next_one_computes():
    model, attempts, alive = built(TinyComposer), list[Any](), list[bool]()
    compute = Attempt.compute

    def note(attempt: Any, *args: Any) -> Any:
        alive.extend(one() is not None for one in attempts)
        attempts.append(weakref.ref(attempt))
        return compute(attempt, *args)

    with installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attempt, "compute", note)
        trainer = trainer_for(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            samples_of(2, 8),
            device_train_microbatch_size="auto",
            callbacks=[Fails()],
        )
        gc.disable()  # memory is wanted at once
        try:
            trainer.fit()
        finally:
            gc.enable()
        trainer.close()
    assert alive
    assert not any(alive)
