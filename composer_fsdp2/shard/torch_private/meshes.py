"""Device meshes that are cut out of others."""

from __future__ import annotations

from typing import Any

from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["root_mesh"]


def root_mesh(mesh: Any) -> DeviceMesh:
    """Returns the mesh that another one was cut out of, else the mesh itself. Collective: no."""
    get = getattr(mesh, "_get_root_mesh", None)  # of newer torch, which warns about the other way
    return device_mesh._mesh_resources.get_root_mesh(mesh) if get is None else get()
