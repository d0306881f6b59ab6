"""How much memory a piece of work takes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


class Peak:
    """The highest anonymous memory seen by a thread, above that at the start."""

    def __init__(self) -> None:
        self.above = 0
        self._base = anonymous_bytes()
        self._done = threading.Event()

    def _sample(self) -> None:
        while not self._done.wait(0.001):
            self.above = max(self.above, anonymous_bytes() - self._base)

    @classmethod
    @contextlib.contextmanager
    def watched(cls) -> Iterator[Peak]:
        peak = cls()
        thread = threading.Thread(target=peak._sample)
        thread.start()
        try:
            yield peak
        finally:
            peak._done.set()
            thread.join()
