"""Whole weights of a file for a model that tensor parallelism divides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2.parallel.row_order import order_of, whole_to_part
from composer_fsdp2.trainer.load_steps import plain_name

__all__ = ["divided_weights"]


def divided_weights(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the weights with this rank's part of those that torch could not divide.

    Collective: no. Others stay as they are. Torch divides a whole tensor by the placements of the
    parameter, which has rows of padding that the tensor has not; see [Note: padding].
    """
    divided = dict(weights)
    for name, param in model.named_parameters(remove_duplicate=False):
        order, whole = order_of(param), weights.get(plain_name(name))
        if order is None or not order.padding or not isinstance(param, DTensor):
            continue
        if isinstance(whole, torch.Tensor) and not isinstance(whole, DTensor):
            divided[plain_name(name)] = whole_to_part(whole.detach(), param).to(param.device)
    return divided
