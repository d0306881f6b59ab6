"""Where the rows and columns of a sharded matrix lie, and which of them an owner computes.

[Note: runs] Along each dimension of a matrix a rank holds runs of neighbours: one under FSDP alone,
one for each block of a fused projection where tensor parallelism has divided it too. What a rank
holds of a matrix, or of a part of one, is every run of rows with every run of columns: its pieces.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composer_fsdp2.optim.muon_iteration import Layout, work
from composer_fsdp2.parallel.row_order import RowOrder, cut_in_order, order_of, shape_in_model
from composer_fsdp2.shard.device_mesh import whole_mesh

__all__ = ["Division", "Item", "Parameter", "Piece", "RankGrid", "divide", "pieces"]

_Run = tuple[int, int, int]
"""first one in the shard, first one in the matrix, how many"""


@dataclass(frozen=True, slots=True)
class RankGrid:
    """The ranks that hold a parameter: `replicas` copies of `shards` shards."""

    shards: int
    replicas: int
    shard: int
    """of this rank"""
    replica: int
    """of this rank"""
    shard_group: dist.ProcessGroup | None
    """has all shards of this replica, and perhaps more ranks; None is the default group"""
    whole_group: dist.ProcessGroup | None
    """all replicas"""
    shard_group_size: int
    """ranks of the group"""
    whole_group_size: int
    """likewise"""
    places_in_shard_group: tuple[int, ...]
    """by shard, of this replica"""
    places_in_whole_group: tuple[int, ...]
    """by replica and shard"""

    @classmethod
    def of(cls, mesh: DeviceMesh, axes: Sequence[int]) -> RankGrid:
        """Reads a mesh; `axes` are those along which parameters are divided. Collective: no.

        A mesh of some ranks only has no group of its own for all axes: each of its replicas then
        counts as the only one, and computes everything.
        """
        whole = whole_mesh(mesh)
        along = list(axes) if whole is mesh else [whole.ndim - 1]
        size = math.prod(mesh.size(axis) for axis in axes)
        last = [*range(-len(along), 0)]
        table = whole.mesh.movedim(along, last).reshape(-1, size).tolist()
        me = dist.get_rank()
        replica = next(number for number, row in enumerate(table) if me in row)
        row = table[replica]
        everyone = [rank for row in table for rank in row]
        shared = len(table) > 1 and sorted(everyone) == list(range(dist.get_world_size()))
        # torch has a group for each axis alone; several take the one of all ranks.
        group = mesh.get_group(axes[0]) if len(axes) == 1 else None
        # `new_group` sorts its ranks by default, whatever their order in the mesh.
        whole_world: Any = dist.group.WORLD
        members = dist.get_process_group_ranks(group or whole_world)
        in_shards = tuple(members.index(rank) for rank in row)
        return cls(
            shards=len(row),
            replicas=len(table) if shared else 1,
            shard=row.index(me),
            replica=replica if shared else 0,
            shard_group=group,
            whole_group=None if shared else group,
            shard_group_size=len(members),
            whole_group_size=len(everyone) if shared else len(members),
            places_in_shard_group=in_shards,
            places_in_whole_group=tuple(everyone) if shared else in_shards,
        )

    @property
    def owner(self) -> int:
        """The number of this rank among all owners."""
        return self.replica * self.shards + self.shard


@dataclass(frozen=True, slots=True)
class Division:
    """How a parameter is divided between shards."""

    shape: tuple[int, ...]
    """as shards hold it: in the ranks' order, with padding"""
    sizes: tuple[int, ...]
    """of the axes of the mesh that divide it; shards are numbered along the last one first"""
    cuts: tuple[tuple[int, int], ...]
    """which axis divides which dimension, one after the other"""
    order: RowOrder | None = None

    @classmethod
    def of(cls, param: DTensor, axes: Sequence[int]) -> Division:
        """Reads a parameter that is divided along these axes of its mesh. Collective: no."""
        cuts = [
            (axes.index(axis), getattr(param.placements[axis], "dim", 0))
            for axis in cut_in_order(param.placements)
            if axis in axes
        ]
        sizes = tuple(param.device_mesh.size(axis) for axis in axes)
        return cls(tuple(param.shape), sizes, tuple(cuts), order_of(param))

    def places(self, shard: int) -> list[int]:
        """Returns the place of a shard on each axis."""
        found: list[int] = []
        for size in reversed(self.sizes):
            shard, place = divmod(shard, size)
            found.insert(0, place)
        return found


