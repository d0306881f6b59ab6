"""Gathered parameters: when they come and go, and who else holds their memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2.shard.torch_private.tensors import local_tensor, storage_id
from composer_fsdp2.shard.torch_private.units import carry_requires_grad

__all__ = [
    "free",
    "gathered_memory",
    "gathered_param",
    "in_function_transform",
    "is_exported",
    "is_gathered",
    "is_idle",
    "memory_id",
    "number_of_holders",
    "places_of",
    "stands_in",
    "wrap_pre_backward",
    "wrap_transitions",
]

_FREES = ("_to_sharded", "_to_sharded_post_forward")


def wrap_transitions(
    group: Any, before: Callable[[], object], after: Callable[[], object], frees: Callable[[], bool]
) -> None:
    """Has functions called where the group's parameters change from shards to whole, and back.

    Args:
        group: of a unit.
        before: called before the whole parameters take the places of the shards.
        after: called when they have.
        frees: called before the memory is freed, and says whether it may be.
    """
    group.wait_for_unshard = partial(_wait, group.wait_for_unshard)
    group._to_unsharded = partial(_gather, group, group._to_unsharded, before, after)
    for name in _FREES:
        setattr(group, name, partial(_free, group, getattr(group, name), frees))


def _wait(wait: Callable[[], None]) -> None:
    """Makes the whole parameters outside of inference mode: training computes with them as well."""
    if not torch.is_inference_mode_enabled():
        wait()
        return
    with torch.inference_mode(False), torch.no_grad():
        wait()


def _gather(
    group: Any,
    gather: Callable[[], None],
    before: Callable[[], object],
    after: Callable[[], object],
) -> None:
    before()
    gather()
    after()


def _free(group: Any, free: Callable[[], None], frees: Callable[[], bool]) -> None:
    # Hooks of `state_dict` and `load_state_dict` call it too, whether the group is gathered or not.
    if not group.is_unsharded or frees():
        carry_requires_grad(group)
        free()


def free(group: Any) -> None:
    """Frees the whole parameters; the shards are in place again."""
    group.reshard()


def wrap_pre_backward(group: Any, before: Callable[[], object]) -> None:
    """Has `before` called whenever backward comes to the group."""
    group.pre_backward = partial(_call_both, before, group.pre_backward)


def _call_both(before: Callable[[], object], after: Callable[..., Any], *args: Any) -> Any:
    before()
    return after(*args)


def is_gathered(group: Any) -> bool:
    """Whether the whole parameters are in place."""
    return group.is_unsharded


def is_idle(group: Any) -> bool:
    """Whether neither forward nor backward is at the group."""
    return group._training_state.name == "IDLE"


def gathered_param(param: Any) -> nn.Parameter:
    """Returns the whole parameter with which modules compute."""
    return param._unsharded_param


def places_of(param: Any) -> list[tuple[nn.Module, str]]:
    """Returns modules and names under which the parameter stands in them."""
    info = param._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [(info.module, info.param_name), *shared]


def stands_in(param: Any, found: object) -> bool:
    """Whether it is the parameter, as FSDP2 itself puts it into modules."""
    record = vars(param)
    names = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
    return any(found is record.get(name) for name in names)


def gathered_memory(param: Any) -> torch.Tensor | None:
    """Returns the whole parameter as a plain tensor; `None` for one of a class of its own."""
    whole = param._unsharded_param
    # A DTensor cannot be detached in inference mode.
    whole = (local_tensor(whole) if isinstance(whole, DTensor) else whole).detach()
    return whole if type(whole) is torch.Tensor else None


def memory_id(param: Any) -> int:
    """Returns a number that tensors over the whole parameter's memory share."""
    whole = gathered_memory(param)
    return -1 if whole is None else storage_id(whole)


def is_exported(param: Any) -> bool:
    """Whether memory of the whole parameter was given to numpy: torch cannot free it any more."""
    return any(not part.untyped_storage().resizable() for part in param.all_gather_outputs)


def number_of_holders(param: Any) -> tuple[int, int]:
    """Returns how many Python objects hold the whole parameter, and how many tensors its memory."""
    # Torch makes this object once, and later gathers fill its memory again, so counts compare.
    refs = sys.getrefcount(param._unsharded_param)
    if not param.all_gather_outputs:
        return refs, 0
    return refs, torch._C._storage_Use_Count(storage_id(param.all_gather_outputs[0]))


def in_function_transform() -> bool:
    """Whether a transformation of `torch.func` runs, such as `vmap`, `grad` or `jvp`."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportUnnecessaryComparison]
