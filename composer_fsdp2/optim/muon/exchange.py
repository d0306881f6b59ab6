"""Brings each matrix of a sharded model to one rank, and what it became back to all shards.

[Note: exchange] Newton-Schulz needs a whole matrix; a rank has some of its rows. The matrices are
divided among the ranks by the work they are. An all-to-all carries every rank's part to the owners,
another one carries the results back. Parts are as long as they are, so uneven rows need no padding.
With replicas (HSDP) an owner is a rank of one replica: on the way there each rank sends inside its
own replica, on the way back to all of them. So no matrix is computed twice, and a bucket takes two
collectives at most.

Everything here follows from shapes and the mesh, which are the same on all ranks. A matrix that
lies in one shard (experts of a list that is divided between ranks) stays there.

[Note: positions] Where something lies in a parameter is a list of positions along each dimension,
in the order of the model. A shard has one, which `torch.arange` cut as the parameter is cut gives,
and so has a matrix; what a shard holds of a matrix is what both have. With tensor parallelism rows
of a shard may be in another order and end in padding, whose position is -1.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composer_fsdp2.optim.muon.newton_schulz import MatrixLayout
from composer_fsdp2.parallel.form import FULLY_SHARDED, ParameterForm, cut_in_order, form_of
from composer_fsdp2.shard.device_mesh import mesh_with_replicas

__all__ = [
    "Matrix",
    "MatrixExchange",
    "MatrixPart",
    "MatrixSplit",
    "Ranks",
    "plan_exchange",
    "ranks_of",
]


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that hold parameters: `replicas` copies of `shards` shards, in a process group.

    The number of a rank is `replica * shards + shard`.
    """

    shards: int = 1
    replicas: int = 1
    me: int = 0
    """number of this rank"""
    places: tuple[int, ...] = (0,)
    """place of each rank in the group, by its number"""
    group_size: int = 1


def ranks_of(mesh: DeviceMesh, axes: Sequence[int]) -> tuple[Ranks, dist.ProcessGroup | None]:
    """Returns the ranks that divide parameters along axes of a mesh, and their process group.

    Collective: no. A group of `None` is the default group. A mesh of some ranks only has no group
    of its own for all its axes: each of its replicas then counts as the only one, and computes
    everything.
    """
    whole = mesh_with_replicas(mesh)
    along = list(axes) if whole is mesh else [whole.ndim - 1]
    size = math.prod(mesh.size(axis) for axis in axes)
    copies = whole.mesh.movedim(along, [*range(-len(along), 0)]).reshape(-1, size)
    group: Any = None
    if len(copies) == 1 or copies.numel() < dist.get_world_size():
        copies = copies[(copies == dist.get_rank()).any(dim=1)]
        # torch has a group for each axis alone; several take the one of all ranks.
        group = mesh.get_group(axes[0]) if len(axes) == 1 else None
    numbered = copies.flatten().tolist()
    default_group: Any = dist.group.WORLD
    # `new_group` sorts its ranks by default, whatever their order in the mesh.
    members = dist.get_process_group_ranks(group or default_group)
    places = tuple(members.index(rank) for rank in numbered)
    me = numbered.index(dist.get_rank())
    return Ranks(size, len(copies), me, places, len(members)), group


@dataclass(frozen=True, slots=True)
class MatrixSplit:
    """How a parameter is divided between shards, and the matrices it holds."""

    shape: tuple[int, ...]
    """in the model"""
    layout: MatrixLayout
    sizes: tuple[int, ...] = ()
    """of the axes of the mesh that divide it; shards are numbered along the last one first"""
    cuts: tuple[tuple[int, int], ...] = ()
    """which axis divides which dimension, one after the other"""
    form: ParameterForm = FULLY_SHARDED

    @classmethod
    def of(cls, param: Tensor, axes: Sequence[int], layout: MatrixLayout) -> MatrixSplit:
        """Reads a parameter that is divided along these axes of its mesh. Collective: no."""
        form = form_of(param)
        shape = tuple(form.unpadded_shape(param.shape))
        if not isinstance(param, DTensor) or not axes:
            return cls(shape, layout)
        in_order = [axis for axis in cut_in_order(param.placements) if axis in axes]
        cuts = [(axes.index(axis), getattr(param.placements[axis], "dim", 0)) for axis in in_order]
        sizes = tuple(param.device_mesh.size(axis) for axis in axes)
        return cls(shape, layout, sizes, tuple(cuts), form)


@functools.lru_cache(maxsize=2**14)
def positions_of(division: MatrixSplit, shard: int) -> tuple[Tensor, ...]:
    """Returns what a shard holds along each dimension; see [Note: positions]."""
    found = [division.form.positions(dim, size) for dim, size in enumerate(division.shape)]
    place = list(itertools.product(*map(range, division.sizes)))[shard]
    for axis, dim in division.cuts:
        # `torch.chunk` makes fewer chunks where there are not enough rows.
        chunks = found[dim].chunk(division.sizes[axis])
        found[dim] = chunks[place[axis]] if place[axis] < len(chunks) else found[dim][:0]
    return tuple(found)


