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

import datetime
import itertools
import weakref
import zlib
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.runtime.agreement import agreement_of, gloo_group
from composer_fsdp2.runtime.events import Event, UnitEvents
from composer_fsdp2.runtime.watchdog import CollectiveWatchdog, rank_text, timed_out, unit_text
from composer_fsdp2.shard.torch_private.units import backward_number

__all__ = ["OrderCheck", "apply_order_check", "check_order_check"]

_ERROR = "an error: "
_SHOWN = 4
"""collectives shown before the first difference"""
_KEPT = 4096
"""collectives of a batch kept for the text of an error"""
_CHECKSUM = 2**24

# One for all models: every gloo group has threads of its own, and lasts until the process ends.
_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)


def check_order_check(when: str) -> None:
    """Refuses what cannot take effect. Collective: no.

    Raises:
        ConfigError: this torch has no gloo.
    """
    if when != "never" and not dist.is_gloo_available():
        raise ConfigError(
            f"'order_check' is {when}, and this torch has no gloo. Ranks compare their collectives "
            "over a group that is not the training's. Write order_check: never, or install a torch "
            "with gloo."
        )


def apply_order_check(events: UnitEvents, when: str, device: torch.device) -> OrderCheck | None:
    """Has ranks compare their collectives, from the first forward of training on.

    Collective: yes, the first time in a process. In the steps that are checked the collectives of
    units raise PlanError on every rank.

    Args:
        events: of the model.
        when: in the `first` step (up to the forward after the first reduction), `always`, `never`.
        device: of the default group's collectives.

    Returns:
        What compares whole batches, or None where nothing is compared.
    """
    if when == "never" or events.watchdog is None:
        return None
    channel = _channel(events.watchdog.late_seconds, device)
    if channel is None:
        return None
    _Check(events, events.watchdog, channel, once=when == "first")
    return OrderCheck(events, channel)


def _channel(timeout_seconds: float, device: torch.device) -> dist.ProcessGroup | None:
    """The group for comparing, `None` with a warning where gloo does not get through."""
    world = dist.group.WORLD
    assert world is not None
    # A rank has no channel when the first model is prepared, and after a collective of it failed.
    if not agreement_of(device).any_rank(world not in _channels):
        return _channels[world]
    # A rank can only end when what it has sent is done, or late.
    timeout = datetime.timedelta(seconds=timeout_seconds)
    channel = gloo_group(
        timeout,
        device,
        "They do not compare the order of their collectives (order_check). Set GLOO_SOCKET_IFNAME "
        "to the interface they share, or write order_check: never.",
    )
    if channel is None:
        return None
    _channels[world] = channel
    return channel


def _reduce(numbers: torch.Tensor, operation: Any, channel: dist.ProcessGroup) -> None:
    try:
        dist.all_reduce(numbers, operation, channel)
    except RuntimeError:
        # Gloo raises the same error in every later collective of the group.
        _channels.clear()
        raise


class _Check:
    def __init__(
        self,
        events: UnitEvents,
        watchdog: CollectiveWatchdog,
        channel: dist.ProcessGroup,
        once: bool,
    ) -> None:
        self._lookout = watchdog
        self._channel = channel
        self._once = once
        self._start()
        events.listeners += (self._hear,)

    def _start(self) -> None:
        self._began = self._reduced = self._ended = False
        self._last: deque[str] = deque(maxlen=_SHOWN)

    def _hear(self, event: Event, name: str) -> None:
        if event == "aborted":
            # A rank that has left in the middle of a comparison may not know that it was the last.
            self._start()
        elif self._ended:
            return
        elif event == "begin":
            self._began = True
            self._compare("the next forward of training")
            self._ended = self._reduced and self._once
        elif self._began and event in ("gather", "reduce"):
            self._compare(f"{event} {unit_text(name)}")
            self._reduced = self._reduced or event == "reduce"
        elif self._began and event == "end":
            self._compare("the end of the first forward", shown=False)
        elif self._began and event == "error":
            self._compare(f"{_ERROR}{name}")

    def _compare(self, what: str, shown: bool = True) -> None:
        """Raises on every rank if this is not what all of them do next. Collective: yes."""
        code = zlib.crc32(what.encode())
        found = torch.tensor([code, -code])
        try:
            _reduce(found, dist.ReduceOp.MAX, self._channel)
        except RuntimeError as error:
            if not timed_out(error):
                raise  # a rank has ended
            raise PlanError(_missed(what, self._lookout)) from None
        if found[0] != -found[1]:
            everyone: list[list[str]] = [[]] * self._channel.size()
            dist.all_gather_object(everyone, [*self._last, what], group=self._channel)
            raise PlanError(_first_error(everyone) or _difference(everyone))
        if shown:
            self._last.append(what)


