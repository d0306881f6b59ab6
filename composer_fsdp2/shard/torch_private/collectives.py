"""Going around every collective that Python starts, and describing it so that it can be joined."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Collective", "Joined", "around_collectives", "group_named", "join"]

_OBJECTS = ("all_gather_object", "broadcast_object_list")
# The newer names are torch's since it renamed them.
_PUBLIC = (
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "barrier"),
    "all_to_all_single",
    *("broadcast", "reduce", "reduce_scatter_single", "reduce_scatter_tensor", *_OBJECTS),
)
_FUNCTIONAL = (
    *("all_gather_single", "all_gather_tensor", "all_reduce", "broadcast"),
    *("reduce_scatter_single", "reduce_scatter_tensor"),
)
"""DTensor's; they return what they would have written"""

_SIZES = ("output_split_sizes", "input_split_sizes")
"""where they are given, ranks send each other different amounts: nobody could join without them"""

Joined = tuple[str, tuple[Any, ...], dict[str, Any]]
"""a collective in plain values, which another rank can `join`"""


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


@dataclass(frozen=True, slots=True)
class _Group:
    """Stands for the group, of which every member has its own object."""


@dataclass(frozen=True, slots=True)
class _Sum:
    """Stands for any reduction: what is joined is thrown away."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One call, that has not been made yet."""

    key: str
    original: Callable[..., Any]
    group: dist.ProcessGroup
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        """Makes the call. Collective: yes."""
        return self.original(*self.args, **self.kwargs)

    @property
    def name(self) -> str:
        """The group's, which is the same on all its ranks."""
        return self.group.group_name

    @property
    def returns_early(self) -> bool:
        """Whether its result is not there yet when it returns."""
        return self.kwargs.get("async_op", False) is True

    def described(self) -> Joined:
        """Returns what `join` needs. Holds no tensor."""
        place = _places_of_groups()[self.key]
        args = [_described(value) for value in self.args]
        if len(args) > place:
            args[place] = _Group()
        kwargs = {name: _described(value) for name, value in self.kwargs.items()}
        if len(args) <= place:
            kwargs["group"] = _Group()
        kwargs.pop("async_op", None)
        return self.key, tuple(args), kwargs


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Tensor(tuple(value.shape), value.dtype, value.device.type)
    if isinstance(value, list | tuple):
        return [_described(one) for one in value]
    if isinstance(value, dist.ReduceOp) or type(value).__name__ == "RedOpType":
        return _Sum()
    return value if isinstance(value, bool | int | str) else None


def _real(value: Any, group: dist.ProcessGroup) -> Any:
    if isinstance(value, _Tensor):
        return torch.zeros(value.shape, dtype=value.dtype, device=value.device_type)
    if isinstance(value, list):
        return [_real(one, group) for one in value]
    if isinstance(value, _Sum):
        return dist.ReduceOp.SUM
    return group if isinstance(value, _Group) else value


def join(collective: Joined, group: dist.ProcessGroup) -> Callable[[], object]:
    """Takes part in a collective with zeros; returns what waits for it. Collective: yes."""
    key, args, kwargs = collective
    original = _originals()[key]
    if "async_op" in inspect.signature(original).parameters:
        kwargs = {**kwargs, "async_op": True}
    made = {name: _real(value, group) for name, value in kwargs.items()}
    under_way = original(*(_real(value, group) for value in args), **made)
    # Functional collectives return the result and no handle; it is waited for by itself.
    if isinstance(under_way, torch.Tensor):
        return functools.partial(functional.wait_tensor, under_way)
    return getattr(under_way, "wait", int)


def group_named(name: str) -> dist.ProcessGroup | None:
    """Returns this rank's group of that name, `None` if this rank is not in it."""
    try:
        return dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore[reportPrivateImportUsage]
    except (RuntimeError, ValueError, KeyError):
        return None


@functools.cache
def _owners() -> dict[str, tuple[Any, str]]:
    rows = [(dist, name) for name in _PUBLIC] + [(functional, name) for name in _FUNCTIONAL]
    return {f"{o.__name__}.{n}": (o, n) for o, n in rows if hasattr(o, n)}


@functools.cache
def _originals() -> dict[str, Callable[..., Any]]:
    # Torch wraps its public collectives in a logger of errors; others may have wrapped them too.
    return {key: inspect.unwrap(getattr(*place)) for key, place in _owners().items()}


@functools.cache
def _places_of_groups() -> dict[str, int]:
    signatures = {key: inspect.signature(call) for key, call in _originals().items()}
    return {key: list(found.parameters).index("group") for key, found in signatures.items()}


@contextlib.contextmanager
def around_collectives(around: Callable[[Collective], Any]) -> Generator[None]:
    """Has `around` called in place of every collective, for the duration of a block.

    Collective: no. `around` gets the call and makes it, in whichever thread that is. Others may
    replace the same functions inside of the block.
    """
    active = [True]
    replaced: list[tuple[Any, str, Any, Any]] = []
    for key, (owner, name) in _owners().items():
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
    place = _places_of_groups()[key]

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not active:
            return original(*args, **kwargs)
        given = args[place] if len(args) > place else kwargs.get("group")
        group = _group(given)
        if group is None or group.size() == 1 or _is_uneven(key, args, kwargs):
            return original(*args, **kwargs)
        return around(Collective(key, original, group, args, kwargs))

    return call


def _is_uneven(key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if not key.endswith("all_to_all_single"):
        return False
    return any(args[2:4]) or any(kwargs.get(name) for name in _SIZES)


def _group(given: Any) -> dist.ProcessGroup | None:
    """The group that a collective was given in one of torch's ways, `None` for other ways."""
    if given is None:
        return dist.group.WORLD
    if isinstance(given, str):
        return group_named(given)
    if isinstance(given, DeviceMesh):
        return given.get_group()
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], DeviceMesh):
        return given[0].get_group(given[1])
    return given if isinstance(given, dist.ProcessGroup) else None
