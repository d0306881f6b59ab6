"""Gathers a parameter as one process has it."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_fsdp2.config.messages import nearest
from composer_fsdp2.errors import PlanError
from composer_fsdp2.parallel.held import held_by
from composer_fsdp2.parallel.row_order import order_of

__all__ = ["full_tensor", "whole_value"]


@torch.no_grad()
def full_tensor(model: nn.Module, name: str, *, gradient: bool = False) -> torch.Tensor | None:
    """Returns a parameter as one process has it: all rows, in the order of the model.

    A DTensor's own `full_tensor()` has rows in the order of the ranks, and rows of padding, where
    tensor parallelism divides a layer. Collective: yes, over the ranks that share the parameter;
    between steps, on every rank.

    Args:
        model: prepared with `prepare_fully_shard`, or not.
        name: of the parameter, as `named_parameters()` of the model before preparing.
        gradient: of it, in place of its value; `None` where it has none.

    Returns:
        A tensor of the shape that the parameter had before it was sharded. It may share memory
        with the parameter where nothing is sharded.

    Raises:
        PlanError: for a name that is no parameter.

    Example:
        >>> import torch
        >>> from composer_fsdp2 import full_tensor, prepare_fully_shard
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8))
        >>> _ = prepare_fully_shard(model, None, {}, device="cpu")
        >>> full_tensor(model, "0.weight").shape
        torch.Size([8, 4])
    """
    owner = model
    try:
        for part in ("", *name.split(".")[:-1]):
            owner = owner.get_submodule(part)
            # A unit that stayed gathered shows a copy in the compute dtype, from before the step.
            if isinstance(owner, FSDPModule):
                owner.reshard()
        param = model.get_parameter(name)
    except AttributeError as error:
        known = [other for other, _ in model.named_parameters(remove_duplicate=False)]
        raise PlanError(
            f"'{name}' is no parameter of the model. Ranks would wait for each other without a "
            f"tensor to gather.{nearest(name, known)} Write a name of model.named_parameters()."
        ) from error
    value = param.grad if gradient else param.detach()
    return whole_value(param, value)


def whole_value(param: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor | None:
    """Returns a parameter's value or gradient as one process has it; see `full_tensor`."""
    if (held := held_by(param)) is not None:
        return held.whole(value)
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    order = order_of(param)
    return whole if whole is None or order is None else order.to_model(whole)
