"""Rows in the order of the ranks, and back."""

from __future__ import annotations

import pytest
import torch

from composer_fsdp2.parallel.form import FusedRowsForm

CASES = [
    ((12,), 2, 0, 1),
    ((8, 4, 4), 2, 0, 0),
    ((8, 4, 4), 4, 1, 0),
    ((6, 2, 2), 2, 1, 3),
    ((6, 6), 3, 0, 2),
]


def parts_by_hand(whole: torch.Tensor, order: FusedRowsForm) -> list[torch.Tensor]:
    """What each rank holds: its share of each block, then zeros."""
    blocks = whole.split(order.sizes, order.dim)
    shares = zip(*(block.chunk(order.degree, order.dim) for block in blocks), strict=True)
    shape = list(whole.shape)
    shape[order.dim] = order.padding
    return [torch.cat([*share, torch.zeros(shape)], order.dim) for share in shares]


@pytest.mark.parametrize(("blocks", "degree", "dim", "padding"), CASES)
def test_there_and_back(blocks: tuple[int, ...], degree: int, dim: int, padding: int):
    order = FusedRowsForm(blocks, degree, dim, padding)
    shape = [3, 5]
    shape[dim] = sum(blocks)
    whole = torch.arange(1.0, 1 + shape[0] * shape[1]).view(shape)
    on_ranks = order.to_ranks(whole)
    assert torch.equal(on_ranks, torch.cat(parts_by_hand(whole, order), dim))
    assert torch.equal(order.to_model(on_ranks), whole)
    assert order.model_shape(on_ranks.shape) == whole.shape
    for here, there, count in order.runs():
        piece = on_ranks.narrow(dim, here, count)
        assert torch.equal(piece, whole.narrow(dim, there, count))
    assert sum(count for *_, count in order.runs()) == sum(blocks)
