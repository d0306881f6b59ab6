"""Parameters that FSDP2 refuses, some of them only in the first forward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from composer_fsdp2.plan.module_tree import (
    ParamRef,
)
from composer_fsdp2.plan.unit_size import (
    FROZEN_MAY_DIFFER,
)
from composer_fsdp2.plan.wrap_plan import ShardUnit

__all__ = ["check_params"]


def check_params(units: Iterable[ShardUnit], refs: Iterable[ParamRef], problems: list[str]) -> None:
    """Finds what FSDP2 would refuse, some of it only at the first forward."""
    params = {ref.name: ref.param for ref in refs}
    for unit in units:
        dtypes: dict[str, str] = {}
        for name in unit.params:
            param = params[name]
            if param.requires_grad or not FROZEN_MAY_DIFFER:
                dtypes.setdefault(str(param.dtype).removeprefix("torch."), name)
            if param.ndim == 0:
                problems.append(_scalar(name))
            elif not param.is_contiguous():
                problems.append(_non_contiguous(name, param))
        if len(dtypes) > 1:
            problems.append(_mixed_dtypes(unit, dtypes))


def _scalar(name: str) -> str:
    return (
        f"'{name}' is a scalar parameter. FSDP2 shards the first dimension, and a scalar has none. "
        "Give it shape (1,), or freeze it and list it in ignored_params."
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
