"""Steps many small parameters as one.

[Note: packing] An optimizer that loops in Python pays for every parameter, whatever its size: 25
to 40 microseconds for Composer's DecoupledAdamW, most of a second a step for the 18,900 parameters
of a model with listed experts. Element by element it does not matter where a tensor ends. So
parameters of one group whose state says the same (step counts, keys, dtypes) are joined end to end,
stepped as one parameter, and cut apart again. Done for float32 and float64 only: CPU kernels
compute the last elements of a bfloat16 tensor, those that fill no vector, with other rounding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from composer_fsdp2.optim.group_shards import GroupShards
from composer_fsdp2.optim.local_shard import LocalShard
from composer_fsdp2.optim.twin import Twins
from composer_fsdp2.optim.written_through import WrittenThrough
from composer_fsdp2.shard.torch_private.tensors import copy_into, join_flat

__all__ = ["Packing"]

SMALL = 2_048
"""elements up to which a parameter's cost is that of Python, not of memory"""
AT_ONCE = 262_144
"""elements of a pack: joined copies of its weights and gradients are held while it is stepped"""
FEW = 4
"""parameters below which joining does not pay"""
DTYPES = (torch.float32, torch.float64)

Step = Callable[[torch.optim.Optimizer], Any]


class Packing:
    """Steps the small parameters of one optimizer, group by group."""

    def __init__(self, step: Step, loops: Callable[[Any, Any], bool], small: int = SMALL) -> None:
        """Takes the step of the optimizer's class without hooks, and which groups it loops over.

        `small` is the number of elements up to which joining a parameter costs less than it saves.
        """
        self._step, self._loops, self._small = step, loops, small
        self._packed: dict[int, _Packed] = {}

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        twins: Twins,
        number: int,
        group: WrittenThrough,
        held: GroupShards,
    ) -> list[int] | None:
        """Steps what can be packed of a group; returns places of what is left, `None` for all."""
        if len(held.shards) < FEW or not self._loops(group, held.shards[0].local):
            return None
        packed = self._packed.get(number)
        if packed is None or not packed.is_current(held):
            packed = self._packed[number] = _Packed(held, self._small)
        for pack in packed.packs:
            joined = pack.join(held.grads)
            one = WrittenThrough(group, {"params": [joined]})
            contents = ([one], defaultdict(dict, {joined: pack.state}))
            self._step(twins.make(optimizer, lambda contents=contents: contents))
            pack.cut(joined, optimizer.state)
        return packed.left


class _Packed:
    """How the shards of one group are divided into packs and those that are stepped alone."""

    def __init__(self, held: GroupShards, small: int) -> None:
        self._held, self._version, self._has_gradient = held, held.version, held.has_gradient
        self.packs: list[_Pack] = []
        alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for place, shard in enumerate(held.shards):
            key = _key(shard, held.grads[place], small)
            if key is not None:
                alike[key].append(place)
        alone = set(range(len(held.shards)))
        for together in alike.values():
            for few in _cut(held.shards, together):
                if len(few) >= FEW:
                    self.packs.append(_Pack(held.shards, few))
                    alone -= set(few)
        self.left = sorted(alone)

    def is_current(self, held: GroupShards) -> bool:
        """Whether nothing was exchanged since, and the same parameters have a gradient."""
        known = held is self._held and held.version == self._version
        return known and held.has_gradient is self._has_gradient


class _Pack:
    """Parameters that are stepped as one.

    Their state is joined for each step and cut again: as views of one tensor its parts would save
    the copies, but torch copies a DTensor wrongly whose local tensor begins inside its memory.
    """

    def __init__(self, held: Sequence[LocalShard], places: list[int]) -> None:
        self._places = places
        self.shards = shards = [held[place] for place in places]
        self._sizes = [shard.local.numel() for shard in shards]
        self._weights = _flat(shard.local.detach() for shard in shards)
        first = shards[0]
        self._elements = {
            key: _flat(shard.state[key] for shard in shards)
            for key, value in first.state.items()
            if _is_elements(value, first.local)
        }
        self.state: dict[Any, Any] = {}

    def join(self, grads: Sequence[torch.Tensor | None]) -> nn.Parameter:
        """The weights and gradients end to end, as one parameter; `state` is its state."""
        joined = nn.Parameter(torch.cat(self._weights))
        own = [grads[place] for place in self._places]
        joined.grad = join_flat([grad for grad in own if grad is not None])
        self.state = {key: self._joined(key, v) for key, v in self.shards[0].state.items()}
        return joined

    def _joined(self, key: Any, value: Any) -> Any:
        if key in self._elements:
            return torch.cat(self._elements[key])
        return value.clone() if isinstance(value, torch.Tensor) else value

    def cut(self, joined: nn.Parameter, states: Any) -> None:
        """Gives each parameter its part of what the step has made, and `states` what is new."""
        copy_into(self._weights, joined.detach().split(self._sizes))
        for shard in self.shards:
            if shard.held is None and self.state:
                shard.read_state(states[shard.param])
        for key, value in self.state.items():
            if not isinstance(value, torch.Tensor):
                for shard in self.shards:
                    shard.state[key] = value
            elif key in self._elements:
                copy_into(self._elements[key], value.split(self._sizes))
            elif _is_elements(value, joined):
                self._make_elements(key, value)
            elif isinstance(self.shards[0].state.get(key), torch.Tensor):
                copy_into([shard.state[key] for shard in self.shards], [value] * len(self.shards))
            else:
                for shard in self.shards:
                    shard.state[key] = value.clone()
        self.state = {}

    def _make_elements(self, key: Any, value: torch.Tensor) -> None:
        for shard, part in zip(self.shards, value.split(self._sizes), strict=True):
            shard.state[key] = part.view(shard.local.shape).clone()
        self._elements[key] = _flat(shard.state[key] for shard in self.shards)


def _flat(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.view(-1) for tensor in tensors]


def _key(shard: LocalShard, grad: torch.Tensor | None, small: int) -> tuple[Any, ...] | None:
    """Shards with equal keys may be joined; `None` for one that is stepped alone."""
    local = shard.local
    if not shard.is_sharded or grad is None or not local.requires_grad:
        return None
    if local.numel() > small or local.dtype not in DTYPES or not _is_plain(local):
        return None
    parts: list[Any] = [local.dtype, local.device]
    for name, value in shard.state.items():
        if not isinstance(value, torch.Tensor):
            if value is not None and not isinstance(value, (bool, int, float)):
                return None
            parts += (name, type(value), value)
        elif value.ndim == 0 and value.device.type == "cpu":
            parts += (name, value.dtype, value.item())
        elif _is_elements(value, local) and value.dtype is local.dtype and _is_plain(value):
            parts += (name, value.dtype, "elements")
        else:
            return None
    return tuple(parts)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Contiguous, and of no class that computes otherwise."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.is_contiguous()


def _is_elements(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == param.shape


def _cut(shards: Sequence[LocalShard], places: Iterable[int]) -> Iterator[list[int]]:
    pack: list[int] = []
    elements = 0
    for place in places:
        size = shards[place].local.numel()
        if pack and elements + size > AT_ONCE:
            yield pack
            pack, elements = [], 0
        pack.append(place)
        elements += size
    if pack:
        yield pack
