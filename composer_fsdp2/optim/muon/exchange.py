"""Brings each matrix of a sharded model to one rank, and the results back to all shards.

[Note: exchange] Newton-Schulz needs a full matrix; a rank has some of its rows. The matrices are
divided among the ranks by the work they are. An all-to-all carries every rank's part to the owners,
another all-to-all carries the results back. Parts are as long as they are, so uneven rows need no
padding. With replicas (HSDP) an owner is a rank of one replica: each rank sends parts to owners
inside its own replica, and owners send results to all replicas. So no matrix is computed twice, and
a bucket takes two collectives at most.

The plan follows from shapes and the mesh, which are the same on all ranks. A matrix that lies in
one shard (experts of a list that is divided between ranks) stays there.

[Note: positions] A shard and a matrix are each a list of positions along every dimension of the
parameter, in the order of the model. Those of a shard are `torch.arange`, cut as the parameter is
cut. A shard's part of a matrix has the positions that both have. With tensor parallelism rows of a
shard may be in another order and end in padding, whose position is -1.
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
    """The ranks that hold parameters: `replicas` times `shards` ranks of a process group.

    The number of a rank is `replica * shards + shard`.
    """

    shards: int = 1
    replicas: int = 1
    me: int = 0
    """number of this rank"""
    group_ranks: tuple[int, ...] = (0,)
    """rank in the process group of each rank, by its number"""
    group_size: int = 1


def ranks_of(mesh: DeviceMesh, axes: Sequence[int]) -> tuple[Ranks, dist.ProcessGroup | None]:
    """Returns the ranks that divide parameters along axes of a mesh, and their process group.

    Collective: no. A group of `None` is the default group. A mesh of a part of the ranks has no
    group for all its axes: each of its replicas then counts as the only one, and computes
    everything.
    """
    replica_mesh = mesh_with_replicas(mesh)
    along = list(axes) if replica_mesh is mesh else [replica_mesh.ndim - 1]
    size = math.prod(mesh.size(axis) for axis in axes)
    replicas = replica_mesh.mesh.movedim(along, [*range(-len(along), 0)]).reshape(-1, size)
    group: Any = None
    if len(replicas) == 1 or replicas.numel() < dist.get_world_size():
        replicas = replicas[(replicas == dist.get_rank()).any(dim=1)]
        # torch has a group for each axis alone; several take the one of all ranks.
        group = mesh.get_group(axes[0]) if len(axes) == 1 else None
    global_ranks = replicas.flatten().tolist()
    default_group: Any = dist.group.WORLD
    # `new_group` sorts its ranks by default, whatever their order in the mesh.
    members = dist.get_process_group_ranks(group or default_group)
    group_ranks = tuple(members.index(rank) for rank in global_ranks)
    me = global_ranks.index(dist.get_rank())
    return Ranks(size, len(replicas), me, group_ranks, len(members)), group


@dataclass(frozen=True, slots=True)
class MatrixSplit:
    """How a parameter is divided between shards, and the matrices it holds."""

    shape: tuple[int, ...]
    """shape that the ranks of the mesh share, without padding"""
    layout: MatrixLayout
    sizes: tuple[int, ...] = ()
    """sizes of the mesh axes that divide the parameter; shards count along the last axis first"""
    cuts: tuple[tuple[int, int], ...] = ()
    """(mesh axis, dimension that it divides), in the order of the cuts"""
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
def positions_of(split: MatrixSplit, shard: int) -> tuple[Tensor, ...]:
    """Returns the positions of a shard along each dimension; see [Note: positions]."""
    positions = [split.form.positions(dim, size) for dim, size in enumerate(split.shape)]
    coordinate = list(itertools.product(*map(range, split.sizes)))[shard]
    for axis, dim in split.cuts:
        # `torch.chunk` makes fewer chunks where there are not enough rows.
        chunks = positions[dim].chunk(split.sizes[axis])
        has_rows = coordinate[axis] < len(chunks)
        positions[dim] = chunks[coordinate[axis]] if has_rows else positions[dim][:0]
    return tuple(positions)


@dataclass(slots=True, eq=False)
class Matrix:
    """A matrix of a parameter, or that of several experts, which one rank orthogonalises."""

    param: int
    """index of the parameter in the exchange"""
    positions: tuple[Tensor, ...]
    """for each dimension of the parameter; see [Note: positions]"""
    owner: int | None = None
    """number of the rank whose shard has the full matrix"""

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of the matrix along each dimension of the parameter."""
        return tuple(map(len, self.positions))

    @property
    def work(self) -> int:
        """The cost of orthogonalising the matrix: `rows * columns * min(rows, columns)`."""
        return math.prod(self.shape) * min(self.shape[-2:])


