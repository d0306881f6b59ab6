"""Finds tensors that a model holds outside of its parameters and buffers.

[Note: where is looked] In the attributes of every module and its class, in the global variables
that the code of its class names, and from there in everything an object refers to, some levels
deep. Not in other registered modules, which are looked at themselves; not in optimizers and other
objects of torch, and not in weak references.
"""

from __future__ import annotations

import gc
import types
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.torch_private.tensors import forward_pre_hooks

__all__ = ["held_by", "held_tensors"]

_DEPTH = 6
"""depth of references that are followed; an object and its `__dict__` count as two"""


_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})


_ATOMS = (str, bytes, int, float, complex, type(None), type, types.ModuleType, types.CodeType)


_EMPTIED = (dict, OrderedDict, set, list, tuple)
"""kinds of which most modules have a dozen that are empty, for hooks"""


_HOLDERS = (torch.Tensor, *_EMPTIED, frozenset, deque, types.SimpleNamespace)
"""values of classes and global variables that are looked into"""


def held_tensors(tree: ModuleTree) -> Iterator[tuple[torch.Tensor, str, str]]:
    """Walks the attributes of all modules; each object is opened once. Collective: no.

    Yields:
        A tensor, the path of a module, and the attribute of the module that leads to the tensor.
    """
    # What was opened stays alive, or another object could take its address.
    opened: dict[int, Any] = {id(module): module for _, module in tree.modules()}
    for path, module in tree.modules():
        # Attributes that are set anew when parameters change, or before each forward, are left out:
        # torch's old weight_norm, spectral_norm and pruning are hooks that name one.
        hooks = forward_pre_hooks(module)
        keys = "name", "_tensor_name"
        renewed = {str(getattr(hook, key, "")) for hook in hooks for key in keys}
        # `RNNBase.__setattr__` puts a weight that is set into this list too.
        flat = {"_flat_weights"} if isinstance(module, nn.RNNBase) else set[str]()
        kind, ignored = type(module), _REGISTERED | renewed | flat
        attributes = [(name, value) for name, value in vars(module).items() if name not in ignored]
        if id(kind) not in opened:
            opened[id(kind)] = kind
            attributes += _of_class(kind)
        for name, value in attributes:
            if type(value) not in _EMPTIED or value:
                for tensor in _tensors_in(value, opened):
                    yield tensor, path, name


def held_by(holder: Any, model: nn.Module) -> Iterator[tuple[torch.Tensor, str]]:
    """Walks the attributes of an object beside a model, not the modules of the model.

    Collective: no.

    Yields:
        A tensor, and the attribute of the object that leads to it.
    """
    opened: dict[int, Any] = {id(module): module for module in model.modules()}
    for name, value in getattr(holder, "__dict__", {}).items():
        for tensor in _tensors_in(value, opened):
            yield tensor, name


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """Yields attributes of classes, and the global variables that their methods name."""
    for owner in kind.__mro__:
        if owner.__module__.partition(".")[0] == "torch" or owner is object:
            continue
        for name, value in vars(owner).items():
            if isinstance(value, _HOLDERS):
                yield name, value
            elif isinstance(value, types.FunctionType):
                codes = [value.__code__]
                for code in codes:  # and that of functions and comprehensions inside it
                    codes += [
                        const for const in code.co_consts if isinstance(const, types.CodeType)
                    ]
                    for variable in code.co_names:
                        if isinstance(holder := value.__globals__.get(variable), _HOLDERS):
                            yield f"{variable} (a global variable)", holder


def _tensors_in(value: Any, opened: dict[int, Any]) -> Iterator[torch.Tensor]:
    """Yields every tensor that a value leads to through objects that are not opened yet."""
    todo: list[tuple[Any, int]] = [(value, 0)]
    while todo:
        item, depth = todo.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif depth <= _DEPTH and not isinstance(item, _ATOMS) and id(item) not in opened:
            opened[id(item)] = item
            todo += [(inside, depth + 1) for inside in _inside(item)]


def _inside(value: Any) -> list[Any]:
    """Returns the objects that a value refers to, without reading its properties."""
    library = type(value).__module__.partition(".")[0]
    if isinstance(value, types.FunctionType):  # not its global variables
        return [*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__]
    if isinstance(value, nn.Module):
        return [*value._parameters.values(), *value._modules.values()]
    if library == "numpy":
        return [getattr(value, "base", None)]  # an array that shares memory keeps what it is of
    if library == "torch" or isinstance(value, torch.optim.Optimizer | types.FrameType):
        return []
    return [referent for referent in gc.get_referents(value) if not isinstance(referent, _ATOMS)]
