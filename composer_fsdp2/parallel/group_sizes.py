"""Sizes of one rank's part of a model under tensor parallelism and FSDP2, from plans alone."""

from __future__ import annotations

from dataclasses import dataclass

from composer_fsdp2.parallel.layers import LayerPlan
from composer_fsdp2.plan.mesh_shape import MeshShape
from composer_fsdp2.plan.module_tree import ModuleTree, canonical_param_ids
from composer_fsdp2.plan.wrap_plan import WrapPlan

__all__ = ["GroupSizes", "group_sizes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSizes:
    """Of each rank. A parameter counts as one, however many names it has."""

    mesh: str
    layers: int
    """that are divided"""
    divided: int
    """elements of their parameters, over all ranks"""
    elements: int
    """of the model"""
    held: int
    """elements of the shards of a rank"""
    held_bytes: int
    """in their own dtypes; gradients take as much, and Adam's state twice as much"""
    gathered: int
    """elements of the largest unit as a rank gathers it"""
    largest: str
    """the unit"""

    def __str__(self) -> str:
        """Lines for `plan`."""
        return (
            f"mesh: {self.mesh}\n"
            f"tensor parallelism: {self.layers} layers are divided, {self.divided:,} of "
            f"{self.elements:,} elements\n"
            f"each rank: holds {self.held:,} elements ({self.held_bytes / 1e9:.1f} GB of weights), "
            f"gathers at most {self.gathered:,} ({self.largest})"
        )


def group_sizes(tree: ModuleTree, plan: LayerPlan, units: WrapPlan, shape: MeshShape) -> GroupSizes:
    """Returns what a rank of a run holds and gathers. Collective: no.

    Args:
        tree: the model, before anything is changed.
        plan: which layers are divided.
        units: of FSDP2.
        shape: of the mesh.
    """
    same, owners = canonical_param_ids(tree.params), units.owner_of()
    divided = {same[id(ref.param)] for ref in tree.params if _is_divided(plan, ref.name)}
    first = {same[id(ref.param)]: ref for ref in reversed(tree.params)}
    gathered: dict[str, int] = {}
    held = held_bytes = cut = elements = 0
    for number, ref in first.items():
        size = ref.param.numel()
        part = -(-size // plan.degree) if number in divided else size
        share = -(-part // shape.shard)
        elements, cut = elements + size, cut + (size if number in divided else 0)
        held, held_bytes = held + share, held_bytes + share * ref.param.element_size()
        if (unit := owners.get(ref.name)) is not None:
            name = unit.modules[0] or "<root>"
            gathered[name] = gathered.get(name, 0) + part
    largest = max(gathered, key=lambda name: gathered[name])
    return GroupSizes(
        mesh=shape.describe(),
        layers=len(plan.cuts),
        divided=cut,
        elements=elements,
        held=held,
        held_bytes=held_bytes,
        gathered=gathered[largest],
        largest=largest,
    )


def _is_divided(plan: LayerPlan, name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    cut = plan.cuts.get(module)
    return (
        cut is not None and cut.kind != "norm" and not (cut.kind == "rows" and attribute == "bias")
    )
