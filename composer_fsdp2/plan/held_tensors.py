"""Tensors that modules hold in other places than those torch registers.

[Note: where is looked] In the attributes of every module and its class, in the global variables
that the code of its class names, and from there through containers, functions (closures, defaults,
partial), arrays of numpy, and objects with attributes, some levels deep. Not in other registered
modules, which are looked at themselves; not in optimizers and other objects of torch.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.shard.torch_private.tensors import forward_pre_hooks

__all__ = ["HeldTensor", "held_tensors"]

_DEPTH = 5
"""containers and objects that are opened one inside the other"""

_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})
_EMPTIED = frozenset({dict, OrderedDict, set, list, tuple, bool, type(None)})
"""kinds of which most modules have a dozen that are empty, for hooks"""
_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, torch.dtype)
_CONTAINERS = (list, tuple, set, frozenset, deque)


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor, and the attribute of a module that leads to it."""

    tensor: torch.Tensor
    module: str
    attribute: str


def held_tensors(tree: ModuleTree) -> Iterator[HeldTensor]:
    """Walks the attributes of all modules; each object is opened once. Collective: no."""
    walk = _Walk({id(module) for _, module in tree.modules()})
    for path, module in tree.modules():
        computed = _computed(module)
        for name, value in vars(module).items():
            if type(value) in _EMPTIED and not value:
                continue
            if name in _REGISTERED or isinstance(value, _ATOMS) or name in computed:
                continue
            for tensor in walk.tensors_in(value):
                yield HeldTensor(tensor, path, name)
        yield from _of_class(walk, path, type(module))


def _of_class(walk: _Walk, path: str, kind: type) -> Iterator[HeldTensor]:
    """Tensors in attributes of classes and in globals that their code names, each class once."""
    if not walk.is_new(kind):
        return
    for owner in kind.__mro__:
        if owner.__module__.partition(".")[0] == "torch" or owner is object:
            continue
        for name, value in vars(owner).items():
            if isinstance(value, (torch.Tensor, dict, *_CONTAINERS)):
                for tensor in walk.tensors_in(value):
                    yield HeldTensor(tensor, path, name)
            elif isinstance(value, types.FunctionType):
                for known, inside in _named_globals(value):
                    for tensor in walk.tensors_in(inside):
                        yield HeldTensor(tensor, path, f"{known} (a global variable)")


def _named_globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Global variables that a function names and that may hold tensors, with their names."""
    for name in _names_in(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, (torch.Tensor, dict, types.SimpleNamespace, *_CONTAINERS)):
            yield name, value


def _names_in(code: types.CodeType) -> set[str]:
    """Names that code looks up, with those of functions and comprehensions inside it."""
    inner = [_names_in(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*inner)


def _computed(module: nn.Module) -> set[str]:
    """Attributes that a module sets anew whenever its parameters change, or before each forward."""
    # `RNNBase.__setattr__` puts a weight that is set into this list too.
    if isinstance(module, nn.RNNBase):
        return {"_flat_weights"}
    # torch's old weight_norm, spectral_norm and pruning are such hooks.
    hooks = forward_pre_hooks(module)
    names = (getattr(hook, key, None) for hook in hooks for key in ("name", "_tensor_name"))
    return {name for name in names if isinstance(name, str)}


@dataclass(slots=True, eq=False)
class _Walk:
    """The objects opened so far. They stay alive, or another object could take an address."""

    registered: set[int]
    """id of the modules that are looked at themselves"""
    _opened: dict[int, Any] = field(default_factory=dict[int, Any])

    def tensors_in(self, value: Any) -> Iterator[torch.Tensor]:
        """Every tensor that a value leads to."""
        todo: list[tuple[Any, int]] = [(value, 0)]
        while todo:
            found, depth = todo.pop()
            if isinstance(found, torch.Tensor):
                yield found
            elif depth <= _DEPTH and not isinstance(found, _ATOMS) and self.is_new(found):
                todo += [(inside, depth + 1) for inside in _inside(found)]

    def is_new(self, value: Any) -> bool:
        """Whether a value is neither looked at elsewhere nor opened yet; it counts as such now."""
        if id(value) in self.registered or id(value) in self._opened:
            return False
        self._opened[id(value)] = value
        return True


def _inside(value: Any) -> Iterable[Any]:
    """Returns the values inside a value, one level deep."""
    if isinstance(value, Mapping):
        return [*_plain(value.keys()), *_plain(value.values())]
    if isinstance(value, _CONTAINERS):
        return _plain(value)
    if isinstance(value, types.FunctionType):
        return _of_function(value)
    if type(value).__module__ == "numpy":
        return [getattr(value, "base", None)]  # an array that shares memory keeps what it is of
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, nn.Module):
        return [*value._parameters.values(), *value._modules.values()]
    if type(value).__module__.partition(".")[0] == "torch" or isinstance(
        value, torch.optim.Optimizer
    ):
        return ()
    return _attributes(value)


def _plain(values: Iterable[Any]) -> list[Any]:
    """Without what cannot hold a tensor: a vocabulary has many thousands of it."""
    try:
        return [value for value in values if not isinstance(value, _ATOMS)]
    except RuntimeError:  # changed meanwhile by another thread
        return []


def _of_function(function: types.FunctionType) -> list[Any]:
    found = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return found + [_content(cell) for cell in function.__closure__ or ()]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _attributes(value: Any) -> list[Any]:
    """Attributes of an object, without asking its properties."""
    try:
        found = _plain(object.__getattribute__(value, "__dict__").values())
    except AttributeError:
        found = []
    for owner in type(value).__mro__:
        slots = owner.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = owner.__dict__.get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    found.append(member.__get__(value, type(value)))
                except AttributeError:  # not set
                    continue
    return found
