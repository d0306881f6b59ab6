"""Exchanges tensors between ranks, and their gradients in backward.

Not by torch's own, whose results leak where a block is computed again in backward:
https://github.com/pytorch/pytorch/issues/161186
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["exchange_tensor"]


class _ThereAndBack(torch.autograd.Function):
    """Calls one function in forward, and another one in backward."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        tensor, there, ctx.back = args
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grads[0]), None, None


def exchange_tensor(
    tensor: torch.Tensor,
    there: Callable[[torch.Tensor], torch.Tensor],
    back: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Returns the result of an exchange, through which gradients go back. Collective: as both are.

    Args:
        tensor: this rank's input of `there`.
        there: the exchange; the graph keeps the function and all that it refers to.
        back: returns the gradient of `tensor`, from that of the result.
    """
    result: Any = _ThereAndBack.apply(tensor, there, back)
    return result
