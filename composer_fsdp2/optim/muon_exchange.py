"""Brings each matrix of a sharded model to one rank, and what it became back to all shards.

[Note: exchange] Newton-Schulz needs a whole matrix; a rank has some of its rows. The matrices are
divided among the ranks by the work they are. An all-to-all in the shard group carries every rank's
rows to the owners, another one carries the results back. Pieces are as long as they are, so uneven
rows need no padding. With replicas (HSDP) an owner is a rank of one replica: the way in stays
inside the replica, the way back goes to all of them, in one collective over all ranks. So no matrix
is computed twice, and a bucket takes two collectives at most.

Everything here follows from shapes and the mesh, which are the same on all ranks. A matrix that
lies in one shard (experts of a list that is divided between ranks) stays there.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from composer_fsdp2.optim.muon_iteration import Layout, work
from composer_fsdp2.shard.device_mesh import whole_mesh

__all__ = ["Exchange", "Item", "Parameter", "RankGrid", "divide"]


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
    whole_group: dist.ProcessGroup | None
    """all replicas; None is the default group"""
    places_in_shard_group: tuple[int, ...]
    """by shard, of this replica"""
    places_in_whole_group: tuple[int, ...]
    """by replica and shard"""

    @classmethod
    def of(cls, mesh: DeviceMesh, axis: int) -> RankGrid:
        """Reads a mesh; `axis` is the one along which parameters are divided. Collective: no.

        A mesh of some ranks only has no group of its own for both axes: each of its replicas then
        counts as the only one, and computes everything.
        """
        whole = whole_mesh(mesh)
        along = whole.ndim - 1 if whole is not mesh else axis
        table = whole.mesh.movedim(along, -1).reshape(-1, mesh.size(axis)).tolist()
        me = dist.get_rank()
        replica = next(number for number, row in enumerate(table) if me in row)
        group = mesh.get_group(axis)
        members = dist.get_process_group_ranks(group)
        row = table[replica]
        # `new_group` sorts its ranks by default, whatever their order in the mesh.
        in_shards = tuple(members.index(rank) for rank in row)
        everyone = [rank for row in table for rank in row]
        shared = len(table) > 1 and sorted(everyone) == list(range(dist.get_world_size()))
        return cls(
            shards=len(row),
            replicas=len(table) if shared else 1,
            shard=row.index(me),
            replica=replica if shared else 0,
            shard_group=group,
            whole_group=None if shared else group,
            places_in_shard_group=in_shards,
            places_in_whole_group=tuple(everyone) if shared else in_shards,
        )

    @property
    def owner(self) -> int:
        """The number of this rank among all owners."""
        return self.replica * self.shards + self.shard

    def rows(self, size: int, shard: int) -> tuple[int, int]:
        """Returns first row and one past the last of a shard, cut as `torch.chunk` does."""
        step = -(-size // self.shards)
        return min(shard * step, size), min((shard + 1) * step, size)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter without its values."""

    shape: tuple[int, ...]
    layout: Layout
    dim: int
    """along which it is divided"""


@dataclass(frozen=True, slots=True)
class Item:
    """A part of a parameter that is computed in one place."""

    param: int
    start: int
    """along the dimension in which the parameter is divided"""
    stop: int
    shape: tuple[int, ...]
    layout: Layout
    owner: int | None = None
    """where that is settled, because it lies there"""

    @property
    def work(self) -> int:
        """The cost of computing it."""
        return work(self.shape, self.layout)


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
        start, stop = grid.rows(param.shape[0], shard)
        for replica in range(grid.replicas):
            first = start + (stop - start) * replica // grid.replicas
            last = start + (stop - start) * (replica + 1) // grid.replicas
            if last > first:
                shape = (last - first, *param.shape[1:])
                owner = replica * grid.shards + shard
                yield Item(number, first, last, shape, param.layout, owner)


Iterate = Callable[[Item, Tensor], Tensor]
Apply = Callable[[Item, int, Tensor], None]
"""item, first row in this rank's shard, rows"""


@dataclass(slots=True, eq=False)
class _Way:
    """One all-to-all: what this rank sends and how much it receives, by place in the group."""

    group: dist.ProcessGroup | None
    send: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """source, first row, rows; in the order of the buffer"""
    send_sizes: list[int] = field(default_factory=list[int])
    receive_sizes: list[int] = field(default_factory=list[int])
    starts: bool = True
    """whether anything is sent at all, by any rank of the group"""

    def start(self, sources: Sequence[Tensor], dims: Sequence[int], like: Tensor) -> _Arriving:
        """Sends rows of the sources. Collective: yes, over the group."""
        parts = [
            sources[source].narrow(dims[source], first, rows).reshape(-1)
            for source, first, rows in self.send
        ]
        sent = torch.cat(parts) if parts else like.new_empty(0)
        if not self.starts:
            return _Arriving(sent, None, sent)
        received = sent.new_empty(sum(self.receive_sizes))
        handle = dist.all_to_all_single(
            received, sent, self.receive_sizes, self.send_sizes, group=self.group, async_op=True
        )
        return _Arriving(received, handle, sent)


