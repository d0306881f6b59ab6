"""How a model was sharded, for those who train, evaluate or watch it afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2.plan.mesh_shape import MeshShape
from composer_fsdp2.plan.wrap_plan import WrapPlan
from composer_fsdp2.runtime.accumulation import Accumulation
from composer_fsdp2.runtime.order_check import OrderCheck
from composer_fsdp2.runtime.unused_parameters import UnusedParameters
from composer_fsdp2.shard.eval_reshard import resharding

__all__ = ["Sharding", "note_sharding", "sharding_of"]

_SHARDING = "_fsdp2_sharding"
"""attribute of a model, for `sharding_of`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a model was sharded."""

    plan: WrapPlan
    shape: MeshShape
    accumulation: Accumulation
    order: OrderCheck | None
    unused: UnusedParameters | None
    units: Mapping[str, FSDPModule]
    eval_reshard: bool | None

    def evaluating(self) -> AbstractContextManager[None]:
        """Around an evaluation: units free or keep their parameters as they were told for it."""
        return resharding(self.units, self.eval_reshard)


def note_sharding(model: nn.Module, sharding: Sharding) -> None:
    """Remembers on a model how it was sharded."""
    setattr(model, _SHARDING, sharding)


def sharding_of(model: nn.Module) -> Sharding | None:
    """Returns what `prepare_fully_shard` did to this model, `None` if nothing."""
    return getattr(model, _SHARDING, None)
