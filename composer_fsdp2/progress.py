"""Shows a progress bar on rank 0 where reading or writing takes seconds, on a terminal alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from torch import distributed as dist
from tqdm import tqdm

__all__ = ["counting_bytes"]

_DELAY_SECONDS = 2.0
"""a task that ends sooner has no bar"""


@contextmanager
def counting_bytes(title: str, total_bytes: int) -> Generator[Callable[[int], object]]:
    """Shows how far a rank is, with its speed and the time left, on standard error.

    The bar is rank 0's; it comes after two seconds and goes when all is done. In a log file or a
    pipe it would be a line for every step, so there nothing is shown, nor is anything from a thread
    in the background.

    Collective: no.

    Args:
        title: what is done, for example "Loading checkpoint".
        total_bytes: of this rank's part, or of the whole that all ranks do at the same time.

    Yields:
        A function that takes the bytes done since the last call.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    in_front = threading.current_thread() is threading.main_thread()
    with tqdm(
        desc=title,
        total=total_bytes,
        unit="B",
        unit_scale=True,
        delay=_DELAY_SECONDS,
        leave=False,
        disable=rank > 0 or not in_front or not sys.stderr.isatty(),
        file=sys.stderr,
    ) as bar:
        yield bar.update
