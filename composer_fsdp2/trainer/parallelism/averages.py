"""Averages of EMA whose rows tensor parallelism holds in an order of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from composer.algorithms.ema.ema import EMAParameters
from torch import nn

from composer_fsdp2.parallel.row_order import RowOrder, order_of, to_model_order, to_ranks_order

__all__ = ["as_in_model", "as_on_ranks", "orders_of", "start_averages"]

_ORDERS = "_fsdp2_orders"
"""attribute of `EMAParameters`, for `orders_of`"""


def start_averages(
    original: Callable[..., None], averages: EMAParameters, model: nn.Module | None
) -> None:
    """Replaces `EMAParameters.__init__`: notes in which order ranks hold what is averaged.

    Collective: no.
    """
    original(averages, model)
    named = () if model is None else model.named_parameters()
    orders = {name: order for name, param in named if (order := order_of(param)) is not None}
    setattr(averages, _ORDERS, orders)


def orders_of(averages: Any) -> Mapping[str, RowOrder]:
    """Returns the orders by name; names that are missing have that of the model. Collective: no."""
    return getattr(averages, _ORDERS, {})


def as_in_model(tensor: torch.Tensor, order: RowOrder | None) -> torch.Tensor:
    """Returns an average as a checkpoint has it. Collective: yes, if there is an order."""
    return tensor if order is None else to_model_order(tensor, order)


def as_on_ranks(value: torch.Tensor, order: RowOrder | None, own: torch.Tensor) -> torch.Tensor:
    """Returns what a checkpoint has, as a rank holds it. Collective: yes, if there is an order."""
    return value if order is None else to_ranks_order(value, order, own)
