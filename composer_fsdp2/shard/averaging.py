"""Finds out how gradients are averaged where a backend does not do it.

[Note: averaging] FSDP2 asks the backend for the average of gradients. Some backends return the
sum without a word, others refuse. Both are found by doing one small reduction; what is wrong is
put right in `set_all_reduce_hook`, which sees every reduced gradient. NCCL averages.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from composer_fsdp2.ranks import is_fake
from composer_fsdp2.shard.device_mesh import mesh_of_replica
from composer_fsdp2.shard.unit_hooks import AverageOverReplicas, AveragingFactor

__all__ = ["MakeHook", "leave_division_to_torch", "probe_reduction"]

MakeHook = Callable[[], Callable[[torch.Tensor], None] | None]
"""makes a unit's argument for `set_all_reduce_hook`; `None` where the backend needs no help"""


def probe_reduction(mesh: DeviceMesh, sources: int = 1) -> tuple[DeviceMesh, MakeHook]:
    """Finds out how gradients can be averaged on a 1-D or (replicate, shard) mesh.

    Collective: yes, over every group of the mesh.

    A 2-D mesh whose backend cannot run torch's own HSDP is sharded on its shard axis, and the hook
    averages over the replicate axis: the same arithmetic, with parameters that are DTensors on the
    shard axis alone.

    Args:
        mesh: the ranks over which gradients are reduced.
        sources: ranks whose tokens a gradient on one rank is of, as that of an expert is. The
            gradient is an average over them too.

    Returns:
        The mesh for `fully_shard`, and the function that makes a hook for each unit.
    """
    shard_group = mesh.get_group(mesh.ndim - 1)
    replicate_group = mesh.get_group(0) if mesh.ndim == 2 else None
    sums = not _averages_reduce_scatter(shard_group, mesh.device_type)
    size = shard_group.size() if sums else 1
    divide = AveragingFactor(size, sources) if sums or sources > 1 else None
    if replicate_group is None or _runs_hsdp(replicate_group, mesh.device_type):
        return mesh, lambda: divide
    shard_mesh = mesh_of_replica(mesh)
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
    return _is_average(output.item(), group.size())


def _is_average(result: float, ranks: int) -> bool:
    """Says whether a reduction of the ranks' numbers is their average and not their sum.

    The sum is at least twice the average. Each rank answers for itself, and many ranks round in
    another order on each of them.
    """
    return math.isclose(result, (ranks - 1) / 2, rel_tol=0.1)


def _runs_hsdp(group: dist.ProcessGroup, device_type: str) -> bool:
    """Says whether torch's own HSDP works: it wants an average, and an event from the stream.

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
    return _is_average(value.item(), group.size())


def leave_division_to_torch(hook: object) -> None:
    """Has a unit's hook divide no more, because FSDP2 sums and divides itself. Collective: no.

    Args:
        hook: the argument of `set_all_reduce_hook`, or `None`. Averages over replicas go on: FSDP2
            knows the shards of one replica alone there.
    """
    before = hook.before if isinstance(hook, AverageOverReplicas) else hook
    if isinstance(before, AveragingFactor):
        before.size = 1
