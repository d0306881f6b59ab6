"""Keeps `requires_grad` of parameters that users freeze or unfreeze while a unit is gathered."""

from __future__ import annotations

from typing import Any

from composer_fsdp2.shard.torch_private.units import carry_requires_grad
from composer_fsdp2.step.run import StepListener

__all__ = ["RequiresGrad"]


class RequiresGrad(StepListener):
    """Carries the flags of a unit that stayed gathered to its shards.

    Those of a unit that is freed are carried before the shards take their places again.
    """

    def before_forward(self, unit: str, group: Any) -> None:
        """Collective: no."""
        carry_requires_grad(group)
