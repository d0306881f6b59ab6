"""The exchange of Muon, with all its ranks in one process: sizes fit, and every row comes home."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_fsdp2.optim.muon_exchange import Exchange
from composer_fsdp2.optim.muon_iteration import Layout, work
from composer_fsdp2.optim.muon_places import Division, Parameter, RankGrid, pieces
from composer_fsdp2.parallel.row_order import RowOrder

LARGE = 2**27


def grids(shards: int, replicas: int = 1) -> list[RankGrid]:
    return [
        RankGrid(
            shards=shards,
            replicas=replicas,
            shard=rank % shards,
            replica=rank // shards,
            shard_group=None,
            whole_group=None,
            shard_group_size=shards,
            whole_group_size=shards * replicas,
            places_in_shard_group=tuple(range(shards)),
            places_in_whole_group=tuple(range(shards * replicas)),
        )
        for rank in range(shards * replicas)
    ]


def divided(shape: tuple[int, ...], layout: Layout, dim: int = 0) -> Parameter:
    """Along one axis, of as many shards as the grid will have."""
    return Parameter(shape, layout, dim, Division(shape, (0,), ((0, dim),)))


def among(params: list[Parameter], ranks: list[RankGrid]) -> list[Parameter]:
    sizes = (ranks[0].shards,)
    return [
        replace(param, division=replace(param.division, sizes=sizes))
        if param.division.sizes == (0,)
        else param
        for param in params
    ]


def exchanges(params: list[Parameter], ranks: list[RankGrid], limit: int) -> list[Exchange]:
    return [Exchange(among(params, ranks), grid, 4, limit) for grid in ranks]


def shards_of(values: list[torch.Tensor], params: list[Parameter], grid: RankGrid):
    """Cuts as torch does, axis after axis, in the order of the ranks."""
    found = []
    for value, param in zip(values, among(params, [grid]), strict=True):
        division = param.division
        part = value if division.order is None else division.order.to_ranks(value)
        for axis, dim in division.cuts:
            chunks = part.chunk(division.sizes[axis], dim)
            place = division.places(grid.shard)[axis]
            none = part.narrow(dim, 0, 0)
            part = chunks[place] if place < len(chunks) else none
        found.append(part)
    return found


def carry(ways, parts, members: list[list[int]]):
    """What an all-to-all inside each group gives every rank."""
    sent = []
    for way, own in zip(ways, parts, strict=True):
        flat = torch.cat([part.reshape(-1) for part in own]) if own else torch.empty(0)
        sent.append(flat.split(way.send_sizes))
    received: list[torch.Tensor] = [torch.empty(0)] * len(ways)
    for group in members:
        for place, rank in enumerate(group):
            given = [sent[other][place] for other in group]
            assert [len(piece) for piece in given] == ways[rank].receive_sizes
            received[rank] = torch.cat(given)
    return received


def run_all(params: list[Parameter], ranks: list[RankGrid], limit: int) -> list[Exchange]:
    """Runs `Exchange.run` by hand on all ranks, doubling the values on the way."""
    shards, replicas = ranks[0].shards, ranks[0].replicas
    values = [torch.randn(param.shape) for param in params]
    planned = exchanges(params, ranks, limit)
    locals_ = [shards_of(values, params, grid) for grid in ranks]
    results = [[torch.full_like(part, math.nan) for part in parts] for parts in locals_]
    computed = torch.zeros(len(params))
    rows = [list(range(r * shards, (r + 1) * shards)) for r in range(replicas)]

    def put(rank: int, item, piece, part: torch.Tensor) -> None:
        target = piece.in_shard(results[rank][item.param])
        assert target.isnan().all()
        target.copy_(part)

    for rank, exchange in enumerate(planned):
        for item in exchange.local:
            (piece,) = pieces(among(params, ranks)[item.param], item, ranks[rank].shard)
            put(rank, item, piece, 2 * piece.in_shard(locals_[rank][item.param]))
            computed[item.param] += item.numel
    for buckets in zip(*(exchange.buckets for exchange in planned), strict=True):
        sent = [
            [piece.in_shard(own[param]) for param, piece in bucket.there.send]
            for bucket, own in zip(buckets, locals_, strict=True)
        ]
        got = carry([b.there for b in buckets], sent, rows)
        wholes = [b.assemble(g) for b, g in zip(buckets, got, strict=True)]
        for bucket, mine in zip(buckets, wholes, strict=True):
            for item, whole in zip(bucket.owned, mine, strict=True):
                assert whole.shape == item.shape
                first = values[item.param].narrow(
                    params[item.param].dim, item.start, item.stop - item.start
                )
                assert torch.equal(whole, first)
                computed[item.param] += whole.numel()
        sent = [
            [2 * piece.in_item(mine[number]) for number, piece in bucket.back.send]
            for bucket, mine in zip(buckets, wholes, strict=True)
        ]
        got = carry([b.back for b in buckets], sent, [list(range(len(ranks)))])
        for rank, (bucket, back) in enumerate(zip(buckets, got, strict=True)):
            bucket.apply(back, lambda item, piece, part, rank=rank: put(rank, item, piece, part))
    for part, result in zip(locals_, results, strict=True):
        # Rows that no model has are nobody's.
        assert all(torch.equal(2 * a, b.nan_to_num(0.0)) for a, b in zip(part, result, strict=True))
    assert computed.tolist() == [math.prod(param.shape) for param in params]  # once each
    return planned


matrices = st.builds(
    lambda rows, columns, joined: divided(
        (rows * joined, columns), Layout((rows,) * joined if joined > 1 else None)
    ),
    st.integers(1, 19),
    st.integers(1, 5),
    st.integers(1, 3),
)
lists = st.builds(
    lambda count, rows: divided((count, rows, 3), Layout()),
    st.integers(1, 9),
    st.integers(1, 4),
)
columns = st.builds(lambda n: divided((3, 4 * n), Layout(), 1), st.integers(1, 4))


@given(
    st.lists(matrices | lists | columns, min_size=1, max_size=7),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([4, 100, LARGE]),
)
def test_every_row_is_computed_once_and_comes_home(params, shards, replicas, limit):
    run_all(params, grids(shards, replicas), limit)


# --- Two axes: one of shards, one of tensor parallelism. ---


def on_two_axes(draw: st.DrawFn) -> tuple[list[Parameter], int, int]:
    shards, degree = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    found: list[Parameter] = []
    for _ in range(draw(st.integers(1, 4))):
        first, other = draw(st.integers(1, 9)), draw(st.integers(1, 5))
        blocks = tuple(degree * size for size in draw(st.lists(st.integers(1, 4), max_size=3)))
        if blocks:  # a fused projection, in the order of the ranks, with rows that share evenly
            own = sum(blocks) // degree
            padding = -own % shards
            order = RowOrder(blocks, degree, 0, padding)
            held = (degree * (own + padding), other)
            layout = Layout(blocks if len(blocks) > 1 else None)
            cuts = ((1, 0), (0, 0))
            division = Division(held, (shards, degree), cuts, order)
            found.append(Parameter((sum(blocks), other), layout, 0, division))
        else:  # rows between shards, columns between the ranks of a tensor group
            shape = (first, degree * other)
            division = Division(shape, (shards, degree), ((0, 0), (1, 1)))
            found.append(Parameter(shape, Layout(), 0, division))
    return found, shards * degree, draw(st.sampled_from([4, 100, LARGE]))


@given(st.composite(on_two_axes)())
def test_parts_on_two_axes_come_home(drawn: tuple[list[Parameter], int, int]):
    params, ranks, limit = drawn
    run_all(params, grids(ranks), limit)


def test_eighteen_rows_on_eight_ranks():
    (param,) = params = [divided((18, 4), Layout())]
    ranks = grids(8)
    values = [torch.zeros(18, 4)]
    assert [len(shards_of(values, params, grid)[0]) for grid in ranks][5:] == [3, 0, 0]
    (planned, *_) = run_all(params, ranks, LARGE)
    assert planned.collectives == 2
    assert len(planned.buckets) == 1
    assert param.shape == (18, 4)


def test_lists_of_matrices_do_not_travel():
    planned = run_all([divided((9, 4, 4), Layout())], grids(4), LARGE)
    assert [exchange.collectives for exchange in planned] == [0] * 4
    copies = run_all([divided((9, 4, 4), Layout())], grids(2, 2), LARGE)
    assert [exchange.collectives for exchange in copies] == [1] * 4  # the way back alone


def _loads(planned: list[Exchange]) -> list[int]:
    return [
        sum(work(item.shape, item.layout) for bucket in exchange.buckets for item in bucket.owned)
        for exchange in planned
    ]


@pytest.mark.parametrize(("shards", "replicas"), [(8, 1), (4, 2), (2, 4)])
def test_work_is_spread_over_all_copies(shards: int, replicas: int):
    layer = [(64, 64)] * 4 + [(128, 64)] * 2 + [(64, 128)]
    params = [divided(shape, Layout()) for shape in layer * 6]
    loads = _loads(exchanges(params, grids(shards, replicas), LARGE))
    assert max(loads) <= 1.1 * sum(loads) / len(loads)


def test_buckets_are_limited_and_keep_every_rank_busy():
    params = [divided((16, 16), Layout())] * 24
    (planned, *_) = exchanges(params, grids(4), limit=2 * 16 * 16 * 4)
    assert len(planned.buckets) == 3  # two matrices a rank at a time
    (least, *_) = exchanges(params, grids(4), limit=1)
    assert len(least.buckets) == 6  # one a rank, whatever the limit says
    assert all(len(bucket.owned) == 1 for bucket in least.buckets)
    works = [bucket.owned[0].work for bucket in least.buckets]
    assert all(a >= b for a, b in pairwise(works))


def test_joined_projections_are_spread_too():
    params = [divided((24, 8), Layout((8, 8, 8)))] * 2
    loads = _loads(exchanges(params, grids(3), LARGE))
    assert len(set(loads)) == 1
