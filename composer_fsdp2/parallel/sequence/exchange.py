"""The two exchanges of attention, forward and backward, on any backend.

[Note: exchanges] Ulysses turns "all heads of a part of the sequence" into "some heads of the whole
sequence", and back: every rank sends each other rank one part, in one all-to-all. Gathered keys and
values leave queries where they are: an all-gather in forward, a reduce-scatter in backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from composer_fsdp2.ranks import all_gather_tensor

__all__ = ["gather_sequence", "heads_to_sequence", "sequence_to_heads", "whole_loss"]


class _AllToAll(torch.autograd.Function):
    """Sends the i-th part of the first dimension to rank i. Its gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(sent, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(grads[0], ctx.group), None


def _all_to_all(sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    sent = sent.contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group)
    return got


def sequence_to_heads(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gives a rank its heads of the whole sequence. Collective: yes, over the group.

    Args:
        tensor: (batch, heads, local positions, size); the group's size divides the heads.
        group: of the ranks that divide the sequence.

    Returns:
        (batch, heads / ranks, ranks x local positions, size), in the order of the ranks.
    """
    ranks = group.size()
    batch, heads, local, size = tensor.shape
    sent = tensor.view(batch, ranks, heads // ranks, local, size).transpose(0, 1)
    got: Any = _AllToAll.apply(sent, group)
    return got.permute(1, 2, 0, 3, 4).reshape(batch, heads // ranks, ranks * local, size)


def heads_to_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Undoes `sequence_to_heads`. Collective: yes, over the group.

    Args:
        tensor: (batch, local heads, positions, size).
        group: of the ranks that divide the sequence.

    Returns:
        (batch, ranks x local heads, positions / ranks, size).
    """
    ranks = group.size()
    batch, heads, length, size = tensor.shape
    sent = tensor.view(batch, heads, ranks, length // ranks, size).permute(2, 0, 1, 3, 4)
    got: Any = _AllToAll.apply(sent, group)
    return got.transpose(0, 1).reshape(batch, ranks * heads, length // ranks, size)


class _Gather(torch.autograd.Function):
    """All ranks' tensors, one after the other in the first dimension; gradients are added up."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        own = own.contiguous()
        got = own.new_empty((group.size() * own.shape[0], *own.shape[1:]))
        all_gather_tensor(got, own, group)
        return got

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        # As an all-to-all: gloo of older torch has no reduce-scatter of one tensor, and the sum is
        # in the order of the ranks everywhere.
        grad = grads[0]
        parts = _all_to_all(grad, ctx.group).view(ctx.group.size(), -1, *grad.shape[1:])
        return parts.sum(0), None


def gather_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gives every rank the whole sequence. Collective: yes, over the group.

    Args:
        tensor: (batch, heads, local positions, size).
        group: of the ranks that divide the sequence.

    Returns:
        (batch, heads, ranks x local positions, size), in the order of the ranks.
    """
    got: Any = _Gather.apply(tensor.movedim(2, 0), group)
    return got.movedim(0, 2)


class _WholeLoss(torch.autograd.Function):
    """The sum over the group. FSDP2 averages gradients over all ranks, and these add up."""

    @staticmethod
    def forward(ctx: Any, term: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.ranks = group.size()
        total = term.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.ranks, None


def whole_loss(term: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns the sum of the ranks' terms of a loss, with a gradient for the own term alone.

    Collective: yes, over the group. The gradient is multiplied by the number of ranks in the group,
    because FSDP2 divides by all ranks while a sequence counts once.
    """
    total: Any = _WholeLoss.apply(term, group)
    return total
