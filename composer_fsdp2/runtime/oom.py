"""Back to a clean state after memory ran out in the middle of a step, on every rank together.

[Note: out of memory] A rank whose allocation fails leaves forward or backward where it is, and the
others would wait for it in the next collective. While an `OOMGuard` is installed, ranks therefore
exchange their state before every collective of a unit. The rank that failed answers with `failed`
until all others have heard it and left as well; then each of them is reset, and all try again with
less. The messages are those of Composer's trainer for FSDP1, so its waiting loop meets ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2.runtime.snapshot import Snapshot
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

__all__ = [
    "REMOTE_OOM_MESSAGE",
    "OOMGuard",
    "Snapshot",
    "exchange",
    "is_out_of_memory",
    "reset",
    "sync_oom",
]

REMOTE_OOM_MESSAGE = "CUDA out of memory encountered on a different rank"
"""what Composer's trainer looks for in the text of an error"""

_OUT_OF_MEMORY = re.compile(
    r"out of memory|_STATUS_ALLOC_FAILED|failed to cuda [cm]alloc|cuda(host)?alloc failed"
    r"|(can't|cannot|failed to) allocate( [\w ]*)?memory|not enough memory"
    # What cuDNN says instead, of batches that are too large.
    r"|CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out: torch's own error, those of CUDA's libraries, or caused by one."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


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
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        if not is_out_of_memory(caught):
            raise
        error = caught
    finished, failed = False, error is not None
    while not finished:
        failed, finished = exchange(failed, True, device)
    if error is None and failed:
        error = torch.OutOfMemoryError(REMOTE_OOM_MESSAGE)
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    if error is not None:
        raise torch.OutOfMemoryError(f"CUDA out of memory: {error}") from error


class OOMGuard:
    """Has the ranks agree before every collective of some units; see [Note: out of memory].

    Costs two small reductions and a wait for the device each time: `remove()` it when the size of
    a microbatch has proved to fit.

    Args:
        units: all of a model.
        agree: otherwise a rank only makes sure that there is memory for a collective before it
            enters it, and something else brings the ranks out.

    Raises:
        PatchError: when this torch lacks what is needed to leave a step and start it again.
    """

    def __init__(self, units: Iterable[FSDPModule], agree: bool = True) -> None:
        self._agree = agree
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
            if self._agree and exchange(False, False, device_of(group))[0]:
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
        for group in param_groups(unit):
            getattr(group, "forget_unused", int)()
            getattr(group, "forget_events", int)()
        if is_root(unit) is None:
            continue  # has not run
        for group in param_groups(unit):
            drop_unreduced(group)
            hook = all_reduce_hook(group)
            if isinstance(hook, AverageOverReplicas):
                hook.forget()
        # Now that no state is that of a forward, in which some units would stay gathered.
        unit.reshard()
