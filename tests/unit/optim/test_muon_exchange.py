"""The exchange of Muon, with all its ranks in one process: sizes fit, and every row comes home."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_fsdp2.optim.muon_exchange import Exchange, Parameter, RankGrid
from composer_fsdp2.optim.muon_iteration import Layout, work

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
            places_in_shard_group=tuple(range(shards)),
            places_in_whole_group=tuple(range(shards * replicas)),
        )
        for rank in range(shards * replicas)
    ]


def exchanges(params: list[Parameter], ranks: list[RankGrid], limit: int) -> list[Exchange]:
    return [Exchange(params, grid, 4, limit) for grid in ranks]


def shards_of(values: list[torch.Tensor], params: list[Parameter], grid: RankGrid):
    found = []
    for value, param in zip(values, params, strict=True):
        start, stop = grid.rows(param.shape[param.dim], grid.shard)
        found.append(value.narrow(param.dim, start, stop - start))
    return found


def carry(ways, sources, dims, members: list[list[int]]):
    """What an all-to-all inside each group gives every rank."""
    sent = []
    for way, source, dim in zip(ways, sources, dims, strict=True):
        parts = [source[n].narrow(dim[n], first, rows).reshape(-1) for n, first, rows in way.send]
        flat = torch.cat(parts) if parts else torch.empty(0)
        sent.append(flat.split(way.send_sizes))
    received: list[torch.Tensor] = [torch.empty(0)] * len(ways)
    for group in members:
        for place, rank in enumerate(group):
            pieces = [sent[other][place] for other in group]
            assert [len(piece) for piece in pieces] == ways[rank].receive_sizes
            received[rank] = torch.cat(pieces)
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
    dims = [param.dim for param in params]

    def put(rank: int, item, row: int, part: torch.Tensor) -> None:
        target = results[rank][item.param].narrow(
            dims[item.param], row, part.shape[dims[item.param]]
        )
        assert target.isnan().all()
        target.copy_(part)

    for rank, exchange in enumerate(planned):
        for item in exchange.local:
            row = item.start - exchange.first_row(item)
            put(
                rank,
                item,
                row,
                2 * locals_[rank][item.param].narrow(0, row, item.stop - item.start),
            )
            computed[item.param] += math.prod(item.shape)
    for buckets in zip(*(exchange.buckets for exchange in planned), strict=True):
        got = carry([b.there for b in buckets], locals_, [dims] * len(ranks), rows)
        wholes = [b.assemble(g, dims) for b, g in zip(buckets, got, strict=True)]
        for bucket, mine in zip(buckets, wholes, strict=True):
            for item, whole in zip(bucket.owned, mine, strict=True):
                assert whole.shape == item.shape
                computed[item.param] += whole.numel()
        done = [[2 * whole for whole in mine] for mine in wholes]
        of_items = [[dims[item.param] for item in bucket.owned] for bucket in buckets]
        got = carry([b.back for b in buckets], done, of_items, [list(range(len(ranks)))])
        for rank, (bucket, back) in enumerate(zip(buckets, got, strict=True)):
            bucket.apply(back, lambda item, row, part, rank=rank: put(rank, item, row, part))
    for part, result in zip(locals_, results, strict=True):
        assert all(torch.equal(2 * a, b) for a, b in zip(part, result, strict=True))
    assert computed.tolist() == [math.prod(param.shape) for param in params]  # once each
    return planned


matrices = st.builds(
    lambda rows, columns, joined: Parameter(
        (rows * joined, columns), Layout((rows,) * joined if joined > 1 else None), 0
    ),
    st.integers(1, 19),
    st.integers(1, 5),
    st.integers(1, 3),
)
lists = st.builds(
    lambda count, rows: Parameter((count, rows, 3), Layout(), 0),
    st.integers(1, 9),
    st.integers(1, 4),
)
columns = st.builds(lambda n: Parameter((3, 4 * n), Layout(), 1), st.integers(1, 4))


@given(
    st.lists(matrices | lists | columns, min_size=1, max_size=7),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([4, 100, LARGE]),
)
def test_every_row_is_computed_once_and_comes_home(params, shards, replicas, limit):
    run_all(params, grids(shards, replicas), limit)


def test_eighteen_rows_on_eight_ranks():
    (param,) = params = [Parameter((18, 4), Layout(), 0)]
    ranks = grids(8)
    assert [grid.rows(18, grid.shard) for grid in ranks][5:] == [(15, 18), (18, 18), (18, 18)]
    (planned, *_) = run_all(params, ranks, LARGE)
    assert planned.collectives == 2
    assert len(planned.buckets) == 1
    assert param.shape == (18, 4)


def test_lists_of_matrices_do_not_travel():
    planned = run_all([Parameter((9, 4, 4), Layout(), 0)], grids(4), LARGE)
    assert [exchange.collectives for exchange in planned] == [0] * 4
    copies = run_all([Parameter((9, 4, 4), Layout(), 0)], grids(2, 2), LARGE)
    assert [exchange.collectives for exchange in copies] == [1] * 4  # the way back alone


def _loads(planned: list[Exchange]) -> list[int]:
    return [
        sum(work(item.shape, item.layout) for bucket in exchange.buckets for item in bucket.owned)
        for exchange in planned
    ]


@pytest.mark.parametrize(("shards", "replicas"), [(8, 1), (4, 2), (2, 4)])
def test_work_is_spread_over_all_copies(shards: int, replicas: int):
    layer = [(64, 64)] * 4 + [(128, 64)] * 2 + [(64, 128)]
    params = [Parameter(shape, Layout(), 0) for shape in layer * 6]
    loads = _loads(exchanges(params, grids(shards, replicas), LARGE))
    assert max(loads) <= 1.1 * sum(loads) / len(loads)


def test_buckets_are_limited_and_keep_every_rank_busy():
    params = [Parameter((16, 16), Layout(), 0)] * 24
    (planned, *_) = exchanges(params, grids(4), limit=2 * 16 * 16 * 4)
    assert len(planned.buckets) == 3  # two matrices a rank at a time
    (least, *_) = exchanges(params, grids(4), limit=1)
    assert len(least.buckets) == 6  # one a rank, whatever the limit says
    assert all(len(bucket.owned) == 1 for bucket in least.buckets)
    works = [bucket.owned[0].work for bucket in least.buckets]
    assert all(a >= b for a, b in pairwise(works))


def test_joined_projections_are_spread_too():
    params = [Parameter((24, 8), Layout((8, 8, 8)), 0)] * 2
    loads = _loads(exchanges(params, grids(3), LARGE))
    assert len(set(loads)) == 1
