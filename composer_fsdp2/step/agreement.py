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

import contextlib
import datetime
import fcntl
import math
import os
import socket
import struct
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from composer_fsdp2.ranks import any_rank, is_fake
from composer_fsdp2.torch_private.tensors import set_timeout, timeout_of

__all__ = ["Agreement", "agreement_of", "connected", "gloo_groups", "neighbours"]


_PROBE = datetime.timedelta(seconds=60)
"""how long ranks try to connect, after all of them have come"""
_ROWS_FROM = 32
"""ranks that stand in rows; see [Note: rows of ranks]"""
_SIOCGIFADDR = 0x8915
"""asks Linux for the address of an interface"""


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
            values = [one for part in parts for one in part]
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
    return [list(range(world.size()))] if is_bound else rows_and_columns(world.size())


def rows_and_columns(count: int) -> list[list[int]]:
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
    """How many ranks each of `count` ranks is connected with in its row and its column."""
    return sum(len(group) - 1 for group in rows_and_columns(count) if 0 in group)


def takes_cpu_tensors(backends: str) -> bool:
    """Whether a group of these backends, such as `cpu:gloo,cuda:nccl`, sends CPU tensors."""
    return any(one.partition(":")[0] == "cpu" for one in backends.split(","))


def gloo_groups(
    members: Sequence[Sequence[int]], timeout: datetime.timedelta, device: torch.device, lost: str
) -> list[dist.ProcessGroup] | None:
    """Returns this rank's new gloo groups, `None` with a warning where gloo does not get through.

    Collective: yes, over the default group too.

    Args:
        members: the ranks of each group, those of other ranks too.
        timeout: of their collectives.
        device: of the default group's collectives.
        lost: follows in the warning: what the ranks do without, and what to do about it.
    """
    _name_interface()
    any_rank(False, device)  # a rank that is late would look like one that cannot be reached
    groups: list[dist.ProcessGroup] = []
    failed = None
    for ranks in members:  # all of them on every rank, after an error too: groups have numbers
        try:
            made: Any = dist.new_group(ranks=ranks, backend="gloo", timeout=min(timeout, _PROBE))
            if dist.get_rank() in ranks:
                set_timeout(timeout, made)
                groups.append(made)
        except (RuntimeError, ValueError) as error:  # noqa: PERF203
            failed = str(error)
    if any_rank(failed is not None, device):
        said = failed or "on another rank"
        warnings.warn(f"gloo cannot connect the ranks: {said}. {lost}", stacklevel=2)
        return None
    return groups


def _name_interface() -> None:
    """Names the interface that leads to other nodes, where gloo would take another one.

    gloo listens at the address of the host name. Where that is of the loopback interface, as in
    Debian's `/etc/hosts`, no other node gets there.
    """
    host, place = "", os.environ.get("MASTER_ADDR")
    with contextlib.suppress(OSError):  # of a name that nobody knows; gloo takes loopback then too
        host = socket.gethostbyname(socket.gethostname())
    if "GLOO_SOCKET_IFNAME" in os.environ or not place or not f"{host or 127}".startswith("127"):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((place, 1))  # sends nothing, and chooses a way
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # of one without an address
                asked = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if asked[20:24] == own:
                    os.environ["GLOO_SOCKET_IFNAME"] = name
