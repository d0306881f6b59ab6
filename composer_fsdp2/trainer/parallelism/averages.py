"""Averages of EMA that ranks hold in another form than checkpoints show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from composer.algorithms.ema.ema import EMAParameters
from torch import nn

from composer_fsdp2.parallel.expert.held import Held, held_by
from composer_fsdp2.parallel.expert.views import seen_by_all, taken_from_all
from composer_fsdp2.parallel.row_order import RowOrder, order_of, to_model_order, to_ranks_order

__all__ = ["Form", "as_in_model", "as_on_ranks", "orders_of", "shape_of", "start_averages"]

Form = RowOrder | Held
"""the order of rows under tensor parallelism, or the ranks that hold an expert"""

_ORDERS = "_fsdp2_orders"
"""attribute of `EMAParameters`, for `orders_of`"""


def start_averages(
    original: Callable[..., None], averages: EMAParameters, model: nn.Module | None
) -> None:
    """Replaces `EMAParameters.__init__`: notes in which form ranks hold what is averaged.

    Collective: no.
    """
    original(averages, model)
    named = () if model is None else model.named_parameters()
    found = ((name, order_of(param) or held_by(param)) for name, param in named)
    orders = {name: form for name, form in found if form is not None}
    setattr(averages, _ORDERS, orders)


def orders_of(averages: Any) -> Mapping[str, Form]:
    """Returns the forms by name; names that are missing have that of the model. Collective: no."""
    return getattr(averages, _ORDERS, {})


def shape_of(tensor: torch.Tensor, form: Form | None) -> torch.Size:
    """Returns the shape of an average in a checkpoint. Collective: no."""
    return form.shape_in_model(tensor.shape) if isinstance(form, RowOrder) else tensor.shape


def as_in_model(tensor: torch.Tensor, form: Form | None) -> torch.Tensor:
    """Returns an average as a checkpoint has it. Collective: yes, if there is a form."""
    if isinstance(form, Held):
        return seen_by_all(form, tensor)
    return tensor if form is None else to_model_order(tensor, form)


def as_on_ranks(value: torch.Tensor, form: Form | None, own: torch.Tensor) -> torch.Tensor:
    """Returns what a checkpoint has, as a rank holds it. Collective: yes, if there is a form."""
    if isinstance(form, Held):
        return taken_from_all(form, value, own)
    return value if form is None else to_ranks_order(value, form, own)
