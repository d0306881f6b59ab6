"""Back to a clean state after memory ran out in the middle of a step, on every rank together.

[Note: out of memory] A rank whose allocation fails leaves forward or backward where it is, and the
others would wait for it in the next collective. While an `OOMGuard` is installed, ranks therefore
exchange their state before every collective of a unit. The rank that failed answers with `failed`
until all others have heard it and left as well; then each of them is reset, and all try again with
less. The messages are those of Composer's trainer for FSDP1, so its waiting loop meets ours.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_fsdp2.shard.averaging import AverageOverReplicas
from composer_fsdp2.shard.torch_private.members import check_private_members
from composer_fsdp2.shard.torch_private.units import (
    GATHER,
    REDUCE,
    all_reduce_hook,
    device_of,
    drop_unreduced,
    is_root,
    param_groups,
    reserve_gather,
    reserve_reduction,
    reset_iteration,
)

__all__ = ["REMOTE_OOM_MESSAGE", "OOMGuard", "Snapshot", "exchange", "reset", "sync_oom"]

REMOTE_OOM_MESSAGE = "CUDA out of memory encountered on a different rank"
"""what Composer's trainer looks for in the text of an error"""


def exchange(failed: bool, finished: bool, device: torch.device) -> tuple[bool, bool]:
    """Whether any rank has failed, and whether all have finished. Collective: yes."""
    found = torch.tensor([int(failed)], dtype=torch.uint8, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    done = torch.tensor([int(finished)], dtype=torch.uint8, device=device)
    dist.all_reduce(done, op=dist.ReduceOp.MIN)
    return bool(found.item()), bool(done.item())


@contextmanager
def sync_oom(device: torch.device) -> Generator[None]:
    """Ranks leave together, and all with an out-of-memory error if one of them had one.

    Collective: yes. Inside, the units' collectives are those of an `OOMGuard`.

    Raises:
        torch.OutOfMemoryError: on every rank, when any rank raised it.
    """
    error: torch.OutOfMemoryError | None = None
    try:
        yield
    except torch.OutOfMemoryError as caught:
        error = caught
    finished, failed = False, error is not None
    while not finished:
        failed, finished = exchange(failed, True, device)
    if error is None and failed:
        error = torch.OutOfMemoryError(REMOTE_OOM_MESSAGE)
    if error is not None:
        raise error


class OOMGuard:
    """Has the ranks agree before every collective of some units; see [Note: out of memory].

    Costs two small reductions and a wait for the device each time: `remove()` it when the size of
    a microbatch has proved to fit.

    Raises:
        PatchError: when this torch lacks what is needed to leave a step and start it again.
    """

    def __init__(self, units: Iterable[FSDPModule]) -> None:
        check_private_members(["device_train_microbatch_size: auto"])
        reserves: dict[str, Callable[[Any], object]] = {
            GATHER: reserve_gather,
            REDUCE: reserve_reduction,
            "agree_on_used": bool,  # ours, about parameters without a gradient; it needs no memory
            "agree_on_writes": bool,  # ours too, about gathered parameters
        }
        self._before: list[tuple[Any, str, Any]] = []
        for group in (group for unit in units for group in param_groups(unit)):
            for name in (name for name in reserves if hasattr(group, name)):
                self._before.append((group, name, vars(group).get(name)))
                setattr(group, name, self._agreeing(group, getattr(group, name), reserves[name]))

    def _agreeing(
        self, group: Any, collective: Callable[..., Any], reserve: Callable[[Any], object]
    ) -> Callable[..., Any]:
        def agreed(*args: Any, **kwargs: Any) -> Any:
            reserve(group)
            if exchange(False, False, device_of(group))[0]:
                raise torch.OutOfMemoryError(REMOTE_OOM_MESSAGE)
            return collective(*args, **kwargs)

        return agreed

    def remove(self) -> None:
        """Gives the units back their own methods."""
        for group, name, before in self._before:
            vars(group).pop(name, None)
            if before is not None:
                setattr(group, name, before)
        self._before = []


# --- Back to a clean state. ---


def reset(units: Iterable[FSDPModule]) -> None:
    """Makes the next forward start as if the aborted one had not been.

    Collective: no. All parameters are shards again. Gradients that were not reduced yet are
    dropped; those of the shards are worth nothing any more, and newer torch drops them too.
    """
    units = list(units)
    reset_iteration(units)
    for unit in units:
        if is_root(unit) is None:
            continue  # has not run
        for group in param_groups(unit):
            drop_unreduced(group)
            hook = all_reduce_hook(group)
            if isinstance(hook, AverageOverReplicas):
                hook.forget()
            getattr(group, "forget_unused", int)()
        unit.reshard()


class Snapshot:
    """What a step changes, kept in CPU memory. Random states are kept from the start."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._random = (random.getstate(), torch.get_rng_state())
        self._device_random = _device_random(device)
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._states: list[tuple[torch.optim.Optimizer, dict[Any, dict[str, Any]]]] = []

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keeps the values of parameters or buffers, of a DTensor this rank's shard."""
        self._tensors += [(tensor, _copied(tensor)) for tensor in tensors]

    def keep_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Keeps what the optimizer is about to change: its parameters and its state."""
        self.keep(param for group in optimizer.param_groups for param in group["params"])
        kept = {
            param: {key: (value, _copied(value)) for key, value in entries.items()}
            for param, entries in optimizer.state.items()
        }
        self._states.append((optimizer, kept))

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back in place."""
        for tensor, copy in self._tensors:
            _local(tensor).copy_(copy)
        for optimizer, kept in self._states:
            for param in set(optimizer.state) - set(kept):
                del optimizer.state[param]
            for param, entries in kept.items():
                optimizer.state[param] = {key: _restored(*pair) for key, pair in entries.items()}
        python, cpu = self._random
        random.setstate(python)
        torch.set_rng_state(cpu)
        if self._device_random is not None:
            torch.get_device_module(self._device).set_rng_state(self._device_random, self._device)


def _device_random(device: torch.device) -> torch.Tensor | None:
    if device.type == "cpu":
        return None
    return torch.get_device_module(device).get_rng_state(device)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _copied(value: Any) -> Any:
    """A copy in CPU memory; of what is no tensor, the value."""
    return _local(value).to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _restored(value: Any, copy: Any) -> Any:
    if isinstance(value, torch.Tensor):
        _local(value).copy_(copy)
        return value
    return copy
