"""Saves outlier statistics of LLM Foundry's adaptive Lions as JSON in a checkpoint.

For each parameter these optimizers keep an object, which nobody collects from a sharded optimizer
and no checkpoint can hold without executing code, and lists that grow, while torch loads as many
values as a fresh optimizer has.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from composer_fsdp2.step.run import Run, StepListener

__all__ = ["ADAPTIVE_LIONS", "LionTrackerFix", "lion_as_text", "save_lions_as_text"]

ADAPTIVE_LIONS = frozenset({"DecoupledAdaLRLion", "DecoupledClipLion"})
_AS_TEXT = frozenset({"grad_tracker", "moment_tracker", "outlier_timestamp"})


def save_lions_as_text(optimizers: Iterable[Any]) -> None:
    """Has adaptive Lions save their statistics as text, and load it. Collective: no."""
    for optimizer in optimizers:
        if type(optimizer).__name__ in ADAPTIVE_LIONS:
            optimizer.register_state_dict_post_hook(lambda _, saved: lion_as_text(saved))  # pyright: ignore[reportUnknownLambdaType]
            optimizer.register_load_state_dict_pre_hook(_with_objects)


class LionTrackerFix(StepListener):
    """Gives the trackers the method that `clip_lion` calls at an outlier, under its new name.

    Source: llm-foundry 0.22, optim/adaptive_lion.py line 399 and optim/outlier_detection.py. A
    tracker that the coming step makes has seen too little for an outlier in it.
    """

    @classmethod
    def wanted(cls, run: Run) -> bool:
        """Says whether an optimizer of the run is an adaptive Lion."""
        return any(type(optimizer).__name__ in ADAPTIVE_LIONS for optimizer in run.optimizers)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Renames the method of trackers that earlier steps, or a checkpoint, have made."""
        for state in optimizer.state.values():
            tracker = state.get("grad_tracker")
            if tracker is not None and not hasattr(tracker, "get_slow_mva"):
                tracker.get_slow_mva = tracker.get_delayed_mva


def lion_as_text(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of a state dict with statistics as text; text stays as it is."""

    def parts(tracker: Any) -> dict[str, Any]:
        recent, delayed = tracker.intermediate_data_queue, tracker.delayed_moving_average
        return {
            "threshold": tracker.threshold,
            "delay": recent.maxlen,
            "recent": list(recent),
            "delayed": list(delayed),
        }

    def change(value: Any) -> Any:
        return value if isinstance(value, str) else json.dumps(value, default=parts)

    return _changed(state_dict, change)


def _with_objects(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    detector = sys.modules[type(optimizer).__module__].OutlierDetector

    def tracker(parts: dict[str, Any]) -> Any:
        averages = detector(parts["threshold"], parts["delay"])
        averages.intermediate_data_queue.extend(parts["recent"])
        averages.delayed_moving_average.extend(parts["delayed"])
        return averages

    def change(value: Any) -> Any:
        return json.loads(value, object_hook=tracker) if isinstance(value, str) else value

    return _changed(state_dict, change)


def _changed(state_dict: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns a copy with other statistics: the state in a state dict is the optimizer's own."""
    states = {
        param: {key: change(value) if key in _AS_TEXT else value for key, value in state.items()}
        for param, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}
