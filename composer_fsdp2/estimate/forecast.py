"""Predicts memory and communication of one training step of a rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.estimate.blocks import copied, extended, find_equal_blocks
from composer_fsdp2.estimate.collectives import Axis
from composer_fsdp2.estimate.trace import STATE, Trace, Window, Work, trace_steps
from composer_fsdp2.plan.wrap_plan import WrapPlan
from composer_fsdp2.shard.units import collector_paused
from composer_fsdp2.text import listed

__all__ = ["Forecast", "Sent", "forecast"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Collectives of one kind over the same ranks, in one step."""

    kind: str
    axis: Axis
    calls: int
    size_bytes: int
    """bytes of full tensors: outputs of gathers, inputs of reductions"""

    @property
    def wire_bytes(self) -> float:
        """Returns the bytes that a rank sends in a ring."""
        others = (self.axis.ranks - 1) / self.axis.ranks
        return self.size_bytes * others * (2 if self.kind == "all-reduce" else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Holds the forecast of one training step of a rank, in bytes."""

    ranks: int
    ranks_per_node: int
    microbatches: int
    held: dict[str, int]
    """parameters, buffers, gradients and optimizer state"""
    on_host: tuple[str, ...] = ()
    """kinds of `held` that are in CPU memory"""
    kept: dict[str, int] | None = None
    """activations and logits that a forward leaves for backward; `None` is unknown"""
    gathered_bytes: int
    """the most that gathered units take at one moment"""
    peak: dict[str, int]
    """by kind, at the moment with the most memory on the device"""
    moment: str
    windows: tuple[Window, ...] = ()
    """the most memory on the device between two events, in the order of the step"""
    sent: tuple[Sent, ...] = ()
    flops: int = 0
    """FLOPs of a step, with those of recomputation in backward"""
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Returns the most memory on the device."""
        return sum(self.peak.values())

    def of_a_step(self) -> dict[str, Any] | None:
        """Returns the numbers that a run can measure in a step, and the notes.

        Returns:
            `None` for a model that could not be traced.
        """
        if self.kept is None:
            return None
        numbers: dict[str, Any] = {**self.held, "gathered_bytes": 0, "reduced_bytes": 0}
        for sent in self.sent:
            if sent.kind in _MEASURED and sent.axis.name in _UNIT_AXES:
                numbers[_MEASURED[sent.kind]] += sent.size_bytes
        return {**numbers, "peak_allocated_bytes": self.peak_bytes, "notes": self.notes}

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        sent = [{**asdict(row), "wire_bytes": round(row.wire_bytes)} for row in self.sent]
        return {**asdict(self), "sent": sent, "peak_bytes": self.peak_bytes}


_MEASURED = {
    "all-gather": "gathered_bytes",
    "reduce-scatter": "reduced_bytes",
    "all-reduce": "reduced_bytes",
}
_UNIT_AXES = {"dp_shard", "dp_replicate", "efsdp", "reshard"}
"""axes on which units are gathered and reduced"""
_WORKSPACES = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)
"""layers whose libraries take much memory for themselves"""


@collector_paused()
def forecast(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    units: WrapPlan,
    work: Work,
    *,
    treated: Collection[str] = (),
    on_host: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Forecast:
    """Predicts a step. Neither the model nor the optimizer is changed.

    Collective: no. `torch.distributed` must not be initialised.

    Args:
        model: on meta or not, before it is sharded.
        optimizer: over the model's parameters, without state yet.
        units: the wrap plan that the run would print.
        work: ranks, microbatches and shapes of the batch.
        treated: modules that transformations change, by name.
        on_host: kinds of memory that the run keeps in CPU memory.
        notes: differences between the run and its trace.

    Raises:
        PlanError: the model cannot be prepared, or calls collectives that are not known.
        ConfigError: likewise.
    """
    said = list(notes)
    trace = _traced(model, optimizer, units, work, treated, said)
    if trace.balanced:
        said.append("every expert is taken to get the same number of tokens")
    if trace.unused:
        said.append(
            f"{listed(trace.unused, 3)} got no gradient: its optimizer state is counted, which a "
            "run makes only if some rank uses the parameter, and the gradient of zeros of the "
            "other ranks and its reduction are not counted"
        )
    if kinds := sorted({type(m).__name__ for m in model.modules() if isinstance(m, _WORKSPACES)}):
        said.append(
            f"layers of {' and '.join(kinds)} compute in workspaces of libraries, which are not "
            "predicted: the peak can be several times as high"
        )
    on_device = (
        {k: n for k, n in w.kinds.items() if n and k not in on_host} for w in trace.windows
    )
    windows = [Window(w.label, kinds) for w, kinds in zip(trace.windows, on_device, strict=True)]
    largest = max(windows, key=lambda window: sum(window.kinds.values()))
    return Forecast(
        ranks=work.ranks,
        ranks_per_node=work.ranks_per_node,
        microbatches=work.microbatches,
        held={kind: trace.held[kind] for kind in STATE},
        on_host=tuple(on_host),
        kept=None if trace.kept is None else dict(trace.kept),
        gathered_bytes=max(window.kinds.get("gathered", 0) for window in trace.windows),
        peak=largest.kinds,
        moment=str(largest),
        windows=tuple(windows),
        sent=tuple(
            Sent(kind=kind, axis=axis, calls=trace.calls[kind, axis], size_bytes=size)
            for (kind, axis), size in sorted(trace.sent.items())
            if axis.ranks > 1
        ),
        flops=trace.flops,
        notes=tuple(said),
    )


def _traced(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    units: WrapPlan,
    work: Work,
    treated: Collection[str],
    said: list[str],
) -> Trace:
    """Traces few of equal blocks, else all, else the state alone."""
    blocks = find_equal_blocks(model, units, treated, work.ahead)
    try:
        if blocks is not None:
            short, long = (
                trace_steps(*copied(model, optimizer, blocks, periods), work)
                for periods in (blocks.short, blocks.short + 1)
            )
            if (trace := extended(short, long, blocks, units)) is not None:
                said.append(
                    f"{blocks.equal} blocks of '{blocks.name}' are equal: "
                    f"{(blocks.short + 1) * blocks.period} of them were traced for all"
                )
                return trace
        return trace_steps(*copied(model, optimizer), work)
    except (ConfigError, PlanError):
        raise
    except Exception as error:  # whatever the model does with tensors that have no values
        text = " ".join(str(error).split())[:200]
        said.append(
            f"the model cannot be traced ({type(error).__name__}: {text}): activations, logits "
            "and collectives are not in these numbers"
        )
        return trace_steps(*copied(model, optimizer), work, state_only=True)
