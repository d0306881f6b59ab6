"""Compares a step of rank 0 with the one that doctor predicted, for `verbose`."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from composer_fsdp2.config.schema import FORECAST
from composer_fsdp2.step.run import Run
from composer_fsdp2.text import size_text
from composer_fsdp2.trainer.monitor import Traffic, show

if TYPE_CHECKING:
    from composer_fsdp2.estimate.forecast import Forecast

__all__ = ["Comparison", "bytes_of"]

_ROWS = {
    "gathered_bytes": "all-gathers of units",
    "reduced_bytes": "reductions of units",
    "peak_allocated_bytes": "peak of the allocator",
}
_KINDS = {
    "all-gather": "gathered_bytes",
    "reduce-scatter": "reduced_bytes",
    "all-reduce": "reduced_bytes",
}
_AXES = {"dp_shard", "dp_replicate", "efsdp", "reshard"}
"""axes on which units are gathered and reduced"""


def bytes_of(found: Forecast) -> dict[str, Any] | None:
    """Returns those numbers of a forecast that a run can measure, and its notes.

    Returns:
        `None` for a model that could not be traced.
    """
    if found.kept is None:
        return None
    numbers: dict[str, Any] = {**dict.fromkeys(_ROWS, 0), "notes": found.notes}
    numbers["peak_allocated_bytes"] = found.peak_bytes
    for sent in found.sent:
        if sent.kind in _KINDS and sent.axis.name in _AXES:
            numbers[_KINDS[sent.kind]] += sent.size_bytes
    return numbers


class Comparison(Traffic):
    """Shows the second step as predicted and as measured.

    It is the first that a forecast describes: the optimizer has its state, units are prefetched,
    and those that have run once reduce as `gradient_sync` says.
    """

    @classmethod
    def wanted(cls, run: Run) -> bool:
        """Says whether `composer-fsdp2 train` left a forecast to this rank. Collective: no."""
        asked = run.settings.verbose and run.optimizer is not None and FORECAST in os.environ
        return asked and distributed.get_rank() == 0

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._predicted = json.loads(os.environ.pop(FORECAST))  # of this model alone
        self._earlier_peak = self._peak()
        self._steps, self._is_in_step = 0, False

    def begin_forward(self) -> None:
        """Counts from the first forward of a step; evaluation may come before it."""
        if torch.is_grad_enabled() and not self._is_in_step:
            self._is_in_step = True
            self.begin()

    def aborted(self) -> None:
        """Counts anew in the next attempt."""
        self._is_in_step = False

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Shows the table once. Collective: no."""
        # The step of a copy of the optimizer, which steps local shards, is heard as well.
        self._steps += self._is_in_step
        self._is_in_step = False
        if self._steps == 2:
            self.run.stop_listening(self)
            self._show()

    def _show(self) -> None:
        measured, peak = dict(self.counts), self._peak()
        if peak > self._earlier_peak:  # else loading took more than a step
            measured["peak_allocated_bytes"] = peak
        lines = ["FSDP2, the second step:      predicted    measured  difference"]
        for key, name in _ROWS.items():
            # A collective over one rank sends nothing, and is counted all the same.
            if (size := self._predicted[key]) and key in measured:
                more = measured[key] / size - 1
                cells = size_text(size), size_text(measured[key]), f"{more:+.1%}"
                lines.append(f"  {name:<24}" + "".join(f"{cell:>12}" for cell in cells))
        if lines[1:]:
            show("\n".join([*lines, *(f"note: {note}" for note in self._predicted["notes"])]))

    def _peak(self) -> int:
        device = self.run.device
        return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