def _matrices(number: int, split: MatrixSplit, ranks: Ranks) -> Iterator[Matrix]:
    """Yields the matrices of a parameter that can be orthogonalised on different ranks."""
    cut_along = {dim for _, dim in split.cuts}
    for outputs in split.layout.outputs(split.shape):
        positions = [torch.arange(size) for size in split.shape]
        positions[split.layout.axis] = outputs
        if len(positions) == 3 and cut_along and 0 not in cut_along:
            # The experts of a layer, of which each shard has some rows or columns.
            for expert in positions[0].split(1):
                yield Matrix(number, (expert, *positions[1:]))
            continue
        if len(positions) == 2 or cut_along != {0}:
            yield Matrix(number, tuple(positions), owner=0 if len(ranks.group_ranks) == 1 else None)
            continue
        # A list of matrices: every shard has full matrices, of which each replica takes a part.
        for shard in range(ranks.shards):
            experts_of = positions_of(split, shard)[0].tensor_split(ranks.replicas)
            for replica, experts in enumerate(experts_of):
                if len(experts):
                    yield Matrix(number, (experts, *positions[1:]), replica * ranks.shards + shard)


@dataclass(slots=True, eq=False)
class MatrixPart:
    """A shard's share of a matrix."""

    matrix: Matrix
    shard_index: tuple[Any, ...]
    """index of the part in the shard, for each dimension a slice or a tensor"""
    matrix_index: tuple[Any, ...]
    """index of the part in the matrix, likewise"""
    shape: tuple[int, ...]
    """shape of the part"""

    @classmethod
    def of(cls, matrix: Matrix, split: MatrixSplit, shard: int) -> MatrixPart:
        """Finds the positions that a shard and a matrix have in common."""
        in_shard: list[Tensor] = []
        in_matrix: list[Tensor] = []
        positions = zip(split.shape, matrix.positions, positions_of(split, shard), strict=True)
        for size, of_matrix, of_shard in positions:
            matrix_index = torch.full((size + 1,), -1)  # the last element is that of padding
            matrix_index[of_matrix] = torch.arange(len(of_matrix))
            indices = matrix_index[of_shard]
            in_shard.append((indices >= 0).nonzero().flatten())
            in_matrix.append(indices[in_shard[-1]])
        return cls(matrix, _index(in_shard), _index(in_matrix), tuple(map(len, in_shard)))

    @property
    def numel(self) -> int:
        """Elements of the part."""
        return math.prod(self.shape)


def _index(positions: Sequence[Tensor]) -> tuple[Any, ...]:
    """Returns the index of all combinations of positions: slices, if all positions are ranges.

    Slices copy nothing.
    """
    slices = [slice(int(p[0]), int(p[-1]) + 1) if len(p) else slice(0, 0) for p in positions]
    if all(s.stop - s.start == len(p) for s, p in zip(slices, positions, strict=True)):
        return tuple(slices)
    last = len(positions) - 1
    return tuple(p.view(-1, *[1] * (last - dim)) for dim, p in enumerate(positions))


Receive = Callable[[], list[tuple[MatrixPart, Tensor]]]
"""waits for the parts that this rank receives, and returns them with their values"""


@dataclass(slots=True, eq=False)
class AllToAll:
    """The parts that this rank sends and receives in one all-to-all, by rank in the group."""

    send: list[list[MatrixPart]]
    receive: list[list[MatrixPart]]
    starts: bool
    """whether any rank of the group sends to another"""

    def start(
        self,
        value_of: Callable[[MatrixPart], Tensor],
        like: Tensor,
        group: dist.ProcessGroup | None,
    ) -> Receive:
        """Sends the value of each part. Collective: yes, over the group."""
        values = [value_of(part).flatten() for parts in self.send for part in parts]
        received = sent = torch.cat([like.new_empty(0), *values])
        handle: Any = None
        if self.starts:
            sizes = [
                [sum(part.numel for part in parts) for parts in by_group_rank]
                for by_group_rank in (self.receive, self.send)
            ]
            received = sent.new_empty(sum(sizes[0]))
            handle = dist.all_to_all_single(received, sent, *sizes, group=group, async_op=True)

        def finish() -> list[tuple[MatrixPart, Tensor]]:
            if handle is not None:
                handle.wait()
            parts = [*itertools.chain(*self.receive)]
            flat = received.split([part.numel for part in parts])
            return [(part, value.view(part.shape)) for part, value in zip(parts, flat, strict=True)]

        return finish


