"""A change of the model that is made before FSDP2 shards it, as one object.

[Note: transformations] Every transformation has the same four steps. `plan` decides on names,
`check` compares the decision with the machine and the units, `apply` changes the model, `describe`
says what is done. Ranks compare the descriptions before any of them changes its model. Their order
is one tuple, `TRANSFORMATIONS` in `prepare/model.py`: a new transformation is a file with its
class, its setting, and its place in that tuple.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2.config.schema import FSDP2Config
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.wrap_plan import WrapPlan

__all__ = ["ModelFacts", "PlannedTransformation", "Transformation", "plan_transformations"]

Plan = TypeVar("Plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Holds the facts of a run that transformations may read before anything is changed."""

    tree: ModuleTree
    """the model, read once"""
    settings: FSDP2Config
    units: WrapPlan
    """as the earlier transformations have left the model"""
    blocks: tuple[str, ...]
    """names of the model's blocks, with those of a tower, which are no units"""
    shard_ranks: int
    """ranks that share one replica of the parameters"""
    device_type: str
    compute: torch.dtype = torch.float32
    """of forwards"""
    odd_optimizer: str = ""
    """class of an optimizer that is not known to compute each element by itself"""
    conditional: tuple[str, ...] = ()
    """names of modules that a rank may leave out of a step"""
    is_checkpointed: Callable[[str, nn.Module], bool] | None = None
    """whether the model itself asks for activation checkpointing of a module; `None` is unknown"""


class Transformation(ABC, Generic[Plan]):
    """One change of the model; see [Note: transformations]."""

    exchanges_modules: ClassVar[bool] = False
    """whether `apply` puts other modules into the model, so that its tree has to be read again"""

    def check_items(
        self, settings: FSDP2Config, items: Iterable[Any], microbatch_size: Any
    ) -> None:
        """Refuses arguments of a Trainer that do not go with this transformation.

        Collective: no.

        Args:
            settings: of the run, which may not ask for this transformation.
            items: callbacks, algorithms and optimizers.
            microbatch_size: the Trainer's `device_train_microbatch_size`, a number or "auto".

        Raises:
            ConfigError: naming the first of them.
        """

    @abstractmethod
    def plan(self, facts: ModelFacts) -> Plan | None:
        """Returns the plan, names and numbers; `None` where no setting asks for the transformation.

        Collective: no. Changes nothing.

        Raises:
            ConfigError: for settings that this model makes impossible.
            PlanError: for a model in which nothing, or something impossible, is chosen.
        """

    def check(self, plan: Plan, facts: ModelFacts) -> None:
        """Refuses what this machine, this torch or the units make impossible. Collective: no."""

    def adjust_units(self, plan: Plan, units: WrapPlan) -> WrapPlan:
        """Returns the units with the changes that this transformation needs. Collective: no."""
        return units

    @abstractmethod
    def apply(self, tree: ModuleTree, plan: Plan) -> None:
        """Changes the model in place. Collective: no."""

    def apply_on(self, tree: ModuleTree, plan: Plan, mesh: DeviceMesh) -> Any:
        """Changes the model in place, where the change needs the mesh. Collective: no.

        Collective: no, but for a `Parallelism` of `parallel.parallelism`, which returns its ranks.

        Args:
            tree: the model that is changed.
            plan: what `plan` returned.
            mesh: the axes that FSDP2 will shard over.
        """
        self.apply(tree, plan)

    def after_sharding(self, tree: ModuleTree, plan: Plan, units: Mapping[str, FSDPModule]) -> None:
        """Finishes the transformation after `fully_shard`. Collective: no.

        Args:
            tree: the model that is changed.
            plan: what `plan` returned.
            units: name in the plan -> sharded module.
        """

    def describe(self, plan: Plan) -> str:
        """Returns the line that `verbose` shows and that ranks compare."""
        return str(plan)


@dataclass(frozen=True, slots=True)
class PlannedTransformation:
    """A transformation that this run asks for, with its plan."""

    step: Transformation[Any]
    plan: Any

    def __str__(self) -> str:
        return self.step.describe(self.plan)


def plan_transformations(
    steps: Sequence[Transformation[Any]], facts: ModelFacts
) -> tuple[tuple[PlannedTransformation, ...], ModelFacts]:
    """Plans and checks transformations in order; each may change the units for the next ones.

    Collective: no.

    Args:
        steps: in the order in which they are applied.
        facts: `units` are those of the settings alone.

    Returns:
        Those that the settings ask for, in order, and the facts with the units they need.

    Raises:
        ConfigError: from `plan` or `check`.
        PlanError: likewise.
    """
    planned: list[PlannedTransformation] = []
    for step in steps:
        plan = step.plan(facts)
        if plan is not None:
            step.check(plan, facts)
            facts = replace(facts, units=step.adjust_units(plan, facts.units))
            planned.append(PlannedTransformation(step, plan))
    return tuple(planned), facts
