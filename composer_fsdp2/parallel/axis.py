"""The tensor axis of a run's mesh, beside the axes that FSDP2 shards over."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

__all__ = ["note_tensor_axis", "tensor_axis"]

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
