"""Says where every rank was when a collective timed out.

[Note: stalls] A rank that waits in a collective cannot speak, and one that never comes to it
does not know that it is waited for. So a thread of each rank looks every few seconds whether
the rank has entered anything since. If not, it writes once, to the store at which the ranks
met, what the last one was. There the ranks look that are told that time is out. NCCL does not
tell, it ends the process: so the thread itself says it on stderr, shortly before.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import sys
import threading
import time
import weakref
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from composer_fsdp2.ranks import is_fake
from composer_fsdp2.text import rank_text, ranks_by, unit_text
from composer_fsdp2.torch_private.tensors import default_store, timeout_of

__all__ = ["CollectiveWatchdog", "add_rank_report", "is_broken", "timed_out", "watchdog_of"]

_TICK_SECONDS = 5.0


_LATE = 0.8
"""share of the timeout after which something is said; a rank may be slow in its first step"""


_SILENT = "has not told: it goes on, or has ended"


_MANY_RANKS = 64
"""from which one rank asks for the reports of all: a request for as many keys as there are ranks
from each of them is the square of their number"""
_FRESH_SECONDS, _LOOKS = 10.0, 20
"""how long a rank takes what another one has found, and waits for it; and how often it looks"""
_PLACES = "composer_fsdp2/places"
"""key of what the last rank has found that asked for all"""


_TIMED_OUT = re.compile(r"tim(e|ed)[ -]?out", re.IGNORECASE)


_LOST = ("Connection closed by peer", "Connection reset by peer", "caused pair closure")
"""words of gloo about a rank that closed its connections"""


def timed_out(error: RuntimeError) -> bool:
    """Whether a collective raised the error because another rank did not come in time."""
    return _TIMED_OUT.search(str(error)) is not None


def is_broken(error: RuntimeError) -> bool:
    """Whether a collective raised the error because a connection is lost."""
    return timed_out(error) or any(part in str(error) for part in _LOST)


class CollectiveWatchdog:
    """Keeps the last unit this rank entered, and tells the other ranks when none follows.

    Args:
        timeout_seconds: after which the backend ends a collective.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.entered: tuple[str, str, int] | None = None
        """event, unit and number of the forward of training"""
        self.late_seconds = _LATE * timeout_seconds
        """after which a rank that does not come is missed"""
        self.tick_seconds = min(_TICK_SECONDS, timeout_seconds / 20)
        self._seen: object = self  # nothing that can be entered
        self._since = 0.0
        self._told, self._late = "", False

    def look(self, now: float) -> None:
        """Tells the other ranks, once, if this rank has entered nothing lately. Collective: no."""
        if self.entered is not self._seen:
            self._seen, self._since, self._late = self.entered, now, False
            if self._told:
                self.tell("")
        elif not self._told:
            self.tell(self._text())
        elif not self._late and now - self._since > self.late_seconds:
            self._late, ranks_by_text = True, self._places()
            told = [
                rank for said, ranks in ranks_by_text.items() if said != _SILENT for rank in ranks
            ]
            # One rank says it, and none where nobody can be waiting for a unit.
            if len(ranks_by_text) > 1 and min(told) == dist.get_rank():
                waited = f"FSDP2: Nothing entered for {now - self._since:.0f} s."
                print(waited, _describe(ranks_by_text), file=sys.stderr, flush=True)

    def report(self) -> str:
        """Names the last unit each rank entered, as far as ranks have told. Collective: no."""
        self.tell(self._text())
        return _describe(self._places())

    def _text(self) -> str:
        if self.entered is None:
            return "no unit yet"
        event, name, microbatch = self.entered
        return f"{event} {unit_text(name)} in microbatch {microbatch}"

    def _places(self) -> dict[str, list[int]]:
        """Returns the reports of the ranks, and which ranks gave them.

        With many ranks one asks for the reports of all, and the others for what it has found.
        """
        if dist.get_world_size() < _MANY_RANKS:
            return _all_places()
        store, now, number = default_store(), time.time(), 0
        if store.check([_PLACES]):
            number, found_at, ranks_by_text = pickle.loads(store.get(_PLACES))
            if abs(now - found_at) < _FRESH_SECONDS:
                return ranks_by_text
        number += 1
        if store.add(f"{_PLACES}/{number}", 1) > 1:
            for _ in range(_LOOKS):  # unless the first has ended meanwhile
                time.sleep(_FRESH_SECONDS / _LOOKS)
                if store.check([_PLACES]):
                    new_number, _, ranks_by_text = pickle.loads(store.get(_PLACES))
                    if new_number >= number:
                        return ranks_by_text
        ranks_by_text = _all_places()
        store.set(_PLACES, pickle.dumps((number, time.time(), ranks_by_text)))
        return ranks_by_text

    def tell(self, text: str) -> None:
        """Writes the position of this rank to the store, "" once it goes on. Collective: no."""
        self._told = text
        default_store().set(_key(dist.get_rank()), text)


