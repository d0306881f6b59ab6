"""Makes gloo groups that reach other nodes, or says why ranks go on without them."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import socket
import struct
import warnings
from collections.abc import Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from composer_fsdp2.ranks import any_rank
from composer_fsdp2.torch_private.tensors import set_timeout

__all__ = ["gloo_groups", "takes_cpu_tensors"]

_PROBE = datetime.timedelta(seconds=60)
"""how long ranks try to connect, after all of them have come"""


_SIOCGIFADDR = 0x8915
"""asks Linux for the address of an interface"""


def takes_cpu_tensors(backends: str) -> bool:
    """Whether a group of these backends, such as `cpu:gloo,cuda:nccl`, sends CPU tensors."""
    return any(backend.partition(":")[0] == "cpu" for backend in backends.split(","))


def gloo_groups(
    members: Sequence[Sequence[int]], timeout: datetime.timedelta, device: torch.device, lost: str
) -> list[dist.ProcessGroup] | None:
    """Returns this rank's new gloo groups, `None` with a warning where gloo does not get through.

    Collective: yes, over the default group too.

    Args:
        members: the ranks of each group, those of other ranks too.
        timeout: of each collective of the groups.
        device: of the default group's collectives.
        lost: follows in the warning: what the ranks do without, and what to do about it.
    """
    _name_interface()
    any_rank(False, device)  # a rank that is late would look like one that cannot be reached
    groups: list[dist.ProcessGroup] = []
    failed = None
    for ranks in members:  # all of them on every rank, after an error too: groups have numbers
        try:
            with _unbound():
                limit = min(timeout, _PROBE)
                made: Any = dist.new_group(ranks=ranks, backend="gloo", timeout=limit)
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


@contextlib.contextmanager
def _unbound() -> Generator[None]:
    """Makes groups without a split of NCCL's communicator.

    With a default group that is bound to a device, torch has NCCL split on each rank that is not in
    a new group, a gloo group too. Its members do not split, so all wait for ever:
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/distributed_c10d.py#L1873
    """
    world: Any = dist.group.WORLD
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


def _name_interface() -> None:
    """Names the interface that leads to other nodes, where gloo would take the loopback.

    gloo listens at the address of the host name. Where that is of the loopback interface, as in
    Debian's `/etc/hosts`, no other node gets there.
    """
    host, master = "", os.environ.get("MASTER_ADDR")
    with contextlib.suppress(OSError):  # of a name that nobody knows; gloo takes loopback then too
        host = socket.gethostbyname(socket.gethostname())
    if "GLOO_SOCKET_IFNAME" in os.environ or not master or not f"{host or 127}".startswith("127"):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 1))  # sends nothing, and chooses a way
        address = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # of one without an address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if answer[20:24] == address:
                    os.environ["GLOO_SOCKET_IFNAME"] = name
