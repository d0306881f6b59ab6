"""Counts what a sharded model communicates and holds while it trains, from outside FSDP.

[Note: what is seen] FSDP tells nobody when it gathers a unit. Two things can be seen from outside.
Its collectives are calls of public functions, with the tensors that go over the wire; whoever
replaces these functions calls `TrafficMeter.collective`. And a gathered unit has plain parameters
where a sharded one has DTensors, so the dict that holds a unit's first parameter is exchanged for
one that notices. Both cost microseconds for each collective, however many units there are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.wrap_plan import WrapPlan

__all__ = ["TrafficMeter"]


class TrafficMeter:
    """Counts what FSDP gathers, reduces and holds on this rank.

    Bytes are those of whole tensors in the dtype that is sent, padding included: the output of an
    all-gather, the input of a reduce-scatter, the tensor of an all-reduce.

    Args:
        model: sharded by `plan`.
        plan: says where the units are.
    """

    def __init__(self, model: nn.Module, plan: WrapPlan) -> None:
        tree = ModuleTree.read(model)
        holders = {ref.name: tree.paths[ref.path_index].module for ref in tree.params}
        self._places = [
            (holders[unit.params[0]], unit.params[0].rpartition(".")[2], unit.numel)
            for unit in plan.units
            if unit.params
        ]
        self._held: dict[int, int] = {}
        self._held_bytes = 0
        self._on_the_way: list[int] = []
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.begin()

    def begin(self) -> None:
        """Starts to count anew; units that are gathered now count in the peak."""
        self.gathered_bytes = 0
        self.reduced_bytes = 0
        self.collectives = 0
        self._waits.clear()
        self.settle()
        self.peak_unsharded_bytes = self._held_bytes

    def settle(self) -> None:
        """To be called after a backward, when FSDP drops what it gathered too early."""
        self._on_the_way.clear()

    def collective(self, name: str, nbytes: int) -> None:
        """Counts one collective, when it starts."""
        self.collectives += 1
        if name.startswith("all_gather"):
            self.gathered_bytes += nbytes
            self._on_the_way.append(nbytes)
            self._note_peak()
        else:
            self.reduced_bytes += nbytes

    def waited(self, before: torch.cuda.Event, after: torch.cuda.Event) -> None:
        """Counts a wait of the computing stream for a collective, between two timing events."""
        self._waits.append((before, after))

    def exposed_seconds(self) -> float | None:
        """How long computation waited for collectives; `None` where nothing tells.

        Waits until the device has come to the last of them.
        """
        if not self._waits:
            return None
        self._waits[-1][1].synchronize()
        return sum(before.elapsed_time(after) for before, after in self._waits) / 1000

    @contextlib.contextmanager
    def following(self) -> Generator[None]:
        """Notices which units are gathered, for the duration of a block."""
        for unit, (module, name, numel) in enumerate(self._places):
            if not isinstance(module._parameters, _Followed):
                # FSDP2 writes into this dict itself, and not through `nn.Module.__setattr__`.
                module._parameters = _Followed(module._parameters)
            module._parameters.told[name] = self._teller(unit, numel)
            module._parameters[name] = module._parameters[name]  # tells what it is now
        try:
            yield
        finally:
            for module, _, _ in self._places:
                module._parameters = dict(module._parameters)
            self._held.clear()
            self._held_bytes = 0

    def _teller(self, unit: int, numel: int) -> Callable[[torch.Tensor], None]:
        def tell(param: torch.Tensor) -> None:
            self._held_bytes -= self._held.pop(unit, 0)
            if not isinstance(param, DTensor):
                self._arrive(unit, numel * param.element_size())
            self._note_peak()

        return tell

    def _arrive(self, unit: int, nbytes: int) -> None:
        """Finds the gather a unit came with: the one on its way that it fits into best."""
        fitting = [sent for sent in self._on_the_way if sent >= nbytes]
        if fitting:
            nbytes = min(fitting)
            self._on_the_way.remove(nbytes)
        self._held[unit] = nbytes
        self._held_bytes += nbytes

    def _note_peak(self) -> None:
        now = self._held_bytes + sum(self._on_the_way)
        self.peak_unsharded_bytes = max(self.peak_unsharded_bytes, now)


class _Followed(dict[str, Any]):
    """A module's parameters, which tell when one is exchanged."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__(params)
        self.told: dict[str, Callable[[torch.Tensor], None]] = {}

    def __setitem__(self, name: str, param: Any) -> None:
        super().__setitem__(name, param)
        if name in self.told:
            self.told[name](param)
