"""Ranks that would enter different collectives hear of it before they do.

[Note: order] Before every collective of a unit the ranks compare what comes next, over a group of
their own. Nobody has entered anything then, so all can raise the same error; and a rank that does
not come at all is missed long before the timeout of the collective it would have been missed in.
That is a small message per collective, in the first step only: afterwards the order is the same
where the step is. Data may choose another way through the model in a later step, and units of equal
shape then take each other's weights without a word. So each rank keeps a checksum of the
collectives of a batch, and the Trainer compares it when the ranks agree on having a next one. In a
loop of one's own it is compared when the next forward of training begins.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import re
import sys
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from composer_fsdp2.errors import PlanError
from composer_fsdp2.ranks import is_fake
from composer_fsdp2.step.agreement import Agreement, agreement_of, connected
from composer_fsdp2.step.run import Run, StepListener
from composer_fsdp2.torch_private.tensors import default_store, timeout_of
from composer_fsdp2.torch_private.units import backward_number

__all__ = [
    "CollectiveWatchdog",
    "OrderCheck",
    "Watchdog",
    "add_rank_report",
    "is_broken",
    "rank_text",
    "ranks_by",
    "timed_out",
    "unit_text",
    "watchdog_of",
]


# --- Says where every rank was when a collective timed out. ---
#
# [Note: stalls] A rank that waits in a collective cannot speak, and one that never comes to it
# does not know that it is waited for. So a thread of each rank looks every few seconds whether
# the rank has entered anything since. If not, it writes once, to the store at which the ranks
# met, what the last one was. There the ranks look that are told that time is out. NCCL does not
# tell, it ends the process: so the thread itself says it on stderr, shortly before.


Value = TypeVar("Value")

_TICK_SECONDS = 5.0
_LATE = 0.8
"""share of the timeout after which something is said; a rank may be slow in its first step"""
_SILENT = "has not told: it goes on, or has ended"
_TIMED_OUT = re.compile(r"tim(e|ed)[ -]?out", re.IGNORECASE)
_LOST = ("Connection closed by peer", "Connection reset by peer", "caused pair closure")
"""words of gloo about a rank that gave up, or that others gave up on"""


def timed_out(error: RuntimeError) -> bool:
    """Whether a collective raised it because another rank did not come in time."""
    return _TIMED_OUT.search(str(error)) is not None


def unit_text(name: str) -> str:
    """Names a unit in the text of an error."""
    return f"'{name}'" if name else "the root"


def is_broken(error: RuntimeError) -> bool:
    """Whether a collective raised it because ranks have lost each other, then or earlier."""
    return timed_out(error) or any(part in str(error) for part in _LOST)


class CollectiveWatchdog:
    """Keeps the last unit this rank entered, and tells the other ranks when it stays the last.

    Args:
        timeout_seconds: of the collectives.
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
            self._late, places = True, self._places()
            told = [rank for said, ranks in places.items() if said != _SILENT for rank in ranks]
            # One rank says it, and none where nobody can be waiting for a unit.
            if len(places) > 1 and min(told) == dist.get_rank():
                text = f"FSDP2: Nothing entered for {now - self._since:.0f} s. {_describe(places)}"
                print(text, file=sys.stderr, flush=True)

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
        """Returns the reports of the ranks, and which ranks gave them."""
        held, keys = default_store(), [_key(rank) for rank in range(dist.get_world_size())]
        # One request for all: asked key by key, a thousand ranks would send a million. Either
        # would wait for a key that is not there until the store's timeout.
        if held.check(keys):
            told = held.multi_get(keys)
        else:
            told = [held.get(key) if held.check([key]) else b"" for key in keys]
        return ranks_by(said.decode() or _SILENT for said in told)

    def tell(self, text: str) -> None:
        """Writes to the store where this rank is; nothing while it goes on. Collective: no."""
        self._told = text
        default_store().set(_key(dist.get_rank()), text)


def _key(rank: int) -> str:
    return f"composer_fsdp2/entered/{rank}"


def _look_again(held: weakref.ref[CollectiveWatchdog]) -> None:
    # A store that is gone takes the others with it.
    with contextlib.suppress(RuntimeError, ValueError):
        while threading.main_thread().is_alive() and (watchdog := held()) is not None:
            watchdog.look(time.monotonic())
            pause = watchdog.tick_seconds
            del watchdog  # it lives as long as its process group
            time.sleep(pause)


def _describe(places: dict[str, list[int]]) -> str:
    lines = [f"  {rank_text(ranks)}: {told}" for told, ranks in places.items()]
    if len(places) == 1:
        lines.append("Ranks wait outside of the model then: for data, a metric or a checkpoint.")
    return "\n".join(["The last unit each rank entered:", *lines])


