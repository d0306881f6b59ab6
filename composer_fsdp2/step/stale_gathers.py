"""Frees units that stay gathered after a forward where their shards are read or changed next."""

from __future__ import annotations

from typing import Any

import torch

from composer_fsdp2.shard.torch_private.gathered import is_gathered
from composer_fsdp2.step.run import StepListener

__all__ = ["StaleGathers"]


class StaleGathers(StepListener):
    """Frees what a forward gathered between backward and step.

    Whoever clips gradients reads those of `model.parameters()`. The gradients are at the shards,
    and a unit that a forward without gradients left gathered shows whole parameters without one.
    After the step its parameters would be those from before the step.
    """

    _gradients_wait = False

    def before_forward(self, unit: str, group: Any) -> None:
        """Learns that gradients may wait for a step. Collective: no."""
        self._gradients_wait = self._gradients_wait or torch.is_grad_enabled()

    def after_group_forward(self, unit: str, group: Any) -> None:
        """Frees a unit after a forward without gradients. Collective: no."""
        if self._gradients_wait and not torch.is_grad_enabled() and is_gathered(group):
            group.reshard()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Frees all units. Collective: no."""
        for name, groups in self.run.groups.items():
            if any(map(is_gathered, groups)):
                self.run.units[name].reshard()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Learns that no gradient waits. Collective: no."""
        self._gradients_wait = False
