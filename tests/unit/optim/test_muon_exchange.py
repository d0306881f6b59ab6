"""The exchange of Muon, with all its ranks in one process: sizes fit, and every row comes home."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_fsdp2.optim.muon.exchange import (
    AllToAll,
    Matrix,
    MatrixExchange,
    MatrixPart,
    MatrixSplit,
    Ranks,
    plan_exchange,
)
from composer_fsdp2.optim.muon.newton_schulz import MatrixLayout
from composer_fsdp2.parallel.form import FusedRowsForm

LARGE = 2**27


def ranks_of(shards: int, replicas: int = 1) -> list[Ranks]:
    count = shards * replicas
    return [Ranks(shards, replicas, rank, tuple(range(count)), count) for rank in range(count)]


def divided(shape: tuple[int, ...], layout: MatrixLayout, dim: int = 0) -> MatrixSplit:
    """Along one axis, of as many shards as the ranks will have."""
    return MatrixSplit(shape, layout, (0,), ((0, dim),))


def among(params: list[MatrixSplit], ranks: list[Ranks]) -> tuple[MatrixSplit, ...]:
    sizes = (ranks[0].shards,)
    return tuple(replace(param, sizes=sizes) if param.sizes == (0,) else param for param in params)


def exchanges(params: list[MatrixSplit], ranks: list[Ranks], limit: int) -> list[MatrixExchange]:
    return [plan_exchange(among(params, ranks), rank, limit) for rank in ranks]


def shards_of(values: list[torch.Tensor], params: tuple[MatrixSplit, ...], shard: int):
    """Cuts as torch does, axis after axis, in the order of the ranks."""
    found = []
    for value, division in zip(values, params, strict=True):
        form = division.form
        part = form.to_ranks(value) if isinstance(form, FusedRowsForm) else value
        for axis, dim in division.cuts:
            chunks = part.chunk(division.sizes[axis], dim)
            below = math.prod(division.sizes[axis + 1 :])
            place = shard // below % division.sizes[axis]
            none = part.narrow(dim, 0, 0)
            part = chunks[place] if place < len(chunks) else none
        found.append(part)
    return found


def carry(ways: list[AllToAll], values: list[list[list[torch.Tensor]]]):
    """What an all-to-all gives every rank: the parts, with what the others send for them."""
    received = []
    for rank, way in enumerate(ways):
        given = [value for sent in values for value in sent[rank]]
        parts = [part for parts in way.receive for part in parts]
        assert [part.shape for part in parts] == [tuple(value.shape) for value in given]
        received.append(list(zip(parts, given, strict=True)))
    for rank, way in enumerate(ways):
        others = [part for to, parts in enumerate(way.send) for part in parts if to != rank]
        assert way.starts or not any(part.numel for part in others)
    return received


def assembled(parts: list[tuple[MatrixPart, torch.Tensor]]) -> dict[Matrix, torch.Tensor]:
    wholes = {part.matrix: torch.zeros(part.matrix.shape) for part, _ in parts}
    for part, value in parts:
        wholes[part.matrix][part.matrix_index] = value
    return wholes


def run_all(params: list[MatrixSplit], ranks: list[Ranks], limit: int) -> list[MatrixExchange]:
    """Runs `MatrixExchange.run` by hand on all ranks, doubling the values on the way."""
    values = [torch.randn(param.shape) for param in params]
    planned = exchanges(params, ranks, limit)
    held = [shards_of(values, among(params, ranks), rank.me % rank.shards) for rank in ranks]
    results = [[torch.full_like(part, math.nan) for part in parts] for parts in held]
    computed = [torch.zeros_like(value) for value in values]

    def put(rank: int, part: MatrixPart, value: torch.Tensor) -> None:
        target = results[rank][part.matrix.param]
        assert target[part.shard_index].isnan().all()
        target[part.shard_index] = value

    def double(matrix: Matrix, whole: torch.Tensor) -> torch.Tensor:
        index = torch.meshgrid(*matrix.positions, indexing="ij")
        assert torch.equal(whole, values[matrix.param][index])
        computed[matrix.param][index] += 1
        return 2 * whole

    for rank, exchange in enumerate(planned):
        for part in exchange.local:
            shard = held[rank][part.matrix.param]
            put(rank, part, double(part.matrix, shard[part.shard_index]))
    for ways in zip(*(exchange.buckets for exchange in planned), strict=True):
        there, back = zip(*ways, strict=True)
        sent = [
            [[own[part.matrix.param][part.shard_index] for part in parts] for parts in way.send]
            for way, own in zip(there, held, strict=True)
        ]
        done = [
            {matrix: double(matrix, whole) for matrix, whole in assembled(parts).items()}
            for parts in carry(list(there), sent)
        ]
        sent = [
            [[own[part.matrix][part.matrix_index] for part in parts] for parts in way.send]
            for way, own in zip(back, done, strict=True)
        ]
        for rank, parts in enumerate(carry(list(back), sent)):
            for part, value in parts:
                put(rank, part, value)
    for shards, result in zip(held, results, strict=True):
        # Rows that no model has are nobody's.
        pairs = zip(shards, result, strict=True)
        assert all(torch.equal(2 * shard, found.nan_to_num(0.0)) for shard, found in pairs)
    assert all((times == 1).all() for times in computed)
    return planned


matrices = st.builds(
    lambda rows, columns, joined, turns: divided(
        (rows * joined * turns, columns),
        MatrixLayout((rows * turns,) * joined if joined > 1 else None, turns=turns),
    ),
    st.integers(1, 19),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 2),
)
transposed = st.builds(
    lambda rows, columns: divided((rows, 4 * columns), MatrixLayout((2 * columns,) * 2, True, 2)),
    st.integers(1, 9),
    st.integers(1, 4),
)
lists = st.builds(
    lambda count, rows: divided((count, rows, 3), MatrixLayout()),
    st.integers(1, 9),
    st.integers(1, 4),
)
columns = st.builds(lambda n: divided((3, 4 * n), MatrixLayout(), 1), st.integers(1, 4))


@pytest.mark.matrix
@given(
    st.lists(matrices | transposed | lists | columns, min_size=1, max_size=7),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([4, 100, LARGE]),
)
def test_every_row_is_computed_once_and_comes_home(params, shards, replicas, limit):
    run_all(params, ranks_of(shards, replicas), limit)


# --- Two axes: one of shards, one of tensor parallelism. ---


def on_two_axes(draw: st.DrawFn) -> tuple[list[MatrixSplit], int, int]:
    shards, degree = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    found: list[MatrixSplit] = []
    for _ in range(draw(st.integers(1, 4))):
        first, other = draw(st.integers(1, 9)), draw(st.integers(1, 5))
        blocks = tuple(degree * size for size in draw(st.lists(st.integers(1, 4), max_size=3)))
        if blocks:  # a fused projection, in the order of the ranks, with rows that share evenly
            own = sum(blocks) // degree
            padding = -own % shards
            order = FusedRowsForm(blocks, degree, 0, padding)
            layout = MatrixLayout(blocks if len(blocks) > 1 else None)
            cuts = ((1, 0), (0, 0))
            shape = (sum(blocks), other)
            found.append(MatrixSplit(shape, layout, (shards, degree), cuts, order))
        else:  # rows between shards, columns between the ranks of a tensor group
            shape = (first, degree * other)
            cuts = ((0, 0), (1, 1))
            found.append(MatrixSplit(shape, MatrixLayout(), (shards, degree), cuts))
    return found, shards * degree, draw(st.sampled_from([4, 100, LARGE]))


@given(st.composite(on_two_axes)())
def test_parts_on_two_axes_come_home(drawn: tuple[list[MatrixSplit], int, int]):
    params, ranks, limit = drawn
    run_all(params, ranks_of(ranks), limit)


def collectives(planned: MatrixExchange) -> int:
    return sum(way.starts for ways in planned.buckets for way in ways)


def owned(ways: tuple[AllToAll, AllToAll]) -> list[Matrix]:
    return list(dict.fromkeys(part.matrix for parts in ways[0].receive for part in parts))


def test_eighteen_rows_on_eight_ranks():
    (param,) = params = [divided((18, 4), MatrixLayout())]
    ranks = ranks_of(8)
    values = [torch.zeros(18, 4)]
    held = [shards_of(values, among(params, ranks), shard)[0] for shard in range(8)]
    assert [len(part) for part in held][5:] == [3, 0, 0]
    (planned, *_) = run_all(params, ranks, LARGE)
    assert collectives(planned) == 2
    assert len(planned.buckets) == 1
    assert param.shape == (18, 4)


def test_lists_of_matrices_do_not_travel():
    planned = run_all([divided((9, 4, 4), MatrixLayout())], ranks_of(4), LARGE)
    assert [*map(collectives, planned)] == [0] * 4
    copies = run_all([divided((9, 4, 4), MatrixLayout())], ranks_of(2, 2), LARGE)
    assert [*map(collectives, copies)] == [1] * 4  # the way back alone


def test_experts_that_all_shards_have_a_part_of_are_matrices_of_their_own():
    params = [divided((8, 16, 16), MatrixLayout(), dim=1)] * 2
    planned = run_all(params, ranks_of(4), 2 * 16 * 16)
    assert len(planned[0].buckets) == 2  # of 16 matrices, two a rank at a time
    loads = _loads(planned)
    assert min(loads) == max(loads)


def _loads(planned: list[MatrixExchange]) -> list[int]:
    return [
        sum(matrix.work for ways in exchange.buckets for matrix in owned(ways))
        for exchange in planned
    ]


@pytest.mark.parametrize(("shards", "replicas"), [(8, 1), (4, 2), (2, 4)])
def test_work_is_spread_over_all_copies(shards: int, replicas: int):
    layer = [(64, 64)] * 4 + [(128, 64)] * 2 + [(64, 128)]
    params = [divided(shape, MatrixLayout()) for shape in layer * 6]
    loads = _loads(exchanges(params, ranks_of(shards, replicas), LARGE))
    assert max(loads) <= 1.1 * sum(loads) / len(loads)


def test_buckets_are_limited_and_keep_every_rank_busy():
    params = [divided((16, 16), MatrixLayout())] * 24
    (planned, *_) = exchanges(params, ranks_of(4), limit=2 * 16 * 16)
    assert len(planned.buckets) == 3  # two matrices a rank at a time
    (least, *_) = exchanges(params, ranks_of(4), limit=1)
    assert len(least.buckets) == 6  # one a rank, whatever the limit says
    works = [matrix.work for ways in least.buckets for matrix in owned(ways)]
    assert len(works) == 6
    assert all(a >= b for a, b in pairwise(works))


def test_joined_projections_are_spread_too():
    params = [divided((24, 8), MatrixLayout((8, 8, 8)))] * 2
    loads = _loads(exchanges(params, ranks_of(3), LARGE))
    assert len(set(loads)) == 1
