"""Refuses to read and write a part of a sharded tensor as the full one, and says how to do it.

[Note: numbers of shards] `float(param.norm())` of a DTensor is the norm of this rank's rows alone:
torch reads one number out of the local part, although the tensor is a full one. Summing over the
ranks instead would be right only where every rank reads, and a callback that reads on rank 0 alone
would wait for the others forever. So reading raises on every rank at once, and names
`full_tensor()`, which is known to be collective. The same holds for `torch.save`, which writes the
local rows under the full shape. The truth value of a comparison (`torch.all(param == other)`) is
reduced, as newer torch does itself and older torch in `torch.equal`: whoever compares parameters
does so on every rank.

Only DTensors on the meshes of models that were prepared here are guarded, with all that is computed
from them. Replicated DTensors, and those on one rank, have the full value and are read as ever. All
ways to a number (`item`, `float`, `if`) meet in one operation of torch, which no optimizer calls on
shards: steps cost what they did. DTensor's methods are replaced when the first model is sharded.
They are torch's own again when the last one is gone, or after `uninstall()`.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composer_fsdp2.errors import ShardReadError
from composer_fsdp2.torch_private.tensors import tree_leaves

__all__ = ["guard_reading", "stop_guarding"]

_READ_NUMBER = torch.ops.aten._local_scalar_dense.default  # pyright: ignore[reportAttributeAccessIssue]
_NUMBER = (
    "One number was read out of a sharded tensor (`.item()`, `float()`, `int()`, `bool()`, `if`). "
    "This rank holds a part of it, so the number would be wrong, and another one on each rank. "
    "Compute on every rank with `composer_fsdp2.full_tensor(model, 'name.of.weight')`, with "
    "`tensor.full_tensor()` of what is no parameter, or inside `with "
    "composer_fsdp2.summon_full_params(model):`."
)
_VALUES = (
    "`{name}` was called on a sharded tensor. This rank holds a part of it, so values would be "
    "missing. Call `composer_fsdp2.full_tensor(model, 'name.of.weight').{name}()` on every rank, "
    "`tensor.full_tensor().{name}()` of what is no parameter, or read inside `with "
    "composer_fsdp2.summon_full_params(model):`; `tensor.to_local()` is this rank's part."
)
_PICKLED = (
    "A sharded tensor was to be pickled, as `torch.save` does. The file would hold this rank's "
    "part under the shape of the whole tensor. Save with the Trainer (`save_folder`), or call "
    "`composer_fsdp2.full_tensor(model, name)` on every rank and save on one, or save inside `with "
    "composer_fsdp2.summon_full_params(model):`; `tensor.to_local()` is this rank's part."
)

_WRITTEN = (
    "Elements of a sharded tensor were to be written by their index (`param[0] = value`). This "
    "rank holds a part of the rows, so the value would go to a copy, or to other rows. Write "
    "inside `with composer_fsdp2.summon_full_params(model):`, or to the whole tensor at once "
    "(`param.mul_(mask)`)."
)

_ASSIGNED = (
    "Other memory was given to a sharded tensor (`tensor.data = value`). FSDP2 gathers the memory "
    "that it has made for the shard, so the value would be lost. Change the tensor in place "
    "(`param.data.copy_(value)`, `param.mul_(0.9)`), or inside `with "
    "composer_fsdp2.summon_full_params(model):`."
)

_HOOKED = (
    "`register_hook` was called on a parameter that is sharded. Autograd computes the gradient of "
    "the gathered copy, so the hook would never run. Use `register_post_accumulate_grad_hook`, "
    "which gets the sharded gradient, or change the gradients before the step."
)


_COMBINED = (
    "A sharded tensor was computed with another that is sharded over other ranks, or not at all "
    "(torch: {said}), and torch has no rule for it. "
)
_CLIPPED = (
    "torch's clip_grad_norm_ and clip_grad_value_ compute with all gradients together. Clip with "
    "composer_fsdp2.clip_grad_norm_, or write clip_grad_value_(..., foreach=False)."
)
_OUTSIDE = (
    "A module was called, or its weight read, outside of the forward of the model, where FSDP2 "
    "gathers it: `model.model(ids)` past the model, or a loss with `lm_head.weight`. Call the "
    "model itself, compute the loss in its forward, or name the method that is called instead in "
    "forward_methods."
)
_PENALTY = (
    "A penalty over `model.parameters()` in the loss does so. A penalty is the optimizer's "
    "weight_decay, or is computed with `param.full_tensor()` of each parameter that is a DTensor. "
    "So does a module that is called past the model: call the model itself, or name the method in "
    "forward_methods. Read whole parameters with `composer_fsdp2.full_tensor(model, name)` on "
    "every rank, or inside `with composer_fsdp2.summon_full_params(model):`."
)
_OPERATOR = re.compile(r"aten\.(\w+)")
_CAUSES = {
    re.compile("_foreach|stack$"): _CLIPPED,
    re.compile("embedding|b?mm$|b?addb?mm$|mv$|linear|convolution|norm$"): _OUTSIDE,
    re.compile(""): _PENALTY,
}
"""name of an operator of torch -> the likely cause of an error in it"""
_NOT_TOGETHER = ("mixed torch.Tensor and DTensor", "cross-mesh", "different mesh", "same mesh")
"""words of torch about tensors that it cannot compute with together"""
_INHERITED = object()


class _Guard:
    """Reads a number out of a DTensor when torch asks for it, and knows the guarded meshes."""

    def __init__(self) -> None:
        # Torch calls these handlers in place of its own rules for an operation on DTensors.
        self.handlers: dict[Any, Any] = _dispatcher()._custom_op_handlers
        self.before: Callable[..., Any] | None = self.handlers.get(_READ_NUMBER)
        self.meshes: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()
        self.models: set[int] = set()
        self._replaced: list[tuple[Any, str, Any]] = []
        self.handlers[_READ_NUMBER] = self

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Gives an object another attribute until `restore`."""
        self._replaced.append((owner, name, vars(owner).get(name, _INHERITED)))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Gives every object its old attributes back, or those that it inherits."""
        while self._replaced:
            owner, name, value = self._replaced.pop()
            if value is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        if self.before is None:
            del self.handlers[_READ_NUMBER]
        else:
            self.handlers[_READ_NUMBER] = self.before

    def is_part(self, tensor: DTensor, *_: Any) -> bool:
        """Says whether the tensor has a guarded mesh, and this rank has a part of its value."""
        mesh = tensor.device_mesh
        sizes = zip(tensor.placements, mesh.shape, strict=True)
        incomplete = any(size > 1 and not placement.is_replicate() for placement, size in sizes)
        return incomplete and mesh in self.meshes

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor: DTensor = args[0]
        if not self.is_part(tensor):
            if self.before is not None:
                return self.before(op, args, kwargs)
            # As torch does: a rank outside the mesh has nothing.
            inside = tensor.device_mesh.get_coordinate() is not None
            return op(tensor._local_tensor) if inside else None
        # The truth value of `all` or `any` over shards is reduced, which is collective. Torch does
        # not keep which of both it was, but where all ranks say the same it is the answer.
        if tensor.dtype is not torch.bool or tensor.numel() != 1 or tensor.to_local().numel() != 1:
            raise ShardReadError(_NUMBER)
        said, ranks = tensor.to_local().long(), 1
        for axis, placement in enumerate(tensor.placements):
            if not placement.is_replicate():
                dist.all_reduce(said, group=tensor.device_mesh.get_group(axis))
                ranks *= tensor.device_mesh.size(axis)
        if said.item() not in (0, ranks):
            raise ShardReadError(_NUMBER)
        return bool(said.item())


_guard: _Guard | None = None


def _dispatcher() -> Any:
    return DTensor._op_dispatcher


def guard_reading(model: nn.Module) -> None:
    """Has torch refuse to read shards of a model, and results of them, as full tensors.

    Holds until the model is gone. Collective: no. See [Note: numbers of shards].

    Args:
        model: sharded; parameters that are not DTensors stay as they are.
    """
    global _guard
    if _guard is None:
        _guard = _Guard()
        _guard_methods(_guard)
        # Where torch cannot compute with tensors together, the error says what to write. A user's
        # own loop, and a backward, run outside of all hooks of the model.
        # Newer torch dispatches in C++, which calls Python to find out how a result is sharded, and
        # refuses plain tensors itself: those of a penalty meet in the backward of the loss.
        newer, dispatcher = "_propagate_op_sharding_dispatch_slow_path", _dispatcher()
        name = newer if hasattr(dispatcher, newer) else "dispatch"
        _guard.replace(dispatcher, name, _explained(getattr(dispatcher, name), _guard))
        _guard.replace(DTensor, "backward", _explained(DTensor.backward, _guard))
    # All have one of a few meshes, whose hash is of all its ranks.
    meshes = (param.device_mesh for param in model.parameters() if isinstance(param, DTensor))
    _guard.meshes.update({id(mesh): mesh for mesh in meshes}.values())
    if id(model) not in _guard.models:
        _guard.models.add(id(model))
        weakref.finalize(model, _forget, _guard, id(model)).atexit = False


def _forget(guard: _Guard, model: int) -> None:
    guard.models.discard(model)
    if not guard.models and guard is _guard:
        stop_guarding()


def stop_guarding() -> None:
    """Gives DTensor the methods back that torch gave it. Collective: no."""
    global _guard
    if _guard is not None:
        _guard.restore()
        _guard = None


def _guard_methods(guard: _Guard) -> None:
    """Replaces methods that read the local part, or that torch refuses in words of subclasses."""

    def formats(tensor: DTensor, spec: str) -> bool:
        return bool(spec) and guard.is_part(tensor)  # without one it shows the placements

    def writes(tensor: DTensor, index: Any, _value: Any) -> bool:
        return guard.is_part(tensor) and not _takes_full_dims(tensor, index)

    def hooks(tensor: DTensor, _hook: Any) -> bool:
        return isinstance(tensor, nn.Parameter) and tensor.device_mesh in guard.meshes

    def assigns(tensor: DTensor, _value: Any) -> bool:
        return tensor.device_mesh in guard.meshes

    # Torch 2.15 ends the process over `__dlpack__`: a DTensor has no memory of its own to hand out.
    refused: dict[str, tuple[str, Callable[..., bool]]] = {
        "numpy": (_VALUES.format(name="numpy"), guard.is_part),
        "tolist": (_VALUES.format(name="tolist"), guard.is_part),
        "__dlpack__": (
            _VALUES.format(name="__dlpack__").replace(".__dlpack__()", ""),
            guard.is_part,
        ),
        "__reduce_ex__": (_PICKLED, guard.is_part),
        "__format__": (_NUMBER, formats),
        "__setitem__": (_WRITTEN, writes),
        "register_hook": (_HOOKED, hooks),
    }
    for name, (message, refuses) in refused.items():
        guard.replace(DTensor, name, _guarded(getattr(DTensor, name), message, refuses))
    data: Any = torch.Tensor.data
    setter = _guarded(data.__set__, _ASSIGNED, assigns)
    guard.replace(DTensor, "data", property(data.__get__, setter))


def _explained(original: Callable[..., Any], guard: _Guard) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except ShardReadError:
            raise
        except Exception as error:
            said = " ".join(str(error).split())
            tensors = (leaf for leaf in tree_leaves(args) if isinstance(leaf, DTensor))
            ours = guard.meshes.intersection(tensor.device_mesh for tensor in tensors)
            if any(words in said for words in _NOT_TOGETHER) and ours:
                operator = _OPERATOR.search(said)
                name = operator[1] if operator else ""
                cause = next(text for names, text in _CAUSES.items() if names.search(name))
                raise ShardReadError(_COMBINED.format(said=said[:100]) + cause) from error
            raise

    return method


def _takes_full_dims(tensor: DTensor, index: Any) -> bool:
    """Says whether an index takes all of each dimension that is divided between ranks.

    Torch gathers a divided dimension that is indexed: the result is a copy.
    """
    indices = list(index) if isinstance(index, tuple) else [index]
    if not all(
        index_of_dim is None or index_of_dim is ... or type(index_of_dim) in (int, slice)
        for index_of_dim in indices
    ):
        return False
    taken_indices = [index_of_dim for index_of_dim in indices if index_of_dim is not None]
    if ... in taken_indices:
        at = taken_indices.index(...)
        taken_indices[at : at + 1] = [slice(None)] * (tensor.ndim - len(taken_indices) + 1)
    dims = {getattr(p, "dim", None) for p in tensor.placements if not p.is_replicate()}
    full_dims = {
        at
        for at in range(tensor.ndim)
        if at >= len(taken_indices) or taken_indices[at] == slice(None)
    }
    return dims <= full_dims


def _guarded(
    original: Callable[..., Any], message: str, refuses: Callable[..., bool]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        if refuses(self, *args):
            raise ShardReadError(message)
        return original(self, *args, **kwargs)

    return method
