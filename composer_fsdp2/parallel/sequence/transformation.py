"""Sequence parallelism: the transformation of a model whose sequences ranks divide."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh

from composer_fsdp2.blocks.transformation import ModelFacts
from composer_fsdp2.config.schema import FSDP2Config
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.parallel.parallelism import (
    DRAWN,
    DRAWS,
    AppliedParallelism,
    Parallelism,
    untried_items,
)
from composer_fsdp2.plan.module_tree import ModuleTree

if TYPE_CHECKING:
    from composer_fsdp2.parallel.sequence.plan import SequencePlan

__all__ = ["SequenceParallel"]


class SequenceParallel(Parallelism["SequencePlan"]):
    """Divides each sequence between ranks: `sequence_parallel`."""

    def check_items(
        self, settings: FSDP2Config, items: Iterable[Any], microbatch_size: Any
    ) -> None:
        """Refuses algorithms that draw random numbers of their own."""
        spec = settings.sequence_parallel
        for name in untried_items(items):
            if spec is not None and spec.degree > 1 and name in DRAWS:
                raise ConfigError(
                    f"{name} and sequence parallelism are both asked for. {DRAWN} Leave it out, or "
                    "take 'sequence_parallel' out of parallelism_config."
                )

    def plan(self, facts: ModelFacts) -> SequencePlan | None:
        """Returns the attention modules, or refuses the model."""
        spec = facts.settings.sequence_parallel
        if spec is None or spec.degree == 1:
            return None
        # Imported on demand: see [Note: dividing].
        from composer_fsdp2.parallel.sequence.plan import plan_sequences

        return plan_sequences(facts, spec)

    def apply_on(
        self, tree: ModuleTree, plan: SequencePlan, mesh: DeviceMesh
    ) -> AppliedParallelism:
        """Connects the attention of the model. Collective: yes, over the default group."""
        from composer_fsdp2.parallel.sequence.plan import connect_attention

        return connect_attention(tree, plan, mesh)
