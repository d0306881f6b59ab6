"""Has ranks leave a step together, from wherever they are in it.

[Note: leaving together] A rank whose allocation fails stands somewhere between two collectives, and
the others enter the next one and wait there. So every collective of the training is counted, per
group, while a `JointExit` is `watching`. The rank that failed says so in the store at which the
ranks met. A thread of each rank that makes no progress looks there, stops its rank from entering
more, and writes how many it has entered. The most that any rank has entered is what all have to
enter: whoever is short of it joins the rest with zeros, which frees those that wait; the results
are thrown away with the step. Then all ranks have entered the same, nobody is inside, and they can
speak to each other again. It is the same whatever the collective is, and costs a healthy run one
count per collective and three small reductions per batch.

A batch of training or evaluation can be tried again: it is an `attempt`, which no rank begins or
leaves before all have come to its beginning or its end. Elsewhere, as in a callback between two
batches, nothing can be tried again, and leaving together is an error on every rank.
"""

from __future__ import annotations

import pickle
import threading
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from composer_fsdp2.guards.leaving.out_of_memory import is_out_of_memory
from composer_fsdp2.guards.watchdog import CollectiveWatchdog, watchdog_of
from composer_fsdp2.step.agreement import agreement_of
from composer_fsdp2.text import rank_text
from composer_fsdp2.torch_private.collectives import (
    Collective,
    Joined,
    around_collectives,
    group_named,
    join,
)
from composer_fsdp2.torch_private.tensors import default_store
from composer_fsdp2.torch_private.units import backward_number

__all__ = ["JointExit", "joint_exit_of", "seconds_between_looks"]

_SHORT_SECONDS, _LONG_SECONDS = 0.005, 1.0
"""between two looks into the store, while nothing is entered: the longer, the longer it lasts"""
_REQUESTS = 2000
"""looks of all ranks in a second, of some 12,000 requests that the store answers"""


class _AbandonedError(RuntimeError):
    """Says that another rank has run out of memory, and this rank enters nothing more."""


class _ToldEveryoneError(RuntimeError):
    """Says something that all ranks raise."""


@dataclass(eq=False)
class _Round:
    """Holds the state between two times that all ranks leave together."""

    number: int
    frozen: bool = False
    """whether this rank has told its number of entered collectives"""
    entered: dict[str, int] = field(default_factory=lambda: defaultdict[str, int](int))
    """how many collectives, by the name of the group"""
    records: dict[str, list[Joined]] = field(
        default_factory=lambda: defaultdict[str, list[Joined]](list)
    )
    """the last collectives of each group, which other ranks may have to join"""
    wanted: dict[str, int] = field(default_factory=dict[str, int])
    """the most that any rank has entered, once all have told"""
    agreed: threading.Event = field(default_factory=threading.Event)

    def key(self, suffix: str) -> str:
        """Returns a name in the store."""
        return f"composer_fsdp2/leaving/{self.number}/{suffix}"


