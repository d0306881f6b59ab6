"""The ranks that read the same batch as this one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

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


def batch_group_of(model: nn.Module) -> BatchGroup | None:
    """Returns the ranks that compute one batch together, `None` where each has its own."""
    found = (tensor_group_of(model), sequence_group_of(model))
    parts = tuple(part for part in found if part is not None)
    return BatchGroup(parts) if parts else None
