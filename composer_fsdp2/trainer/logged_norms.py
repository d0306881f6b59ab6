"""Norms that Composer's `OptimizerMonitor` logs of a sharded model, in one reduction."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from composer_fsdp2.optim.norms import Groups, groups_of, local_part, whole_metrics
from composer_fsdp2.trainer.load_steps import plain_name

__all__ = ["GRADIENT", "logged_norms"]

GRADIENT = "l2_norm/grad"
_NORM = "l2_norm/"
_HOMES = ("composer.optim.", "llmfoundry.optim.")
"""Optimizers from here report norms under names that begin with `l2_norm/`, and nothing else of
which a shard would have a part."""


def logged_norms(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, reported: bool
) -> dict[str, Any]:
    """Numbers of every trained parameter that has a gradient on some rank, under plain names.

    Collective: yes, one for each mesh. A rank without a gradient takes part with zeros: the others
    may have one, and wait for its part.

    Args:
        model: sharded.
        optimizer: the one that may report more than the norm of the gradient.
        reported: whether to ask the optimizer.
    """
    found, names = _Found(optimizer, reported), dict[str, list[str]]()
    for given_name, param in model.named_parameters():
        if param.requires_grad:
            name = plain_name(given_name)
            names[name] = found.add(name, param)
    numbers = whole_metrics(found.metrics, found.shards)
    without = [name for name in names if numbers.pop(_seen(name)) == 0]
    for metric in (metric for name in without for metric in names[name]):
        del numbers[metric]
    return numbers


def _seen(name: str) -> str:
    """Of a number that is 0 if no rank has a gradient."""
    return f"seen/{name}"


class _Found:
    """Metrics of this rank."""

    def __init__(self, optimizer: torch.optim.Optimizer, reported: bool) -> None:
        self.metrics: dict[str, Any] = {}
        self.shards: dict[str, Groups] = {}
        """metrics that are norms of shards, and what these are divided between"""
        self._optimizer = optimizer
        report = getattr(optimizer, "report_per_parameter_metrics", None)
        self._report: Any = report if reported and callable(report) else None
        self._of_shards = type(optimizer).__module__.startswith(_HOMES)

    def add(self, name: str, param: torch.Tensor) -> list[str]:
        """Returns the names of the metrics of one parameter."""
        has_gradient = param.grad is not None
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        try:
            own, norms = self._of(name, param)
            local = local_part(param.grad)
        finally:
            param.grad = param.grad if has_gradient else None
        self.metrics.update(own)
        self.metrics[_seen(name)] = local.new_full((), float(has_gradient))
        self.shards.update(dict.fromkeys((*norms, _seen(name)), groups_of(param)))
        return list(own)

    def _of(self, name: str, param: torch.Tensor) -> tuple[dict[str, Any], set[str]]:
        """Metrics of a parameter, and which of them are norms of this rank's shard alone."""
        gradient, own = f"{GRADIENT}/{name}", dict[str, Any]()
        norms: set[str] = set()
        if self._report is not None and self._of_shards:
            own = self._report_of_shard(name, param)
            norms = {metric for metric in own if metric.startswith(_NORM)}
        elif self._report is not None:
            own = dict(self._report(param, name, {}))
        if gradient not in own and param.grad is not None:
            own[gradient] = torch.linalg.vector_norm(local_part(param.grad))
            norms.add(gradient)
        return own, norms

    def _report_of_shard(self, name: str, param: torch.Tensor) -> dict[str, Any]:
        """The optimizer's report of a parameter that is this rank's shard."""
        state = self._optimizer.state
        held = state.get(param)
        if held is None or param.grad is None:
            return {}
        shard = local_part(param).detach()
        shard.grad = local_part(param.grad)
        state[shard] = {
            key: local_part(value) if isinstance(value, torch.Tensor) else value
            for key, value in held.items()
        }
        try:
            return dict(self._report(shard, name, {}))
        finally:
            del state[shard]
