"""Builds the device mesh of a run, and its process groups."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.weak import WeakIdKeyDictionary

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.plan.mesh_shape import TENSOR_AXIS, MeshShape
from composer_fsdp2.ranks import is_fake
from composer_fsdp2.torch_private.tensors import root_mesh

__all__ = ["build_mesh", "mesh_of_replica", "mesh_with_replicas", "with_cpu_backend"]

_REPLICA_MESHES: Any = WeakIdKeyDictionary()
"""mesh of the shards of one replica -> mesh with all replicas"""


def build_mesh(shape: MeshShape, device_type: str) -> DeviceMesh:
    """Builds the device mesh: ranks of a replica side by side, those of a tensor group innermost.

    Returns the axes that FSDP2 shards over.

    Collective: yes (creates process groups). `torch.distributed` must be initialised.
    """
    if not torch.distributed.is_initialized():
        raise ConfigError(
            "torch.distributed is not initialised. A device mesh needs its process group. "
            "Call torch.distributed.init_process_group() first, or train through the Trainer."
        )
    sizes = tuple(shape.axes.values())
    root = init_device_mesh(device_type, sizes, mesh_dim_names=tuple(shape.axes))
    # Part of the mesh that has the tensor axis too, on which torch insists.
    return root[tuple(name for name in shape.axes if name != TENSOR_AXIS)]


def mesh_of_replica(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the ranks that shard this rank's replica, and remembers the mesh of all replicas.

    Collective: no.

    Args:
        mesh: (replicate, shard), on its own or cut out of a mesh with a tensor axis.
    """
    root = root_mesh(mesh)
    names = list(mesh.mesh_dim_names or ())[1:]
    if TENSOR_AXIS in (root.mesh_dim_names or ()):
        # For each parameter that lies on a tensor axis torch 2.7 cuts a mesh out of the root, in
        # time that grows with the replicas, unless the axes of the parameter are all of the root:
        # https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/device_mesh.py#L139
        axes = (*names, TENSOR_AXIS)
        replica = DeviceMesh.from_group(
            [root.get_group(axis) for axis in axes],
            root.device_type,
            mesh=root.mesh[root.get_local_rank(0)],
            mesh_dim_names=axes,
        )
        # There, equal meshes have one root, the last that they were cut out of. In newer torch each
        # mesh has its own, and parameters keep that of all replicas.
        if root_mesh(replica) is replica:
            tensor = root[TENSOR_AXIS]
            if root_mesh(replica[TENSOR_AXIS]) is root_mesh(tensor):
                root = replica
    # Torch 2.7 cuts axes out of a whole mesh alone.
    shards = root[names[0]]
    # FSDP2 gives this very object to the DTensors that it makes of plain parameters. By identity:
    # after the process group was destroyed and made again, another mesh may be equal to it.
    _REPLICA_MESHES[shards] = mesh
    return shards


def mesh_with_replicas(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh of all replicas, whose last axis is that of the shards. Collective: no."""
    return _REPLICA_MESHES.get(mesh, mesh)


def with_cpu_backend(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the same ranks and axes, in groups that reduce tensors on the CPU as well.

    Collective: yes (creates process groups). Norms and full tensors of parameters that live in CPU
    memory are computed there, which a group that was started for the GPU alone cannot.
    """
    if is_fake():
        return mesh  # gloo would wait for ranks that are not there
    backend = "gloo"
    if mesh.device_type != "cpu":
        # The backend of one device, or those of several (`cpu:gloo,cuda:nccl`).
        backends = dist.get_backend(mesh.get_group(0))
        by_device = dict(part.split(":") for part in backends.split(",") if ":" in part)
        backend = f"cpu:gloo,{mesh.device_type}:{by_device.get(mesh.device_type, backends)}"
    groups: list[Any] = []
    for axis in range(mesh.ndim):
        # Every rank takes part in making every group, also those it is not in: torch wants that.
        rows = mesh.mesh.swapdims(-1, axis).reshape(-1, mesh.size(axis)).tolist()
        groups.append(dist.new_subgroups_by_enumeration(rows, backend=backend)[0])
    is_1d = mesh.ndim == 1
    return DeviceMesh.from_group(
        groups[0] if is_1d else groups,
        mesh.device_type,
        mesh=None if is_1d else mesh.mesh,
        mesh_dim_names=mesh.mesh_dim_names,
    )
