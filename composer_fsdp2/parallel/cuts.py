"""How one layer is divided between the ranks of a tensor group. Names and numbers only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

__all__ = ["Cut", "Kind", "has_weight", "is_adapted", "is_conv1d", "is_linear", "rows_and_columns"]

Kind = Literal["columns", "rows", "embedding", "norm"]
"""`columns`: each rank computes a part of the output. `rows`: each rank has a part of the input,
and outputs are added up. `embedding`: each rank has a part of the vocabulary. `norm`: whole on each
rank, which gives it its own heads; gradients are added up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How one layer is divided."""

    kind: Kind
    gathers: bool = False
    """whether the ranks exchange their parts of the output"""
    blocks: tuple[int, ...] = ()
    """sizes of what lies one after the other in a fused projection; each is cut by itself"""

    def __str__(self) -> str:
        fused = f" of {' + '.join(map(str, self.blocks))}" if self.blocks else ""
        return f"{self.kind}{fused}{', gathered' if self.gathers else ''}"


def is_adapted(module: nn.Module) -> bool:
    """Whether it is a linear layer with low-rank adapters of PEFT. Nothing is imported for that."""
    kind = type(module)
    return kind.__name__ == "Linear" and kind.__module__ == "peft.tuners.lora.layer"


def _layer_of(module: nn.Module) -> nn.Module:
    return module.get_submodule("base_layer") if is_adapted(module) else module


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' linear layer, whose weight is (input, output)."""
    module = _layer_of(module)
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    """Whether it multiplies with one matrix, plain and with a usual forward; adapters may add."""
    module = _layer_of(module)
    usual = type(module).forward is nn.Linear.forward and isinstance(module, nn.Linear)
    return usual or is_conv1d(module)


def has_weight(module: nn.Module) -> bool:
    """Whether the matrix of a linear layer is a parameter, and not computed from others."""
    return _layer_of(module)._parameters.get("weight") is not None


def rows_and_columns(module: nn.Module) -> tuple[int, int]:
    """Sizes of the input and the output of a linear layer."""
    first, second = _layer_of(module).get_parameter("weight").shape
    return (first, second) if is_conv1d(module) else (second, first)
