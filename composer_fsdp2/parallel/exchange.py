"""Exchanges of tensors between ranks, with the exchange of their gradients in backward.

Not torch's own, whose results leak where a block is computed again in backward:
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
        given, there, ctx.back = args
        return there(given)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grads[0]), None, None


def exchange_tensor(
    given: torch.Tensor,
    there: Callable[[torch.Tensor], torch.Tensor],
    back: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Returns what an exchange makes of a tensor. Collective: as both functions are.

    Args:
        given: of this rank.
        there: the exchange; the graph keeps what it holds.
        back: returns the gradient of `given`, from that of the result.
    """
    found: Any = _ThereAndBack.apply(given, there, back)
    return found