class OrderCheck:
    """Compares the collectives of whole batches of training, after the batch.

    Who sends `terms` with a collective of its own calls `check`; else the next forward does both.

    Args:
        events: of the model.
        channel: the group over which ranks tell each other what they ran.
    """

    def __init__(self, events: UnitEvents, channel: dist.ProcessGroup) -> None:
        self._channel = channel
        self._is_asked = self._began = False
        self._start()
        events.listeners += (self._hear,)

    def _start(self) -> None:
        self._checksum = self._count = 0
        self._last: deque[str] = deque(maxlen=_KEPT)

    def _hear(self, event: Event, name: str) -> None:
        if event == "aborted":  # each rank has left the batch at another place
            self._began = False
            self._start()
        elif event == "begin":
            if self._began and not self._is_asked:
                self._compare()
            self._began = True
        # Evaluations and generation, which may be a rank's own affair, run without gradients.
        # Autograd turns grad mode off in backward, so the mode alone would not tell them apart.
        training = torch.is_grad_enabled() or backward_number() != -1
        if event in ("gather", "reduce") and training:
            what = f"{event} {unit_text(name)}"
            self._checksum = zlib.crc32(what.encode(), self._checksum)
            self._count += 1
            self._last.append(what)

    def terms(self) -> tuple[int, int]:
        """Two numbers whose sums over the ranks `check` needs. Collective: no."""
        self._is_asked = True
        checksum = self._checksum % _CHECKSUM
        return checksum, checksum**2

    def _compare(self) -> None:
        checksum = self._checksum % _CHECKSUM
        sums = torch.tensor([checksum, checksum**2])
        _reduce(sums, dist.ReduceOp.SUM, self._channel)
        self.check(*sums.tolist())

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
        if total**2 == squares * self._channel.size():
            self._start()
            return
        everyone: list[tuple[int, list[str]]] = [(0, [])] * self._channel.size()
        mine = (self._count - len(self._last), list(self._last))
        dist.all_gather_object(everyone, mine, group=self._channel)
        self._start()
        raise PlanError(
            "The ranks ran different units in the last batch, and took each other's weights or "
            f"gradients for their own.{_first_difference(everyone)} The weights are wrong since "
            "that batch: resume from a checkpoint from before it. Have every rank run the same "
            "units in every step, or name modules that a rank may leave out in "
            "unused_parameters. `order_check: always` finds the difference before the collective."
        )


def _first_difference(everyone: Sequence[tuple[int, list[str]]]) -> str:
    """The first collective in which ranks differ, if all still know it."""
    start = max(skipped for skipped, _ in everyone)
    known = [last[start - skipped :] for skipped, last in everyone]
    for at in itertools.zip_longest(*known, fillvalue="nothing more"):
        if len(set(at)) > 1:
            ranks: dict[str, list[int]] = defaultdict(list)
            for rank, what in enumerate(at):
                ranks[what].append(rank)
            places = [f"{what} on {rank_text(which)}" for what, which in ranks.items()]
            return f" The first difference: {' and '.join(places[:_SHOWN])}."
    return ""


def _missed(what: str, watchdog: CollectiveWatchdog) -> str:
    return (
        f"{what} is next on this rank, and another rank did not come to it in "
        f"{watchdog.late_seconds:.0f} s. The ranks would wait until the process group gives up, "
        "and not learn for whom. Look at the rank that is at another place below: it may have "
        "another number of microbatches, or wait for data; if it is only slow, raise "
        "`dist_timeout`.\n" + watchdog.report()
    )


def _first_error(everyone: list[list[str]]) -> str | None:
    """Returns the reason why another rank could not go on; all ranks raise it."""
    errors = [(rank, last[-1]) for rank, last in enumerate(everyone) if last[-1].startswith(_ERROR)]
    return f"On rank {errors[0][0]}: {errors[0][1].removeprefix(_ERROR)}" if errors else None


def _difference(everyone: list[list[str]]) -> str:
    ranks: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, last in enumerate(everyone):
        ranks[tuple(last)].append(rank)
    (first, at_first), (other, at_other) = list(ranks.items())[:2]
    lines = [f"  {rank_text(which)}: {', '.join(last)}" for last, which in ranks.items()]
    return (
        f"The next collective is {first[-1]} on {rank_text(at_first)} and {other[-1]} on "
        f"{rank_text(at_other)}. The ranks would wait for each other until the process group gives "
        "up, or mix the weights of different units. Have every rank run the same modules in the "
        "same order. The last collectives of each:\n" + "\n".join(lines)
    )