@dataclass(slots=True, eq=False)
class _Arriving:
    """An all-to-all on its way, with the tensors that it needs until then."""

    received: Tensor
    handle: Any
    sent: Tensor

    def wait(self) -> Tensor:
        if self.handle is not None:
            self.handle.wait()
        return self.received


@dataclass(slots=True, eq=False)
class _Bucket:
    """Items that travel together."""

    owned: list[Item]
    there: _Way
    pieces: list[list[tuple[int, tuple[int, ...]]]]
    """of each owned item: where its parts begin in what is received, and their shapes"""
    back: _Way
    results: list[tuple[Item, int, int, tuple[int, ...]]]
    """item, where it begins in what is received, first row in the shard, shape"""

    def assemble(self, received: Tensor, dims: Sequence[int]) -> list[Tensor]:
        """Returns the items that this rank owns, whole."""
        wholes: list[Tensor] = []
        for item, pieces in zip(self.owned, self.pieces, strict=True):
            parts = [
                received[start : start + math.prod(shape)].view(shape) for start, shape in pieces
            ]
            wholes.append(parts[0] if len(parts) == 1 else torch.cat(parts, dims[item.param]))
        return wholes

    def apply(self, received: Tensor, apply: Apply) -> None:
        """Hands out what came back."""
        for item, start, row, shape in self.results:
            apply(item, row, received[start : start + math.prod(shape)].view(shape))


