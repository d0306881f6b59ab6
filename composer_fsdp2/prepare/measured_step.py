"""Measures what units communicate and hold, and shows a step beside the one that was predicted."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import Counter
from typing import Any

import torch
from composer.utils import dist

from composer_fsdp2.config.schema import FORECAST
from composer_fsdp2.optim.state import kept_storages
from composer_fsdp2.parallel.form import form_of
from composer_fsdp2.step.run import Run, StepListener
from composer_fsdp2.text import size_text
from composer_fsdp2.torch_private.units import (
    all_reduces,
    gather_bytes,
    holds_gathered,
    reduction_bytes,
    shards_of,
)

__all__ = ["MONITOR", "StepComparison", "Traffic", "show"]

MONITOR = "fsdp2_monitor"
"""the monitor in LLM Foundry's registry of callbacks"""

log = logging.getLogger(__name__)


class Traffic(StepListener):
    """Counts the collectives of units, just before torch starts them."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.counts: Counter[str] = Counter()
        self._gathered: dict[Any, int] = {}

    def begin(self) -> None:
        """Sets counts to zero; units that are gathered now count in the peak."""
        self.counts.clear()
        self._note_peak()

    def before_gather(self, unit: str, group: Any) -> None:
        """Counts an all-gather. Collective: no."""
        self._gathered[group] = gather_bytes(group)
        self.counts.update(collectives=1, gathered_bytes=self._gathered[group])
        self._note_peak(group)

    def before_reduce(self, unit: str, group: Any) -> None:
        """Counts a reduce-scatter, and an all-reduce over replicas. Collective: no."""
        shape, part = self.run.shape, reduction_bytes(group)
        self.counts.update(collectives=1, reduced_bytes=part * shards_of(group))
        if (shape.replicate or 1) > 1 and all_reduces(group):
            self.counts.update(collectives=1, reduced_bytes=part)

    def _note_peak(self, coming: Any = None) -> None:
        """Updates the peak of gathered units, `coming` included."""
        gathered = self._gathered.items()
        self._gathered = {g: n for g, n in gathered if g is coming or holds_gathered(g)}
        self.counts["peak_unsharded_bytes"] = max(
            self.counts["peak_unsharded_bytes"], sum(self._gathered.values())
        )


def show(text: str) -> None:
    """Shows a text that the user asked for, also where logging is not set up."""
    if log.isEnabledFor(logging.INFO):
        log.info(text)
    else:
        print(text, file=sys.stderr, flush=True)


_ROWS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "gathered_bytes": "all-gathers of units",
    "reduced_bytes": "reductions of units",
    "peak_allocated_bytes": "peak of the allocator",
}


class StepComparison(Traffic):
    """Shows the second step as predicted and as measured.

    The second step is the first that a forecast describes: the optimizer has its state, units are
    prefetched, and units that have run once reduce as `gradient_sync` says.
    """

    @classmethod
    def wanted(cls, run: Run) -> bool:
        """Says whether `composer-fsdp2 train` left a forecast to this rank. Collective: no."""
        is_predicted = run.settings.verbose and len(run.optimizers) == 1 and FORECAST in os.environ
        return is_predicted and dist.get_global_rank() == 0

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._predicted = json.loads(os.environ.pop(FORECAST))  # of this model alone
        self._params = [param for param in run.model.parameters() if not form_of(param).is_remote]
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
        if self._steps != 2:
            return
        self.run.stop_listening(self)
        # The optimizer itself has all state, whichever copy has stepped.
        stay = kept_storages(self._params, self.run.optimizers[0])
        storages = {storage.data_ptr(): (kind, storage.nbytes()) for kind, storage in stay}
        measured, peak = Counter(self.counts), self._peak()
        for kind, size in storages.values():
            measured[kind] += size
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
