"""The form of a parameter: which part of which tensor a rank has of it.

[Note: tensors of one parameter] A parameter of a prepared model is met as five tensors:

- *sharded*: the parameter between steps, a DTensor. Gradients lie as it does.
- *unsharded*: what FSDP2 gathers for compute, on one rank for a while. Tensor parallelism leaves it
  a slice in the ranks' order of rows, expert parallelism the rank's own experts.
- *full*: what one process has, in the shape and the order of the model: `full()`, `shard()`.
- *in a checkpoint*: the full tensor as FSDP2 alone would shard it. State dicts show it, see
  `state_dicts`: `to_checkpoint()`, `from_checkpoint()`.
- *in the optimizer*: state of the shape of the sharded one lies as it does. `optim.state` may keep
  its local part in fewer bits.

[Note: order of rows] Query, key and value of a fused projection lie one after the other. A rank of
a tensor group needs its heads of each, so each block is cut by itself, and what one rank has lies
together: the parameter has the same rows in another order.

[Note: padding] FSDP2 shards what a rank of a tensor group has, and torch does so evenly alone. So
each rank's part ends in rows of zeros where its size is not a multiple of the ranks that share it.
What is computed with them is cut off, so their gradients are zero, and no state dict shows them.

[Note: remote experts] Every rank keeps a parameter for each expert of a list, under its name and
with its shape. An expert of other ranks is a DTensor on a mesh without this rank, with nothing in
it: torch's optimizers, checkpoints and counts of parameters see the same names on every rank.

[Note: stacks] A tensor that has all experts in its first dimension is cut along it: a rank has the
slice of its experts as a parameter of its own, which FSDP2 shards over the ranks with the same
experts. So it lies on one mesh, and never as a `_StridedShard`, which checkpoints of torch move by
hand and in which no rank has a whole matrix. FSDP2 shards the first dimension that its ranks divide
evenly, for past the first it can do no other; where that is the first, matrices stay in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from composer_fsdp2.plan.mesh_shape import TENSOR_AXIS

__all__ = [
    "FULLY_SHARDED",
    "ExpertForm",
    "ExpertMesh",
    "FusedRowsForm",
    "ParameterForm",
    "as_in_model",
    "cut_in_order",
    "form_of",
    "form_on",
    "group_dividing",
    "part_of",
    "placement_of",
    "rows_of",
    "set_form",
]

_FORM = "_fsdp2_form"
"""attribute of a parameter, for `form_of`; sharding carries attributes over"""


# --- Parts of a tensor ---


def _is_strided(placement: Placement) -> bool:
    """Says whether an axis divides rows that the axes to its right have divided before."""
    # The class is private: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/tensor/placement_types.py#L375
    return hasattr(placement, "split_factor")


def cut_in_order(placements: Sequence[Placement]) -> list[int]:
    """Returns the axes of a mesh in the order in which they cut a tensor."""
    return sorted(range(len(placements)), key=lambda axis: _is_strided(placements[axis]))


def rows_of(count: int, ranks: int, rank: int) -> range:
    """Returns the rows of a rank. A rank past the end has none, as with `torch.chunk` and FSDP2.

    Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_common.py#L121
    """
    step = -(-count // ranks)
    return range(min(rank * step, count), min((rank + 1) * step, count))


def part_of(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Returns this rank's part of a tensor that every rank has, as a copy. Collective: no."""
    part = tensor.detach()
    for axis in cut_in_order(placements):
        dim: int | None = getattr(placements[axis], "dim", None)
        if dim is None:
            continue
        rows = rows_of(part.shape[dim], mesh.size(axis), mesh.get_local_rank(axis))
        part = part.narrow(dim, rows.start, len(rows))
    # The shape is given because torch would take all parts to be as large as this one. Its check
    # would be a collective, and ranks have cut the same tensor.
    return DTensor.from_local(
        # A copy: a view would keep the whole tensor.
        part.clone(memory_format=torch.contiguous_format),
        mesh,
        placements,
        run_check=False,
        shape=tensor.shape,
        stride=torch.empty(tensor.shape, device="meta").stride(),
    )


def group_dividing(param: object) -> dist.ProcessGroup | None:
    """Returns the ranks that divide a parameter's layer, `None` where none do. Collective: no."""
    if isinstance(param, DTensor) and TENSOR_AXIS in (param.device_mesh.mesh_dim_names or ()):
        return param.device_mesh.get_group(TENSOR_AXIS)
    return None


