"""Counts the bytes that collectives send, by their kind and the ranks that they are between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from composer_fsdp2.errors import PlanError
from composer_fsdp2.torch_private.fake import fake_group_named
from composer_fsdp2.torch_private.tensors import tree_leaves

__all__ = ["Axis", "CollectiveCounter", "Key"]


@dataclass(frozen=True, slots=True, order=True)
class Axis:
    """Ranks that take part in a collective."""

    name: str
    """of the mesh axis: `dp_shard`, `ep`"""
    ranks: int
    nodes: int
    """nodes that the ranks lie on; 1: they are inside a node"""

    def __str__(self) -> str:
        where = "inside a node" if self.nodes == 1 else f"across {self.nodes} nodes"
        return f"{self.name}, {self.ranks} ranks {where}"


Key = tuple[str, Axis]
"""kind of a collective, and the axis of its group"""


_FIRST, _SECOND, _RESULT = 0, 1, -1
_ROWS: Mapping[str, tuple[str, int, int]] = {
    "_allgather_base_": ("all-gather", _FIRST, 2),
    "_reduce_scatter_base_": ("reduce-scatter", _SECOND, 2),
    "allgather_": ("all-gather", _FIRST, 2),
    "allreduce_": ("all-reduce", _FIRST, 1),
    "alltoall_base_": ("all-to-all", _SECOND, 2),
    "broadcast_": ("broadcast", _FIRST, 1),
    "all_gather_into_tensor": ("all-gather", _RESULT, 2),
    "all_reduce": ("all-reduce", _FIRST, 2),
    "all_reduce_": ("all-reduce", _FIRST, 2),
    "all_to_all_single": ("all-to-all", _FIRST, 3),
    "reduce_scatter_tensor": ("reduce-scatter", _FIRST, 3),
}
"""operators of torch -> the kind, the tensors whose bytes count (whole ones), place of the group"""
_SEND_NOTHING = {"_wrap_tensor_autograd", "barrier", "monitored_barrier_", "wait_tensor"}
_AGREE = {"all-reduce", "broadcast"}
"""kinds by which ranks agree on integers"""
_COPIED = {"all-gather", "reduce-scatter"}
"""kinds for which gloo takes a tensor as large as the whole one, and frees it (`newLikeFlat` and
`clone` in https://github.com/pytorch/pytorch/blob/v2.7.0/torch/csrc/distributed/c10d/ProcessGroupGloo.cpp)"""


class CollectiveCounter:
    """Adds up collectives of this rank.

    Args:
        ranks_per_node: ranks with numbers next to each other are on one node.
        whole: name of the axis that is all ranks, where the mesh has one axis.
    """

    def __init__(self, ranks_per_node: int, default_axis: str = "all ranks") -> None:
        self._per_node, self._whole = ranks_per_node, default_axis
        self.bytes: Counter[Key] = Counter()
        self.calls: Counter[Key] = Counter()

    def hear(self, name: str, args: Any, result: Any) -> list[torch.Tensor]:
        """Counts one call, and returns the tensors of which gloo makes a copy.

        Integers that ranks agree on are not counted: they are some bytes.

        Raises:
            PlanError: it is of a kind that is not known, and would be missing in the sum.
        """
        if name in _SEND_NOTHING:
            return []
        if name not in _ROWS:
            raise PlanError(
                f"A step calls the collective '{name}', which the plan has no row for. Its bytes "
                "would be missing. Add it to `estimate/collectives.py`."
            )
        kind, chosen, position = _ROWS[name]
        value = result if chosen == _RESULT else args[chosen]
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if kind in _AGREE and not any(tensor.is_floating_point() for tensor in tensors):
            return []
        key = kind, self.axis_of(args[position])
        self.calls[key] += 1
        self.bytes[key] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return tensors if kind in _COPIED else []

    def axis_of(self, handle: Any) -> Axis:
        """Returns the axis of a group, which an operator is given by name or in a box."""
        group: Any = handle
        if isinstance(handle, str):
            group = fake_group_named(handle)
        elif not isinstance(handle, dist.ProcessGroup):
            group = dist.ProcessGroup.unbox(handle)
        ranks = dist.get_process_group_ranks(group)
        name = group.group_desc.removeprefix("mesh_")
        if len(ranks) == dist.get_world_size():
            name = self._whole
        elif name.startswith("dim_"):
            name = "reshard"  # torch names no axis of the groups of an int `reshard_after_forward`
        return Axis(name, len(ranks), len({rank // self._per_node for rank in ranks}))
