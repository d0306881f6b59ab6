"""Finds tensors that modules hold in other places than those torch registers.

[Note: where is looked] In the attributes of every module and its class, in the global variables
that the code of its class names, and from there in everything an object refers to, some levels
deep. Not in other registered modules, which are looked at themselves; not in optimizers and other
objects of torch, and not in weak references.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import types
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.shard.torch_private.tensors import forward_pre_hooks

__all__ = ["HeldTensor", "held_tensors"]

_DEPTH = 8
"""references that are followed one after the other; an object and its `__dict__` are two"""

_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})
_ATOMS = (str, bytes, int, float, complex, type(None), type, types.ModuleType, types.CodeType)
_EMPTIED = (dict, OrderedDict, set, list, tuple)
"""kinds of which most modules have a dozen that are empty, for hooks"""
_HOLDERS = (torch.Tensor, *_EMPTIED, frozenset, deque, types.SimpleNamespace)
"""values of classes and global variables that are looked into"""


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor, and the attribute of a module that leads to it."""

    tensor: torch.Tensor
    module: str
    attribute: str


def held_tensors(tree: ModuleTree) -> Iterator[HeldTensor]:
    """Walks the attributes of all modules; each object is opened once. Collective: no."""
    # What was opened stays alive, or another object could take its address.
    opened: dict[int, Any] = {id(module): module for _, module in tree.modules()}
    for path, module in tree.modules():
        kind, ignored = type(module), _REGISTERED | _recomputed(module)
        found = [(name, value) for name, value in vars(module).items() if name not in ignored]
        if id(kind) not in opened:
            opened[id(kind)] = kind
            found += _of_class(kind)
        for name, value in found:
            if type(value) not in _EMPTIED or value:
                for tensor in _tensors_in(value, opened):
                    yield HeldTensor(tensor, path, name)


def _recomputed(module: nn.Module) -> set[Any]:
    """Returns attributes that are set anew when parameters change, or before each forward."""
    # `RNNBase.__setattr__` puts a weight that is set into this list too.
    if isinstance(module, nn.RNNBase):
        return {"_flat_weights"}
    # torch's old weight_norm, spectral_norm and pruning are such hooks.
    hooks = forward_pre_hooks(module)
    return {getattr(hook, key, None) for hook in hooks for key in ("name", "_tensor_name")}


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """Yields attributes of classes, and the global variables that their methods name."""
    for owner in kind.__mro__:
        if owner.__module__.partition(".")[0] == "torch" or owner is object:
            continue
        for name, value in vars(owner).items():
            if isinstance(value, _HOLDERS):
                yield name, value
            elif isinstance(value, types.FunctionType):
                with contextlib.suppress(ValueError):  # a closure that is not filled yet
                    for known, held in inspect.getclosurevars(value).globals.items():
                        if isinstance(held, _HOLDERS):
                            yield f"{known} (a global variable)", held


def _tensors_in(value: Any, opened: dict[int, Any]) -> Iterator[torch.Tensor]:
    """Yields every tensor that a value leads to through objects that are not opened yet."""
    todo: list[tuple[Any, int]] = [(value, 0)]
    while todo:
        found, depth = todo.pop()
        if isinstance(found, torch.Tensor):
            yield found
        elif depth <= _DEPTH and not isinstance(found, _ATOMS) and id(found) not in opened:
            opened[id(found)] = found
            todo += [(inside, depth + 1) for inside in _inside(found)]


def _inside(value: Any) -> list[Any]:
    """Returns what a value refers to, without asking its properties."""
    library = type(value).__module__.partition(".")[0]
    if isinstance(value, types.FunctionType):  # not its global variables
        return [*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__]
    if isinstance(value, nn.Module):
        return [*value._parameters.values(), *value._modules.values()]
    if library == "numpy":
        return [getattr(value, "base", None)]  # an array that shares memory keeps what it is of
    if library == "torch" or isinstance(value, torch.optim.Optimizer | types.FrameType):
        return []
    return [held for held in gc.get_referents(value) if not isinstance(held, _ATOMS)]
