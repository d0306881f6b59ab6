"""Plans of a save for ranks that are not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

PROPERTIES = TensorProperties.create_from_tensor(torch.empty(0))


@dataclass
class Shard:
    """A piece of a tensor, in a state dict in place of a DTensor."""

    size: Sequence[int]
    offsets: Sequence[int]
    sizes: Sequence[int]
    kind: WriteItemType = WriteItemType.SHARD

    def __create_write_items__(self, fqn: str, _value: Any) -> list[WriteItem]:
        """The method that DTensor has for torch's planner."""
        offsets = torch.Size(self.offsets)
        chunk = ChunkStorageMetadata(offsets, torch.Size(self.sizes))
        data = TensorWriteData(chunk, PROPERTIES, torch.Size(self.size))
        return [WriteItem(MetadataIndex(fqn, offsets), self.kind, tensor_data=data)]


def rows_of(size: Sequence[int], rank: int, ranks: int) -> Shard:
    """The rows that FSDP2 gives a rank; torch writes an empty piece at the end of the tensor."""
    step = -(-size[0] // ranks)
    start = min(rank * step, size[0])
    height = min(step, size[0] - start)
    return Shard(size, (start, *[0] * (len(size) - 1)), (height, *size[1:]))


def local_plan(planner: DefaultSavePlanner, state_dict: Mapping[str, Any], rank: int) -> SavePlan:
    """Plans what a rank could write, as `torch.distributed.checkpoint.save` does."""
    planner.set_up_planner(dict(state_dict), is_coordinator=rank == 0)
    return planner.create_local_plan()


def plan_save(
    planners: Sequence[DefaultSavePlanner], state_dicts: Sequence[Mapping[str, Any]]
) -> tuple[list[list[WriteItem]], Metadata]:
    """Plans a save of all ranks; returns what each rank writes, and the metadata."""
    plans = [
        local_plan(planner, values, rank)
        for rank, (planner, values) in enumerate(zip(planners, state_dicts, strict=True))
    ]
    plans, metadata = planners[0].create_global_plan(plans)
    finished = [planner.finish_plan(plan) for planner, plan in zip(planners, plans, strict=True)]
    return [plan.items for plan in finished], metadata