@dataclass(slots=True, eq=False)
class Matrix:
    """A matrix of a parameter, or that of several experts, which one rank orthogonalises."""

    param: int
    """number of the parameter"""
    positions: tuple[Tensor, ...]
    owner: int | None = None
    """number of the rank that has all of it"""

    @property
    def shape(self) -> tuple[int, ...]:
        """The size along each dimension, as the parameter has them."""
        return tuple(map(len, self.positions))

    @property
    def work(self) -> int:
        """The cost of orthogonalising it: `rows * columns * min(rows, columns)`."""
        return math.prod(self.shape) * min(self.shape[-2:])


def _matrices(number: int, division: MatrixSplit, ranks: Ranks) -> Iterator[Matrix]:
    """The matrices of a parameter that can be orthogonalised in different places."""
    cut_along = {dim for _, dim in division.cuts}
    for outputs in division.layout.outputs(division.shape):
        along = [torch.arange(size) for size in division.shape]
        along[division.layout.axis] = outputs
        if len(along) == 2 or cut_along != {0}:
            yield Matrix(number, tuple(along), owner=0 if len(ranks.places) == 1 else None)
            continue
        # A list of matrices: every shard has whole ones, of which each replica takes a part.
        for shard in range(ranks.shards):
            held = positions_of(division, shard)[0].tensor_split(ranks.replicas)
            for replica, experts in enumerate(held):
                if len(experts):
                    yield Matrix(number, (experts, *along[1:]), replica * ranks.shards + shard)


@dataclass(slots=True, eq=False)
class MatrixPart:
    """A shard's share of a matrix."""

    matrix: Matrix
    here: tuple[Any, ...]
    """its index in the shard"""
    there: tuple[Any, ...]
    """its index in the matrix"""
    shape: tuple[int, ...]

    @classmethod
    def of(cls, matrix: Matrix, division: MatrixSplit, shard: int) -> MatrixPart:
        """Finds the positions that a shard and a matrix have in common."""
        here: list[Tensor] = []
        there: list[Tensor] = []
        held = positions_of(division, shard)
        for size, wanted, given in zip(division.shape, matrix.positions, held, strict=True):
            places = torch.full((size + 1,), -1)  # the last one is that of padding
            places[wanted] = torch.arange(len(wanted))
            found = places[given]
            here.append((found >= 0).nonzero().flatten())
            there.append(found[here[-1]])
        return cls(matrix, _index(here), _index(there), tuple(map(len, here)))

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


def _index(positions: Sequence[Tensor]) -> tuple[Any, ...]:
    """The index of all combinations of positions: slices, which copy nothing, where it can be."""
    slices = [slice(int(p[0]), int(p[-1]) + 1) if len(p) else slice(0, 0) for p in positions]
    if all(s.stop - s.start == len(p) for s, p in zip(slices, positions, strict=True)):
        return tuple(slices)
    last = len(positions) - 1
    return tuple(p.view(-1, *[1] * (last - dim)) for dim, p in enumerate(positions))


Arriving = Callable[[], list[tuple[MatrixPart, Tensor]]]
"""waits for the parts that come, and returns them with their values"""


@dataclass(slots=True, eq=False)
class Way:
    """One all-to-all: the parts that this rank sends and receives, by place in the group."""

    send: list[list[MatrixPart]]
    receive: list[list[MatrixPart]]
    starts: bool
    """whether any rank of the group sends to another"""

    def start(
        self,
        value_of: Callable[[MatrixPart], Tensor],
        like: Tensor,
        group: dist.ProcessGroup | None,
    ) -> Arriving:
        """Sends the value of each part. Collective: yes, over the group."""
        values = [value_of(part).flatten() for parts in self.send for part in parts]
        received = sent = torch.cat([like.new_empty(0), *values])
        handle: Any = None
        if self.starts:
            ways = (self.receive, self.send)
            sizes = [[sum(part.numel for part in parts) for parts in way] for way in ways]
            received = sent.new_empty(sum(sizes[0]))
            handle = dist.all_to_all_single(received, sent, *sizes, group=group, async_op=True)

        def finish() -> list[tuple[MatrixPart, Tensor]]:
            if handle is not None:
                handle.wait()
            parts = [*itertools.chain(*self.receive)]
            flat = received.split([part.numel for part in parts])
            return [(part, own.view(part.shape)) for part, own in zip(parts, flat, strict=True)]

        return finish


