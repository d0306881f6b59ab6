"""Weights from outside the model, of which every rank reads only what its shards hold.

[Note: weights from a source] A source knows parameters and persistent buffers by name. Its values
win over whatever the model holds on any rank, so those are dropped before anything is sharded: a
unit goes from meta to shards on meta, then memory is made for the shards alone and filled slice by
slice. What the source does not know (rotary tables, masks) follows [Note: initial weights].
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2.parallel.row_order import RowOrder, order_of
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.progress import counting_bytes
from composer_fsdp2.ranks import any_rank, raise_on_all_ranks
from composer_fsdp2.shard.sharded_tensor import sharded_like

__all__ = ["SourcedWeights", "WeightSource"]


class WeightSource(Protocol):
    """Values of parameters and persistent buffers by the model's names."""

    def __contains__(self, name: object) -> bool: ...

    def read_into(self, target: torch.Tensor, name: str, offsets: Sequence[int]) -> None:
        """Fills `target` with the part of its shape that begins at `offsets`, one per dim.

        Collective: no. Any device and dtype; no memory of the size of the target may be needed
        besides it.
        """
        ...


@dataclass(slots=True, eq=False)
class SourcedWeights:
    """Fills parameters and buffers from a source."""

    source: WeightSource
    device: torch.device
    shards_on: torch.device
    _places: dict[str, list[tuple[nn.Module, str]]] = field(
        default_factory=dict[str, list[tuple[nn.Module, str]]]
    )
    """parameter name -> every place of that parameter"""
    _orders: dict[str, RowOrder] = field(default_factory=dict[str, RowOrder])
    """parameter name -> the order of its rows, where tensor parallelism changed it"""
    _failure: Exception | None = None
    _total_bytes: int = 0
    """of all parameters that are read, on all ranks together"""
    _advance: Callable[[int], object] = int

    @classmethod
    def take_over(
        cls,
        tree: ModuleTree,
        source: WeightSource,
        device: torch.device,
        shards_on: torch.device,
    ) -> SourcedWeights:
        """Puts every parameter the source knows on meta, in all its places. Collective: no.

        Their values are freed once the caller's `tree` lets go of them.
        """
        weights = cls(source, device, shards_on)
        by_param: dict[int, list[tuple[nn.Module, str]]] = {}
        for ref in tree.params:
            if ref.name not in source:
                continue
            places = by_param.setdefault(id(ref.param), [])
            places.append((tree.paths[ref.path_index].module, ref.name.rpartition(".")[2]))
            weights._places[ref.name] = places
            if (order := order_of(ref.param)) is not None:
                weights._orders[ref.name] = order
        for ref in tree.params:
            places = by_param.pop(id(ref.param), None)
            if places is not None:
                weights._total_bytes += ref.param.nbytes
            if places is not None and not ref.param.is_meta:
                _put(places, ref.param, torch.empty_like(ref.param, device="meta"))
        return weights

    @contextmanager
    def shown(self) -> Generator[None]:
        """Shows how much of the model all ranks have read, around the reading. Collective: no.

        Every rank reads its part of each parameter, so rank 0 counts whole parameters.
        """
        with counting_bytes("Reading pretrained weights", self._total_bytes) as self._advance:
            yield
        self._advance = int

    @torch.no_grad()
    def read_parameters(self, names: Iterable[str]) -> None:
        """Makes parameters real that are on meta, sharded or not: only this rank's part is read.

        Collective: no. What goes wrong is kept for `agree_on_failure`, because other ranks may be
        in a collective by then.
        """
        for name in names:
            places = self._places.get(name, [])
            for module, attribute in places[:1]:
                param = module._parameters[attribute]
                if param is not None and param.is_meta:
                    # FSDP2 takes up the new parameter in its first forward, and pads it.
                    _put(places, param, self._read(name, param))
                    self._advance(param.nbytes)

    def read_buffer(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        """Fills a buffer in place, or a new one where it is on meta; returns it. Collective: no."""
        if buffer.device != self.device:
            buffer = torch.empty_like(buffer, device=self.device)
        self._fill(name, buffer, (0,) * buffer.ndim)
        return buffer

    def agree_on_failure(self) -> None:
        """Raises on every rank what went wrong while any rank was reading.

        Collective: yes.

        Raises:
            CheckpointError: as the source raised it.
        """
        if any_rank(self._failure is not None, self.device):
            raise_on_all_ranks({}, self._failure)

    def _read(self, name: str, param: nn.Parameter) -> torch.Tensor:
        if not isinstance(param, DTensor):
            whole = torch.empty_like(param, device=self.device)
            self._fill(name, whole, (0,) * whole.ndim)
            return whole
        # Torch's checkpoints ask this way where a shard begins; a DTensor has one on each rank.
        (chunk,) = param.__create_chunk_list__()
        local = torch.zeros(param.to_local().shape, dtype=param.dtype, device=self.shards_on)
        if (order := self._orders.get(name)) is None:
            self._fill(name, local, chunk.offsets)
        else:
            self._fill_runs(name, local, chunk.offsets, order)
        return sharded_like(local, param)

    def _fill_runs(
        self, name: str, local: torch.Tensor, offsets: Sequence[int], order: RowOrder
    ) -> None:
        """Reads rows that lie in another order in the source; see [Note: order of rows]."""
        begin = offsets[order.dim]
        end = begin + local.shape[order.dim]
        for here, there, count in order.runs():
            first, last = max(begin, here), min(end, here + count)
            if first < last:
                starts = [*offsets]
                starts[order.dim] = there + first - here
                part = local.narrow(order.dim, first - begin, last - first)
                self._fill(name, part, starts)

    def _fill(self, name: str, target: torch.Tensor, offsets: Sequence[int]) -> None:
        """Reads, unless something has gone wrong already."""
        if self._failure is not None:
            return  # the run ends anyway, with the first error
        try:
            self.source.read_into(target, name, offsets)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            self._failure = error


def _put(places: Iterable[tuple[nn.Module, str]], old: nn.Parameter, data: torch.Tensor) -> None:
    """Puts a new parameter in all places; what users hung on the old one is carried over later."""
    new = nn.Parameter(data, requires_grad=old.requires_grad)
    for module, attribute in places:
        module._parameters[attribute] = new
