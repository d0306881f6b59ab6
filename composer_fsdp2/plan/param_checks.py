"""Parameters that FSDP2 refuses, some of them only in the first forward.

[Note: left whole] A frozen parameter that cannot be sharded (a scalar, one without elements, of
integers) needs none of what sharding does for it: it has no gradient and never changes. It is left
alone, whole on every rank. A trained one is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2.plan.module_tree import (
    ParamRef,
)
from composer_fsdp2.plan.unit_size import (
    FROZEN_MAY_DIFFER,
)
from composer_fsdp2.plan.wrap_plan import ShardUnit

__all__ = ["check_params", "check_ties", "left_whole"]

_GATHERED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""dtypes that every backend sends and autograd takes for weights"""

_LARGE_BYTES = 2**24
"""so much whole on every rank is worth a warning"""


def left_whole(refs: Collection[ParamRef], weight_of: Mapping[int, int]) -> set[int]:
    """Finds frozen weights that FSDP2 cannot shard and need not; see [Note: left whole].

    Args:
        refs: every name of every parameter.
        weight_of: id(parameter) -> that of the first one over the same memory.
    """
    trained = {weight_of[id(ref.param)] for ref in refs if ref.param.requires_grad}
    found: dict[int, ParamRef] = {}
    for ref in refs:
        if weight_of[id(ref.param)] not in trained and _cannot_be_sharded(ref.param):
            found.setdefault(weight_of[id(ref.param)], ref)
    size = sum(ref.param.nbytes for ref in found.values())
    if size >= _LARGE_BYTES:
        names = ", ".join(f"'{ref.name}'" for ref in list(found.values())[:3])
        warnings.warn(
            f"{len(found)} frozen parameters ({names}, ...) are of a dtype that FSDP2 does not "
            f"shard, so every rank keeps all {size:,} bytes of them. Keep them in bf16 or fp32 to "
            "have them sharded.",
            stacklevel=3,
        )
    return set(found)


def _cannot_be_sharded(param: nn.Parameter) -> bool:
    if isinstance(param, DTensor) or _is_foreign(param) or param.is_quantized:
        return False
    return param.ndim == 0 or not param.numel() or param.dtype not in _GATHERED


def check_params(units: Iterable[ShardUnit], refs: Iterable[ParamRef], problems: list[str]) -> None:
    """Finds what FSDP2 would refuse, some of it only at the first forward."""
    params = {ref.name: ref.param for ref in refs}
    for unit in units:
        dtypes: dict[str, str] = {}
        for name in unit.params:
            param = params[name]
            if (problem := _problem_of(name, param)) is not None:
                problems.append(problem)
            elif param.requires_grad or not FROZEN_MAY_DIFFER:
                dtypes.setdefault(str(param.dtype).removeprefix("torch."), name)
        if len(dtypes) > 1:
            problems.append(_mixed_dtypes(unit, dtypes))


def check_ties(ties: Iterable[Sequence[ParamRef]], problems: list[str]) -> None:
    """Finds memory that is trained under one name and frozen under another."""
    for group in ties:
        trained = [ref.name for ref in group if ref.param.requires_grad]
        frozen = [ref.name for ref in group if not ref.param.requires_grad]
        if trained and frozen:
            problems.append(
                f"'{trained[0]}' is trained and '{frozen[0]}' is frozen, and both are the same "
                "memory. Sharding makes one parameter of them, and the use of the frozen one "
                "would then get a gradient. Hold one parameter, and use its `.detach()` where no "
                "gradient is wanted."
            )


def _problem_of(name: str, param: nn.Parameter) -> str | None:
    if param.is_quantized:
        return _quantised(name, param)
    if _is_foreign(param):
        return _foreign(name, param)
    if param.ndim == 0:
        return _scalar(name)
    if not param.numel():
        return _empty(name, param)
    if param.is_complex():
        return _complex(name, param)
    if param.dtype not in _GATHERED:
        return _other_dtype(name, param)
    return None if param.is_contiguous() else _non_contiguous(name, param)


def _is_foreign(param: nn.Parameter) -> bool:
    """Whether it is of a class that sharding would drop; some say themselves how to gather them."""
    kind = type(param)
    of_torch = kind.__module__.partition(".")[0] == "torch"
    return not of_torch and not hasattr(kind, "fsdp_pre_all_gather")


def _foreign(name: str, param: nn.Parameter) -> str:
    return (
        f"'{name}' is of the class {type(param).__name__}, which FSDP2 would exchange for a plain "
        "parameter: what the class does would be lost. Use `nn.Parameter`; attributes you set on "
        "it are kept. A frozen one can be left whole on every rank with ignored_params, and a "
        "class with `fsdp_pre_all_gather` and `fsdp_post_all_gather` is gathered as it says."
    )


def _quantised(name: str, param: nn.Parameter) -> str:
    return (
        f"'{name}' is quantised ({str(param.dtype).removeprefix('torch.')}), and neither shards "
        "nor gradients of such tensors exist. Register the integers (`.int_repr()`) as a buffer "
        "and compute `scale * integers` in forward, or train `.dequantize()`."
    )


def _scalar(name: str) -> str:
    return (
        f"'{name}' is a scalar parameter. FSDP2 shards the first dimension, and a scalar has none. "
        "Give it shape (1,), or freeze it: it then stays whole on every rank."
    )


def _empty(name: str, param: nn.Parameter) -> str:
    return (
        f"'{name}' has no elements (shape {tuple(param.shape)}). FSDP2 has no rows to cut, and "
        "torch would stop with an error of its own. Leave the layer out where its size is 0 "
        "(`nn.Identity()`), or freeze the parameter: there is nothing to train in it."
    )


def _complex(name: str, param: nn.Parameter) -> str:
    return (
        f"'{name}' is complex ({str(param.dtype).removeprefix('torch.')}). The gathered copy would "
        "be cast to real numbers, or not be sent at all. Store a real parameter whose last "
        "dimension is 2, and call `torch.view_as_complex` in forward."
    )


def _other_dtype(name: str, param: nn.Parameter) -> str:
    return (
        f"'{name}' has the dtype {str(param.dtype).removeprefix('torch.')}, which cannot be "
        "reduced between ranks. Train it in fp32 or bf16 (see `mixed_precision` and `fp8`), or "
        "freeze it: it then stays whole on every rank."
    )


def _non_contiguous(name: str, param: nn.Parameter) -> str:
    return (
        f"'{name}' is not contiguous (shape {tuple(param.shape)}, stride {param.stride()}). FSDP2 "
        "cuts the memory into rows, so it needs rows that follow each other. "
        "Store it as `nn.Parameter(weight.contiguous())`."
    )


def _mixed_dtypes(unit: ShardUnit, dtypes: Mapping[str, str]) -> str:
    found = " and ".join(f"{dtype} ('{name}')" for dtype, name in dtypes.items())
    where = f"The unit '{unit.modules[0]}'" if unit.modules[0] else "The root unit"
    return (
        f"{where} holds parameters of different dtypes: {found}. One "
        "collective gathers one dtype, and torch would stop at the first forward. Modules of one "
        "dtype are made units of their own, but these share a module: cast them to one dtype, or "
        "list frozen ones in ignored_params."
    )
