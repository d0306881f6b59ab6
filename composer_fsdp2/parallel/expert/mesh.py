"""The ranks that hold experts between them, and those that shard the same ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from composer_fsdp2.plan.mesh_shape import REPLICATE_AXIS, TENSOR_AXIS
from composer_fsdp2.torch_private.tensors import root_mesh

__all__ = ["ExpertMesh"]

_EXPERTS, _SHARDS = "ep", "efsdp"


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMesh:
    """The ranks of a run as experts see them: `dp_replicate x efsdp x ep`."""

    shards: DeviceMesh
    """the ranks that FSDP2 shards the same experts over, with the copies of HSDP around them"""
    group: dist.ProcessGroup
    """the ranks that hold all experts of a layer between them, next to each other"""
    usual: DeviceMesh
    """the ranks that share one copy of the model, with the copies of HSDP around them"""
    tensor: DeviceMesh | None
    """the ranks that have the same tokens, because they divide the layers around the experts"""
    elsewhere: DeviceMesh
    """some rank that is not this one"""
    groups: tuple[dist.ProcessGroup, ...]
    """over which sums over all experts of a layer are taken"""

    @classmethod
    def build(cls, usual: DeviceMesh, degree: int) -> ExpertMesh:
        """Divides the ranks of a run once more. Collective: yes (creates process groups).

        Args:
            usual: the axes that FSDP2 shards other weights over.
            degree: ranks that hold the experts between them; divides the ranks of one copy, and is
                a multiple of the ranks that have the same tokens.
        """
        root, tensor = root_mesh(usual), None
        if TENSOR_AXIS in (root.mesh_dim_names or ()):
            tensor = root[TENSOR_AXIS]
            usual = DeviceMesh(
                usual.device_type, root.mesh.flatten(-2), mesh_dim_names=usual.mesh_dim_names
            )
        ranks = usual.mesh
        sizes = (*ranks.shape[:-1], ranks.shape[-1] // degree, degree)
        names = (REPLICATE_AXIS, _SHARDS, _EXPERTS)[-len(sizes) :]
        # A second root: one parameter may not lie on axes of two, and no expert lies on `ep`.
        root = DeviceMesh(usual.device_type, ranks.reshape(sizes), mesh_dim_names=names)
        single = [DeviceMesh(usual.device_type, [rank]) for rank in (0, 1)]
        group = root.get_group(_EXPERTS)
        return cls(
            shards=root[names[:-1]],
            group=group,
            usual=usual,
            tensor=tensor,
            elsewhere=single[int(dist.get_rank() == 0)],
            groups=(root.get_group(_SHARDS), group),
        )

    @property
    def degree(self) -> int:
        """Ranks that hold the experts between them."""
        return self.group.size()

    @property
    def sources(self) -> int:
        """Ranks with tokens of their own among them."""
        return self.degree // (1 if self.tensor is None else self.tensor.size())

    def own_tokens(self, count: int) -> slice:
        """Returns which of its tokens this rank sends; ranks with the same ones send the rest."""
        if self.tensor is None:
            return slice(0, count)
        step = -(-count // self.tensor.size())
        start = min(step * self.tensor.get_local_rank(), count)
        return slice(start, min(start + step, count))

    @property
    def place(self) -> int:
        """Number of this rank among them."""
        return self.group.rank()
