"""Finds out how gradients are averaged where a backend does not do it.

[Note: averaging] FSDP2 asks the backend for the average of gradients. Some backends return the sum
without a word, others refuse. Both are found by doing one small reduction; what is wrong is put
right in `set_all_reduce_hook`, which sees every reduced gradient. NCCL averages.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from composer_fsdp2.ranks import is_fake
from composer_fsdp2.shard.device_mesh import note_copies
from composer_fsdp2.shard.torch_private.meshes import root_mesh
from composer_fsdp2.shard.unit_hooks import AverageOverReplicas, Division

__all__ = ["MakeHook", "probe_reduction"]


MakeHook = Callable[[], Callable[[torch.Tensor], None] | None]
"""makes what a unit gives to `set_all_reduce_hook`; `None` where the backend needs no help"""


def probe_reduction(mesh: DeviceMesh) -> tuple[DeviceMesh, MakeHook]:
    """Finds out how gradients can be averaged on a 1-D or (replicate, shard) mesh.

    Collective: yes, over every group of the mesh.

    A 2-D mesh whose backend cannot run torch's own HSDP is sharded on its shard axis, and the hook
    averages over the replicate axis: the same arithmetic, with parameters that are DTensors on the
    shard axis alone.

    Returns:
        The mesh to give to `fully_shard`, and what makes a hook for each unit.
    """
    shard_group = mesh.get_group(mesh.ndim - 1)
    replicate_group = mesh.get_group(0) if mesh.ndim == 2 else None
    sums = not _averages_reduce_scatter(shard_group, mesh.device_type)
    divide = Division(shard_group.size()) if sums else None
    if replicate_group is None or _runs_hsdp(replicate_group, mesh.device_type):
        return mesh, lambda: divide
    # Torch 2.7 cuts axes out of a whole mesh alone.
    shard_mesh = root_mesh(mesh)[mesh.mesh_dim_names[1]]  # pyright: ignore[reportOptionalSubscript]
    note_copies(shard_mesh, mesh)
    return shard_mesh, lambda: AverageOverReplicas(replicate_group, divide)


def _averages_reduce_scatter(group: dist.ProcessGroup, device_type: str) -> bool:
    if is_fake(group) or group.size() == 1:
        return True
    # On the mesh's device: in a group with several backends the tensor's device chooses one.
    output = torch.zeros(1, device=device_type)
    values = torch.full((group.size(),), float(group.rank()), device=device_type)
    # Newer torch renamed it and warns about the old name.
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    reduce_scatter(output, values, op=dist.ReduceOp.AVG, group=group)
    return abs(output.item() - (group.size() - 1) / 2) < 1e-3


def _runs_hsdp(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether torch's own HSDP works: it wants an average, and an event from the stream.

    Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py#L461
    """
    # CPU streams of older torch give no event, over which its backward stops with an assertion.
    if device_type == "cpu" and torch.cpu.current_stream().record_event() is None:
        return False
    if is_fake(group):
        return True
    value = torch.full((1,), float(group.rank()), device=device_type)
    try:
        dist.all_reduce(value, op=dist.ReduceOp.AVG, group=group)
    except (RuntimeError, ValueError):
        return False  # the arguments are refused on every rank, before anything is sent
    return abs(value.item() - (group.size() - 1) / 2) < 1e-3
