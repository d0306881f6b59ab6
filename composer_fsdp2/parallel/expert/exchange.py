"""Tokens travel to the ranks of their experts, and back.

[Note: exchange] A rank sorts its pairs of token and expert by the expert, and sends the rows of
each expert to the rank that holds it. Ranks first tell each other how many rows come, which the
host reads once for both ways. Sorting is stable, so an expert sees its tokens in the order of the
ranks and of their batches. What comes back lies as it was sent, and the sender multiplies it by the
router's weights: their gradient needs no other rank.

Every rank of the group takes part in every exchange of forward and backward, also with no row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from composer_fsdp2.ranks import is_fake

__all__ = ["Routing", "exchange"]


@dataclass(frozen=True, eq=False)  # no slots: experts hold weak references to it
class Routing:
    """Where the rows of one forward go. A row is a token for one of its experts."""

    chosen: torch.Tensor
    """experts of each token, (tokens, experts of a token)"""
    counts: torch.Tensor
    """rows for each expert of the group"""
    order: torch.Tensor
    """pairs of token and expert, sorted by the expert"""
    sent: list[int]
    """rows for each rank"""
    received: list[int]
    """rows from each rank"""
    sizes: list[int]
    """rows for each expert of this rank"""
    by_expert: torch.Tensor
    """received rows, sorted by the expert"""

    @classmethod
    @torch.no_grad()
    def agree(
        cls, chosen: torch.Tensor, count: int, group: dist.ProcessGroup, part: slice
    ) -> Routing:
        """Tells the ranks of a group how many rows come to each of their experts.

        Collective: yes, over the group.

        Args:
            chosen: experts of each token on this rank.
            count: experts of the group.
            group: holds as many of them on each rank.
            part: the tokens that this rank sends.
        """
        ranks, pairs = group.size(), chosen[part].flatten()
        order = torch.argsort(pairs, stable=True) + part.start * chosen.shape[1]
        mine = torch.zeros(count, dtype=torch.int64, device=chosen.device)
        mine.index_add_(0, pairs, torch.ones_like(pairs))
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=group)
        # The one time that the host waits for the device.
        if is_fake(group):
            # Nothing is sent: experts get equally many rows.
            share, rest = divmod(pairs.numel(), count)
            sizes = [share + (number < rest) for number in range(count)]
            own = [sizes[at : at + count // ranks] for at in range(0, count, count // ranks)]
            numbers = [own, [own[group.rank()]] * ranks]
        else:
            numbers = torch.stack((mine, theirs)).view(2, ranks, -1).tolist()
        sent, received = ([sum(rows) for rows in side] for side in numbers)
        held = torch.arange(count // ranks, device=chosen.device).repeat(ranks)
        by_expert = torch.argsort(
            held.repeat_interleave(theirs, output_size=sum(received)), stable=True
        )
        sizes = [sum(rows) for rows in zip(*numbers[1], strict=True)]
        return cls(chosen, mine, order, sent, received, sizes, by_expert)


def exchange(
    rows: torch.Tensor, routing: Routing, group: dist.ProcessGroup, *, back: bool = False
) -> torch.Tensor:
    """Sends rows to the ranks of their experts, or back to those of their tokens.

    Collective: yes, over the group, in forward and in backward.

    Args:
        rows: sorted by the rank that they go to.
        routing: of this forward.
        group: of the ranks that hold the experts between them.
        back: from the experts to the tokens.
    """
    arrived: Any = _Exchange.apply(rows, routing, group, back)
    return arrived


class _Exchange(torch.autograd.Function):
    """All-to-all, whose backward is that of the other way.

    Not torch's own, whose results leak where a block is computed again in backward:
    https://github.com/pytorch/pytorch/issues/161186
    """

    @staticmethod
    def forward(  # pyright: ignore
        ctx: Any, rows: torch.Tensor, routing: Routing, group: dist.ProcessGroup, back: bool
    ) -> torch.Tensor:
        ctx.routing, ctx.group, ctx.back = routing, group, back
        return _send(rows, routing, group, back)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore
        return _send(grad, ctx.routing, ctx.group, not ctx.back), None, None, None


def _send(
    rows: torch.Tensor, routing: Routing, group: dist.ProcessGroup, back: bool
) -> torch.Tensor:
    sent, received = routing.sent, routing.received
    if back:
        sent, received = received, sent
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
