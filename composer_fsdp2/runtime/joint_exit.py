"""Leaving a step together, from wherever the ranks are in it.

[Note: leaving together] A rank whose allocation fails stands somewhere between two collectives, and
the others enter the next one and wait there. So every collective of the training is counted, per
group, while a `JointExit` is `watching`. The rank that failed says so in the store at which the
ranks met. A thread of each rank that makes no progress looks there, stops its rank from entering
more, and writes how many it has entered. The most that any rank has entered is what all have to
enter: whoever is short of it joins the rest with zeros, which frees those that wait; the results
are thrown away with the step. Then all ranks have entered the same, nobody is inside, and they can
speak to each other again. It is the same whatever the collective is, and costs a healthy run one
count per collective and one small reduction per batch.

A batch of training or evaluation can be tried again: it is an `attempt`, which no rank leaves
before all have come to its end. Elsewhere, as in a callback between two batches, nothing can be
tried again, and leaving together is an error on every rank.
"""

from __future__ import annotations

import pickle
import threading
import traceback
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from composer_fsdp2.runtime.oom import is_out_of_memory
from composer_fsdp2.runtime.watchdog import CollectiveWatchdog, rank_text, store, watchdog_of
from composer_fsdp2.shard.torch_private.collectives import (
    Collective,
    Joined,
    around_collectives,
    group_named,
    join,
)
from composer_fsdp2.shard.torch_private.units import backward_number

__all__ = ["JointExit", "joint_exit_of"]

_SHORT_SECONDS, _LONG_SECONDS = 0.005, 1.0
"""between two looks into the store, while nothing is entered: the longer, the longer it lasts"""


class _AbandonedError(RuntimeError):
    """Another rank has run out of memory: this one enters nothing more."""


