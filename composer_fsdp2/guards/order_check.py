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
import weakref
import zlib
from collections import deque
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist

from composer_fsdp2.errors import PlanError
from composer_fsdp2.guards.watchdog import timed_out, watchdog_of
from composer_fsdp2.step.agreement import Agreement, agreement_of, connected
from composer_fsdp2.step.run import Run, StepListener
from composer_fsdp2.text import rank_text, ranks_by, unit_text
from composer_fsdp2.torch_private.units import backward_number

__all__ = ["OrderCheck", "Watchdog"]


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
    """Has a new channel made after an error: gloo would raise the same error ever after."""
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
        self._watchdog: Any = watchdog_of(run.device)  # `wanted` has asked for it
        self._channel = _channels[world]
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
        """Raises on every rank if ranks differ in their next collective. Collective: yes."""
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
            squares: the sum over the ranks of the second.

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
        start = max(skipped for skipped, _ in everyone)
        common = [last[start - skipped :] for skipped, last in everyone]
        columns = itertools.zip_longest(*common, fillvalue="nothing more")
        # The first collective in which ranks differ, if all ranks still record it.
        first = next((at for at in columns if len(set(at)) > 1), ())
        calls = [f"{call} on {rank_text(which)}" for call, which in ranks_by(first).items()]
        shown = f" The first difference: {' and '.join(calls[:_SHOWN])}." if calls else ""
        raise PlanError(
            "The ranks ran different units in the last batch, and took each other's weights or "
            f"gradients for their own.{shown} The weights are wrong since "
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
        self._watchdog: Any = watchdog_of(run.device)  # `wanted` has asked for it
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
