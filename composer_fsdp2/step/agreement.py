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
other instead of 2,046, and a rank has 62 sockets instead of 1,023. Where their number is no product
of two that are near each other, some rows have one rank more, which stands in no column: the first
rank of its row sends it what came of the columns.
"""

from __future__ import annotations

import datetime
import math
import weakref
from collections.abc import Callable, Sequence
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
_LONGEST = 4
"""a row is at most so many times as long as a column"""


class Agreement:
    """Computes maxima and sums of small numbers over all ranks; see [Note: agreements].

    Args:
        groups: take tensors of `device`: one of all ranks, or this rank's row and its column; the
            default group by default.
        device: on which the numbers are sent: the CPU, or where gloo does not get through that of
            the default group, whose answers wait for it.
        ranks: those that agree, in the order of the rows; by default those of the one group.
        has_rest: whether a rank of this rank's row stands in no column.
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup] = (),
        device: torch.device | str = "cpu",
        ranks: Sequence[int] | None = None,
        *,
        has_rest: bool = False,
    ) -> None:
        self.groups, self.device = tuple(groups), torch.device(device)
        self._parts = self.groups or (None,)
        self._ranks = ranks
        self._rest = self.groups[:1] if has_rest else ()
        self.collectives = 0
        """how many were made so far"""

    @property
    def rank(self) -> int:
        """Returns the number of this rank among those that agree."""
        if not dist.is_initialized():
            return 0
        if self._ranks is None:
            return dist.get_rank(self._parts[0])
        return self._ranks.index(dist.get_rank())

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
        return self._with_rest(box)[0]

    def of_all(self, value: Any) -> list[Any]:
        """Returns the plain value of each rank. Collective: yes."""
        values = [value]
        if not dist.is_initialized():
            return values
        self.collectives += 1
        for group in self._parts:
            parts: list[list[Any]] = [[]] * dist.get_world_size(group)
            dist.all_gather_object(parts, values, group=group)
            values = [rank_value for part in parts for rank_value in part]
        return self._with_rest([values])[0]

    def answered(self, value: Any, answer: Callable[[list[Any]], list[Any]]) -> Any:
        """Returns what the first rank answers to this rank's plain value. Collective: yes.

        Args:
            value: this rank's value, of plain types.
            answer: called on the first rank with the values of all, in order; returns an answer to
                each. It must not raise, because the others wait.
        """
        if not dist.is_initialized():
            return answer([value])[0]
        sent, asked = [value], []
        self.collectives += 1
        for group in self._parts:
            first = dist.get_rank(group) == 0
            received: list[Any] | None = [None] * dist.get_world_size(group) if first else None
            dist.gather_object(sent, received, group=group, group_dst=0)
            asked.append((group, received))
            if received is None:
                break
            sent = [rank_value for part in received for rank_value in part]
        else:
            sent = answer(sent)
        for group, received in reversed(asked):
            each = iter(sent)
            parts = None if received is None else [[next(each) for _ in part] for part in received]
            box: list[Any] = [None]
            dist.scatter_object_list(box, parts, group=group, group_src=0)
            sent = box[0]
        return sent[0]

    def _with_rest(self, box: list[Any]) -> list[Any]:
        """Sends what came of the columns to the rank of the row that stands in none."""
        for group in self._rest:
            dist.broadcast_object_list(box, group=group, group_src=0)
        return box

    def _reduced(self, numbers: Sequence[int], operation: Any) -> list[int]:
        if dist.get_world_size() == 1:
            return list(numbers)
        # 64 bits: squares of checksums are among the numbers, and counts over many ranks.
        sent = torch.tensor(list(numbers), dtype=torch.int64, device=self.device)
        self.collectives += 1
        for group in self._parts:
            dist.all_reduce(sent, op=operation, group=group)
        for group in self._rest:
            dist.broadcast(sent, group=group, group_src=0)
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
    is_small = not rank_rows_and_columns(world.size())[1]
    takes = takes_cpu_tensors(dist.get_backend_config(world)) and is_small
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


def connected(
    timeout: datetime.timedelta,
    device: torch.device,
    lost: str,
    ranks: Sequence[int] | None = None,
) -> Agreement | None:
    """Returns an agreement over new groups, `None` with a warning where gloo does not get through.

    Collective: yes, over the default group too, on ranks that do not agree as well: what they get
    is of no use to them. The first arguments are those of `gloo_groups`.

    Args:
        timeout: of each collective of the groups.
        device: of the default group's collectives.
        lost: feature that is off without the groups; in the warning.
        ranks: those that agree; all of them by default.
    """
    ranks = range(dist.get_world_size()) if ranks is None else ranks
    rows, columns = rank_rows_and_columns(len(ranks))
    members = [[ranks[number] for number in group] for group in (*rows, *columns)]
    groups = gloo_groups(members, timeout, device, lost)
    if groups is None:
        return None
    rank = dist.get_rank()
    row = next((group for group in members if rank in group), [])
    has_rest = bool(columns) and any(sum(other in m for m in members) == 1 for other in row)
    return Agreement(groups, ranks=ranks, has_rest=has_rest)


def rank_rows_and_columns(count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the ranks of each row, and of each column; see [Note: rows of ranks].

    Args:
        count: of all ranks. Few of them make one row and no column.
    """
    everyone = list(range(count))
    if count < _ROWS_FROM:
        return [everyone], []
    divisors = [d for d in range(1, math.isqrt(count) + 1) if count % d == 0]
    height, rest = divisors[-1], 0
    width = count // height
    if width > _LONGEST * height:
        width = math.isqrt(count)
        height, rest = divmod(count, width)
    starts = [row * width + min(row, rest) for row in range(height)]
    ends = [*starts[1:], count]
    rows = [everyone[start:end] for start, end in zip(starts, ends, strict=True)]
    return rows, [[start + column for start in starts] for column in range(width)]


def neighbours(count: int) -> int:
    """Returns the most ranks that are in the row and column of one of `count` ranks."""
    rows, columns = rank_rows_and_columns(count)
    return sum(len(group) - 1 for group in (*rows, *columns) if 0 in group)
