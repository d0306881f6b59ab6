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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composer_fsdp2.optim.muon_places import Item, Parameter, Piece, RankGrid, divide, pieces

__all__ = ["Exchange"]


Iterate = Callable[[Item, Tensor], Tensor]
Apply = Callable[[Item, Piece, Tensor], None]
"""item, what of it lies in this rank's shard, its values"""


@dataclass(slots=True, eq=False)
class _Way:
    """One all-to-all: what this rank sends and how much it receives, by place in the group."""

    group: dist.ProcessGroup | None
    send_sizes: list[int]
    receive_sizes: list[int]
    send: list[tuple[int, Piece]] = field(default_factory=list[tuple[int, Piece]])
    """source and what of it; in the order of the buffer"""
    starts: bool = True
    """whether anything is sent at all, by any rank of the group"""

    @classmethod
    def through(cls, group: dist.ProcessGroup | None, size: int) -> _Way:
        return cls(group, [0] * size, [0] * size)

    def start(self, parts: Sequence[Tensor], like: Tensor) -> _Arriving:
        """Sends parts in the order of the buffer. Collective: yes, over the group."""
        sent = torch.cat([part.reshape(-1) for part in parts]) if parts else like.new_empty(0)
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
    parts: list[list[tuple[int, Piece]]]
    """of each owned item: where they begin in what is received"""
    back: _Way
    results: list[tuple[Item, int, Piece]]
    """where they begin in what is received"""

    def send(self, shards: Sequence[Tensor]) -> _Arriving:
        """Sends what this rank holds to the owners. Collective: yes."""
        sent = [piece.in_shard(shards[param]) for param, piece in self.there.send]
        return self.there.start(sent, shards[0])

    def assemble(self, received: Tensor) -> list[Tensor]:
        """Returns the items that this rank owns, whole."""
        wholes: list[Tensor] = []
        for item, places in zip(self.owned, self.parts, strict=True):
            parts = [
                received[start : start + piece.numel].view(piece.shape) for start, piece in places
            ]
            dim = _joined_along(item, [piece for _, piece in places])
            if dim is not None:
                wholes.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim))
                continue
            whole = received.new_empty(item.shape)
            for part, (_, piece) in zip(parts, places, strict=True):
                piece.in_item(whole).copy_(part)
            wholes.append(whole)
        return wholes

    def send_back(self, done: Sequence[Tensor], like: Tensor) -> _Arriving:
        """Sends results to all who hold a part. Collective: yes."""
        sent = [piece.in_item(done[number]) for number, piece in self.back.send]
        return self.back.start(sent, like)

    def apply(self, received: Tensor, apply: Apply) -> None:
        """Hands out what came back."""
        for item, start, piece in self.results:
            apply(item, piece, received[start : start + piece.numel].view(piece.shape))


def _joined_along(item: Item, parts: Sequence[Piece]) -> int | None:
    """The dimension along which parts follow each other, if it is one alone."""
    dims = {
        dim for piece in parts for dim, size in enumerate(piece.shape) if size != item.shape[dim]
    }
    return None if len(dims) > 1 else dims.pop() if dims else 0


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
            apply: takes a part of a result.
        """
        for item in self.local:
            (piece,) = self._pieces(item, self._grid.shard)
            apply(item, piece, iterate(item, piece.in_shard(parts[item.param])))
        coming = self._send(0, parts)
        going: tuple[_Bucket, _Arriving] | None = None
        for number, bucket in enumerate(self.buckets):
            received, coming = coming, self._send(number + 1, parts)
            if received is None:  # not reached: there is one for each bucket
                break
            wholes = bucket.assemble(received.wait())
            done = [iterate(i, whole) for i, whole in zip(bucket.owned, wholes, strict=True)]
            back = bucket.send_back(done, parts[0])
            if going is not None:
                going[0].apply(going[1].wait(), apply)
            going = bucket, back
        if going is not None:
            going[0].apply(going[1].wait(), apply)

    def _send(self, number: int, parts: Sequence[Tensor]) -> _Arriving | None:
        if number >= len(self.buckets):
            return None
        return self.buckets[number].send(parts)

    def _pieces(self, item: Item, shard: int) -> list[Piece]:
        return pieces(self._params[item.param], item, shard)

    def _chunks(self, items: Sequence[Item], limit: int) -> Iterator[list[tuple[Item, int]]]:
        """Buckets: items of about the same work, each with its owner."""
        ranks = self._grid.shards * self._grid.replicas
        totals = [0] * ranks
        chunk: list[Item] = []
        size = 0
        for item in items:
            if len(chunk) >= ranks and size + item.numel > limit:
                yield self._with_owners(chunk, totals)
                chunk, size = [], 0
            chunk.append(item)
            size += item.numel
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
        there, parts = self._way_there(owned, mine)
        back, results = self._way_back(owned, mine)
        return _Bucket(mine, there, parts, back, results)

    def _way_there(
        self, owned: list[tuple[Item, int]], mine: list[Item]
    ) -> tuple[_Way, list[list[tuple[int, Piece]]]]:
        grid = self._grid
        way = _Way.through(grid.shard_group, grid.shard_group_size)
        items_of = _by_owner(owned)
        parts: list[list[tuple[int, Piece]]] = [[] for _ in mine]
        position = 0
        for place, shard in sorted(
            zip(grid.places_in_shard_group, range(grid.shards), strict=True)
        ):
            sent = [
                (item.param, piece)
                for item in items_of[grid.replica * grid.shards + shard]
                for piece in self._pieces(item, grid.shard)
            ]
            way.send += sent
            way.send_sizes[place] = sum(piece.numel for _, piece in sent)
            begin = position
            for number, item in enumerate(mine):
                for piece in self._pieces(item, shard):
                    parts[number].append((position, piece))
                    position += piece.numel
            way.receive_sizes[place] = position - begin
        for found in parts:  # wherever they are in the buffer
            found.sort(key=lambda part: part[1].there)
        alone = grid.shard_group is not grid.whole_group
        way.starts = grid.shards > 1 and any(
            sum(piece.numel for piece in self._pieces(item, owner % grid.shards)) < item.numel
            for item, owner in owned
            if not alone or owner // grid.shards == grid.replica
        )
        return way, parts

    def _way_back(
        self, owned: list[tuple[Item, int]], mine: list[Item]
    ) -> tuple[_Way, list[tuple[Item, int, Piece]]]:
        grid = self._grid
        way = _Way.through(grid.whole_group, grid.whole_group_size)
        results: list[tuple[Item, int, Piece]] = []
        items_of = _by_owner(owned)
        position = 0
        owners = range(grid.shards * grid.replicas)
        for place, owner in sorted(zip(grid.places_in_whole_group, owners, strict=True)):
            sent = [
                (number, piece)
                for number, item in enumerate(mine)
                for piece in self._pieces(item, owner % grid.shards)
            ]
            way.send += sent
            way.send_sizes[place] = sum(piece.numel for _, piece in sent)
            begin = position
            for item in items_of[owner]:
                for piece in self._pieces(item, grid.shard):
                    results.append((item, position, piece))
                    position += piece.numel
            way.receive_sizes[place] = position - begin
        way.starts = grid.shards * grid.replicas > 1
        return way, results


def _by_owner(owned: Iterable[tuple[Item, int]]) -> dict[int, list[Item]]:
    found: dict[int, list[Item]] = defaultdict(list)
    for item, owner in owned:
        found[owner].append(item)
    return found
