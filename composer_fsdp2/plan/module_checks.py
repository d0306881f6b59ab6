"""Modules that cannot be trained in shards: what would be silently wrong, or torch's own error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from composer_fsdp2.errors import PlanError
from composer_fsdp2.plan.held_tensors import HeldTensor, held_tensors
from composer_fsdp2.plan.module_tree import ModuleTree, ParamRef, memory_of
from composer_fsdp2.text import child_name, listed

__all__ = ["check_modules", "refuse_gradients", "refuse_unreadable"]

_SHOWN = 5
"""at most so many of one kind are named"""


def refuse_unreadable(tree: ModuleTree) -> None:
    """Refuses a model that nothing can be decided about. Collective: no.

    Raises:
        PlanError: for modules that contain themselves, and for parameters without a shape.
    """
    if tree.circles:
        inner, outer = tree.circles[0]
        around = f"'{outer}'" if outer else "the whole model"
        raise PlanError(
            f"'{inner}' is {around} again: the module contains itself. torch's own train(), to() "
            "and state_dict() would never end. Hold it outside registration: "
            f"`self.__dict__['{inner.rpartition('.')[2]}'] = module`."
        )
    lazy = [ref.name for ref in tree.params if is_lazy(ref.param)]
    if lazy:
        raise PlanError(
            f"{listed(lazy)} has no shape yet: a lazy module gets it in its first call. There is "
            "nothing to shard until then. Call the model once with a batch before it is prepared, "
            "or give the sizes (`nn.Linear` instead of `nn.LazyLinear`)."
        )


def refuse_gradients(tree: ModuleTree) -> None:
    """Refuses a model with gradients from a backward before it is prepared. Collective: no.

    Raises:
        PlanError: for gradients that are not zero; shards begin without any.
    """
    grads = ((ref.name, ref.param.grad) for ref in tree.params)
    found = [name for name, grad in grads if grad is not None and not grad.is_meta and grad.any()]
    if found:
        raise PlanError(
            f"{listed(found)} has a gradient already. It is of the whole parameter, and the first "
            "step would go without it, because shards begin with no gradient. Prepare the model "
            "before the first backward, or clear the gradients: `model.zero_grad()`."
        )


def check_modules(tree: ModuleTree, refs: Sequence[ParamRef], problems: list[str]) -> None:
    """Finds modules that would train wrongly. Collective: no; linear in the number of modules.

    Args:
        tree: the model.
        refs: the parameters that are to be sharded.
        problems: is added to.
    """
    sharded = {id(ref.param): ref for ref in refs}
    for path, module in tree.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and id(module.weight) in sharded:
            problems += _embedding(path, module)
        if isinstance(module, torch.jit.ScriptModule):
            problems += _scripted(path, module)
    memory = _by_memory(refs)
    problems += _aliasing_buffers(tree, memory)
    problems += _held_elsewhere(tree, sharded, memory)


def _embedding(path: str, module: nn.Embedding | nn.EmbeddingBag) -> Iterator[str]:
    kind = type(module).__name__
    if module.max_norm is not None:
        yield (
            f"'{path}' ({kind}) has max_norm={module.max_norm}: its forward rescales rows of the "
            "weight in place. FSDP2 computes with a gathered copy that is dropped afterwards, and "
            "the change with it. Take max_norm out, and rescale the rows that were looked up in "
            "forward, or the weight in a callback after the step."
        )
    if module.sparse and module.weight.requires_grad:
        yield (
            f"'{path}' ({kind}) has sparse=True. FSDP2 reduces dense gradients, and torch would "
            "stop in the first backward. Write sparse=False; an optimizer for sparse gradients "
            "(SparseAdam) is then replaced by one for dense ones."
        )


def _scripted(path: str, module: torch.jit.ScriptModule) -> Iterator[str]:
    """Its parameters live in C++, where FSDP2 cannot exchange them."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    if names:
        yield (
            f"'{path}' was made by torch.jit (script or trace) and holds {listed(names)}. Its "
            "parameters cannot be exchanged by shards. Take the module itself instead of its "
            "scripted form, and set `compile: true` if it has to be fast."
        )


Memory = Mapping[int, Sequence[ParamRef]]
"""Number of a storage -> the parameters in it."""


def _by_memory(refs: Iterable[ParamRef]) -> Memory:
    found: dict[int, list[ParamRef]] = defaultdict(list)
    for ref in refs:
        if (memory := memory_of(ref.param)) is not None:
            found[memory.storage].append(ref)
    return found


def _sharing(tensor: torch.Tensor, memory: Memory) -> ParamRef | None:
    """The parameter that a tensor shares elements with."""
    own = memory_of(tensor)
    for ref in memory.get(own.storage, ()) if own is not None else ():
        other = memory_of(ref.param)
        if own is not None and other is not None and own.overlaps(other):
            return ref
    return None


def _aliasing_buffers(tree: ModuleTree, memory: Memory) -> Iterator[str]:
    for path, module in tree.modules():
        for name, buffer in module._buffers.items():
            ref = None if buffer is None else _sharing(buffer, memory)
            if ref is not None:
                yield (
                    f"The buffer '{child_name(path, name)}' shares memory with the parameter "
                    f"'{ref.name}'. Sharding gives the parameter memory of its own, and the buffer "
                    "would keep the first values. Read the parameter in forward, or register a "
                    "copy (`.clone()`) if the values are to stay."
                )


def _held_elsewhere(
    tree: ModuleTree, sharded: Mapping[int, ParamRef], memory: Memory
) -> Iterator[str]:
    """Parameters that something else than the registration leads to."""
    told: set[int] = set()
    for held in held_tensors(tree):
        ref = sharded.get(id(held.tensor))
        if ref is None and not isinstance(held.tensor, DTensor):
            ref = _sharing(held.tensor, memory)
        if ref is None or id(ref.param) in told:
            continue
        told.add(id(ref.param))
        if len(told) <= _SHOWN:
            yield _held(ref, held)


def _held(ref: ParamRef, held: HeldTensor) -> str:
    owner = f"of '{held.module}'" if held.module else "of the model"
    if held.tensor is ref.param:
        what = (
            f"'{ref.name}' is also held by '{held.attribute}' {owner}, where it is not registered"
        )
    else:
        what = f"'{held.attribute}' {owner} shares memory with the parameter '{ref.name}'"
    return (
        f"{what}. FSDP2 puts shards and gathered weights in the registered place only, and what is "
        "held there would keep the first values. Hold the module and read its parameter in "
        "forward, or register it there too (`nn.ParameterList`, `nn.ParameterDict`)."
    )
