"""The ranks that read the same batch as this one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from composer_fsdp2.parallel.same_batch import check_same_batch, difference_term
from composer_fsdp2.parallel.sequence.group import SequenceGroup, sequence_group_of
from composer_fsdp2.parallel.tensor_group import TensorGroup, tensor_group_of

__all__ = ["BatchGroup", "batch_group_of"]


@dataclass(frozen=True, slots=True)
class BatchGroup:
    """A tensor group, a sequence group, or as many sequence groups as ranks divide a layer."""

    parts: tuple[TensorGroup | SequenceGroup, ...]

    @property
    def size(self) -> int:
        """Ranks that read the same batch, next to each other."""
        size = 1
        for part in self.parts:
            size *= part.size
        return size

    def begin(self) -> None:
        """Has the next batch compared: data and random states may be others. Collective: no."""
        for part in self.parts:
            part.begin()

    def difference_term(self, batch: Any) -> int:
        """Returns this rank's term of a sum that is zero where all groups read one batch each.

        Collective: no.
        """
        index, place = divmod(dist.get_rank(), self.size)
        return difference_term(batch, index, place, self.size)

    def raise_different(self, batch: Any) -> None:
        """Raises the error that names the ranks. Collective: yes, over the default group.

        Raises:
            PlanError: the same on every rank, if batches in any group differ.
        """
        for part in self.parts:
            check_same_batch(part.group, batch, part.why)


def batch_group_of(model: nn.Module) -> BatchGroup | None:
    """Returns the ranks that compute one batch together, `None` where each has its own."""
    found = (tensor_group_of(model), sequence_group_of(model))
    parts = tuple(part for part in found if part is not None)
    return BatchGroup(parts) if parts else None
