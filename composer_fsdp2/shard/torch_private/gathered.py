"""Gathered parameters: when they come and go, and who else holds their memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2.shard.torch_private.tensors import local_tensor, storage_id

__all__ = [
    "free",
    "gathered_memory",
    "gathered_param",
    "in_function_transform",
    "is_exported",
    "is_gathered",
    "is_idle",
    "memory_id",
    "places_of",
    "stands_in",
]


def free(group: Any) -> None:
    """Frees the whole parameters; the shards are in place again."""
    group.reshard()


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


def in_function_transform() -> bool:
    """Whether a transformation of `torch.func` runs, such as `vmap`, `grad` or `jvp`."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportUnnecessaryComparison]
