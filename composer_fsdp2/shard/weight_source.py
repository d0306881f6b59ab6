"""Weights from outside the model, of which every rank reads only what its shards hold.

[Note: weights from a source] A source knows parameters and persistent buffers by name. Its values
win over those of the model on any rank, which are dropped before anything is sharded: a unit goes
from meta to shards on meta, then memory is made for the shards alone and filled slice by slice.
Tensors that the source does not know (rotary tables, masks) follow [Note: initial weights].
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor

from composer_fsdp2.parallel.form import ParameterForm, form_of
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.progress import counting_bytes
from composer_fsdp2.ranks import any_rank, raise_on_all_ranks
from composer_fsdp2.shard.layout import Slot, replace_parameter, slot_of
from composer_fsdp2.torch_private.tensors import sharded_like

__all__ = ["SourcedWeights", "WeightSource"]


class WeightSource(Protocol):
    """Values of parameters and persistent buffers by the model's names."""

    def __contains__(self, name: object) -> bool: ...

    def read_into(self, target: torch.Tensor, name: str, offsets: Sequence[int]) -> None:
        """Fills `target` with the part of its shape that begins at `offsets`, one per dim.

        Collective: no. Any device and dtype; no memory of the size of the target may be needed
        besides it.
        """


class SourcedWeights:
    """Fills parameters and buffers from a source.

    Puts every parameter the source knows on meta, in all its slots. Their values are freed once
    the caller's `tree` lets go of them. Collective: no.

    Args:
        tree: the model, not sharded yet.
        source: has the values; `None` knows no names.
        device: where parameters that are not sharded live.
        shards_on: device of the shards.
    """

    def __init__(
        self,
        tree: ModuleTree,
        source: WeightSource | None,
        device: torch.device,
        shards_on: torch.device,
    ) -> None:
        self._source, self._device, self._shards_on = source, device, shards_on
        self._slots: dict[str, list[Slot]] = {}
        """parameter name -> all slots of that parameter"""
        self._forms: dict[str, ParameterForm] = {}
        """parameter name -> its form: until all units are sharded, a shard has no note of it"""
        self._failure: Exception | None = None
        self._total_bytes = 0
        """size of all parameters that are read, on all ranks together"""
        self._advance: Callable[[int], object] = int
        by_param: dict[int, list[Slot]] = {}
        for ref in tree.params:
            if ref.name in self:
                self._slots[ref.name] = by_param.setdefault(id(ref.param), [])
                self._slots[ref.name].append(slot_of(tree, ref))
                self._forms[ref.name] = form_of(ref.param)
        for ref in tree.params:
            if (slots := by_param.pop(id(ref.param), None)) is not None:
                self._total_bytes += ref.param.nbytes
                if not ref.param.is_meta:
                    replace_parameter(slots, ref.param, torch.empty_like(ref.param, device="meta"))

    def __contains__(self, name: object) -> bool:
        return self._source is not None and name in self._source

    @contextmanager
    def shown(self) -> Generator[None]:
        """Shows how much of the model all ranks have read, around the reading. Collective: no.

        Every rank reads its part of each parameter, so rank 0 counts full parameters.
        """
        with counting_bytes("Reading pretrained weights", self._total_bytes) as self._advance:
            yield
        self._advance = int

    @torch.no_grad()
    def read_parameters(self, names: Iterable[str]) -> None:
        """Makes parameters real that are on meta, sharded or not: only this rank's part is read.

        Collective: no. An error is kept for `agree_on_failure`, because other ranks may be in a
        collective by then.
        """
        for name in names:
            slots = self._slots.get(name, [])
            for module, attribute in slots[:1]:
                param = module._parameters[attribute]
                if param is None or not param.is_meta:
                    continue
                if not isinstance(param, DTensor):
                    data = torch.empty_like(param, device=self._device)
                    self._fill(name, data, (0,) * data.ndim)
                else:
                    shape = param.to_local().shape
                    local = torch.zeros(shape, dtype=param.dtype, device=self._shards_on)
                    for index, offsets in self._forms[name].blocks(param):
                        self._fill(name, local[index], offsets)
                    data = sharded_like(local, param)
                # FSDP2 takes up the new parameter in its first forward, and pads it.
                replace_parameter(slots, param, data)
                self._advance(param.nbytes)

    def read_buffer(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        """Returns a buffer with the source's values; new if it was elsewhere. Collective: no."""
        if buffer.device != self._device:
            buffer = torch.empty_like(buffer, device=self._device)
        self._fill(name, buffer, (0,) * buffer.ndim)
        return buffer

    def agree_on_failure(self) -> None:
        """Raises on every rank the error that any rank met while it was reading.

        Collective: yes, where there is a source.

        Raises:
            CheckpointError: as the source raised it.
        """
        if self._source is not None and any_rank(self._failure is not None, self._device):
            raise_on_all_ranks({}, self._failure)

    def _fill(self, name: str, target: torch.Tensor, offsets: Sequence[int]) -> None:
        """Reads a part of a tensor into `target`, unless an error was met already."""
        if self._source is None or self._failure is not None:
            return  # the run ends anyway, with the first error
        try:
            self._source.read_into(target, name, offsets)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            self._failure = error
