"""Telling watchers of FSDP's collectives and waits, which replaces nothing FSDP does."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Generator
from typing import Any, Protocol

import torch

__all__ = ["Watcher", "watching"]

# The newer names are torch's since it renamed them; FSDP calls those its torch has.
_COLLECTIVES = (
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)
_CALLERS = ("torch.distributed.fsdp.", "composer_fsdp2.shard.averaging")
"""modules that reduce and gather for FSDP2; the second one averages where a backend cannot"""


class Watcher(Protocol):
    """Is told what FSDP does."""

    def collective(self, name: str, nbytes: int) -> None:
        """A collective starts; `nbytes` are those of its larger tensor."""
        ...

    def waited(self, before: Any, after: Any) -> None:
        """The computing stream waits for one between these two CUDA events."""
        ...


_watchers: list[Watcher] = []
_watched: list[tuple[Any, str, Any]] = []
"""owner, name and original of everything that tells the watchers"""


@contextlib.contextmanager
def watching(watcher: Watcher) -> Generator[None]:
    """Tells a watcher of FSDP's collectives and waits for the duration of a block.

    Collective: no. Every call goes on to the original with its arguments as they are, so there is
    no fingerprint to compare.
    """
    if not _watchers:
        _watch()
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)
        if not _watchers:
            while _watched:
                setattr(*_watched.pop())


def _watch() -> None:
    for name in _COLLECTIVES:
        if hasattr(torch.distributed, name):
            # FSDP looks a function up in this module each time that it calls it.
            original = getattr(torch.distributed, name)
            _watched.append((torch.distributed, name, original))
            setattr(torch.distributed, name, _told_of_collectives(name, original))
    if torch.cuda.is_available():
        original = torch.cuda.Stream.wait_event
        _watched.append((torch.cuda.Stream, "wait_event", original))
        torch.cuda.Stream.wait_event = _told_of_waits(original)


def _told_of_collectives(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        # FSDP always names its group; others who reduce from the same modules do not.
        if "group" in kwargs and _calls_for_fsdp():
            tensors = (
                value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)
            )
            nbytes = max(tensor.nbytes for tensor in tensors)
            for watcher in _watchers:
                watcher.collective(name, nbytes)
        return original(*args, **kwargs)

    return call


def _told_of_waits(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def call(stream: Any, event: Any) -> None:
        # FSDP's own streams wait for each other as well, which stops no computation.
        if not _calls_for_fsdp() or stream != torch.cuda.current_stream(stream.device):
            original(stream, event)
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        original(stream, event)
        after.record(stream)
        for watcher in _watchers:
            watcher.waited(before, after)

    return call


def _calls_for_fsdp() -> bool:
    """Whether the caller of the calling function is FSDP."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith(_CALLERS)
