"""Compares memory and collectives of a run's first step with their prediction, for `verbose`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from composer_fsdp2.config.placement import OptimizerState
from composer_fsdp2.config.schema import FORECAST
from composer_fsdp2.estimate.blocks import copied_optimizer
from composer_fsdp2.estimate.forecast import Forecast
from composer_fsdp2.estimate.report import NAMES, size_text
from composer_fsdp2.estimate.trace import STATE, State
from composer_fsdp2.optim.muon.optimizer import Muon
from composer_fsdp2.parallel.expert.transformation import ExpertParallel
from composer_fsdp2.plan.module_tree import canonical_param_ids
from composer_fsdp2.step.run import Run
from composer_fsdp2.torch_private.fake import FakeTensorMode, Watch
from composer_fsdp2.trainer.monitor import Traffic
from composer_fsdp2.trainer.prepare_plan import PreparePlan

__all__ = ["Comparison", "first_step", "predicted_step"]

_PEAK, _RESUMED, _GATHERED, _REDUCED = "peak", "resumed", "gathered", "reduced"
_NAMES = {
    **{kind: NAMES[kind] for kind in STATE},
    _PEAK: "peak",
    _GATHERED: "all-gathers of units",
    _REDUCED: "reductions of units",
}
"""kinds of bytes, in the order of the table"""
_KINDS = {"all-gather": _GATHERED, "reduce-scatter": _REDUCED, "all-reduce": _REDUCED}
_AXES = {"dp_shard", "dp_replicate", "efsdp", "reshard"}
"""axes on which units are gathered and reduced"""


def first_step(found: Forecast) -> dict[str, Any]:
    """Returns bytes of the first step of a rank by kind, and notes, from a forecast of a later one.

    The first step makes the state of the optimizer, which is not there in forward and backward.
    """
    step: dict[str, Any] = {**found.held, "notes": list(found.notes)}
    if found.kept is not None:
        windows = [(window.label[0] in ("step", "end"), window.kinds) for window in found.windows]
        fresh = (
            sum(n for kind, n in w.items() if new or kind != "optimizer") for new, w in windows
        )
        step |= {_GATHERED: 0, _REDUCED: 0, _PEAK: max(fresh), _RESUMED: found.peak_bytes}
        for one in found.sent:
            if one.kind in _KINDS and one.axis.name in _AXES:
                step[_KINDS[one.kind]] += one.size_bytes
    return step


def predicted_step(plan: PreparePlan) -> dict[str, Any]:
    """Predicts the first step of this rank as `first_step`, before its model is sharded.

    Collective: no. `composer-fsdp2 train` gives the forecast of doctor. Without it, the optimizer
    of the run steps shards of zeros on fake tensors, if all are cut out by FSDP.
    """
    if (text := os.environ.pop(FORECAST, None)) is not None:
        return json.loads(text)
    optimizer: Any = plan.optimizer
    is_divided = plan.shape.tensor > 1 or plan.plan_of(ExpertParallel) is not None
    is_kept = plan.settings.optimizer_state != OptimizerState()
    step = {"notes": ["`composer-fsdp2 train RUN.yaml`, and `plan`, predict a whole step"]}
    if is_divided or is_kept or isinstance(optimizer, Muon):
        return step
    sharded = {name for unit in plan.units.units for name in unit.params}
    ranks = {id(ref.param): plan.shape.shard for ref in plan.tree.params if ref.name in sharded}
    first = canonical_param_ids(plan.tree.params)
    mode = FakeTensorMode()
    # Whatever the optimizer does with tensors that have no values.
    with contextlib.suppress(Exception), mode, Watch(lambda *_: None, mode) as watch:
        cut = {
            id(ref.param): nn.Parameter(
                torch.zeros(
                    *(-(-size // ranks.get(id(ref.param), 1)) for size in ref.param.shape[:1]),
                    *ref.param.shape[1:],
                    dtype=ref.param.dtype,
                ),
                requires_grad=ref.param.requires_grad,
            )
            for ref in plan.tree.params
        }
        new = {key: cut[same] for key, same in first.items()}
        state = State(nn.ParameterList(new.values()), copied_optimizer(optimizer, new), watch)
        return {**state.make(), **step}
    return step


class Comparison(Traffic):
    """Shows, when the first step is over, bytes of this rank beside those that were predicted.

    Args:
        run: of the model.
        optimizer: of the run.
        predicted: from `predicted_step`.
        show: is given the table.
    """

    def __init__(
        self,
        run: Run,
        optimizer: torch.optim.Optimizer,
        predicted: Mapping[str, Any],
        show: Callable[[str], None],
    ) -> None:
        super().__init__(run)
        # With `last`, units that have never run reduce in each microbatch.
        later = _KINDS.values() if run.settings.gradient_sync == "last" else ()
        self._predicted = {kind: size for kind, size in predicted.items() if kind not in later}
        self._optimizer, self._show = optimizer, show
        self._state = State(run.model, optimizer, Watch(lambda *_: None))
        self._before: int | None = None
        """the peak before the first step"""
        run.listen(self)
        # After the hook that gives the optimizer the state of its shards.
        optimizer.register_step_post_hook(self._end)

    def begin_forward(self) -> None:
        """Begins to count with the first forward that trains."""
        if torch.is_grad_enabled() and self._before is None:
            self._before = _peak_bytes(self.run.device) or 0
            if self._optimizer.state and _RESUMED in self._predicted:
                self._predicted[_PEAK] = self._predicted[_RESUMED]
            self.begin()

    def aborted(self) -> None:
        """Begins anew with the next attempt."""
        self._before = None

    def _end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # The step of a parent class, which a copy of the optimizer calls, comes here as well.
        if optimizer is self._optimizer and self in self.run.listeners:
            self.run.stop_listening(self)
            self._show("\n".join(self._lines()))

    def _lines(self) -> Iterator[str]:
        peak, predicted = _peak_bytes(self.run.device), self._predicted
        measured = {
            **self._state.bytes(),
            _GATHERED: self.counts["gathered_bytes"],
            _REDUCED: self.counts["reduced_bytes"],
            _PEAK: peak if peak is not None and peak > (self._before or 0) else None,
        }
        yield "FSDP2: the first step of rank 0, in bytes:"
        yield f"  {'':<20}{'predicted':>12}{'measured':>12}{'difference':>12}"
        for kind, name in _NAMES.items():
            pair = predicted.get(kind), measured[kind]
            if any(pair):
                cells = ["unknown" if size is None else size_text(size) for size in pair]
                if pair[0] is not None and pair[1] is not None:
                    more = pair[1] - pair[0]
                    cells.append(f"{'-+'[more > 0]}{size_text(abs(more))}" if more else "none")
                yield f"  {name:<20}" + "".join(f"{cell:>12}" for cell in cells)
        if peak is None:
            yield "note: the peak is not measured on the CPU"
        elif measured[_PEAK] is None:
            yield f"note: {size_text(peak)} were allocated before; the peak of the step is no more"
        yield from (f"note: {note}" for note in predicted["notes"])


def _peak_bytes(device: torch.device) -> int | None:
    """Returns the most that the allocator of a device has given out; `None` for the CPU's."""
    count = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return None if count is None else count(device)