@dataclass(slots=True, eq=False)
class MatrixExchange:
    """How the parameters of one mesh travel in each step; see [Note: exchange]."""

    local: list[MatrixPart]
    """full matrices in this rank's shards that this rank orthogonalises"""
    buckets: list[tuple[AllToAll, AllToAll]]
    """for matrices that travel together: the all-to-all to their owners, and that to the shards"""

    def run(
        self,
        shards: Sequence[Tensor],
        group: dist.ProcessGroup | None,
        orthogonalise: Callable[[int, Tensor], Tensor],
        apply: Callable[[MatrixPart, Tensor], None],
    ) -> None:
        """Computes every matrix on one rank and hands the results to all shards.

        Collective: yes, over the group. A bucket is sent while the one before is computed.

        Args:
            shards: this rank's shard of each parameter, in the dtype of the iteration.
            group: the process group of `Ranks`; `None` is the default group.
            orthogonalise: returns the result for a matrix of a parameter, in the same dtype.
            apply: is called with each part of a result for this rank's shards.
        """

        def shard_value(part: MatrixPart) -> Tensor:
            return shards[part.matrix.param][part.shard_index]

        def send(number: int) -> Receive:
            if number == len(self.buckets):
                return list
            return self.buckets[number][0].start(shard_value, shards[0], group)

        for part in self.local:
            apply(part, orthogonalise(part.matrix.param, shard_value(part)))
        coming, returning = send(0), list
        for number, (_, back) in enumerate(self.buckets):
            received, coming = coming(), send(number + 1)
            matrices = dict.fromkeys(part.matrix for part, _ in received)
            full = {matrix: shards[0].new_empty(matrix.shape) for matrix in matrices}
            for part, value in received:
                full[part.matrix][part.matrix_index] = value
            results = {matrix: orthogonalise(matrix.param, full[matrix]) for matrix in full}
            starting = back.start(
                lambda part, results=results: results[part.matrix][part.matrix_index],
                shards[0],
                group,
            )
            for part, value in returning():
                apply(part, value)
            returning = starting
        for part, value in returning():
            apply(part, value)


@functools.lru_cache(maxsize=8)
def plan_exchange(splits: tuple[MatrixSplit, ...], ranks: Ranks, limit: int) -> MatrixExchange:
    """Settles which rank orthogonalises which matrix. Collective: no.

    Args:
        splits: for each parameter, in the same order on all ranks.
        ranks: hold the shards of the parameters.
        limit: elements of a bucket on one rank, which has one matrix at least.
    """
    matrices = [m for n, split in enumerate(splits) for m in _matrices(n, split, ranks)]
    stay = [m for m in matrices if m.owner is not None and ranks.replicas == 1]
    local = [MatrixPart.of(m, splits[m.param], ranks.me) for m in stay if m.owner == ranks.me]
    totals, filled = [0] * len(ranks.group_ranks), [(0, 0)] * len(ranks.group_ranks)
    buckets: dict[int, list[tuple[Matrix, int]]] = defaultdict(list)
    # The largest first, to the rank with the least work.
    for matrix in sorted((m for m in matrices if m not in stay), key=lambda m: -m.work):
        owner = totals.index(min(totals)) if matrix.owner is None else matrix.owner
        totals[owner] += matrix.work
        number, size = filled[owner]
        numel = math.prod(matrix.shape)
        if size and size + numel > limit:
            number, size = number + 1, 0
        filled[owner] = number, size + numel
        buckets[number].append((matrix, owner))
    return MatrixExchange(
        local, [_all_to_alls(bucket, splits, ranks) for bucket in buckets.values()]
    )


def _all_to_alls(
    bucket: Sequence[tuple[Matrix, int]], splits: Sequence[MatrixSplit], ranks: Ranks
) -> tuple[AllToAll, AllToAll]:
    """Returns the all-to-all of matrices to their owners, and that of results to the shards."""

    def parts(owner: int, shard: int) -> list[MatrixPart]:
        matrices = (matrix for matrix, rank in bucket if rank == owner)
        return [MatrixPart.of(matrix, splits[matrix.param], shard) for matrix in matrices]

    def by_group_rank(of_ranks: Sequence[list[MatrixPart]]) -> list[list[MatrixPart]]:
        of_group_rank = dict(zip(ranks.group_ranks, of_ranks, strict=True))
        return [of_group_rank.get(group_rank, []) for group_rank in range(ranks.group_size)]

    numbers, shards = range(len(ranks.group_ranks)), ranks.shards
    shard_parts = [parts(owner, ranks.me % shards) for owner in numbers]
    owned_parts = [parts(ranks.me, shard) for shard in range(shards)]
    any_travels = any(
        MatrixPart.of(matrix, splits[matrix.param], owner % shards).numel < math.prod(matrix.shape)
        for matrix, owner in bucket
    )
    in_replica = [number // shards == ranks.me // shards for number in numbers]
    to_owners = AllToAll(
        send=by_group_rank([shard_parts[n] if in_replica[n] else [] for n in numbers]),
        receive=by_group_rank([owned_parts[n % shards] if in_replica[n] else [] for n in numbers]),
        starts=any_travels,
    )
    to_shards = AllToAll(
        send=by_group_rank([owned_parts[number % shards] for number in numbers]),
        receive=by_group_rank(shard_parts),
        starts=len(numbers) > 1,
    )
    return to_owners, to_shards
