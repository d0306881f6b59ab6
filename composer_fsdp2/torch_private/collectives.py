"""Goes around every collective that Python starts, and describes it for ranks that join it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

from composer_fsdp2.torch_private.tensors import tree_leaves

__all__ = ["Collective", "Joined", "around_collectives", "group_named", "join"]

# The newer names are torch's since it renamed them.
_PUBLIC = (
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "barrier"),
    "all_to_all_single",
    *("broadcast", "reduce", "reduce_scatter_single", "reduce_scatter_tensor"),
    *("all_gather_object", "broadcast_object_list"),
)
_FUNCTIONAL = (
    *("all_gather_single", "all_gather_tensor", "all_reduce", "broadcast"),
    *("reduce_scatter_single", "reduce_scatter_tensor"),
)
"""collectives of DTensor, which return their result"""

_SIZES = ("output_split_sizes", "input_split_sizes")
"""where they are given, ranks send each other different amounts: nobody could join without them"""
_OWN = ("group", "async_op")
"""arguments that a rank which joins chooses itself"""
_ALIGNED_BYTES = 256

Joined = tuple[str, dict[str, Any]]
"""a collective in plain values, which another rank can `join`"""


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str

    @property
    def room_bytes(self) -> int:
        """Returns its bytes, rounded up so that the next tensor is aligned."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES


@dataclass(frozen=True, slots=True)
class Collective:
    """Holds one call that has not been made yet."""

    key: str
    original: Callable[..., Any]
    group: dist.ProcessGroup
    given: dict[str, Any]
    """arguments by name"""

    def __call__(self) -> Any:
        """Makes the call. Collective: yes."""
        return self.original(**self.given)

    def described(self) -> Joined:
        """Returns the values that `join` needs, without tensors."""
        given = self.given.items()
        return self.key, {name: _described(value) for name, value in given if name not in _OWN}


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Tensor(tuple(value.shape), value.dtype, value.device.type)
    if isinstance(value, list | tuple):
        return [_described(one) for one in value]
    # NCCL wants one operation on all ranks; one that multiplies holds its factor.
    return value if isinstance(value, bool | int | str | dist.ReduceOp) else None


def _real(value: Any, scratch: dict[str, torch.Tensor], taken: dict[str, int]) -> Any:
    """Replaces descriptions of tensors by parts of `scratch`, and counts in `taken` their bytes."""
    if isinstance(value, list):
        return [_real(one, scratch, taken) for one in value]
    if not isinstance(value, _Tensor):
        return value
    kind, count = value.device_type, math.prod(value.shape)
    begin = taken.get(kind, 0)
    taken[kind] = end = begin + value.room_bytes
    return scratch[kind][begin:end].view(value.dtype)[:count].view(value.shape)


def join(collectives: Sequence[Joined], group: dist.ProcessGroup) -> None:
    """Takes part in collectives of a group with zeros, one after the other. Collective: yes.

    All use the same memory: a host that does not wait for NCCL may have a whole backward to join,
    and has no memory left.
    """
    most: dict[str, int] = {}
    for _, others in collectives:
        found = [leaf for leaf in tree_leaves(others) if isinstance(leaf, _Tensor)]
        for kind in {one.device_type for one in found}:
            room = sum(one.room_bytes for one in found if one.device_type == kind)
            most[kind] = max(room, most.get(kind, 0))
    scratch = {
        kind: torch.zeros(room, dtype=torch.uint8, device=kind) for kind, room in most.items()
    }
    for key, others in collectives:
        original, signature = _originals()[key]
        for room in scratch.values():
            room.zero_()  # of what the last one left
        taken: dict[str, int] = {}
        made = {name: _real(value, scratch, taken) for name, value in others.items()}
        if "async_op" in signature.parameters:
            made["async_op"] = True
        under_way = original(**made, group=group)
        # Functional collectives return the result and no handle; it is waited for by itself.
        if isinstance(under_way, torch.Tensor):
            functional.wait_tensor(under_way)
        elif hasattr(under_way, "wait"):
            under_way.wait()


def group_named(name: str) -> dist.ProcessGroup | None:
    """Returns this rank's group of that name, `None` if this rank is not in it."""
    try:
        return dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore[reportPrivateImportUsage]
    except (RuntimeError, ValueError, KeyError):
        return None


@functools.cache
def _originals() -> dict[str, tuple[Callable[..., Any], inspect.Signature]]:
    # Torch wraps its public collectives in a logger of errors; others may have wrapped them too.
    calls = {key: inspect.unwrap(getattr(*place)) for key, place in _places().items()}
    return {key: (call, inspect.signature(call)) for key, call in calls.items()}


def _places() -> dict[str, tuple[Any, str]]:
    rows = [(dist, name) for name in _PUBLIC] + [(functional, name) for name in _FUNCTIONAL]
    return {f"{o.__name__}.{n}": (o, n) for o, n in rows if hasattr(o, n)}


@contextlib.contextmanager
def around_collectives(around: Callable[[Collective], Any]) -> Generator[None]:
    """Has `around` called in place of every collective, for the duration of a block.

    Collective: no. `around` gets the call and makes it, in whichever thread that is. Others may
    replace the same functions inside of the block.
    """
    active = [True]
    replaced: list[tuple[Any, str, Any, Any]] = []
    for key, (owner, name) in _places().items():
        original = getattr(owner, name)
        replacement = _replacement(key, original, around, active)
        replaced.append((owner, name, original, replacement))
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        active.clear()
        for owner, name, original, replacement in replaced:
            if getattr(owner, name) is replacement:
                setattr(owner, name, original)


def _replacement(
    key: str, original: Callable[..., Any], around: Callable[[Collective], Any], active: list[bool]
) -> Callable[..., Any]:
    _, signature = _originals()[key]

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not active:
            return original(*args, **kwargs)
        # By name: torch itself gives the group by place in some calls and by name in others.
        given = signature.bind(*args, **kwargs).arguments
        group = _group(given.get("group"))
        if group is None or group.size() == 1 or any(given.get(name) for name in _SIZES):
            return original(*args, **kwargs)
        return around(Collective(key, original, group, given))

    return call


def _group(given: Any) -> dist.ProcessGroup | None:
    """Returns the group that a collective was given in one of torch's ways, `None` else."""
    if given is None:
        return dist.group.WORLD
    if isinstance(given, str):
        return group_named(given)
    if isinstance(given, DeviceMesh):
        return given.get_group()
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], DeviceMesh):
        return given[0].get_group(given[1])
    return given if isinstance(given, dist.ProcessGroup) else None