@dataclass(slots=True, eq=False)
class MatrixExchange:
    """How the parameters of one mesh travel in each step; see [Note: exchange]."""

    local: list[MatrixPart]
    """matrices that neither come nor go"""
    buckets: list[tuple[Way, Way]]
    """matrices that travel together: the way to their owners, and the way back"""

    def run(
        self,
        shards: Sequence[Tensor],
        group: dist.ProcessGroup | None,
        orthogonalise: Callable[[int, Tensor], Tensor],
        apply: Callable[[MatrixPart, Tensor], None],
    ) -> None:
        """Computes every matrix in one place and hands the results to all shards.

        Collective: yes, over the group. The next bucket is on its way while one is computed.

        Args:
            shards: this rank's shard of each parameter, in the dtype of the iteration.
            group: of the ranks.
            orthogonalise: gives the result of a matrix of a parameter, in the same dtype.
            apply: takes a part of a result.
        """

        def held(part: MatrixPart) -> Tensor:
            return shards[part.matrix.param][part.here]

        def send(number: int) -> Arriving:
            if number == len(self.buckets):
                return list
            return self.buckets[number][0].start(held, shards[0], group)

        for part in self.local:
            apply(part, orthogonalise(part.matrix.param, held(part)))
        coming, returning = send(0), list
        for number, (_, back) in enumerate(self.buckets):
            received, coming = coming(), send(number + 1)
            matrices = dict.fromkeys(part.matrix for part, _ in received)
            wholes = {matrix: shards[0].new_empty(matrix.shape) for matrix in matrices}
            for part, value in received:
                wholes[part.matrix][part.there] = value
            done = {matrix: orthogonalise(matrix.param, wholes[matrix]) for matrix in wholes}
            starting = back.start(
                lambda part, done=done: done[part.matrix][part.there], shards[0], group
            )
            for part, value in returning():
                apply(part, value)
            returning = starting
        for part, value in returning():
            apply(part, value)


@functools.lru_cache(maxsize=8)
def plan_exchange(divisions: tuple[MatrixSplit, ...], ranks: Ranks, limit: int) -> MatrixExchange:
    """Settles which rank orthogonalises which matrix. Collective: no.

    Args:
        divisions: of the parameters, in the same order on all ranks.
        ranks: that hold them.
        limit: elements of a bucket on one rank, which holds one matrix at least.
    """
    found = [m for n, division in enumerate(divisions) for m in _matrices(n, division, ranks)]
    stay = [m for m in found if m.owner is not None and ranks.replicas == 1]
    local = [MatrixPart.of(m, divisions[m.param], ranks.me) for m in stay if m.owner == ranks.me]
    totals, filled = [0] * len(ranks.places), [(0, 0)] * len(ranks.places)
    buckets: dict[int, list[tuple[Matrix, int]]] = defaultdict(list)
    # The largest first, to the rank with the least work.
    for matrix in sorted((m for m in found if m not in stay), key=lambda m: -m.work):
        owner = totals.index(min(totals)) if matrix.owner is None else matrix.owner
        totals[owner] += matrix.work
        number, size = filled[owner]
        numel = math.prod(matrix.shape)
        if size and size + numel > limit:
            number, size = number + 1, 0
        filled[owner] = number, size + numel
        buckets[number].append((matrix, owner))
    return MatrixExchange(local, [_ways(bucket, divisions, ranks) for bucket in buckets.values()])


def _ways(
    bucket: Sequence[tuple[Matrix, int]], divisions: Sequence[MatrixSplit], ranks: Ranks
) -> tuple[Way, Way]:
    """The way of matrices to their owners, and the way back."""

    def parts(owner: int, shard: int) -> list[MatrixPart]:
        return [MatrixPart.of(m, divisions[m.param], shard) for m, own in bucket if own == owner]

    def by_place(of_ranks: Sequence[list[MatrixPart]]) -> list[list[MatrixPart]]:
        of_place = dict(zip(ranks.places, of_ranks, strict=True))
        return [of_place.get(place, []) for place in range(ranks.group_size)]

    numbers, shards = range(len(ranks.places)), ranks.shards
    held = [parts(owner, ranks.me % shards) for owner in numbers]
    owned = [parts(ranks.me, shard) for shard in range(shards)]
    travels = any(
        MatrixPart.of(matrix, divisions[matrix.param], owner % shards).numel
        < math.prod(matrix.shape)
        for matrix, owner in bucket
    )
    near = [number // shards == ranks.me // shards for number in numbers]  # in the same replica
    there = Way(
        send=by_place([held[number] if near[number] else [] for number in numbers]),
        receive=by_place([owned[number % shards] if near[number] else [] for number in numbers]),
        starts=travels,
    )
    back = Way(
        send=by_place([owned[number % shards] for number in numbers]),
        receive=by_place(held),
        starts=len(numbers) > 1,
    )
    return there, back
