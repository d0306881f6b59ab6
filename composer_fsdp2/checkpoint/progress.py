"""The bytes that a save writes, piece by piece, for a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, WriteItem

__all__ = ["CountedPlanner", "bytes_of"]


def bytes_of(items: Iterable[WriteItem]) -> int:
    """Returns the size of the tensors that a plan writes."""
    total = 0
    for item in items:
        # Other values are pickled when they are written, and their size is not known before.
        if item.tensor_data is not None:
            dtype = item.tensor_data.properties.dtype
            total += item.tensor_data.chunk.sizes.numel() * dtype.itemsize
    return total


class CountedPlanner:
    """A planner that tells of every value it hands out; all else is the planner's own."""

    def __init__(self, planner: Any, plan: SavePlan, done: Callable[[int], object]) -> None:
        self._planner = planner
        self._sizes = {item.index: bytes_of([item]) for item in plan.items}
        self._done = done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Returns the value of an item, which is written next."""
        value = self._planner.resolve_data(write_item)
        self._done(self._sizes.get(write_item.index, 0))
        return value
