"""Comparing two checkpoints of any kind, value by value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from composer_fsdp2.checkpoint.source import Checkpoint

__all__ = ["Comparison", "compare_checkpoints"]

_BLOCK = 1 << 24
"""elements compared at once; each may need 16 bytes"""


@dataclass(slots=True)
class Comparison:
    """Differences by key; all empty if the checkpoints are equal."""

    only_in_first: list[str] = field(default_factory=list)
    only_in_second: list[str] = field(default_factory=list)
    layouts: dict[str, tuple[str, str]] = field(default_factory=dict)
    """shape and dtype on either side, where they differ"""
    values: dict[str, float] = field(default_factory=dict)
    """largest absolute difference, where the bytes differ; NaN if either has one"""
    objects: dict[str, tuple[str, str]] = field(default_factory=dict)
    """text of what is no tensor, on either side"""
    equal_tensors: int = 0
    equal_objects: int = 0

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        found = (self.only_in_first, self.only_in_second, self.layouts, self.values, self.objects)
        return not any(found)


def compare_checkpoints(
    first: Checkpoint, second: Checkpoint, advance: Callable[[int, int], object]
) -> Comparison:
    """Compares by key; the kinds may differ.

    Args:
        first: an open checkpoint.
        second: another one.
        advance: told the bytes of tensors compared so far, and in all.

    Raises:
        CheckpointError: a value cannot be read.
    """
    found = Comparison(
        only_in_first=[key for key in first.paths if key not in second.paths],
        only_in_second=[key for key in second.paths if key not in first.paths],
    )
    both = [key for key in first.paths if key in second.paths]
    total = max(1, sum(first.tensors[key].size_bytes for key in both if key in first.tensors))
    done = 0
    for key in both:
        if key in first.tensors and key in second.tensors:
            _compare_tensors(key, first, second, found)
        else:
            _compare_objects(key, first, second, found)
        done += first.tensors[key].size_bytes if key in first.tensors else 0
        advance(done, total)
    return found


def _compare_tensors(key: str, first: Checkpoint, second: Checkpoint, found: Comparison) -> None:
    if first.tensors[key] != second.tensors[key]:
        found.layouts[key] = (_layout(first, key), _layout(second, key))
        return
    difference = _largest_difference(first.tensor(key), second.tensor(key))
    if difference is None:
        found.equal_tensors += 1
    else:
        found.values[key] = difference


def _compare_objects(key: str, first: Checkpoint, second: Checkpoint, found: Comparison) -> None:
    a = _layout(first, key) if key in first.tensors else first.object(key)
    b = _layout(second, key) if key in second.tensors else second.object(key)
    if _same(a, b):
        found.equal_objects += 1
    else:
        found.objects[key] = (_text(a), _text(b))


def _layout(checkpoint: Checkpoint, key: str) -> str:
    entry = checkpoint.tensors[key]
    return f"{str(entry.dtype).removeprefix('torch.')} {list(entry.shape)}"


def _text(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def _largest_difference(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """None if the bytes are equal; in blocks, because the arithmetic needs wider numbers."""
    a, b = a.detach().reshape(-1), b.detach().reshape(-1)
    found: list[float] = []
    for start in range(0, len(a), _BLOCK):
        x, y = a[start : start + _BLOCK], b[start : start + _BLOCK]
        if not torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
            wide = torch.complex128 if x.is_complex() else torch.float64
            found.append((x.to(wide) - y.to(wide)).abs().max().item())
    return float(np.max(found)) if found else None


def _same(a: Any, b: Any) -> bool:
    """Equality inside containers too; `==` of arrays is an array."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return type(a) is type(b) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(type(a) is type(b) and (a == b or (a != a and b != b)))
