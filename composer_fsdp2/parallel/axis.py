"""The tensor axis of a run's mesh, beside the axes that FSDP2 shards over."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composer_fsdp2.plan.mesh_shape import TENSOR_AXIS

__all__ = ["is_divided", "note_tensor_axis", "tensor_axis"]

_AXIS = "_fsdp2_tensor_axis"
"""attribute of the mesh of the other axes, for `tensor_axis`"""


def note_tensor_axis(mesh: DeviceMesh, axis: DeviceMesh) -> None:
    """Remembers on the mesh that FSDP2 shards over which ranks divide each layer.

    Collective: no. Both are parts of one mesh, which torch insists on.
    """
    setattr(mesh, _AXIS, axis)


def tensor_axis(mesh: DeviceMesh) -> DeviceMesh | None:
    """Returns the ranks that divide each layer, `None` where none do. Collective: no."""
    return getattr(mesh, _AXIS, None)


def is_divided(module: nn.Module) -> bool:
    """Whether layers in it are divided by tensor parallelism. Collective: no."""
    return any(
        isinstance(param, DTensor) and TENSOR_AXIS in (param.device_mesh.mesh_dim_names or ())
        for param in module.parameters()
    )