class JointExit:
    """Counts collectives, and brings all ranks out of them; see [Note: leaving together].

    Args:
        device: of the default group's collectives.
        watchdog: knows how long a rank may be late.
    """

    def __init__(self, device: torch.device, watchdog: CollectiveWatchdog) -> None:
        self._device = device
        self._late_seconds = watchdog.late_seconds
        self._lock = threading.Lock()
        self._inside = threading.local()
        self._owner = 0
        self._watching = False
        self.attempting = False
        """whether an attempt has begun and not ended"""
        self._total = 0
        self._now = _Round(0)
        self._wake = threading.Event()

    # --- Counting. ---

    @contextmanager
    def watching(self) -> Generator[None]:
        """Goes around everything in which ranks may have to leave together.

        Collective: yes, at the end.

        Raises:
            RuntimeError: on every rank, when memory ran out where nothing can be tried again.
        """
        if self._watching:
            yield
            return
        self.attempting, self._owner = False, threading.get_ident()
        self._watching = True
        look = threading.Thread(target=self._look, name="joint exit", daemon=True)
        look.start()
        try:
            with around_collectives(self._around):
                try:
                    yield
                    self.meet()  # nobody goes where others cannot reach it
                except Exception as error:
                    self.attempting = False
                    text = self._reason(error)
                    if text is None:
                        raise
                    raise self._end(text) from error
        finally:
            self._watching = False
            self._wake.set()
            look.join()

    def _around(self, collective: Collective) -> Any:
        # Other threads, such as those that save, have groups and an order of their own. Autograd
        # runs the backward of a GPU in threads of its own, with the hooks of units.
        trains = threading.get_ident() == self._owner or backward_number() != -1
        if getattr(self._inside, "depth", 0) or not trains:
            return collective()
        # The name of a group is the same on all its ranks.
        name, record = collective.group.group_name, collective.described()
        with self._lock:
            now = self._now
            if now.frozen:
                raise _AbandonedError
            now.entered[name] += 1
            now.records[name].append(record)
            self._total += 1
        self._inside.depth = 1
        try:
            result = collective()
        except BaseException:
            with self._lock:  # not entered after all
                now.entered[name] -= 1
                if not now.frozen:  # else the others have been told that it was, and may ask for it
                    now.records[name].pop()
            raise
        finally:
            self._inside.depth = 0
        if now.frozen and collective.given.get("async_op") is not True:
            raise _AbandonedError  # the result may be of the zeros of a rank that has left
        return result

    # --- Attempts. ---

    def begin(self) -> None:
        """Begins an attempt, once all ranks have reached it. Collective: yes."""
        self.attempting = True
        with self.attempt():
            self.meet()

    def end(self) -> None:
        """Ends the attempt on every rank, or on none. Collective: yes."""
        if self.attempting:
            self.meet()
            self.attempting = False

    def meet(self) -> None:
        """Waits for all ranks; none is short of anything after that. Collective: yes."""
        agreement_of(self._device).any_rank(False)
        with self._lock:
            if self._now.frozen:
                raise _AbandonedError
            for records in self._now.records.values():
                records.clear()  # all ranks have entered these

    @contextmanager
    def attempt(self, let_go: Callable[[], object] | None = None) -> Generator[None]:
        """Runs a part of an attempt: all ranks leave the part when memory runs out on one.

        Collective: yes, when it does.

        Args:
            let_go: is called before the rank joins the others, to free what the attempt computed.

        Raises:
            torch.OutOfMemoryError: on every rank, when memory ran out on one in this attempt.
            RuntimeError: on every rank, when it ran out where nothing can be tried again.
        """
        try:
            yield
            return
        except Exception as error:
            text = self._reason(error) if self.attempting else None
            if text is None:
                raise
            traceback.clear_frames(error.__traceback__)  # which hold what was allocated
            if error.__traceback__ is not None:
                # Since Python 3.12 this frame leads back to the error, and both would stay.
                error.__traceback__ = error.__traceback__.tb_next
            if let_go is not None:
                let_go()
        raise self._end(text)

    def _reason(self, error: Exception) -> str | None:
        """Returns the reason for this rank to leave with the others; `None`: it stays."""
        if isinstance(error, _ToldEveryoneError) or "microbatch of size 1" in str(error):
            return None
        if isinstance(error, _AbandonedError) or not is_out_of_memory(error):
            return "" if self._now.frozen else None
        return str(error).strip() or type(error).__name__

    # --- Leaving. ---

    def _end(self, text: str) -> RuntimeError:
        """Leaves with all other ranks; returns the error that each rank raises. Collective: yes."""
        now = self._now
        if text:
            default_store().set(now.key("failed"), "1")
        self._freeze(now)
        if self._device.type != "cpu":
            torch.get_device_module(self._device).empty_cache()
        if not now.agreed.wait(self._late_seconds):
            raise _ToldEveryoneError(
                "Memory ran out on a rank, and not all ranks have answered that since: one has "
                "ended, or is outside of the training. Resume from the last checkpoint with a "
                "smaller device_train_microbatch_size."
            )
        self._inside.depth = 1
        try:
            self._join_the_rest(now)
            everyone: list[tuple[str, bool]] = [("", True)] * dist.get_world_size()
            dist.all_gather_object(everyone, (text, self.attempting))
        finally:
            self._inside.depth = 0
        with self._lock:
            self.attempting, self._now = False, _Round(now.number + 1)
        failed = {rank: said for rank, (said, _) in enumerate(everyone) if said}
        why = f"{rank_text(failed)}: {next(iter(failed.values()), '')}"
        if all(attempting for _, attempting in everyone):
            return torch.OutOfMemoryError(f"CUDA out of memory on {why}")
        return _ToldEveryoneError(
            f"Memory ran out where nothing can be tried again, on {why}\nA smaller microbatch is "
            "tried by itself in the forward, backward and step of a batch alone, and this was "
            "beside them: in a callback, an algorithm, a metric or a checkpoint. Resume from the "
            "last checkpoint and use less memory there, or write a smaller number for "
            "device_train_microbatch_size to leave more for it."
        )

    def _freeze(self, now: _Round) -> None:
        """Tells how much this rank has entered; from now on that is all. Collective: no."""
        with self._lock:
            if now.frozen:
                return
            now.frozen = True
            told = pickle.dumps(dict(now.entered))
        self._total += 1
        store, ranks = default_store(), range(dist.get_world_size())
        store.set(now.key(f"entered/{dist.get_rank()}"), told)
        # The last to tell sums up, and the others ask for one key instead of one of each rank.
        if store.add(now.key("told"), 1) == len(ranks):
            everyone = store.multi_get([now.key(f"entered/{rank}") for rank in ranks])
            # For each group the most that a rank has entered, and such a rank.
            most: dict[str, tuple[int, int]] = {}
            for rank, entered in enumerate(map(pickle.loads, everyone)):
                for name, count in entered.items():
                    most[name] = max(most.get(name, (0, 0)), (count, rank))
            store.set(now.key("wanted"), pickle.dumps(most))
        self._wake.set()

    def _join_the_rest(self, now: _Round) -> None:
        """Enters the collectives that other ranks have entered. Collective: yes.

        Each group has its own order and, as some collectives return only when they are over, its
        own thread: a rank that waits in one group comes to the next one late.
        """
        rest: list[tuple[list[Joined], dist.ProcessGroup]] = []
        for name, total in now.wanted.items():
            missing, group = total - now.entered.get(name, 0), group_named(name)
            if missing and group is not None:
                records: list[Joined] = pickle.loads(default_store().get(now.key(f"held/{name}")))
                rest.append((records[len(records) - missing :], group))

        def join_all(owed: tuple[list[Joined], dist.ProcessGroup]) -> None:
            if self._device.type != "cpu":
                # Each thread has a current device of its own, in a new thread the first one.
                torch.get_device_module(self._device).set_device(self._device)
            join(*owed)

        with ThreadPoolExecutor(max(1, len(rest)), "joint exit") as pool:
            list(pool.map(join_all, rest))

    # --- The thread that looks. ---

    def _look(self) -> None:
        shortest, longest = seconds_between_looks(dist.get_world_size())
        seen, pause = -1, shortest
        # A store that is gone takes the others with it.
        with suppress(RuntimeError, ValueError):
            while self._watching:
                self._wake.wait(pause)
                self._wake.clear()
                now = self._now  # a look is at one round, whatever the rank does meanwhile
                if now.frozen:
                    pause = shortest
                    _agree(now, self._lock)
                elif seen != self._total:
                    seen, pause = self._total, shortest
                else:
                    pause = min(1.3 * pause, longest)
                    # `get` would wait for the key until the store's timeout.
                    if default_store().check([now.key("failed")]):
                        self._freeze(now)


