"""Containers that a unit is given: tensors in them are exchanged, and the containers stay.

[Note: containers] A module may append its loss to a list that it is given, put keys and values
into a dict that later layers read, or write its result into its batch. torch makes a new container
of each that a unit is given: to mark tensors behind which backward has left the unit, to move those
of the root, and to cast. What the unit puts into it would be lost. So tensors are exchanged here,
in the caller's own containers, for as long as the unit runs. Afterwards each tensor that the unit
left alone is the caller's again, and what the unit has put there is an output of it.
Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_state.py#L214
https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py#L564
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from composer_fsdp2.torch_private.tensors import is_namedtuple
from composer_fsdp2.torch_private.units import after_backward

__all__ = [
    "NO_CONTAINERS",
    "Exchange",
    "GivenContainers",
    "InputCast",
    "items_of",
    "tensors_in",
]


NO_CONTAINERS = frozenset((torch.Tensor, nn.Parameter, type(None), bool, int, float, str))
"""types of values in which no tensor can be exchanged"""


@dataclasses.dataclass(frozen=True, slots=True)
class InputCast:
    """Casts floating point tensors, and moves tensors, if at all."""

    dtype: torch.dtype | None = None
    device: str | torch.device | None = None
    """that inputs are moved to where shards are in CPU memory: a model that asks for the device of
    its weights (`hidden.to(head.weight.device)`) has moved them there"""

    def __call__(self, value: Any) -> Any:
        """Returns another tensor, or what is no tensor as it is."""
        if isinstance(value, PackedSequence):
            return value if self.device is None else value.to(self.device)
        if not isinstance(value, torch.Tensor):
            return value
        # As FSDP2's own cast does: integers and complex numbers stay.
        return value.to(self.device, self.dtype if value.is_floating_point() else None)


class GivenContainers:
    """Knows what containers a call of a unit was given, and the tensors in them."""

    def __init__(self, given: list[Any]) -> None:
        self._given = given
        self.exchanges: list[Exchange] = []
        walk = Exchange(_same)
        if torch.is_grad_enabled():
            walk(given)
        self._before, self.containers = walk.tensors, walk.containers

    def give_back(self) -> None:
        """Puts back what the unit has left in the containers, wherever it is there."""
        for exchange in reversed(self.exchanges):
            exchange.put({id(now): before for before, now in exchange.pairs})

    def again_in_backward(self, outputs: Iterable[torch.Tensor]) -> None:
        """Exchanges once more while backward runs, for what is computed again there."""

        def again(_gradient: object) -> None:
            for exchange in self.exchanges:
                exchange.put({id(before): now for before, now in exchange.pairs})
            after_backward(self.give_back)

        for output in outputs:
            if output.requires_grad:
                output.register_hook(again)

    def new_tensors(self) -> list[torch.Tensor]:
        """Returns what the unit has put there."""
        return [tensor for tensor in tensors_in(self._given) if id(tensor) not in self._before]


class Exchange:
    """Puts other tensors into containers, which stay the same objects, until they are given back.

    Immutable ones are made anew. Knows tuples, lists, dicts, deques and dataclasses.

    Args:
        other: returns another tensor for a tensor, or the same one.
    """

    def __init__(self, other: Callable[[Any], Any]) -> None:
        self.other = other
        self.tensors: dict[int, torch.Tensor] = {}
        self.containers: dict[int, Any] = {}
        self.pairs: list[tuple[Any, Any]] = []
        """of what was in a container, and what is there now"""

    def __call__(self, value: Any) -> Any:
        """Returns the value, or what is there for it."""
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = value
            return self.other(value)
        if type(value) is tuple or is_namedtuple(value):
            items = list(map(self, value))
            if all(one is other for one, other in zip(items, value, strict=True)):
                return value
            return tuple(items) if type(value) is tuple else type(value)(*items)
        if isinstance(value, list | dict | deque):
            if id(value) not in self.containers:
                self.containers[id(value)] = value
                for key, item in items_of(value):
                    if (other := self(item)) is not item:
                        value[key] = other
                        self.pairs.append((item, other))
            return value
        if dataclasses.is_dataclass(value) and hasattr(value, "__dict__"):
            self(vars(value))
            return value
        return self.other(value)

    def put(self, others: dict[int, Any]) -> None:
        """Puts others, by address, in the places of what is in the containers."""
        for container in self.containers.values():
            for key, item in items_of(container):
                if id(item) in others:
                    container[key] = others[id(item)]


def _same(value: Any) -> Any:
    return value


def items_of(container: Any) -> list[tuple[Any, Any]]:
    """Returns keys or places of a container, and what is there; changes may follow."""
    return list(container.items() if isinstance(container, dict) else enumerate(container))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in a value, however deep in containers."""
    walk = Exchange(_same)
    walk(value)
    return list(walk.tensors.values())
