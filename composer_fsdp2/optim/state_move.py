"""State between CPU memory and the device: the next bucket travels while one is stepped.

[Note: double buffers] Two streams of their own carry state there and back, so that the copies of
one bucket overlap with the step of another. At most three buckets are on the device: the one that
is stepped, the one that comes next, and the one that goes back. The host waits for the last of
these before it sends for another, because it would run ahead and take memory for all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

import torch

__all__ = ["Traffic"]

B = TypeVar("B")
S = TypeVar("S")


class Traffic:
    """State that is where the parameters are: nothing travels. Collective: no."""

    @staticmethod
    def of(device: torch.device, on_cpu: bool) -> Traffic:
        """Moves state that is kept in CPU memory or not to parameters of a device."""
        return StreamTraffic(device) if on_cpu and device.type == "cuda" else Traffic()

    def fetched(self, buckets: Sequence[B], fetch: Callable[[B], S]) -> Iterator[tuple[B, S]]:
        """Yields each bucket with its state; its step comes before the next is asked for."""
        for bucket in buckets:
            yield bucket, fetch(bucket)

    @contextlib.contextmanager
    def sending(self, _state: Any) -> Generator[None]:
        """Around keeping what a step has left of a bucket's state."""
        yield

    def finish(self) -> None:
        """Called after the last bucket."""


class StreamTraffic(Traffic):
    """See [Note: double buffers]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._there: Any = torch.cuda.Stream(device)
        self._back: Any = torch.cuda.Stream(device)
        self._sent: list[Any] = []

    @property
    def _current(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def fetched(self, buckets: Sequence[B], fetch: Callable[[B], S]) -> Iterator[tuple[B, S]]:
        """Yields each bucket when its state is there, and has sent for the one after it."""
        current = self._current
        self._there.wait_stream(current)

        def sent_for(bucket: B) -> tuple[S, Any]:
            with torch.cuda.stream(self._there):
                state = fetch(bucket)
            event = torch.cuda.Event()
            event.record(self._there)
            return state, event

        coming = sent_for(buckets[0]) if buckets else None
        for number, bucket in enumerate(buckets):
            assert coming is not None
            (state, event), coming = coming, None
            if number + 1 < len(buckets):
                if self._sent:
                    self._sent.pop().synchronize()
                coming = sent_for(buckets[number + 1])
            current.wait_event(event)
            _used_by(current, state)
            yield bucket, state
            del state

    @contextlib.contextmanager
    def sending(self, state: Any) -> Generator[None]:
        """Around keeping: what is kept goes back on a stream of its own."""
        self._back.wait_stream(self._current)
        with torch.cuda.stream(self._back):
            yield
        _used_by(self._back, state)
        event = torch.cuda.Event()
        event.record(self._back)
        self._sent = [event]

    def finish(self) -> None:
        """Has whatever reads state from now on wait for what has been sent."""
        self._sent = []
        self._current.wait_stream(self._back)


def _used_by(stream: Any, state: Any) -> None:
    """Memory that another stream has taken is not given away before this one has used it."""
    if isinstance(state, torch.Tensor):
        if state.device.type == "cuda":
            state.record_stream(stream)
    elif isinstance(state, dict):
        for value in state.values():
            _used_by(stream, value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            _used_by(stream, value)
