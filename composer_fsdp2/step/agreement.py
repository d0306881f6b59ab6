"""Agreements of ranks in a step, for which no host waits for its device.

[Note: agreements] How many microbatches a batch has, whether data is left, who used a parameter:
these are numbers of the host, and the host needs the answer before it goes on. Sent through NCCL
they queue behind all that the device still has to compute, and reading the answer waits for it. So
they go over groups for CPU tensors: a host waits for the slowest host, and devices go on. Where
the default group takes CPU tensors (gloo, or `cpu:gloo,cuda:nccl`) it is used. Else gloo groups
are made when the first model is prepared, with the timeout of the default group, for all models
and as long as the process lives. They hold every rank under HSDP too: what is agreed on is the same
in all copies. Their collectives are torch's public functions, so a `JointExit` counts and joins
them as any other.

[Note: rows of ranks] gloo sends a small number around a ring, one rank after the other, and
connects each rank of a group with each other. So many ranks stand in rows and columns: a number
goes around the rows, and what came of it around the columns. Of 1,024 ranks 124 hops follow each
other instead of 2,046, and a rank has 62 sockets instead of 1,023.
"""

from __future__ import annotations

import datetime
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from composer_fsdp2.ranks import is_fake
from composer_fsdp2.step.gloo import gloo_groups, takes_cpu_tensors
from composer_fsdp2.torch_private.tensors import timeout_of

__all__ = ["Agreement", "agreement_of", "connected", "neighbours"]


_ROWS_FROM = 32
"""with more ranks, messages go by rows and columns; see [Note: rows of ranks]"""


class Agreement:
    """Computes maxima and sums of small numbers over all ranks; see [Note: agreements].

    Args:
        groups: take tensors of `device`: one of all ranks, or this rank's row and its column; the
            default group by default.
        device: on which the numbers are sent: the CPU, or where gloo does not get through that of
            the default group, whose answers wait for it.
    """

    def __init__(
        self, groups: Sequence[dist.ProcessGroup] = (), device: torch.device | str = "cpu"
    ) -> None:
        self.groups, self.device = tuple(groups), torch.device(device)
        self._parts = self.groups or (None,)
        self.collectives = 0
        """how many were made so far"""

    def maximum(self, numbers: Sequence[int]) -> list[int]:
        """Returns the largest of each of the ranks' numbers. Collective: yes."""
        return self._reduced(numbers, dist.ReduceOp.MAX)

    def total(self, numbers: Sequence[int]) -> list[int]:
        """Returns the sum of each of the ranks' numbers. Collective: yes."""
        return self._reduced(numbers, dist.ReduceOp.SUM)

    def min_max(self, number: int) -> tuple[int, int]:
        """Returns the least and the largest of the ranks' numbers. Collective: yes."""
        least, most = self.maximum([-number, number])
        return -least, most

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. Collective: yes."""
        return bool(self.maximum([int(flag)])[0])

    def of_rank0(self, value: Any) -> Any:
        """Returns rank 0's plain value. Collective: yes."""
        if dist.get_world_size() == 1:
            return value
        box = [value]
        self.collectives += 1
        for group in self._parts:
            dist.broadcast_object_list(box, group=group, group_src=0)
        return box[0]

    def of_all(self, value: Any) -> list[Any]:
        """Returns the plain value of each rank. Collective: yes."""
        values = [value]
        self.collectives += 1
        for group in self._parts:
            parts: list[list[Any]] = [[]] * dist.get_world_size(group)
            dist.all_gather_object(parts, values, group=group)
            values = [rank_value for part in parts for rank_value in part]
        return values

    def _reduced(self, numbers: Sequence[int], operation: Any) -> list[int]:
        if dist.get_world_size() == 1:
            return list(numbers)
        # 64 bits: squares of checksums are among the numbers, and counts over many ranks.
        sent = torch.tensor(list(numbers), dtype=torch.int64, device=self.device)
        self.collectives += 1
        for group in self._parts:
            dist.all_reduce(sent, op=operation, group=group)
        return sent.tolist()


_agreements: weakref.WeakKeyDictionary[dist.ProcessGroup, Agreement] = weakref.WeakKeyDictionary()


def agreement_of(device: torch.device) -> Agreement:
    """Returns the agreement of this process, which preparing a model makes.

    Collective: yes, the first time in a process, where the default group takes no CPU tensors.

    Args:
        device: of the default group's collectives.
    """
    world: Any = dist.group.WORLD
    if world in _agreements:
        return _agreements[world]
    takes = takes_cpu_tensors(dist.get_backend_config(world)) and len(_members(world)) == 1
    if world.size() == 1 or is_fake(world) or takes:
        agreement = Agreement()
    else:
        # A new group gets the default of its backend, not what the default group was given.
        timeout = timeout_of(world, device) or default_pg_timeout
        lost = (
            "Their agreements before each batch go through the device then, and every one of them "
            "waits for it. Set GLOO_SOCKET_IFNAME to the interface they share."
        )
        agreement = connected(timeout, device, lost) or Agreement((), device)
    _agreements[world] = agreement
    return agreement


def connected(timeout: datetime.timedelta, device: torch.device, lost: str) -> Agreement | None:
    """Returns an agreement over new groups, `None` with a warning where gloo does not get through.

    Collective: yes, over the default group too. The arguments are those of `gloo_groups`.
    """
    world: Any = dist.group.WORLD
    groups = gloo_groups(_members(world), timeout, device, lost)
    return None if groups is None else Agreement(groups)


def _members(world: dist.ProcessGroup) -> list[list[int]]:
    """Returns the ranks of each group to make."""
    # With a default group that is bound to a device, torch 2.7 has NCCL split for each group that
    # a rank is not in, a gloo group too, and waits for ever.
    is_bound = world.bound_device_id is not None
    return [list(range(world.size()))] if is_bound else rank_rows_and_columns(world.size())


def rank_rows_and_columns(count: int) -> list[list[int]]:
    """Returns the ranks of each row, then of each column; see [Note: rows of ranks].

    Args:
        count: of all ranks. Few of them, or a prime number, make one row.
    """
    everyone = list(range(count))
    divisors = [d for d in range(1, math.isqrt(count) + 1) if count % d == 0]
    height = divisors[-1] if count >= _ROWS_FROM else 1
    width = count // height
    rows = [everyone[begin : begin + width] for begin in range(0, count, width)]
    return rows + [everyone[begin::width] for begin in range(width if height > 1 else 0)]


def neighbours(count: int) -> int:
    """Returns the number of ranks in the row and column of each of `count` ranks."""
    return sum(len(group) - 1 for group in rank_rows_and_columns(count) if 0 in group)