class _ToldEveryoneError(RuntimeError):
    """All ranks raise it."""


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
        self._watching = self._attempting = False
        self._total = 0
        self._round = 0
        """how often all ranks have left together"""
        self._start()

    def _start(self) -> None:
        self._frozen = False
        self._entered: dict[str, int] = {}
        self._records: dict[str, list[Joined]] = {}
        self._owed: list[tuple[str, Joined]] = []
        """counted, and not entered after all"""
        self._wanted: dict[str, int] | None = None
        self._sound: dict[str, int] = {}
        """in how many nobody who had failed took part"""
        self._agreed = threading.Event()
        self._wake = threading.Event()

    # --- Counting. ---

    @contextmanager
    def watching(self) -> Generator[None]:
        """Around everything in which ranks may have to leave together.

        Collective: yes, at the end.

        Raises:
            RuntimeError: on every rank, when memory ran out where nothing can be tried again.
        """
        if self._watching:
            yield
            return
        self._start()
        self._attempting, self._owner = False, threading.get_ident()
        self._watching = True
        stop = threading.Event()
        look = threading.Thread(target=self._look, args=(stop,), name="joint exit", daemon=True)
        look.start()
        try:
            with around_collectives(self._around):
                try:
                    yield
                    self.meet()  # nobody goes where others cannot reach it
                except Exception as error:
                    self._attempting = False
                    text = self._reason(error)
                    if text is None:
                        raise
                    raise self._end(text) from error
        finally:
            self._watching = False
            stop.set()
            self._wake.set()
            look.join()

    def _around(self, collective: Collective) -> Any:
        if getattr(self._inside, "depth", 0) or not self._is_training():
            return collective()
        self._enter(collective)
        self._inside.depth = 1
        try:
            result = collective()
        except BaseException:
            self._take_back(collective)
            raise
        finally:
            self._inside.depth = 0
        if self._frozen and not collective.returns_early:
            self._check(collective.name)
        return result

    def _is_training(self) -> bool:
        """Other threads, such as those that save, have groups and an order of their own."""
        return threading.get_ident() == self._owner or backward_number() != -1

    def _enter(self, collective: Collective) -> None:
        """Counts, unless this rank is to leave."""
        while True:
            with self._lock:
                if not self._frozen or self._is_wanted(collective.name):
                    self._count(collective)
                    return
                if self._attempting or self._wanted is not None:
                    raise _AbandonedError
            # Others may wait in what comes before their attempt, with results that count.
            self._wait_for_all()

    def _is_wanted(self, name: str) -> bool:
        if self._attempting or self._wanted is None:
            return False
        return self._entered.get(name, 0) < self._wanted.get(name, 0)

    def _count(self, collective: Collective) -> None:
        name = collective.name
        self._entered[name] = self._entered.get(name, 0) + 1
        self._records.setdefault(name, []).append(collective.described())
        self._total += 1

    def _take_back(self, collective: Collective) -> None:
        """It was not entered, and perhaps the others have been told that it was."""
        with self._lock:
            described = self._records[collective.name][-1]
            if self._frozen:
                self._owed.append((collective.name, described))
            else:
                self._records[collective.name].pop()
                self._entered[collective.name] -= 1

    def _check(self, name: str) -> None:
        """Raises if what was received may be the zeros of a rank that has left."""
        if not self._attempting:
            self._wait_for_all()
        if self._attempting or self._entered[name] > self._sound.get(name, self._entered[name]):
            raise _AbandonedError

    # --- Attempts. ---

    @property
    def attempting(self) -> bool:
        """Whether an attempt has begun and not ended."""
        return self._attempting

    def begin(self) -> None:
        """An attempt begins. Collective: no."""
        self._attempting = True

    def end(self) -> None:
        """The attempt ends on every rank, or on none. Collective: yes."""
        if self._attempting:
            self.meet()
            self._attempting = False

    def meet(self) -> None:
        """Waits for all ranks; none is short of anything after that. Collective: yes."""
        flag = torch.zeros(1, dtype=torch.uint8, device=self._device)
        dist.all_reduce(flag)
        flag.item()  # waits
        with self._lock:
            if self._frozen:
                raise _AbandonedError
            for held in self._records.values():
                held.clear()  # all ranks have entered these

    @contextmanager
    def attempt(self) -> Generator[None]:
        """Around a part of an attempt: all ranks leave it when memory runs out on one.

        Collective: yes, when it does.

        Raises:
            torch.OutOfMemoryError: on every rank, when memory ran out on one in this attempt.
            RuntimeError: on every rank, when it ran out where nothing can be tried again.
        """
        try:
            yield
            return
        except Exception as error:
            text = self._reason(error) if self._attempting else None
            if text is None:
                raise
            traceback.clear_frames(error.__traceback__)  # which hold what was allocated
        raise self._end(text)

    def _reason(self, error: Exception) -> str | None:
        """Why this rank has to leave with the others; `None` if it has not."""
        if isinstance(error, _ToldEveryoneError) or "microbatch of size 1" in str(error):
            return None
        if isinstance(error, _AbandonedError) or not is_out_of_memory(error):
            return "" if self._frozen else None
        return str(error).strip() or type(error).__name__

    # --- Leaving. ---

    def _end(self, text: str) -> RuntimeError:
        """Leaves with all others; returns what each of them raises. Collective: yes."""
        if text:
            store().set(self._key("failed"), "1")
        self._freeze(failed=bool(text))
        if self._device.type != "cpu":
            torch.get_device_module(self._device).empty_cache()
        self._wait_for_all()
        self._inside.depth = 1
        try:
            self._join_the_rest()
            everyone: list[tuple[str, bool]] = [("", True)] * dist.get_world_size()
            dist.all_gather_object(everyone, (text, self._attempting))
        finally:
            self._inside.depth = 0
        with self._lock:
            self._round += 1
            self._attempting = False
            self._start()
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

    def _wait_for_all(self) -> None:
        if not self._agreed.wait(self._late_seconds):
            raise _ToldEveryoneError(
                "Memory ran out on a rank, and not all ranks have answered that since: one has "
                "ended, or is outside of the training. Resume from the last checkpoint with a "
                "smaller device_train_microbatch_size."
            )

    def _freeze(self, failed: bool) -> None:
        """Tells how much this rank has entered; from now on that is all. Collective: no."""
        with self._lock:
            if self._frozen:
                return
            self._frozen = True
            entered = dict(self._entered)
        self._total += 1
        told = pickle.dumps((entered, failed))
        store().set(self._key(f"entered/{dist.get_rank()}"), told)
        self._wake.set()

    def _join_the_rest(self) -> None:
        """Enters what others have entered. Collective: yes."""
        waits: list[Callable[[], object]] = []
        for name, described in self._owed:
            waits.append(self._join(name, described))
        for name, wanted in (self._wanted or {}).items():
            missing = wanted - self._entered.get(name, 0)
            if missing and (group := group_named(name)) is not None:
                held: list[Joined] = pickle.loads(store().get(self._key(f"held/{name}")))
                waits += [join(one, group) for one in held[len(held) - missing :]]
        for wait in waits:
            wait()

    def _join(self, name: str, described: Joined) -> Callable[[], object]:
        group = group_named(name)
        return int if group is None else join(described, group)

    def _key(self, what: str) -> str:
        return f"composer_fsdp2/leaving/{self._round}/{what}"

    # --- The thread that looks. ---

    def _look(self, stop: threading.Event) -> None:
        seen, pause = -1, _SHORT_SECONDS
        # A store that is gone takes the others with it.
        with suppress(RuntimeError, ValueError):
            while not stop.is_set():
                self._wake.wait(pause)
                self._wake.clear()
                if seen != self._total:
                    seen, pause = self._total, _SHORT_SECONDS
                elif not self._frozen:
                    pause = min(1.3 * pause, _LONG_SECONDS)
                if self._frozen:
                    pause = _SHORT_SECONDS
                    self._agree()
                elif pause > _SHORT_SECONDS and store().check([self._key("failed")]):
                    self._freeze(failed=False)

    def _agree(self) -> None:
        """Finds out how much every rank has to enter, when all have told."""
        keys = [self._key(f"entered/{rank}") for rank in range(dist.get_world_size())]
        if self._agreed.is_set() or not all(store().check([key]) for key in keys):
            return
        told: list[tuple[dict[str, int], bool]] = [pickle.loads(store().get(key)) for key in keys]
        wanted: dict[str, int] = {}
        sound: dict[str, int] = {}
        for entered, failed in told:
            for name, count in entered.items():
                wanted[name] = max(count, wanted.get(name, 0))
                if failed:
                    sound[name] = min(count, sound.get(name, count))
        for name, count in wanted.items():
            first = next(
                rank for rank, (entered, _) in enumerate(told) if entered.get(name) == count
            )
            if first == dist.get_rank():
                with self._lock:
                    held = self._records[name][: self._told_records(name, count)]
                store().set(self._key(f"held/{name}"), pickle.dumps(held))
        with self._lock:
            self._wanted, self._sound = wanted, sound
        self._agreed.set()

    def _told_records(self, name: str, count: int) -> int:
        """How many of the records are of what was told; nothing was entered since."""
        return len(self._records[name]) - (self._entered[name] - count)


_exits: weakref.WeakKeyDictionary[dist.ProcessGroup, JointExit] = weakref.WeakKeyDictionary()


def joint_exit_of(device: torch.device) -> JointExit | None:
    """The one of this process, `None` where no other rank could wait. Collective: no."""
    world: Any = dist.group.WORLD
    watchdog = watchdog_of(device)
    if watchdog is None:
        return None
    if world not in _exits:
        _exits[world] = JointExit(device, watchdog)
    return _exits[world]