@functools.lru_cache(maxsize=2**16)
def _runs(division: Division, shard: int) -> tuple[tuple[_Run, ...], ...]:
    """Runs of a shard along each dimension."""
    places = division.places(shard)
    spans = [(0, size) for size in division.shape]
    for axis, dim in division.cuts:
        # As `torch.chunk` cuts.
        first, size = spans[dim]
        step = -(-size // division.sizes[axis])
        begin = min(places[axis] * step, size)
        spans[dim] = first + begin, min(step, size - begin)
    order = division.order
    found: list[tuple[_Run, ...]] = []
    for dim, (first, size) in enumerate(spans):
        known = [(0, 0, division.shape[dim])] if order is None or order.dim != dim else order.runs()
        found.append(tuple(_clipped(known, first, first + size)))
    return tuple(found)


def _clipped(runs: Sequence[_Run], first: int, end: int) -> Iterator[_Run]:
    """Runs of all ranks, as far as they lie between two places in the ranks' order."""
    for here, there, count in runs:
        begin, stop = max(here, first), min(here + count, end)
        if stop > begin:
            yield begin - first, there + begin - here, stop - begin


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter without its values."""

    shape: tuple[int, ...]
    """in the model"""
    layout: Layout
    dim: int
    """along which it may be computed in parts"""
    division: Division

    @classmethod
    def of(cls, param: DTensor, axes: Sequence[int], layout: Layout) -> Parameter:
        """Reads a parameter that is divided along these axes of its mesh. Collective: no."""
        division = Division.of(param, axes)
        dim = division.cuts[0][1] if len(axes) == 1 else 0
        return cls(tuple(shape_in_model(param)), layout, dim, division)


@dataclass(frozen=True, slots=True)
class Item:
    """A part of a parameter that is computed in one place."""

    param: int
    start: int
    """along the dimension in which the parameter is computed in parts"""
    stop: int
    shape: tuple[int, ...]
    layout: Layout
    owner: int | None = None
    """where that is settled, because it lies there"""

    @property
    def work(self) -> int:
        """The cost of computing it."""
        return work(self.shape, self.layout)

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


def divide(number: int, param: Parameter, grid: RankGrid) -> list[Item]:
    """Returns the parts of a parameter that can be computed in different places."""
    shape, dim, layout = param.shape, param.dim, param.layout
    if len(shape) > 2 and dim == 0:
        return list(_divide_list(number, param, grid))
    joined = dim == 0 and not layout.transposed and layout.turns == 1
    sizes = layout.sizes(shape) if joined else (shape[dim],)
    ends = list(itertools.accumulate(sizes))
    return [
        Item(
            number,
            end - size,
            end,
            (*shape[:dim], size, *shape[dim + 1 :]),
            Layout() if joined else layout,
        )
        for end, size in zip(ends, sizes, strict=True)
    ]


def _divide_list(number: int, param: Parameter, grid: RankGrid) -> Iterator[Item]:
    """A list of matrices: every shard has whole ones, of which each replica takes a part."""
    for shard in range(grid.shards):
        for _, start, count in _runs(param.division, shard)[0]:
            for replica in range(grid.replicas):
                first = start + count * replica // grid.replicas
                last = start + count * (replica + 1) // grid.replicas
                if last > first:
                    shape = (last - first, *param.shape[1:])
                    owner = replica * grid.shards + shard
                    yield Item(number, first, last, shape, param.layout, owner)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an item that lies in a shard together."""

    here: tuple[int, ...]
    """where it begins in the shard"""
    there: tuple[int, ...]
    """in the item"""
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    def in_shard(self, tensor: Tensor) -> Tensor:
        """Returns this part of a shard."""
        return _narrowed(tensor, self.here, self.shape)

    def in_item(self, tensor: Tensor) -> Tensor:
        """Returns this part of an item."""
        return _narrowed(tensor, self.there, self.shape)


def _narrowed(tensor: Tensor, starts: Sequence[int], shape: Sequence[int]) -> Tensor:
    for dim, (start, size) in enumerate(zip(starts, shape, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, size)
    return tensor


def pieces(param: Parameter, item: Item, shard: int) -> list[Piece]:
    """Returns what a shard holds of an item, in the order of the item."""
    along = list(_runs(param.division, shard))
    along[param.dim] = tuple(
        (here + max(item.start - there, 0), max(there - item.start, 0), stop - begin)
        for here, there, count in along[param.dim]
        if (stop := min(there + count, item.stop)) > (begin := max(there, item.start))
    )
    found = [Piece(*zip(*runs, strict=True)) for runs in itertools.product(*along)]
    return sorted(found, key=lambda piece: piece.there)
