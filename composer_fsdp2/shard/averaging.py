"""Averages gradients over the shards and the copies of a model.

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
from composer_fsdp2.shard.device_mesh import note_copies
from composer_fsdp2.torch_private.tensors import root_mesh

__all__ = [
    "AverageOverReplicas",
    "Division",
    "MakeHook",
    "leave_division_to_torch",
    "probe_reduction",
]


class Division:
    """Makes a sum over the shards an average, in place.

    Args:
        size: ranks over which the backend takes a sum where FSDP2 asks for an average.
        sources: ranks whose tokens a gradient on one rank is of, as that of an expert is.
    """

    def __init__(self, size: int, sources: int = 1) -> None:
        self.size, self._sources = size, sources

    def __call__(self, reduced: torch.Tensor) -> None:
        """Divides. Collective: no."""
        _use_in_this_stream(reduced)
        if self._sources > 1:
            # Not torch's own factor, which divides twice where one rank has all of a gradient:
            # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py
            reduced.div_(self._sources)
        # FSDP2 asks for an average of these two only; others it sums and divides itself.
        # https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py#L554
        if self.size > 1 and reduced.dtype in (torch.float32, torch.bfloat16):
            reduced.div_(self.size)


def _use_in_this_stream(reduced: torch.Tensor) -> None:
    """Keeps a reduced gradient until the stream of its hook is done with it.

    The memory is of the stream that reduces. Torch adds it to gradients of earlier microbatches on
    this stream, and frees it; the next reduction could write there before the sum has read it.

    Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py#L449
    """
    if reduced.device.type != "cpu":
        reduced.record_stream(torch.get_device_module(reduced.device).current_stream())


def leave_division_to_torch(hook: object) -> None:
    """Has a unit's hook divide no more, because FSDP2 sums and divides itself. Collective: no.

    Args:
        hook: what `set_all_reduce_hook` was given, perhaps nothing. Averages over copies of the
            model go on: FSDP2 knows the shards of one copy alone there.
    """
    before = hook.before if isinstance(hook, AverageOverReplicas) else hook
    if isinstance(before, Division):
        before.size = 1


class AverageOverReplicas:
    """Averages the reduced gradients of one unit over the copies of the model, in place.

    Args:
        group: one rank of every copy.
        before: done first, to what the shards' reduction gave.
    """

    def __init__(
        self, group: dist.ProcessGroup, before: Callable[[torch.Tensor], None] | None
    ) -> None:
        self._group = group
        self.before = before
        self.due = True
        """false keeps gradients on this rank until a call with true, as torch's own HSDP does"""
        self.waiting: torch.Tensor | None = None

    def __call__(self, reduced: torch.Tensor) -> None:
        """Collective: yes, when it is due."""
        _use_in_this_stream(reduced)
        if self.before is not None:
            self.before(reduced)
        if self.waiting is not None:
            reduced += self.waiting
        if not self.due:
            self.waiting = reduced.clone()
            # FSDP adds the result of this hook to the gradients of the shards.
            # https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py#L449
            reduced.zero_()
            return
        self.waiting = None
        # A sum, which every backend has: some of those that come here refuse an average.
        dist.all_reduce(reduced, group=self._group)
        reduced.div_(self._group.size())


MakeHook = Callable[[], Callable[[torch.Tensor], None] | None]
"""makes what a unit gives to `set_all_reduce_hook`; `None` where the backend needs no help"""


def probe_reduction(mesh: DeviceMesh, sources: int = 1) -> tuple[DeviceMesh, MakeHook]:
    """Finds out how gradients can be averaged on a 1-D or (replicate, shard) mesh.

    Collective: yes, over every group of the mesh.

    A 2-D mesh whose backend cannot run torch's own HSDP is sharded on its shard axis, and the hook
    averages over the replicate axis: the same arithmetic, with parameters that are DTensors on the
    shard axis alone.

    Args:
        mesh: of the ranks between which gradients are reduced.
        sources: ranks whose tokens a gradient on one rank is of, as that of an expert is. It is an
            average over them too.

    Returns:
        The mesh to give to `fully_shard`, and what makes a hook for each unit.
    """
    shard_group = mesh.get_group(mesh.ndim - 1)
    replicate_group = mesh.get_group(0) if mesh.ndim == 2 else None
    sums = not _averages_reduce_scatter(shard_group, mesh.device_type)
    size = shard_group.size() if sums else 1
    divide = Division(size, sources) if sums or sources > 1 else None
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
    return _is_average(output.item(), group.size())


def _is_average(found: float, ranks: int) -> bool:
    """Whether ranks that sent their numbers got the average; their sum is at least twice as much.

    Each rank answers for itself, and many ranks round in another order on each of them.
    """
    return math.isclose(found, (ranks - 1) / 2, rel_tol=0.1)


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
    return _is_average(value.item(), group.size())