def _all_places() -> dict[str, list[int]]:
    store, keys = default_store(), [_key(rank) for rank in range(dist.get_world_size())]
    # One request for all: asked key by key, a thousand ranks would send a million. Either
    # would wait for a key that is not there until the store's timeout.
    if store.check(keys):
        told = store.multi_get(keys)
    else:
        told = [store.get(key) if store.check([key]) else b"" for key in keys]
    return ranks_by(said.decode() or _SILENT for said in told)


def _key(rank: int) -> str:
    return f"composer_fsdp2/entered/{rank}"


def _look_again(watchdog_ref: weakref.ref[CollectiveWatchdog]) -> None:
    # A store that is gone takes the others with it.
    with contextlib.suppress(RuntimeError, ValueError):
        while threading.main_thread().is_alive() and (watchdog := watchdog_ref()) is not None:
            watchdog.look(time.monotonic())
            pause = watchdog.tick_seconds
            del watchdog  # it lives as long as its process group
            time.sleep(pause)


def _describe(ranks_by_text: dict[str, list[int]]) -> str:
    lines = [f"  {rank_text(ranks)}: {told}" for told, ranks in ranks_by_text.items()]
    if len(ranks_by_text) == 1:
        lines.append("Ranks wait outside of the model then: for data, a metric or a checkpoint.")
    return "\n".join(["The last unit each rank entered:", *lines])


_watchdogs: weakref.WeakKeyDictionary[dist.ProcessGroup, CollectiveWatchdog] = (
    weakref.WeakKeyDictionary()
)


def watchdog_of(device: torch.device) -> CollectiveWatchdog | None:
    """Returns the watchdog of this process: a rank is at one place, whatever models it has.

    `None` where no other rank could wait. Collective: no.
    """
    world: Any = dist.group.WORLD
    if world.size() == 1 or is_fake(world):
        return None
    if world not in _watchdogs:
        timeout = timeout_of(world, device) or default_pg_timeout
        watchdog = _watchdogs[world] = CollectiveWatchdog(timeout.total_seconds())
        watchdog.tell("")  # so that all keys are there when a rank reads them
        # Looks every few seconds, as long as the process group is there.
        watchdog_ref = weakref.ref(watchdog)
        threading.Thread(
            target=_look_again, args=(watchdog_ref,), name="watchdog", daemon=True
        ).start()
    return _watchdogs[world]


@contextlib.contextmanager
def add_rank_report() -> Generator[None]:
    """Adds to the error of a collective that timed out where every rank was. Collective: no."""
    try:
        yield
    except RuntimeError as error:
        world = dist.group.WORLD if dist.is_initialized() else None
        watchdog = None if world is None else _watchdogs.get(world)
        if watchdog is not None and timed_out(error):
            with contextlib.suppress(RuntimeError):  # of a store that is gone
                error.args = (f"{error}\n{watchdog.report()}",)
        raise
