"""Finds the names of a plan in a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from composer_fsdp2.plan.module_tree import ModuleTree, ParamRef
from composer_fsdp2.plan.wrap_plan import ShardUnit, WrapPlan
from composer_fsdp2.torch_private.tensors import copy_hooks

__all__ = ["Layout", "Slot", "replace_parameter", "slot_of"]


Slot = tuple[nn.Module, str]
"""A module and the attribute a parameter sits in; holds no parameter, so sharding can free it."""


class Layout:
    """Finds the modules and parameters that a plan names.

    Args:
        tree: the model, not sharded yet.
        plan: made for the tree.
    """

    def __init__(self, tree: ModuleTree, plan: WrapPlan) -> None:
        self.modules: dict[str, Any] = {}
        """name -> module, the activation wrapper where there is one; a unit once it is sharded"""
        self.holders: dict[str, nn.Module] = {}
        """name -> the module itself, which holds the parameters of that name"""
        for node in tree.paths:
            self.modules.setdefault(node.path, node.module)
            self.holders[node.path] = node.module
        unit_at = {id(self.modules[unit.module]): unit.module for unit in plan.units}
        nearest: list[str | None] = []
        for node in tree.paths:
            above = nearest[node.parent] if node.parent >= 0 else None
            nearest.append(unit_at.get(id(node.module), above))
        self.members: dict[str, list[tuple[str, nn.Module]]] = defaultdict(list)
        """unit name -> modules whose nearest unit it is"""
        for index in tree.first_path.values():
            if (unit := nearest[index]) is not None:
                self.members[unit].append((tree.paths[index].path, tree.paths[index].module))
        # `fully_shard` looks for parameters below its module, and stops at modules that are units:
        # https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_init.py#L123
        owner_of = {name: unit.module for unit in plan.units for name in unit.params}
        self.foreign, hidden = _foreign(tree, nearest, owner_of)
        """unit name -> slots of parameters that the unit would find and another unit owns"""
        # A unit with hidden parameters is given everything below it, so it comes before the units
        # inside it, outer ones first; all others come children before parents.
        first = [unit for unit in reversed(plan.units) if unit.module in hidden]
        rest = [unit for unit in plan.units if unit.module not in hidden]
        self.order = first + rest

    def modules_of(self, unit: ShardUnit) -> list[tuple[str, nn.Module]]:
        """Returns modules, by path, whose tensors must be real before the unit is sharded."""
        modules = list(self.members[unit.module])
        member_paths = {path for path, _ in modules}
        paths = dict.fromkeys(name.rpartition(".")[0] for name in unit.params)
        return modules + [(path, self.holders[path]) for path in paths if path not in member_paths]

    def param_of(self, name: str) -> nn.Parameter:
        """Returns the parameter that stands under a name now."""
        path, _, attribute = name.rpartition(".")
        return getattr(self.holders[path], attribute)


def slot_of(tree: ModuleTree, ref: ParamRef) -> Slot:
    """Returns the module and the attribute that a name of a parameter leads to."""
    return tree.paths[ref.path_index].module, ref.name.rpartition(".")[2]


def _foreign(
    tree: ModuleTree, nearest: list[str | None], owner_of: Mapping[str, str]
) -> tuple[dict[str, list[Slot]], set[str]]:
    """Finds parameters each unit must leave to another, and units that would miss their own.

    `fully_shard` looks for parameters in modules outside nested units. A weight lifted out of all
    units that use it (shared by all layers, registered nowhere else) is in none of those.
    """
    owners = [(ref, owner_of.get(ref.name)) for ref in tree.params]
    visible = {id(ref.param) for ref, owner in owners if owner == nearest[ref.path_index]}
    hidden = {owner for ref, owner in owners if owner is not None and id(ref.param) not in visible}
    # Of each module, the units that find its parameters. One with hidden parameters finds all that
    # are below it, because it is sharded before the units inside it.
    finders: list[set[str | None]] = []
    for index, node in enumerate(tree.paths):
        around = finders[node.parent] & hidden if node.parent >= 0 else set[str]()
        finders.append({nearest[index], *around})
    foreign: dict[str, list[Slot]] = defaultdict(list)
    for ref, owner in owners:
        for unit in finders[ref.path_index]:
            if unit is not None and unit != owner:
                foreign[unit].append(slot_of(tree, ref))
    return foreign, hidden


def replace_parameter(slots: Iterable[Slot], old: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """Puts a new parameter with `data` in all slots of `old`, with its attributes and hooks."""
    # Torch refuses to assign memory of a device to `.data` of a parameter on meta.
    new = nn.Parameter(data, requires_grad=old.requires_grad)
    vars(new).update(vars(old))
    copy_hooks(old, new)
    for module, attribute in slots:
        module._parameters[attribute] = new
    return new
