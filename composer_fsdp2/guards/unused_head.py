"""Warns of a model that calls none of the heads which `chunked_loss` has changed."""

from __future__ import annotations

import warnings

import torch

from composer_fsdp2.blocks.chunked_loss import ChunkedHead
from composer_fsdp2.step.run import Run, StepListener

__all__ = ["UnusedHead"]


class UnusedHead(StepListener):
    """Looks at the heads of `chunked_loss` after the first forward in training."""

    @classmethod
    def wanted(cls, run: Run) -> bool:
        """Whether a head computes with the loss. Collective: no."""
        return run.settings.chunked_loss is not None

    def end_forward(self) -> None:
        """Warns of a model that called none of its heads. Collective: no."""
        if not self.run.model.training or not torch.is_grad_enabled():
            return
        self.run.stop_listening(self)
        forwards = [vars(module).get("forward") for _, module in self.run.tree.modules()]
        heads = [forward for forward in forwards if isinstance(forward, ChunkedHead)]
        if not any(head.called for head in heads):
            warnings.warn(
                f"chunked_loss has no effect: the model computes its loss without calling "
                f"{' or '.join(repr(head.name) for head in heads)}. A loss that reads the weight "
                "of the head itself is in parts already. Take chunked_loss out, or that loss.",
                stacklevel=2,
            )
