"""The ranks that hold experts between them, and those that shard the same ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from composer_fsdp2.parallel.axis import data_axes
from composer_fsdp2.plan.mesh_shape import REPLICATE_AXIS

__all__ = ["EXPERT_AXIS", "SHARD_AXIS", "ExpertMesh", "holders_of"]

EXPERT_AXIS = "ep"
SHARD_AXIS = "efsdp"

_HOLDERS = "_fsdp2_expert_group"
"""attribute of the mesh of a rank's experts, for `holders_of`"""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMesh:
    """The ranks of a run as experts see them: `dp_replicate x efsdp x ep`."""

    shards: DeviceMesh
    """the ranks that FSDP2 shards the same experts over, with the copies of HSDP around them"""
    group: dist.ProcessGroup
    """the ranks that hold all experts of a layer between them, next to each other"""

    @classmethod
    def build(cls, mesh: DeviceMesh, degree: int) -> ExpertMesh:
        """Divides the ranks of a run once more. Collective: yes (creates process groups).

        Args:
            mesh: the axes that FSDP2 shards other weights over.
            degree: ranks that hold the experts between them; divides the last axis.
        """
        ranks = mesh.mesh
        sizes = (*ranks.shape[:-1], ranks.shape[-1] // degree, degree)
        names = (REPLICATE_AXIS, SHARD_AXIS, EXPERT_AXIS)[-len(sizes) :]
        # A second root: one parameter may not lie on axes of two, and no expert lies on `ep`.
        root = DeviceMesh(mesh.device_type, ranks.reshape(sizes), mesh_dim_names=names)
        shards, group = data_axes(root), root.get_group(EXPERT_AXIS)
        # FSDP2 gives this very mesh to the parameters that it shards.
        setattr(shards, _HOLDERS, group)
        return cls(shards, group)

    @property
    def degree(self) -> int:
        """Ranks that hold the experts between them."""
        return self.group.size()

    @property
    def place(self) -> int:
        """Number of this rank among them."""
        return self.group.rank()


def holders_of(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Returns the ranks that hold other experts of the same layers. Collective: no.

    Args:
        mesh: of a parameter, with all copies; `None` for one that is no expert's.
    """
    return getattr(mesh, _HOLDERS, None)
