"""Tensor parallelism: the first transformation of a model, before FSDP2 shards what is left."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composer_fsdp2.blocks.transformation import ModelFacts, Transformation
from composer_fsdp2.errors import PlanError
from composer_fsdp2.parallel.adapters import unknown_adapter
from composer_fsdp2.parallel.axis import tensor_axis
from composer_fsdp2.parallel.divide import divide_layers
from composer_fsdp2.parallel.layers import LayerPlan, plan_layers
from composer_fsdp2.parallel.tensor_group import TensorGroup
from composer_fsdp2.plan.conditional_modules import conditional_modules
from composer_fsdp2.plan.module_tree import ModuleTree, attribute_of

__all__ = ["TensorParallel"]

log = logging.getLogger(__name__)


class TensorParallel(Transformation[LayerPlan]):
    """Divides layers between ranks: `tensor_parallel`."""

    def plan(self, facts: ModelFacts) -> LayerPlan | None:
        """Returns the layers to divide."""
        spec = facts.settings.tensor_parallel
        if spec is None or spec.degree == 1:
            return None
        for refuse in _REFUSALS:
            if (why := refuse(facts)) is not None:
                raise PlanError(
                    f"tensor_parallel has degree {spec.degree}, and {why}. Ranks would compute "
                    "another model, or wait for each other. Leave tensor parallelism out, or that."
                )
        return plan_layers(facts.tree, spec, facts.shard_ranks)

    def apply(self, tree: ModuleTree, plan: LayerPlan) -> None:
        """Refused: it needs the mesh of the run."""
        raise NotImplementedError

    def apply_on(self, tree: ModuleTree, plan: LayerPlan, mesh: DeviceMesh) -> None:
        """Divides the layers of the plan. Collective: yes, over the default group."""
        axis = tensor_axis(mesh)
        assert axis is not None
        if plan.whole and dist.get_rank() == 0:
            log.warning(
                "tensor_parallel leaves %s whole on each rank of a group, because the degree %d "
                "does not divide its vocabulary or it is not a plain layer.",
                ", ".join(plan.whole),
                plan.degree,
            )
        divide_layers(tree, plan, axis)
        TensorGroup(tree.root, axis.get_group())


def _towers(facts: ModelFacts) -> str | None:
    """Experts are lists, and each of them is divided: ranks of a group leave out the same ones."""
    modules = dict(facts.tree.modules())
    names = conditional_modules(facts.tree)
    found = [name for name in names if not isinstance(modules[name], _LISTS)]
    return f"'{found[0]}' may be left out by a rank (a tower)" if found else None


_LISTS = (nn.ModuleList, nn.ModuleDict)


def _adapters(facts: ModelFacts) -> str | None:
    return unknown_adapter(facts.tree)


def _alibi(facts: ModelFacts) -> str | None:
    found = [name for name, m in facts.tree.modules() if attribute_of(m, "alibi") is True]
    return f"'{found[0]}' uses ALiBi, whose slopes are those of all heads" if found else None


def _already_divided(facts: ModelFacts) -> str | None:
    found = [ref.name for ref in facts.tree.params if type(ref.param.data) is not torch.Tensor]
    return f"'{found[0]}' is divided or quantised already" if found else None


def _groups_of_ranks(facts: ModelFacts) -> str | None:
    sizes = [facts.settings.reshard_after_forward]
    sizes += [unit.reshard_after_forward for unit in facts.units.units]
    if any(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        return "reshard_after_forward is a number, which has not been tried with it"
    return None


_REFUSALS: tuple[Callable[[ModelFacts], str | None], ...] = (
    _towers,
    _adapters,
    _alibi,
    _already_divided,
    _groups_of_ranks,
)
"""Parts of a model that have not been tried with tensor parallelism. Settings are refused where
they are declared, in `config.parallel`."""
