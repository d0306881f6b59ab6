"""The tensor axis of a run's mesh, beside the axes that FSDP2 shards over."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composer_fsdp2.plan.mesh_shape import TENSOR_AXIS

__all__ = ["data_axes", "divided_by", "root_of", "tensor_axis"]

_ROOT = "_fsdp2_root_mesh"
"""attribute of the mesh of the other axes, for `root_of`"""


def data_axes(root: DeviceMesh) -> DeviceMesh:
    """Returns the axes of a mesh that FSDP2 shards over; they know the tensor axis, the last one.

    Collective: no. Both are parts of one mesh, which torch insists on.
    """
    names: list[str] = list(root.mesh_dim_names or ())
    mesh = root[tuple(names[:-1])] if len(names) > 2 else root[names[0]]
    setattr(mesh, _ROOT, root)
    return mesh


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh with all axes of a run. Collective: no.

    Torch 2.7 cuts an axis out of that one alone.
    """
    return getattr(mesh, _ROOT, mesh)


def tensor_axis(mesh: DeviceMesh) -> DeviceMesh | None:
    """Returns the ranks that divide each layer, `None` where none do. Collective: no."""
    root = root_of(mesh)
    names: list[str] = list(root.mesh_dim_names or ())
    return None if root is mesh else root[names[-1]]


def divided_by(module: nn.Module) -> dist.ProcessGroup | None:
    """Returns the ranks that divide layers in it, `None` where none do. Collective: no."""
    for param in module.parameters():
        if isinstance(param, DTensor):
            mesh = param.device_mesh
            if TENSOR_AXIS in (mesh.mesh_dim_names or ()):
                return mesh.get_group(TENSOR_AXIS)
    return None
