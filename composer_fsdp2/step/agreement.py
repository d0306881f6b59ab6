"""Agreements of ranks in a step, for which no host waits for its device.

[Note: agreements] How many microbatches a batch has, whether data is left, who used a parameter:
these are numbers of the host, and the host needs the answer before it goes on. Sent through NCCL
they queue behind all that the device still has to compute, and reading the answer waits for it. So
they go over a group for CPU tensors: a host waits for the slowest host, and devices go on. Where
the default group takes CPU tensors (gloo, or `cpu:gloo,cuda:nccl`) it is used. Else one gloo group
of all ranks is made when the first model is prepared, with the timeout of the default group, for
all models and as long as the process lives. It holds every rank under HSDP too: what is agreed on
is the same in all copies. Its collectives are torch's public functions, so a `JointExit` counts and
joins them as any other.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
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

__all__ = ["Agreement", "agreement_of", "gloo_group"]


_PROBE = datetime.timedelta(seconds=60)
"""how long ranks try to connect, after all of them have come"""
_SIOCGIFADDR = 0x8915
"""asks Linux for the address of an interface"""


class Agreement:
    """Computes maxima and sums of small numbers over all ranks; see [Note: agreements].

    Args:
        group: takes tensors of `device`; the default group by default.
        device: on which the numbers are sent: the CPU, or where gloo does not get through that of
            the default group, whose answers wait for it.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.group, self.device = group, torch.device(device)
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
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def _reduced(self, numbers: Sequence[int], operation: Any) -> list[int]:
        if dist.get_world_size() == 1:
            return list(numbers)
        # 64 bits: squares of checksums are among the numbers, and counts over many ranks.
        sent = torch.tensor(list(numbers), dtype=torch.int64, device=self.device)
        self.collectives += 1
        dist.all_reduce(sent, op=operation, group=self.group)
        return sent.tolist()


_agreements: weakref.WeakKeyDictionary[dist.ProcessGroup, Agreement] = weakref.WeakKeyDictionary()


def agreement_of(device: torch.device) -> Agreement:
    """Returns the agreement of this process, which preparing a model makes.

    Collective: yes, the first time in a process, where the default group takes no CPU tensors.

    Args:
        device: of the default group's collectives.
    """
    world: Any = dist.group.WORLD
    if world not in _agreements:
        _agreements[world] = _made(world, device)
    return _agreements[world]


def _made(world: dist.ProcessGroup, device: torch.device) -> Agreement:
    if world.size() == 1 or is_fake(world) or takes_cpu_tensors(dist.get_backend_config(world)):
        return Agreement()
    # A new group gets the default of its backend, not what the default group was given.
    timeout = timeout_of(world, device) or default_pg_timeout
    lost = (
        "Their agreements before each batch go through the device then, and every one of them "
        "waits for it. Set GLOO_SOCKET_IFNAME to the interface they share."
    )
    group = gloo_group(timeout, device, lost)
    return Agreement(group) if group is not None else Agreement(None, device)


def takes_cpu_tensors(backends: str) -> bool:
    """Whether a group of these backends, such as `cpu:gloo,cuda:nccl`, sends CPU tensors."""
    return any(one.partition(":")[0] == "cpu" for one in backends.split(","))


def gloo_group(
    timeout: datetime.timedelta, device: torch.device, lost: str
) -> dist.ProcessGroup | None:
    """Returns a new gloo group of all ranks, `None` with a warning where gloo does not get through.

    Collective: yes, over the default group too.

    Args:
        timeout: of its collectives.
        device: of the default group's collectives.
        lost: follows in the warning: what the ranks do without, and what to do about it.
    """
    _name_interface()
    any_rank(False, device)  # a rank that is late would look like one that cannot be reached
    group, failed = None, "on another rank"
    try:
        made: Any = dist.new_group(backend="gloo", timeout=min(timeout, _PROBE))
        set_timeout(timeout, made)
        group = made
    except (RuntimeError, ValueError) as error:
        failed = str(error)
    if any_rank(group is None, device):
        warnings.warn(f"gloo cannot connect the ranks: {failed}. {lost}", stacklevel=2)
        return None
    return group


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