class Exchange:
    """How the parameters of one mesh travel in each step; see [Note: exchange].

    Args:
        params: in the same order on all ranks.
        grid: the ranks that hold them.
        element_size: bytes of an element on the way.
        bucket_bytes: of what one rank holds at a time; a bucket has one item a rank at least.
    """

    def __init__(
        self, params: Sequence[Parameter], grid: RankGrid, element_size: int, bucket_bytes: int
    ) -> None:
        self._grid = grid
        self._params = params
        self._dims = [param.dim for param in params]
        items = [item for n, param in enumerate(params) for item in divide(n, param, grid)]
        stay = [item for item in items if item.owner is not None and grid.replicas == 1]
        self.local = [item for item in stay if item.owner == grid.owner]
        """items that neither come nor go"""
        lists = [item for item in items if item.owner is not None and grid.replicas > 1]
        free = sorted((i for i in items if i.owner is None), key=lambda item: -item.work)
        limit = bucket_bytes * grid.shards * grid.replicas // element_size
        self.buckets = [self._bucket(chunk) for chunk in self._chunks(lists, limit)]
        self.buckets += [self._bucket(chunk) for chunk in self._chunks(free, limit)]

    @property
    def collectives(self) -> int:
        """The number of all-to-alls of a step, on this rank."""
        return sum(bucket.there.starts + bucket.back.starts for bucket in self.buckets)

    def run(self, parts: Sequence[Tensor], iterate: Iterate, apply: Apply) -> None:
        """Computes every item in one place and hands the results to all shards.

        Collective: yes, over the groups of the grid. The next bucket is on its way while one is
        computed.

        Args:
            parts: this rank's shard of each parameter, in the dtype of the iteration.
            iterate: gives the result of an item, in the same dtype.
            apply: takes rows of a result.
        """
        for item in self.local:
            start = item.start - self.first_row(item)
            part = parts[item.param].narrow(0, start, item.stop - item.start)
            apply(item, start, iterate(item, part))
        coming = self._send(0, parts)
        going: tuple[_Bucket, _Arriving] | None = None
        for number, bucket in enumerate(self.buckets):
            received, coming = coming, self._send(number + 1, parts)
            if received is None:  # not reached: there is one for each bucket
                break
            wholes = bucket.assemble(received.wait(), self._dims)
            done = [iterate(i, whole) for i, whole in zip(bucket.owned, wholes, strict=True)]
            dims = [self._dims[item.param] for item in bucket.owned]
            back = bucket.back.start(done, dims, parts[0])
            if going is not None:
                going[0].apply(going[1].wait(), apply)
            going = bucket, back
        if going is not None:
            going[0].apply(going[1].wait(), apply)

    def _send(self, number: int, parts: Sequence[Tensor]) -> _Arriving | None:
        if number >= len(self.buckets):
            return None
        return self.buckets[number].there.start(parts, self._dims, parts[0])

    def first_row(self, item: Item, shard: int | None = None) -> int:
        """Returns where a shard of an item's parameter begins; by default that of this rank."""
        param = self._params[item.param]
        shard = self._grid.shard if shard is None else shard
        return self._grid.rows(param.shape[param.dim], shard)[0]

    def _chunks(self, items: Sequence[Item], limit: int) -> Iterator[list[tuple[Item, int]]]:
        """Buckets: items of about the same work, each with its owner."""
        ranks = self._grid.shards * self._grid.replicas
        totals = [0] * ranks
        chunk: list[Item] = []
        size = 0
        for item in items:
            numel = math.prod(item.shape)
            if len(chunk) >= ranks and size + numel > limit:
                yield self._with_owners(chunk, totals)
                chunk, size = [], 0
            chunk.append(item)
            size += numel
        if chunk:
            yield self._with_owners(chunk, totals)

    def _with_owners(self, items: Iterable[Item], totals: list[int]) -> list[tuple[Item, int]]:
        """The largest first, to the rank with the least work in this bucket, else altogether."""
        heap = [(0, total, rank) for rank, total in enumerate(totals)]
        heapq.heapify(heap)
        found: list[tuple[Item, int]] = []
        for item in items:
            if item.owner is not None:
                found.append((item, item.owner))
                continue
            load, total, rank = heap[0]
            heapq.heapreplace(heap, (load + item.work, total + item.work, rank))
            totals[rank] += item.work
            found.append((item, rank))
        return found

    def _bucket(self, owned: list[tuple[Item, int]]) -> _Bucket:
        grid = self._grid
        mine = [item for item, owner in owned if owner == grid.owner]
        there, pieces = self._way_there(owned, mine)
        back, results = self._way_back(owned, mine)
        return _Bucket(mine, there, pieces, back, results)

    def _overlap(self, item: Item, shard: int) -> tuple[int, int]:
        """First row and number of rows of an item that lie in a shard."""
        param = self._params[item.param]
        start, stop = self._grid.rows(param.shape[param.dim], shard)
        first = max(start, item.start)
        return first, max(0, min(stop, item.stop) - first)

    def _shape(self, item: Item, rows: int) -> tuple[int, ...]:
        dim = self._dims[item.param]
        return (*item.shape[:dim], rows, *item.shape[dim + 1 :])

    def _way_there(
        self, owned: list[tuple[Item, int]], mine: list[Item]
    ) -> tuple[_Way, list[list[tuple[int, tuple[int, ...]]]]]:
        grid = self._grid
        way = _Way(grid.shard_group)
        items_of = _by_owner(owned)
        for shard in _by_place(grid.places_in_shard_group):
            before = len(way.send)
            for item in items_of[grid.replica * grid.shards + shard]:
                first, rows = self._overlap(item, grid.shard)
                if rows:
                    way.send.append((item.param, first - self.first_row(item), rows))
            way.send_sizes.append(self._numel(way.send[before:]))
        pieces: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in mine]
        # Parts are joined in the order of rows, wherever they are in the buffer.
        places = {shard: [] for shard in range(grid.shards)}
        position = 0
        for shard in _by_place(grid.places_in_shard_group):
            begin = position
            for number, item in enumerate(mine):
                _, rows = self._overlap(item, shard)
                if rows:
                    shape = self._shape(item, rows)
                    places[shard].append((number, (position, shape)))
                    position += math.prod(shape)
            way.receive_sizes.append(position - begin)
        for shard in range(grid.shards):
            for number, piece in places[shard]:
                pieces[number].append(piece)
        way.starts = grid.shards > 1 and any(
            self._overlap(item, owner % grid.shards)[1] < item.stop - item.start
            for item, owner in owned
            if owner // grid.shards == grid.replica
        )
        return way, pieces

    def _numel(self, rows: Iterable[tuple[int, int, int]]) -> int:
        total = 0
        for param, _, count in rows:
            shape, dim = self._params[param].shape, self._dims[param]
            total += math.prod(shape[:dim]) * math.prod(shape[dim + 1 :]) * count
        return total

    def _way_back(
        self, owned: list[tuple[Item, int]], mine: list[Item]
    ) -> tuple[_Way, list[tuple[Item, int, int, tuple[int, ...]]]]:
        grid = self._grid
        way = _Way(grid.whole_group)
        results: list[tuple[Item, int, int, tuple[int, ...]]] = []
        items_of = _by_owner(owned)
        position = 0
        for owner in _by_place(grid.places_in_whole_group):
            size = 0
            for number, item in enumerate(mine):
                first, rows = self._overlap(item, owner % grid.shards)
                if rows:
                    way.send.append((number, first - item.start, rows))
                    size += math.prod(self._shape(item, rows))
            way.send_sizes.append(size)
            begin = position
            for item in items_of[owner]:
                first, rows = self._overlap(item, grid.shard)
                if rows:
                    shape = self._shape(item, rows)
                    results.append((item, position, first - self.first_row(item), shape))
                    position += math.prod(shape)
            way.receive_sizes.append(position - begin)
        way.starts = grid.shards * grid.replicas > 1
        return way, results


def _by_owner(owned: Iterable[tuple[Item, int]]) -> dict[int, list[Item]]:
    found: dict[int, list[Item]] = defaultdict(list)
    for item, owner in owned:
        found[owner].append(item)
    return found


def _by_place(places: Sequence[int]) -> list[int]:
    """Numbers in the order of their places in a group."""
    return sorted(range(len(places)), key=places.__getitem__)
