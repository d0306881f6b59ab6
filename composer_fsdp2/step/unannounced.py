"""Warns of a loop that does not say which microbatch is the last of its batch."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from composer_fsdp2.step.run import Run, StepListener

__all__ = ["UnannouncedMicrobatches"]


class UnannouncedMicrobatches(StepListener):
    """Warns once when a setting of `gradient_sync` cannot take effect."""

    @classmethod
    def wanted(cls, run: Run) -> bool:
        """Says whether gradients wait for the last microbatch."""
        return run.settings.gradient_sync != "every"

    _warned = False

    def before_forward(self, unit: str, group: Any) -> None:
        """Looks whether a forward of training belongs to a microbatch. Collective: no."""
        module = self.run.units[unit]
        assert isinstance(module, nn.Module)
        outside = torch.is_grad_enabled() and not self.run.accumulation.inside
        if self._warned or not (outside and module.training):
            return
        self._warned = True
        warnings.warn(
            f"gradient_sync is {self.run.settings.gradient_sync!r}, and the model runs outside of "
            "`microbatch()`. Gradients are reduced in every backward. Train through Composer's "
            "Trainer, or put each microbatch into "
            "`run_of(model).accumulation.microbatch(last=...)`.",
            stacklevel=2,
        )
