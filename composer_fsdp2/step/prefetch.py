"""Gathers units before they are needed, in the order in which they really run.

[Note: recorded order] The order of registration is not that of running: a decoder may be
registered before its encoder, and backward follows autograd. So the first forward and backward
of training are watched with torch's own prefetching, the ranks compare what they saw, and from
then on each unit starts the gathers of those that come next. Evaluation is left alone: it may
call a part of the model, and a gather nobody waits for would be used later, with weights that
are old by then.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from composer_fsdp2.ranks import raise_on_all_ranks
from composer_fsdp2.step.run import Run, StepListener

__all__ = ["Prefetch"]


class Prefetch(StepListener):
    """Has units gather the units that run next, once a step of training has shown the order.

    The second forward of training is a collective over the default group, and raises PlanError on
    every rank when the units ran in another order on some rank.
    """

    @classmethod
    def wanted(cls, run: Run) -> bool:
        """Says whether a setting asks for units to be gathered ahead."""
        settings = run.settings
        return bool(settings.forward_prefetch) or settings.backward_prefetch is not None

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._units = {name: run.units[name] for name in run.groups}
        self._counts = run.settings.forward_prefetch or 0, run.settings.backward_prefetch or 0
        """how many units ahead in forward and in backward"""
        if run.settings.backward_prefetch == 0:
            for unit in self._units.values():
                # Torch gathers by its own order where the list is empty. The unit itself is
                # gathered already.
                unit.set_modules_to_backward_prefetch([unit])
        self._running = False
        self._ran: list[str] = []
        self._came_back: list[str] = []
        self._order: list[str] | None = None
        self._ahead: dict[str, list[str]] = {}
        self._ahead_in_backward: dict[str, list[str]] = {}
        self._warned = False

    def begin_forward(self) -> None:
        """Sets which units gather which. Collective: yes, the second time in training."""
        self._running = torch.is_grad_enabled()
        if not self._running:
            return
        if self._order is None and self._ran and any(self._counts):
            # Now, not at the end of backward: a backward may be left, or come in several parts.
            raise_on_all_ranks(
                {
                    "order of units in forward": "\n".join(self._ran),
                    "order of units in backward": "\n".join(self._came_back),
                }
            )
            if self._came_back:  # else a forward for its own sake; the next may be of training
                self._order = self._ran
                forward, backward = self._counts
                times = Counter(self._ran)
                self._ahead = _units_ahead(list(times), forward, times)
                self._ahead_in_backward = _units_ahead(self._came_back, backward, times)
                for name, targets in self._ahead_in_backward.items():
                    modules = [self._units[target] for target in targets]
                    # One that is given nothing here prefetches by torch's own order, as before.
                    self._units[name].set_modules_to_backward_prefetch(modules)
        self._ran, self._came_back = [], []
        self._set_forward(self._ahead)

    def before_forward(self, unit: str, group: Any) -> None:
        """Records the order of forward. Collective: no."""
        # Newer torch has several groups in one unit, and calls this for each of them.
        if self._running and group is self.run.groups[unit][0]:
            self._ran.append(unit)

    def before_backward(self, unit: str, group: Any) -> None:
        """Records the order of backward. Collective: no."""
        # Torch comes here once for each output of the unit, and again in a recomputed block.
        if unit not in self._came_back:
            self._came_back.append(unit)

    def aborted(self) -> None:
        """Starts anew: each rank has left the step at another place, and may know no order yet."""
        self._running, self._ran, self._came_back = False, [], []
        self._set_forward(dict.fromkeys(self._ahead, ()))
        for name in self._ahead_in_backward:
            self._units[name].set_modules_to_backward_prefetch([])
        self._order, self._ahead, self._ahead_in_backward = None, {}, {}

    def end_forward(self) -> None:
        """Ends the prefetching of this forward. Collective: no, unless a unit did not run."""
        if not self._running:
            return
        self._running = False
        # Torch keeps these lists, and would prefetch by them in an evaluation as well.
        self._set_forward(dict.fromkeys(self._ahead, ()))
        if self._order is None:
            return
        # Drops gathers that were started for units which did not run after all. Torch would take
        # such a gather for that of the next forward, after the optimizer's step.
        # https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py#L252
        started = {target for name in self._ran for target in self._ahead.get(name, ())}
        for name in sorted(started.difference(self._ran)):
            self._units[name].unshard()  # waits for what is on its way
            self._units[name].reshard()
        if self._ran != self._order and not self._warned:
            self._warned = True
            pairs = enumerate(itertools.zip_longest(self._order, self._ran, fillvalue=None))
            position, names = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
            was, now = ("none" if name is None else f"'{name}'" for name in names)
            warnings.warn(
                f"FSDP units ran in another order than in the first step: {now} in place "
                f"{position} where {was} was. forward_prefetch and backward_prefetch keep "
                "the first order, and gather units too early or for nothing. Leave them out if the "
                "order changes often.",
                stacklevel=2,
            )

    def _set_forward(self, ahead: Mapping[str, Sequence[str]]) -> None:
        for name, targets in ahead.items():
            modules = [self._units[target] for target in targets]
            self._units[name].set_modules_to_forward_prefetch(modules)


def _units_ahead(order: list[str], count: int, times: Mapping[str, int]) -> dict[str, list[str]]:
    """Returns the units whose gather each unit starts.

    One that runs several times starts nothing: it would gather again what has long been used.
    """
    numbered = enumerate(order, 1) if count else ()
    return {name: order[after : after + count] for after, name in numbered if times[name] == 1}
