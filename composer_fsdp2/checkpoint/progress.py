"""A progress bar for reading and writing that takes seconds: on rank 0, and on a terminal alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

from torch import distributed as dist
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from tqdm import tqdm

__all__ = ["CountedPlanner", "bytes_of", "counting_bytes"]

_DELAY_SECONDS = 2.0
"""what is done sooner has no bar"""


@contextmanager
def counting_bytes(title: str, total_bytes: int) -> Generator[Callable[[int], object]]:
    """Shows how far a rank is, with its speed and the time left, on standard error.

    The bar is of rank 0's own part; it comes after two seconds and goes when the part is done. In a
    log file or a pipe it would be a line for every step, so there nothing is shown, nor is anything
    from a thread in the background.

    Collective: no.

    Args:
        title: what is done, for example "Loading checkpoint".
        total_bytes: of this rank's part.

    Yields:
        A function that takes the bytes done since the last call.
    """
    if not _is_seen():
        yield lambda done: None
        return
    with tqdm(
        desc=title,
        total=total_bytes,
        unit="B",
        unit_scale=True,
        delay=_DELAY_SECONDS,
        leave=False,
        file=sys.stderr,
    ) as bar:
        yield bar.update


def _is_seen() -> bool:
    rank = dist.get_rank() if dist.is_initialized() else 0
    in_front = threading.current_thread() is threading.main_thread()
    return rank == 0 and in_front and sys.stderr.isatty()


def bytes_of(items: Iterable[WriteItem]) -> int:
    """Returns the size of the tensors that a plan writes."""
    total = 0
    for item in items:
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
