"""Random numbers inside of divided layers: others on each rank of a tensor group.

[Note: two streams] Between layers divided by columns and the layer divided by rows that follows
them, a rank has its own heads or its own part of an MLP, and dropout must draw its own numbers for
them. Everywhere else the ranks compute the same; see [Note: one stream]. So the generator is given
a seed of the rank there, made of its state, and goes back to where it was. Activation checkpointing
restores the state from before a block, and with it the seed.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["draw_apart", "draws"]

_ODD = 0x9E3779B97F4A7C15
"""spreads seeds that lie next to each other"""


def draws(module: nn.Module) -> bool:
    """Whether it has dropout, as a module or as a number. Collective: no."""
    for part in module.modules():
        values = {"dropout": part.p} if isinstance(part, nn.Dropout) else vars(part)
        for name, value in values.items():
            if "drop" in name and isinstance(value, numbers.Real) and 0 < float(value) <= 1:
                return True
    return False


def draw_apart(
    parent: nn.Module, begins: Iterable[nn.Module], ends: Iterable[nn.Module], mesh: DeviceMesh
) -> None:
    """Has a rank draw its own numbers between divided layers; see [Note: two streams].

    Collective: no.

    Args:
        parent: the attention or MLP that holds the layers.
        begins: layers divided by columns.
        ends: layers divided by rows.
        mesh: the tensor axis of the run's mesh.
    """
    stream = _Stream(mesh.device_type, mesh.get_local_rank())

    def begin(*_: Any) -> None:
        if parent.training:
            stream.begin()

    def end(*_: Any) -> None:
        stream.end()

    for module in begins:
        module.register_forward_hook(begin)
    for module in ends:
        module.register_forward_pre_hook(end)
    # After an error too, with which a recomputation ends once it has what it needs.
    parent.register_forward_hook(end, always_call=True)


class _Stream:
    """The device's generator, as one rank uses it for a while."""

    def __init__(self, device_type: str, rank: int) -> None:
        self._device_type, self._rank = device_type, rank
        self._kept: torch.Tensor | None = None

    def begin(self) -> None:
        if self._kept is None:
            generator = self._generator()
            seed = self._next_seed(generator)
            self._kept = generator.get_state()
            generator.manual_seed((seed + (self._rank + 1) * _ODD) % 2**63)

    def end(self) -> None:
        if self._kept is not None:
            self._generator().set_state(self._kept)
            self._kept = None

    def _generator(self) -> torch.Generator:
        if self._device_type == "cpu":
            return torch.default_generator
        module: Any = torch.get_device_module(self._device_type)
        return module.default_generators[module.current_device()]

    def _next_seed(self, generator: torch.Generator) -> int:
        """A number that all ranks of the group draw alike, and another one each time."""
        if self._device_type == "cpu":
            return int(torch.randint(2**62, (), generator=generator))
        # A number from the device would have to be waited for. An offset is a multiple of 4.
        offset = generator.get_offset()
        generator.set_offset(offset + 4)
        return generator.initial_seed() + offset * _ODD
