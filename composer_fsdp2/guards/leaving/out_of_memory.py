"""Leaves a step on every rank together when memory runs out in the middle of it.

[Note: out of memory] A rank whose allocation fails leaves forward or backward where it is, and the
others would wait for it in the next collective. While an `OOMGuard` that agrees is installed, ranks
exchange their state before every collective of a unit; one of the Trainer does not agree, and
`guards.leaving.joint_exit` brings its ranks out. The rank that failed answers with `failed`
until all others have heard it and left as well; then each of them is reset, and all try again with
less. The messages are those of Composer's trainer for FSDP1, so its waiting loop meets ours.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from composer_fsdp2.step.run import Run, StepListener
from composer_fsdp2.torch_private.members import check_private_members
from composer_fsdp2.torch_private.units import (
    reserve_gather,
    reserve_reduction,
)

__all__ = [
    "REMOTE_OOM_MESSAGE",
    "OOMGuard",
    "agree_on_failure",
    "is_out_of_memory",
    "sync_oom",
]

REMOTE_OOM_MESSAGE = "CUDA out of memory encountered on a different rank"
"""words that Composer's trainer looks for in the text of an error"""

_OUT_OF_MEMORY = re.compile(
    r"out of memory|_STATUS_ALLOC_FAILED|failed to cuda [cm]alloc|cuda(host)?alloc failed"
    r"|(can't|cannot|failed to) allocate( [\w ]*)?memory|not enough memory"
    # cuDNN says this instead, of batches that are too large.
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


def agree_on_failure(failed: bool, finished: bool, device: torch.device) -> tuple[bool, bool]:
    """Whether any rank has failed, and whether all have finished. Collective: yes."""
    any_failed = torch.tensor([int(failed)], dtype=torch.uint8, device=device)
    dist.all_reduce(any_failed, op=dist.ReduceOp.MAX)
    done = torch.tensor([int(finished)], dtype=torch.uint8, device=device)
    dist.all_reduce(done, op=dist.ReduceOp.MIN)
    return bool(any_failed.item()), bool(done.item())


@contextmanager
def sync_oom(device: torch.device) -> Generator[None]:
    """Has ranks leave together, all with an out-of-memory error if any rank had one.

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
        failed, finished = agree_on_failure(failed, True, device)
    if error is None and failed:
        error = torch.OutOfMemoryError(REMOTE_OOM_MESSAGE)
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    if error is not None:
        raise torch.OutOfMemoryError(f"CUDA out of memory: {error}") from error


class OOMGuard(StepListener):
    """Has ranks leave a step of a run together when memory runs out on one, until it is removed.

    Take it away with `remove()` when the size of a microbatch has proved to fit. Each agreement
    costs two small reductions and a wait for the device.

    Args:
        run: the run whose steps are guarded.
        agree: otherwise a rank only makes sure that there is memory for a collective before it
            enters the collective, and something else brings the ranks out.

    Raises:
        PatchError: when this torch lacks what is needed to leave a step and start it again.
    """

    def __init__(self, run: Run, agree: bool = True) -> None:
        check_private_members(["device_train_microbatch_size: auto"])
        super().__init__(run)
        self._agrees = agree
        # Before other agreements: a rank that leaves answers this agreement alone.
        run.listen(self, first=True)

    def remove(self) -> None:
        """Takes the guard away; nothing the next time."""
        self.run.stop_listening(self)

    def begin_forward(self) -> None:
        """Collective: yes, in training, where ranks agree."""
        # Other listeners compare then what the ranks do, and memory may have run out before it.
        if torch.is_grad_enabled():
            self._agree()

    def before_gather(self, unit: str, group: Any) -> None:
        """Collective: yes, where ranks agree."""
        reserve_gather(group)
        self._agree()

    def before_reduce(self, unit: str, group: Any) -> None:
        """Collective: yes, where ranks agree."""
        reserve_reduction(group)
        self._agree()

    def before_agreement(self, subject: str) -> None:
        """Collective: yes, where ranks agree."""
        self._agree()

    def _agree(self) -> None:
        if self._agrees and agree_on_failure(False, False, self.run.device)[0]:
            raise torch.OutOfMemoryError(REMOTE_OOM_MESSAGE)