# --- Forms ---


class ParameterForm:
    """The form of a parameter as FSDP2 alone shards it, or of a parameter that is not sharded.

    Its subclasses are the forms that tensor and expert parallelism leave behind.
    """

    __slots__ = ()

    @property
    def parallelism(self) -> str:
        """The parallelism that made the form: "tensor", "expert" or none."""
        return ""

    @property
    def is_remote(self) -> bool:
        """Whether other ranks have the parameter; see [Note: remote experts]."""
        return False

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...] | None:
        """Between whose ranks elements are divided; `None`: along the axes of its mesh."""
        return None

    @property
    def placement(self) -> Shard | None:
        """How FSDP2 is to shard the parameter; `None` leaves it to torch."""
        return None

    def model_shape(self, shape: torch.Size) -> torch.Size:
        """Returns the shape of the full tensor, given that of the sharded one."""
        return shape

    def unpadded_shape(self, shape: torch.Size) -> torch.Size:
        """Returns the shape that the ranks of one mesh share, without padding."""
        return shape

    def positions(self, dim: int, size: int) -> torch.Tensor:
        """Returns where in the model's order each row along a dimension lies; -1 is padding.

        Args:
            dim: a dimension of the sharded tensor.
            size: rows along the dimension, without padding.
        """
        del dim
        return torch.arange(size)

    def blocks(self, param: DTensor) -> Iterator[tuple[tuple[Any, ...], list[int]]]:
        """Yields the blocks of this rank's shard that lie together in the full tensor.

        Collective: no.

        Yields:
            The index of a block in the shard, and its offsets in the full tensor, one per dim. No
            block has padding.
        """
        # Torch's checkpoints ask this way where a shard begins; each rank has a single shard.
        (chunk,) = param.__create_chunk_list__()
        yield (...,), list(chunk.offsets)

    def full(self, value: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the full tensor, on every rank; it may be `value` where nothing is sharded.

        Collective: yes, over the ranks that share the parameter.

        Args:
            value: the parameter, its gradient or state; `None` where the rank has none.
        """
        return value.full_tensor() if isinstance(value, DTensor) else value

    def shard(self, full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of a full tensor that every rank has. Collective: no.

        Args:
            full: in the model's shape, on any device.
            like: a tensor of this form, for mesh, placements and device; on meta, the part stays
                where the full tensor is.
        """
        device = full.device if like.is_meta else like.device
        if not isinstance(like, DTensor):
            return full.to(device)
        # The mesh may be on the GPU, and the shards offloaded to the CPU.
        return part_of(self._of_mesh(full), like.device_mesh, like.placements).to(device)

    def to_checkpoint(self, value: torch.Tensor) -> torch.Tensor:
        """Returns a sharded tensor as FSDP2 alone would shard it. Collective: yes, as `full`."""
        return value

    def from_checkpoint(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of a checkpoint as this rank has it. Collective: yes, as `full`.

        Args:
            value: the full tensor, or as `to_checkpoint` returns it.
            like: a tensor of this form.
        """
        return value if isinstance(value, DTensor) else self.shard(value, like)

    def _of_mesh(self, full: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that the ranks of one mesh share between them."""
        return full


FULLY_SHARDED = ParameterForm()
"""the form of every parameter that neither tensor nor expert parallelism has changed"""


def form_of(param: object) -> ParameterForm:
    """Returns the form of a parameter. Collective: no."""
    return getattr(param, _FORM, FULLY_SHARDED)


def form_on(param: object) -> ParameterForm | None:
    """Returns the form that was noted on a parameter itself.

    A gathered parameter is another object, without a note. Collective: no.
    """
    return getattr(param, _FORM, None)


def set_form(param: nn.Parameter, form: ParameterForm) -> None:
    """Notes the form on a parameter."""
    setattr(param, _FORM, form)


def as_in_model(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns attributes of a parameter for a full tensor in its place. Collective: no."""
    return {**attributes, _FORM: FULLY_SHARDED}


def placement_of(param: nn.Parameter) -> Shard | None:
    """Returns how FSDP2 is to shard a parameter; `None` leaves it to torch."""
    return form_of(param).placement


@dataclass(frozen=True, slots=True)
class FusedRowsForm(ParameterForm):
    """The form of rows in blocks along one dimension; see [Note: order of rows]."""

    sizes: tuple[int, ...]
    """rows of each block in the model, each a multiple of the degree"""
    degree: int
    dim: int
    padding: int = 0
    """rows of zeros at the end of each rank's part; see [Note: padding]"""

    @property
    def parallelism(self) -> str:
        """Tensor parallelism divides fused projections."""
        return "tensor"

    @property
    def rows(self) -> int:
        """Rows of the model that each rank has."""
        return sum(self.sizes) // self.degree

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yields rows that follow each other in both orders: first here, in the model, and count.

        Rows that are in none of them are padding.
        """
        for rank in range(self.degree):
            here, start = rank * (self.rows + self.padding), 0
            for size in self.sizes:
                share = size // self.degree
                yield here, start + rank * share, share
                here, start = here + share, start + size

    def to_ranks(self, full: torch.Tensor) -> torch.Tensor:
        """Returns the full tensor in the ranks' order, with padding."""
        shape = list(full.shape)
        shape[self.dim] = self.degree * (self.rows + self.padding)
        in_ranks = full.new_zeros(shape)
        for here, there, count in self.runs():
            in_ranks.narrow(self.dim, here, count).copy_(full.narrow(self.dim, there, count))
        return in_ranks

    def to_model(self, in_ranks: torch.Tensor) -> torch.Tensor:
        """Returns a full tensor in the model's order, without padding."""
        full = in_ranks.new_empty(self.model_shape(in_ranks.shape))
        for here, there, count in self.runs():
            full.narrow(self.dim, there, count).copy_(in_ranks.narrow(self.dim, here, count))
        return full

    def model_shape(self, shape: torch.Size) -> torch.Size:
        """Leaves padding out."""
        return torch.Size((*shape[: self.dim], sum(self.sizes), *shape[self.dim + 1 :]))

    unpadded_shape = model_shape

    def positions(self, dim: int, size: int) -> torch.Tensor:
        """Puts rows into the ranks' order."""
        positions = torch.arange(size)
        return replace(self, dim=0).to_ranks(positions + 1) - 1 if dim == self.dim else positions

    def blocks(self, param: DTensor) -> Iterator[tuple[tuple[Any, ...], list[int]]]:
        """Cuts a shard where the model's order goes on elsewhere."""
        ((_, offsets),) = ParameterForm.blocks(self, param)
        begin = offsets[self.dim]
        end = begin + param.to_local().shape[self.dim]
        for here, there, count in self.runs():
            first, last = max(begin, here), min(end, here + count)
            if first < last:
                index = (*[slice(None)] * self.dim, slice(first - begin, last - begin))
                starts = [*offsets]
                starts[self.dim] = there + first - here
                yield index, starts

    def full(self, value: torch.Tensor | None) -> torch.Tensor | None:
        """Gathers, and puts rows into the model's order."""
        in_ranks = ParameterForm.full(self, value)
        return None if in_ranks is None else self.to_model(in_ranks)

    def to_checkpoint(self, value: torch.Tensor) -> torch.Tensor:
        """Exchanges rows with other ranks, which takes the full tensor on each for a moment."""
        if not isinstance(value, DTensor):
            return self.to_model(value)
        placements: Sequence[Placement] = value.placements
        if self.padding:  # torch knows no uneven strided placements
            placements = [Shard(getattr(p, "dim", 0)) if _is_strided(p) else p for p in placements]
        return part_of(self.to_model(value.full_tensor()), value.device_mesh, placements)

    def from_checkpoint(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Exchanges rows with other ranks."""
        if not isinstance(value, DTensor):
            return self.shard(value, like)
        if self.padding and value.shape == like.shape:
            return value  # divided already
        mesh = like if isinstance(like, DTensor) else value
        in_ranks = self.to_ranks(value.full_tensor())
        return part_of(in_ranks, mesh.device_mesh, mesh.placements).to(value.device)

    def _of_mesh(self, full: torch.Tensor) -> torch.Tensor:
        return self.to_ranks(full)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMesh:
    """The ranks of a run as a layer of experts sees them."""

    shards: DeviceMesh
    """the ranks that FSDP2 shards the same experts over, with the replicas of HSDP around them"""
    group: dist.ProcessGroup
    """the ranks that have all experts of a layer between them, next to each other"""
    data_parallel: DeviceMesh
    """the ranks that share one replica of the model, with the replicas of HSDP around them"""
    tensor: DeviceMesh | None
    """the ranks that have the same tokens, because they divide the layers around this one"""
    remote: DeviceMesh
    """some rank that is not this one"""
    groups: tuple[dist.ProcessGroup, ...]
    """process groups over which a sum over all experts of a layer is reduced"""

    @property
    def degree(self) -> int:
        """Ranks of the group."""
        return self.group.size()

    @property
    def sources(self) -> int:
        """Ranks of the group with tokens of their own."""
        return self.degree // (1 if self.tensor is None else self.tensor.size())

    @property
    def group_rank(self) -> int:
        """Number of this rank in the group."""
        return self.group.rank()


@dataclass(frozen=True, slots=True, eq=False)
class ExpertForm(ParameterForm):
    """The form of a parameter of one expert, or of a tensor with all experts of a layer.

    See [Note: remote experts] and [Note: stacks].
    """

    mesh: ExpertMesh
    owner: int
    """group rank that has the expert; of a tensor with all experts, this rank's own"""
    dim: int | None = None
    """dimension that FSDP2 shards, of a tensor with all experts"""

    @property
    def parallelism(self) -> str:
        """Expert parallelism."""
        return "expert"

    @property
    def is_remote(self) -> bool:
        """Whether another rank of the group is the owner."""
        return self.owner != self.mesh.group_rank

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The mesh of an expert has one rank of a group alone, and its groups may be others'.

        Torch may have exchanged it for an older equal one, of another model.
        """
        return self.mesh.groups

    @property
    def placement(self) -> Shard | None:
        """A dimension that the ranks divide evenly."""
        return None if self.dim is None else Shard(self.dim)

    def model_shape(self, shape: torch.Size) -> torch.Size:
        """Counts the experts of all ranks."""
        if self.dim is None:
            return shape
        return torch.Size((shape[0] * self.mesh.degree, *shape[1:]))

    def blocks(self, param: DTensor) -> Iterator[tuple[tuple[Any, ...], list[int]]]:
        """Begins at this rank's first expert."""
        for index, offsets in ParameterForm.blocks(self, param):
            if self.dim is not None:
                offsets[0] += self.owner * param.shape[0]
            yield index, offsets

    @torch.no_grad()
    def full(self, value: torch.Tensor | None) -> torch.Tensor | None:
        """Sends the owner's tensor to every rank of the group, into memory of its own."""
        if self.dim is None:
            return _broadcast(self.mesh, self.owner, value)
        slices = [_broadcast(self.mesh, rank, value) for rank in range(self.mesh.degree)]
        tensors = [part for part in slices if part is not None]
        return torch.cat(tensors) if len(tensors) == len(slices) else None

    def shard(self, full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Leaves a remote expert as it is."""
        return like if self.is_remote else ParameterForm.shard(self, full, like)

    def to_checkpoint(self, value: torch.Tensor) -> torch.Tensor:
        """Sends each expert to all ranks, of which each keeps its rows."""
        full, data_parallel = self.full(value), self.mesh.data_parallel
        assert full is not None
        return part_of(full, data_parallel, [*[Replicate()] * (data_parallel.ndim - 1), Shard(0)])

    def from_checkpoint(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Gathers, and keeps this rank's rows."""
        full = value.full_tensor() if isinstance(value, DTensor) else value
        return self.shard(full, like)

    def slice_of(self, full: torch.Tensor) -> torch.Tensor:
        """Returns this rank's experts of a tensor with all of them, as a view. Collective: no."""
        if self.dim is None:
            return full
        share = full.shape[0] // self.mesh.degree
        return full.narrow(0, self.owner * share, share)

    _of_mesh = slice_of


def _broadcast(mesh: ExpertMesh, owner: int, value: torch.Tensor | None) -> torch.Tensor | None:
    """Returns on every rank of the group the tensor whose shards the owner's mesh has.

    Collective: yes, over the group and the owner's mesh.
    """
    group = mesh.group
    sharded: Any = value if owner == mesh.group_rank else None
    full: torch.Tensor | None = None if sharded is None else sharded.detach().full_tensor()
    source = dist.get_global_rank(group, owner)
    facts: list[Any] = [None if full is None else (full.shape, full.dtype)]
    dist.broadcast_object_list(facts, src=source, group=group)
    if facts[0] is None:
        return None
    if full is None:
        shape, dtype = facts[0]
        full = torch.empty(shape, dtype=dtype, device=mesh.data_parallel.device_type)
    full = full.clone(memory_format=torch.contiguous_format)
    dist.broadcast(full, src=source, group=group)
    return full
