"""Which positions of a sequence each rank of a group computes. Numbers only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["Division"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """A sequence, padded so that each rank has as many positions as the others.

    In order, rank `r` of `n` has the `r`-th part. Balanced, it has parts `r` and `2n - 1 - r` of
    `2n`, so that every rank has as many pairs of a query and an earlier key.
    """

    length: int
    """positions, without padding"""
    degree: int
    is_balanced: bool

    @property
    def parts(self) -> int:
        """Parts of equal length."""
        return self.degree * (2 if self.is_balanced else 1)

    @property
    def part_length(self) -> int:
        """Positions in each part."""
        return -(-self.length // self.parts)

    @property
    def padded(self) -> int:
        """Positions with padding."""
        return self.parts * self.part_length

    @property
    def local(self) -> int:
        """Positions of one rank."""
        return self.padded // self.degree

    def parts_of(self, rank: int) -> tuple[int, ...]:
        """Returns the numbers of a rank's parts, in the order in which it holds them."""
        return (rank, self.parts - 1 - rank) if self.is_balanced else (rank,)

    def spans_of(self, rank: int) -> Iterator[tuple[int, int]]:
        """Yields begin and end of each of a rank's parts."""
        for part in self.parts_of(rank):
            yield part * self.part_length, (part + 1) * self.part_length

    def positions_of(self, rank: int, device: torch.device) -> torch.Tensor:
        """Returns the positions of a rank: shape (local,)."""
        spans = [torch.arange(*span, device=device) for span in self.spans_of(rank)]
        return torch.cat(spans)

    def cut(self, whole: torch.Tensor, rank: int, dim: int = 1) -> torch.Tensor:
        """Returns a rank's positions of what holds all of them, padding included."""
        spans = [whole.narrow(dim, a, b - a) for a, b in self.spans_of(rank)]
        return spans[0] if len(spans) == 1 else torch.cat(spans, dim)

    def put_together(self, gathered: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns in the order of positions what the ranks hold one after the other in `dim`."""
        if not self.is_balanced:
            return gathered
        held = [part for rank in range(self.degree) for part in self.parts_of(rank)]
        pieces = gathered.split(self.part_length, dim)
        return torch.cat([pieces[held.index(part)] for part in range(self.parts)], dim)
