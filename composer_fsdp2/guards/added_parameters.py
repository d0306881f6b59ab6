"""Refuses to step parameters that a model got after it was prepared: nobody averages them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from composer_fsdp2.errors import PlanError
from composer_fsdp2.parallel.row_order import group_dividing

__all__ = ["refuse_added_parameters"]


def refuse_added_parameters(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Checks the parameters of an optimizer before its first step with them. Collective: no.

    The step raises `PlanError` for a trainable parameter that is not sharded, and for an optimizer
    that was built later where tensor parallelism divides a layer.

    Args:
        model: the sharded model.
        optimizer: the optimizer that `prepare_fully_shard` was given. Every parameter that is added
            to it is checked. Of other optimizers only parameters of the model are: they may step
            another model, whose gradients somebody else averages.
    """
    if dist.get_world_size() == 1:
        return
    whole = {id(param) for param in _plain(model.parameters())}
    if optimizer is not None:
        whole |= {id(param) for param in _plain(_params_of(optimizer))}
    held, given = weakref.ref(model), None if optimizer is None else weakref.ref(optimizer)
    seen = weakref.WeakKeyDictionary[torch.optim.Optimizer, list[int]]()

    def check(stepped: torch.optim.Optimizer, *_: Any) -> None:
        if (sharded := held()) is None:
            return
        found = [id(param) for param in _params_of(stepped)]
        if seen.get(stepped) == found:
            return
        names = {id(param): f"'{name}'" for name, param in sharded.named_parameters()}
        is_given = given is not None and stepped is given()
        own = (param for param in _params_of(stepped) if id(param) in names)
        if not is_given and any(group_dividing(param) is not None for param in own):
            raise PlanError(
                f"{type(stepped).__name__} was built after the model was prepared with tensor "
                "parallelism. Its checkpoints would hold fused weights in another order. Give it "
                "to prepare_fully_shard, or to the Trainer."
            )
        for param in _plain(_params_of(stepped)):
            name = names.get(id(param), f"A parameter of shape {tuple(param.shape)}" * is_given)
            if param.requires_grad and id(param) not in whole and name:
                raise PlanError(
                    f"{name} was given to {type(stepped).__name__} after the model was prepared. "
                    "No rank averages its gradient with others, so each would train another "
                    "value. Add it to the model and to the optimizer before prepare_fully_shard, "
                    "or before the Trainer is made."
                )
        seen[stepped] = found

    # It is never removed: the model may be collected while torch goes through its hooks.
    register_optimizer_step_pre_hook(check)


def _params_of(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _plain(params: Iterator[Any]) -> Iterator[Any]:
    return (param for param in params if not isinstance(param, DTensor))