def seconds_between_looks(ranks: int) -> tuple[float, float]:
    """Returns how long a rank waits at least and at most between two looks into the store.

    All ranks wait when one of them is late, and then all of them look.
    """
    least = ranks / _REQUESTS
    return max(_SHORT_SECONDS, least), max(_LONG_SECONDS, least)


def _agree(now: _Round, lock: threading.Lock) -> None:
    """Finds out how much every rank has to enter, when all have told. Collective: no."""
    if now.agreed.is_set() or not default_store().check([now.key("wanted")]):
        return
    most: dict[str, tuple[int, int]] = pickle.loads(default_store().get(now.key("wanted")))
    for name, (count, rank) in most.items():
        now.wanted[name] = count
        if rank == dist.get_rank():
            with lock:
                records = pickle.dumps(now.records[name])
            default_store().set(now.key(f"held/{name}"), records)
    now.agreed.set()


_exits: weakref.WeakKeyDictionary[dist.ProcessGroup, JointExit] = weakref.WeakKeyDictionary()


def joint_exit_of(device: torch.device) -> JointExit | None:
    """Returns the exit of this process, `None` where no other rank could wait. Collective: no."""
    world: Any = dist.group.WORLD
    watchdog = watchdog_of(device)
    if watchdog is None:
        return None
    if world not in _exits:
        _exits[world] = JointExit(device, watchdog)
    return _exits[world]