def ranks_by(values: Iterable[Value]) -> dict[Value, list[int]]:
    """Returns the ranks that have each value; `values` has an item for each rank."""
    ranks: dict[Value, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def rank_text(ranks: Iterable[int]) -> str:
    """Numbers in ascending order, such as `ranks 0-3, 6`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    text = ", ".join("-".join(map(str, span)) for span in spans)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


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
        held = weakref.ref(watchdog)
        threading.Thread(target=_look_again, args=(held,), name="watchdog", daemon=True).start()
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


_ERROR = "an error: "
_SHOWN = 4
"""collectives shown before the first difference"""
_KEPT = 4096
"""collectives of a batch kept for the text of an error"""
_CHECKSUM = 2**24

# A channel for all models: every gloo group has threads of its own until the process ends.
_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, Agreement] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def _forgetting() -> Generator[None]:
    """Has another channel made after an error: gloo raises the same one ever after."""
    try:
        yield
    except RuntimeError:
        _channels.clear()
        raise


class OrderCheck(StepListener):
    """Compares the collectives of units between ranks; see [Note: order].

    Each collective of the first step, or of every step, is compared before it begins, and raises
    PlanError on every rank where they differ. The collectives of a whole batch are compared after
    it: whoever sends `terms` with a collective of its own calls `check`; else the next forward of
    training does both.
    """

    @classmethod
    def wanted(cls, run: Run) -> bool:
        """Says whether another rank could differ. Collective: yes, the first time in a process."""
        world: Any = dist.group.WORLD
        watchdog = watchdog_of(run.device)
        if run.settings.order_check == "never" or watchdog is None:
            return False
        # A rank has no channel when the first model is prepared, and after a collective of it
        # failed.
        if agreement_of(run.device).any_rank(world not in _channels):
            channel = connected(
                # A rank can only end when its messages have arrived, or are late.
                datetime.timedelta(seconds=watchdog.late_seconds),
                run.device,
                "They do not compare the order of their collectives (order_check). Set "
                "GLOO_SOCKET_IFNAME to the interface they share, or write order_check: never.",
            )
            if channel is None:
                return False
            _channels[world] = channel
        return True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        world: Any = dist.group.WORLD
        self._watchdog, self._channel = _watchdogs[world], _channels[world]
        self._names = {name: unit_text(name) for name in run.units}
        self._once = run.settings.order_check == "first"
        self._is_asked = False
        self._start_batch()
        self._start_step()

    def _start_step(self) -> None:
        """Compares the collectives of the next step one by one."""
        self._began = self._reduced = self._ended = False
        self._shown: deque[str] = deque(maxlen=_SHOWN)
        """the last collectives, for the text of an error"""

    def _start_batch(self) -> None:
        self._checksum = self._count = 0
        self._last: deque[str] = deque(maxlen=_KEPT)

    def begin_forward(self) -> None:
        """Compares that ranks begin another forward of training. Collective: yes."""
        if not torch.is_grad_enabled():
            return
        is_next, self._began = self._began, True
        if not self._ended:
            self._compare("the next forward of training")
            self._ended = self._reduced and self._once
        if is_next and not self._is_asked:
            with _forgetting():
                total, squares = self._channel.total(self._terms())
            self.check(total, squares)

    def before_gather(self, unit: str, group: Any) -> None:
        """Collective: yes, in a step that is checked."""
        self._note(f"gather {self._names[unit]}")

    def before_reduce(self, unit: str, group: Any) -> None:
        """Collective: yes, in a step that is checked."""
        self._note(f"reduce {self._names[unit]}")
        self._reduced = True

    def before_agreement(self, subject: str) -> None:
        """Collective: yes, in a step that is checked."""
        if self._began and not self._ended:
            self._compare(subject, shown=False)

    def failed(self, error: str) -> None:
        """Has all ranks raise the error of a rank. Collective: yes, in a step that is checked."""
        if self._began and not self._ended:
            self._compare(f"{_ERROR}{error}")

    def aborted(self) -> None:
        """Starts anew: each rank has left the batch at another place. Collective: no."""
        self._start_batch()
        # A rank that has left in the middle of a comparison may not know that it was the last.
        self._start_step()

    def _note(self, collective: str) -> None:
        # Evaluations and generation, which may be a rank's own affair, run without gradients.
        # Autograd turns grad mode off in backward, so the mode alone would not tell them apart.
        if torch.is_grad_enabled() or backward_number() != -1:
            self._checksum = zlib.crc32(collective.encode(), self._checksum)
            self._count += 1
            self._last.append(collective)
        if self._began and not self._ended:
            self._compare(collective)

    def _compare(self, subject: str, shown: bool = True) -> None:
        """Raises on every rank if this is not next on all of them. Collective: yes."""
        code = zlib.crc32(subject.encode())
        try:
            with _forgetting():
                least, most = self._channel.min_max(code)
        except RuntimeError as error:
            if not timed_out(error):
                raise  # a rank has ended
            raise PlanError(
                f"{subject} is next on this rank, and another rank did not come to it in "
                f"{self._watchdog.late_seconds:.0f} s. The ranks would wait until the process "
                "group gives up, and not learn for whom. Look at the rank that is at another place "
                "below: it may have another number of microbatches, or wait for data; if it is "
                "only slow, raise `dist_timeout`.\n" + self._watchdog.report()
            ) from None
        if least != most:
            everyone: list[list[str]] = self._channel.of_all([*self._shown, subject])
            for rank, last in enumerate(everyone):
                if last[-1].startswith(_ERROR):
                    # That rank could not go on; all ranks raise its error.
                    raise PlanError(f"On rank {rank}: {last[-1].removeprefix(_ERROR)}")
            ranks = ranks_by(map(tuple, everyone))
            (first, at_first), (other, at_other) = list(ranks.items())[:2]
            lines = [f"  {rank_text(which)}: {', '.join(last)}" for last, which in ranks.items()]
            raise PlanError(
                f"The next collective is {first[-1]} on {rank_text(at_first)} and {other[-1]} on "
                f"{rank_text(at_other)}. The ranks would wait for each other until the process "
                "group gives up, or mix the weights of different units. Have every rank run the "
                "same modules in the same order. The last collectives of each:\n" + "\n".join(lines)
            )
        if shown:
            self._shown.append(subject)

    def terms(self) -> tuple[int, int]:
        """Returns two numbers whose sums over the ranks `check` needs. Collective: no."""
        self._is_asked = True
        return self._terms()

    def _terms(self) -> tuple[int, int]:
        checksum = self._checksum % _CHECKSUM
        return checksum, checksum**2

    def check(self, total: int, squares: int) -> None:
        """Raises on every rank if the ranks ran different units since the last call.

        Collective: yes, when they did.

        Args:
            total: the sum over the ranks of the first of their `terms`.
            squares: of the second.

        Raises:
            PlanError: on every rank, with the first difference.
        """
        # Only equal numbers have a mean square that is the square of their mean.
        if total**2 == squares * dist.get_world_size():
            self._start_batch()
            return
        mine = (self._count - len(self._last), list(self._last))
        everyone: list[tuple[int, list[str]]] = self._channel.of_all(mine)
        self._start_batch()
        raise PlanError(
            "The ranks ran different units in the last batch, and took each other's weights or "
            f"gradients for their own.{_first_difference(everyone)} The weights are wrong since "
            "that batch: resume from a checkpoint from before it. Have every rank run the same "
            "units in every step, or name modules that a rank may leave out in "
            "unused_parameters. `order_check: always` finds the difference before the collective."
        )


class Watchdog(StepListener):
    """Notes which unit this rank enters, for the `CollectiveWatchdog` of the process."""

    @classmethod
    def wanted(cls, run: Run) -> bool:
        """Says whether another rank could wait."""
        return watchdog_of(run.device) is not None

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._watchdog = _watchdogs[dist.group.WORLD]  # pyright: ignore[reportArgumentType]
        self._microbatch = 0

    def begin_forward(self) -> None:
        """Collective: no."""
        self._microbatch += torch.is_grad_enabled()

    def before_gather(self, unit: str, group: Any) -> None:
        """Collective: no."""
        self._watchdog.entered = ("gather", unit, self._microbatch)

    def before_reduce(self, unit: str, group: Any) -> None:
        """Collective: no."""
        self._watchdog.entered = ("reduce", unit, self._microbatch)


def _first_difference(everyone: Sequence[tuple[int, list[str]]]) -> str:
    """Names the first collective in which ranks differ, if all still know it."""
    start = max(skipped for skipped, _ in everyone)
    known = [last[start - skipped :] for skipped, last in everyone]
    for at in itertools.zip_longest(*known, fillvalue="nothing more"):
        if len(set(at)) > 1:
            places = [f"{what} on {rank_text(which)}" for what, which in ranks_by(at).items()]
            return f" The first difference: {' and '.join(places[:_SHOWN])}."
    return ""
