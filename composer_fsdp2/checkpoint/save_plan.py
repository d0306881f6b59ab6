"""Plans a sharded save: which rank writes which piece of which value.

[Note: pieces by layout] torch's planner gathers an item for each piece of each rank, copies each of
them twice on rank 0 and compares all pairs of pieces of a tensor:
https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/checkpoint/default_planner.py#L608
A state dict has thousands of FQNs in a few layouts, and ranks differ only in the pieces of those
layouts. So a rank sends its FQNs in compressed form, which rank 0 reads once for all ranks that
sent the same bytes, and each distinct piece once. Rank 0 checks each layout once, and answers with
the positions of the items that a lower rank writes. Nothing is kept from one save to the next:
torch's `enable_plan_caching` takes a state dict of another dtype for the one before.
"""

from __future__ import annotations

import pickle
import zlib
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from composer_fsdp2.checkpoint.metadata import covers_exactly
from composer_fsdp2.errors import CheckpointError

__all__ = ["ShardSavePlanner"]

Numbers = tuple[int, ...]
Piece = tuple[Numbers, Numbers, Numbers] | None
"""size of the tensor, offsets and sizes of the piece; `None` is a value that is no tensor"""


@dataclass(frozen=True, slots=True)
class _LocalPlan:
    """Items that a rank could write.

    Attributes:
        outline: compressed: FQN, properties and number of the piece of each item, and the paths of
            the FQNs in the state dict.
        pieces: each distinct piece of the rank.
    """

    outline: bytes
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class _WrittenPieces:
    """The pieces of a value.

    Attributes:
        size: of the tensor; `None` where the value is no tensor.
        chunks: the pieces that are written.
        surplus: group of ranks and rank of the pieces that a lower rank writes.
    """

    size: Numbers | None
    chunks: list[ChunkStorageMetadata]
    surplus: list[tuple[int, int]]


class ShardSavePlanner(DefaultSavePlanner):
    """Plans as torch's planner does with `dedup_save_to_lowest_rank`; see the note above.

    By default torch spreads the values that all ranks hold over them. The lowest rank is Composer's
    choice: https://github.com/mosaicml/composer/blob/v0.32.1/composer/utils/checkpoint.py#L1089
    """

    def create_local_plan(self) -> SavePlan:
        """Returns a plan without items, whose data is a `_LocalPlan`. Collective: no."""
        plan = super().create_local_plan()
        numbers: dict[Piece, int] = {}
        rows: list[tuple[str, Any, int]] = []
        for item in plan.items:
            data, piece = item.tensor_data, None
            if data is not None:
                piece = (tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes))
            number = numbers.setdefault(piece, len(numbers))
            rows.append((item.index.fqn, None if data is None else data.properties, number))
        outline = zlib.compress(pickle.dumps((rows, plan.planner_data)), 1)
        return SavePlan([], planner_data=_LocalPlan(outline, list(numbers)))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Returns for each rank the positions of its items that a lower rank writes.

        Collective: no. Called on rank 0 alone; torch raises its error on every rank.

        Raises:
            CheckpointError: the pieces of a tensor overlap, or some of it is in none.
        """
        local_plans: list[_LocalPlan] = [plan.planner_data for plan in all_plans]
        groups: defaultdict[bytes, list[int]] = defaultdict(list)
        for rank, local in enumerate(local_plans):
            groups[local.outline].append(rank)
        ranks_of, paths = list(groups.values()), dict[str, Any]()
        properties_of: dict[str, Any] = {}
        rows_by_fqn: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for group, outline in enumerate(groups):
            rows, own_paths = pickle.loads(zlib.decompress(outline))
            paths = own_paths | paths
            for position, (fqn, properties, number) in enumerate(rows):
                properties_of.setdefault(fqn, properties)
                rows_by_fqn[fqn].append((group, number, position))
        layouts: dict[tuple[tuple[int, int], ...], _WrittenPieces] = {}
        surplus: list[list[int]] = [[] for _ in local_plans]
        described: dict[str, Any] = {}
        for fqn, group_rows in rows_by_fqn.items():
            key = tuple((group, number) for group, number, _ in group_rows)
            if key not in layouts:
                pieces = sorted(
                    (rank, index, local_plans[rank].pieces[number])
                    for index, (group, number) in enumerate(key)
                    for rank in ranks_of[group]
                )
                layouts[key] = _lay_out(fqn, pieces)
            layout = layouts[key]
            for rank, index in layout.surplus:
                surplus[rank].append(group_rows[index][2])
            described[fqn] = (
                BytesStorageMetadata()
                if layout.size is None
                else TensorStorageMetadata(
                    properties_of[fqn], torch.Size(layout.size), layout.chunks
                )
            )
        return [SavePlan([], planner_data=dropped) for dropped in surplus], Metadata(
            described, paths
        )

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Returns the plan with the items that this rank writes. Collective: no."""
        surplus = set(new_plan.planner_data)
        items = [item for position, item in enumerate(self.plan.items) if position not in surplus]
        self.plan = replace(new_plan, items=items, planner_data=None)
        return self.plan


def _lay_out(fqn: str, pieces: list[tuple[int, int, Piece]]) -> _WrittenPieces:
    """Gives each piece to the lowest rank that has it, and checks that the pieces fill the tensor.

    Args:
        fqn: one value with this layout; in error messages.
        pieces: rank, place in a list of the caller's, and piece; by rank.
    """
    size = None if pieces[0][2] is None else pieces[0][2][0]
    writers: dict[Numbers | None, int] = {}
    boxes: list[tuple[Numbers, Numbers]] = []
    surplus: list[tuple[int, int]] = []
    for rank, index, piece in pieces:
        # torch tells pieces apart by their offsets, too.
        if writers.setdefault(None if piece is None else piece[1], rank) != rank:
            surplus.append((rank, index))
        elif piece is not None:
            boxes.append(piece[1:])
    mixed = None in writers and len(writers) > 1
    if mixed or (size is not None and not covers_exactly(size, boxes)):
        ranks = ", ".join(map(str, list(writers.values())[:4])) + ", ..." * (len(writers) > 4)
        raise CheckpointError(
            f"The pieces of '{fqn}' that ranks {ranks} would write do not fit together: they "
            "overlap, leave a part out, or are a tensor on some ranks alone. No load could put it "
            "together. Give every rank of its mesh the same sharded tensor under this name"
        )
    chunks = [ChunkStorageMetadata(torch.Size(start), torch.Size(part)) for start, part in boxes]
    return _WrittenPieces(size, chunks, surplus)
