"""Wraps every collective that Python starts, and describes it for ranks that join it."""

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
"""arguments with which ranks send each other different amounts, so that nobody could join"""
_CHOSEN_BY_RANK = ("group", "async_op")
"""arguments that each rank chooses itself when it joins"""
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
        """Returns the tensor's bytes, rounded up so that the next tensor is aligned."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES


@dataclass(frozen=True, slots=True)
class Collective:
    """Holds one call of a collective that has not been made yet."""

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
        arguments = self.given.items()
        return self.key, {n: _described(v) for n, v in arguments if n not in _CHOSEN_BY_RANK}


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Tensor(tuple(value.shape), value.dtype, value.device.type)
    if isinstance(value, list | tuple):
        return [_described(item) for item in value]
    # NCCL wants one operation on all ranks; one that multiplies holds its factor.
    return value if isinstance(value, bool | int | str | dist.ReduceOp) else None


def _real(value: Any, scratch: dict[str, torch.Tensor], used_bytes: dict[str, int]) -> Any:
    """Replaces descriptions of tensors by parts of `scratch`; `used_bytes` counts their bytes."""
    if isinstance(value, list):
        return [_real(item, scratch, used_bytes) for item in value]
    if not isinstance(value, _Tensor):
        return value
    kind, count = value.device_type, math.prod(value.shape)
    begin = used_bytes.get(kind, 0)
    used_bytes[kind] = end = begin + value.room_bytes
    return scratch[kind][begin:end].view(value.dtype)[:count].view(value.shape)


def join(collectives: Sequence[Joined], group: dist.ProcessGroup) -> None:
    """Takes part in collectives of a group with zeros, one after the other. Collective: yes.

    All use the same memory: a host that does not wait for NCCL may have a whole backward to join,
    and has no memory left.
    """
    most: dict[str, int] = {}
    for _, others in collectives:
        tensors = [leaf for leaf in tree_leaves(others) if isinstance(leaf, _Tensor)]
        for kind in {tensor.device_type for tensor in tensors}:
            room = sum(tensor.room_bytes for tensor in tensors if tensor.device_type == kind)
            most[kind] = max(room, most.get(kind, 0))
    scratch = {
        kind: torch.zeros(room, dtype=torch.uint8, device=kind) for kind, room in most.items()
    }
    for key, others in collectives:
        original, signature = _originals()[key]
        for room in scratch.values():
            room.zero_()  # the last collective has written here
        used_bytes: dict[str, int] = {}
        arguments = {name: _real(value, scratch, used_bytes) for name, value in others.items()}
        if "async_op" in signature.parameters:
            arguments["async_op"] = True
        under_way = original(**arguments, group=group)
        # Functional collectives return the result and no handle: wait for the result.
        if isinstance(under_way, torch.Tensor):
            functional.wait_tensor(under_way)
        elif hasattr(under_way, "wait"):
            under_way.wait()


def group_named(name: str) -> dist.ProcessGroup | None:
    """Returns the process group of a name, `None` if this rank is not in it."""
    try:
        return dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore[reportPrivateImportUsage]
    except (RuntimeError, ValueError, KeyError):
        return None


@functools.cache
def _originals() -> dict[str, tuple[Callable[..., Any], inspect.Signature]]:
    # Torch wraps its public collectives in a logger of errors; others may have wrapped them too.
    calls = {key: inspect.unwrap(getattr(*slot)) for key, slot in _functions().items()}
    return {key: (call, inspect.signature(call)) for key, call in calls.items()}


def _functions() -> dict[str, tuple[Any, str]]:
    rows = [(dist, name) for name in _PUBLIC] + [(functional, name) for name in _FUNCTIONAL]
    return {f"{o.__name__}.{n}": (o, n) for o, n in rows if hasattr(o, n)}


@contextlib.contextmanager
def around_collectives(around: Callable[[Collective], Any]) -> Generator[None]:
    """Calls `around` instead of every collective, while a block runs.

    Collective: no. `around` gets the call and makes it, in whichever thread that is. Others may
    replace the same functions inside of the block.
    """
    active = [True]
    replaced: list[tuple[Any, str, Any, Any]] = []
    for key, (owner, name) in _functions().items():
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
        # By name: torch itself gives the group by position in some calls and by name in others.
        arguments = signature.bind(*args, **kwargs).arguments
        group = _group(arguments.get("group"))
        if group is None or group.size() == 1 or any(arguments.get(name) for name in _SIZES):
            return original(*args, **kwargs)
        return around(Collective(key, original, group, arguments))

    return call


def _group(group: Any) -> dist.ProcessGroup | None:
    """Returns the process group of a collective's argument; `None` for unknown types."""
    if group is None:
        return dist.group.WORLD
    if isinstance(group, str):
        return group_named(group)
    if isinstance(group, DeviceMesh):
        return group.get_group()
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        return group[0].get_group(group[1])
    return group if isinstance(group, dist.ProcessGroup) else None
