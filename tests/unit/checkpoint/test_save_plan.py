"""The plan of a sharded save is torch's, at any number of ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType

from composer_fsdp2.checkpoint.save_plan import ShardSavePlanner
from composer_fsdp2.errors import CheckpointError
from tests.support.save_plans import Shard, local_plan, plan_save, rows_of

StateDict = dict[str, Any]


def plain(rank: int, ranks: int) -> StateDict:
    """Weights with their moments, rows that do not divide, and values that all ranks hold."""
    sizes = {"wte": (10, 4), "norm": (3,), "deep": (7, 2, 3)}
    shards = {name: rows_of(size, rank, ranks) for name, size in sizes.items()}
    moments = {
        name: {"step": torch.tensor(1.0), "exp_avg": shard} for name, shard in shards.items()
    }
    own = {"rng": b"bytes"} if rank == 0 else {f"only {rank}": torch.ones(2)}
    return {"model": shards, "optim": moments, "epoch": 3, "list": [torch.ones(2), "text"], **own}


def hybrid(rank: int, ranks: int) -> StateDict:
    """Two replicas."""
    return {"w": rows_of((6, 2), rank % (ranks // 2), ranks // 2), **plain(0, 1)}


def experts(rank: int, ranks: int) -> StateDict:
    """Each pair of ranks has experts of its own; a router lies over all; columns as under TP."""
    expert = rows_of((4, 4), rank % 2, 2)
    column = Shard((4, ranks), (0, rank), (4, 1))
    named = {f"expert{rank // 2}": expert, f"twin{rank // 2}": expert, "column": column}
    # The order of names differs between ranks.
    return dict(sorted(named.items(), reverse=rank % 2 == 1)) | plain(rank, ranks)


def grid(rank: int, ranks: int) -> StateDict:
    """Tiles of a matrix."""
    row, column = divmod(rank, 2)
    return {"w": Shard((ranks // 2 * 3, 10), (row * 3, column * 5), (3, 5)), "x": torch.ones(())}


CASES: list[Callable[[int, int], StateDict]] = [plain, hybrid, experts, grid]


def items_of(items: list[Any]) -> list[Any]:
    """What is written, without the position among the pieces, which is a hint to readers."""
    return [(item.index.fqn, item.index.offset, item.type, item.tensor_data) for item in items]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_it_is_torchs_plan(case: Callable[[int, int], StateDict], ranks: int):
    states = [case(rank, ranks) for rank in range(ranks)]
    theirs = [DefaultSavePlanner(dedup_save_to_lowest_rank=True) for _ in states]
    wanted, wanted_metadata = plan_save(theirs, states)
    written, metadata = plan_save([ShardSavePlanner() for _ in states], states)
    assert [items_of(items) for items in written] == [items_of(items) for items in wanted]
    assert metadata == wanted_metadata
    assert list(metadata.state_dict_metadata) == list(wanted_metadata.state_dict_metadata)


def overlap(rank: int, ranks: int) -> StateDict:
    return {"fine": torch.ones(2), "w": Shard((8, 2), (rank * 2, 0), (3, 2))}


def gap(rank: int, ranks: int) -> StateDict:
    return {"w": rows_of((10, 2), rank, ranks + 1)}


def outside(rank: int, ranks: int) -> StateDict:
    return {"w": rows_of((8, 2), rank, ranks) if rank else Shard((8, 2), (0, 1), (2, 2))}


def twice(rank: int, ranks: int) -> StateDict:
    return {"w": rows_of((8, 2), rank, ranks) if rank else Shard((8, 2), (0, 0), (8, 2))}


def mixed(rank: int, ranks: int) -> StateDict:
    return {"w": "text" if rank else torch.ones(2)}


@pytest.mark.parametrize("case", [overlap, gap, outside, twice, mixed])
def test_pieces_that_do_not_fit_are_refused(case: Callable[[int, int], StateDict]):
    states = [case(rank, 4) for rank in range(4)]
    with pytest.raises(CheckpointError, match="The pieces of 'w'"):
        plan_save([ShardSavePlanner() for _ in states], states)


def test_drawn_cuts_are_judged_as_torch_does():
    draw = random.Random(0)
    judged: set[bool] = set()
    for _ in range(200):
        # Not empty: torch 2.7 refuses an empty piece in the middle of another.
        cuts = sorted(draw.sample(range(1, 6), 3))
        starts, ends = [0, *cuts], [*cuts, 6]
        if draw.random() < 0.5:
            changed = draw.randrange(4)
            ends[changed] = draw.randrange(starts[changed] + 1, 8)
        states = [
            {"w": Shard((6,), (start,), (end - start,))}
            for start, end in zip(starts, ends, strict=True)
        ]
        try:
            wanted = plan_save(
                [DefaultSavePlanner(dedup_save_to_lowest_rank=True) for _ in states], states
            )[1]
        except ValueError:
            wanted = None
        try:
            metadata = plan_save([ShardSavePlanner() for _ in states], states)[1]
        except CheckpointError:
            metadata = None
        assert metadata == wanted
        judged.add(metadata is None)
    assert judged == {True, False}


def test_many_ranks_send_little_and_differ_in_their_pieces():
    ranks, names = 256, [f"layers.{n}.weight" for n in range(40)]
    states = [dict.fromkeys(names, rows_of((4096, 64), rank, ranks)) for rank in range(ranks)]
    plans = [local_plan(ShardSavePlanner(), values, rank) for rank, values in enumerate(states)]
    assert len({plan.planner_data.outline for plan in plans}) == 1
    assert all(len(plan.planner_data.pieces) == 1 and plan.items == [] for plan in plans)
    answers, metadata = ShardSavePlanner().create_global_plan(plans)
    assert all(answer.items == [] and answer.planner_data == [] for answer in answers)
    chunks = {id(entry.chunks) for entry in metadata.state_dict_metadata.values()}
    assert len(chunks) == 1  # so `.metadata` holds a layout once


def test_the_kind_of_a_value_is_kept():
    states = [{"w": Shard((2,), (0,), (2,), WriteItemType.TENSOR)} for _ in range(2)]
    written, _ = plan_save([ShardSavePlanner() for _ in states], states)
    assert [[item.type for item in items] for items in written] == [[WriteItemType.TENSOR], []]
