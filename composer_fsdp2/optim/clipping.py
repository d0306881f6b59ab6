"""Clipping of gradients on local shards."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

from composer_fsdp2.optim.norms import Shards, norm_of

__all__ = ["clip_grad_norm_", "clip_grad_value_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clips the norm of all gradients, as if they were one vector; takes what torch's own takes.

    It computes on local shards and sends one number for each mesh, where
    `torch.nn.utils.clip_grad_norm_` goes through a DTensor for each gradient. Parameters may be
    sharded over several meshes, which torch's own refuses, and some may be plain tensors, which
    count once.

    Collective: yes, over the meshes of the parameters. Every rank gives the same parameters in the
    same order; a parameter may have no gradient on some of them.

    Args:
        parameters: a tensor or several, whose gradients are scaled in place.
        max_norm: the largest norm that is left as it is.
        norm_type: p of the p-norm, above 0; `float("inf")` for the largest absolute value.
        error_if_nonfinite: refuse a norm that is infinite or NaN. The host then waits for the
            device.
        foreach: use the implementation for many tensors at once; by default where there is one.

    Returns:
        The norm before clipping, over all ranks: a plain tensor, in float64 if a parameter is and
        else in float32. torch's own returns a DTensor, whose `item()` may be a part of the norm.

    Raises:
        RuntimeError: the norm is infinite or NaN and `error_if_nonfinite` is true. The gradients
            stay as they are.
        ValueError: `norm_type` is not above 0.

    Source: the factor is torch's,
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/nn/utils/clip_grad.py#L109

    Example:
        >>> import torch, composer_fsdp2
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = composer_fsdp2.prepare_fully_shard(model, None, {}, device="cpu")
        >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
        >>> composer_fsdp2.clip_grad_norm_(model.parameters(), max_norm=1.0)
        tensor(5.)
    """
    shards = Shards([parameters] if isinstance(parameters, torch.Tensor) else parameters)
    total = norm_of(shards, norm_type, foreach=foreach)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The norm of order {norm_type} of all gradients is non-finite ({total.item()}), so "
            "clipping would make every gradient 0 or NaN. Look for the step whose loss is not "
            "finite, or pass error_if_nonfinite=False to scale by it all the same."
        )
    torch.nn.utils.clip_grads_with_norm_(_holders(shards.grads), max_norm, total, foreach)
    return total


@torch.no_grad()
def clip_grad_value_(parameters: Iterable[torch.Tensor], clip_value: float) -> None:
    """Clips each element of the gradients. Collective: no."""
    torch.nn.utils.clip_grad_value_(_holders(Shards(parameters).grads), clip_value)


def _holders(grads: Iterable[torch.Tensor]) -> list[Any]:
    """Objects that have a gradient as `grad`, which is all that torch reads of parameters."""
    return [SimpleNamespace(grad=grad) for grad in grads]
