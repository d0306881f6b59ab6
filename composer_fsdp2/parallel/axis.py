"""The tensor axis of a run's mesh, beside the axes that FSDP2 shards over."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composer_fsdp2.plan.mesh_shape import TENSOR_AXIS

__all__ = ["data_axes", "group_dividing", "root_of", "tensor_axis"]

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
    """Returns the mesh with all axes of a run, the only one that torch 2.7 cuts axes out of."""
    return getattr(mesh, _ROOT, mesh)


def tensor_axis(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the ranks that divide each layer, of a mesh that `data_axes` has returned."""
    return root_of(mesh)[TENSOR_AXIS]


def group_dividing(param: object) -> dist.ProcessGroup | None:
    """Returns the ranks that divide a parameter's layer, `None` where none do. Collective: no."""
    if isinstance(param, DTensor) and TENSOR_AXIS in (param.device_mesh.mesh_dim_names or ()):
        return param.device_mesh.get_group(TENSOR_AXIS)
    return None
