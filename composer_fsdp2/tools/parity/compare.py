"""Compares what two runs recorded, as text, as JSON and as CSV."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_fsdp2.errors import ConfigError

__all__ = [
    "QUANTITIES",
    "TOLERANCES",
    "Comparison",
    "Step",
    "read_steps",
    "relative_difference",
    "tolerance_for",
]

QUANTITIES: Mapping[str, str] = {"loss": "loss", "gradient_norm": "gradient norm"}
"""attributes of `Step`, and what a reader calls them"""

# [Note: tolerances] fp32 is measured, on two ranks of a CPU: DDP and FSDP2 on the quickstart are
# 7e-8 apart within 10 steps, FSDP1 and FSDP2 on a small model 2e-7 within 100. It leaves room
# for more ranks and for kernels that add in no fixed order. The others are not measured on GPUs:
# they are a few times what one rounding of the format is worth. What a migration can get wrong (a
# sum for an average, another start, another learning rate) is mostly larger within ten steps.
TOLERANCES: Mapping[str, float] = {
    "fp32": 1e-5,
    "amp_bf16": 2e-2,
    "amp_fp16": 5e-3,
    "amp_fp8": 1e-1,
}
"""largest relative difference by precision"""

_ROWS, _EDGE = 40, 3
_VALUE, _SHARE = 12, 11


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step, over all ranks."""

    number: int
    loss: float
    gradient_norm: float
    """before clipping"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same steps of two runs.

    Args:
        old: steps of the old configuration, at least one.
        new: steps of the new one, as many and with the same numbers.
        tolerance: largest relative difference that passes.
    """

    old: tuple[Step, ...]
    new: tuple[Step, ...]
    tolerance: float

    def difference(self, index: int, quantity: str) -> float:
        """Returns the relative difference of a step, by its place."""
        old, new = self.old[index], self.new[index]
        return relative_difference(getattr(old, quantity), getattr(new, quantity))

    def largest(self, quantity: str) -> tuple[float, int]:
        """Returns the largest difference of a quantity, and the first step that has it."""
        found = [self.difference(index, quantity) for index in range(len(self.old))]
        return max(found), self.old[found.index(max(found))].number

    @property
    def within(self) -> bool:
        """Whether no difference is beyond the tolerance."""
        return all(self.largest(quantity)[0] <= self.tolerance for quantity in QUANTITIES)

    def table(self) -> list[str]:
        """Returns at most 100 columns; of a long run every nth step, both ends and the worst."""
        count = len(self.old)
        every = 1 if count <= _ROWS else math.ceil(count / (_ROWS - 2 * _EDGE))
        worst = {self.largest(quantity)[1] for quantity in QUANTITIES}
        width = 2 * _VALUE + _SHARE
        heads = "".join(f"   {name:^{width}}" for name in QUANTITIES.values())
        names = f"   {'old':>{_VALUE}}{'new':>{_VALUE}}{'relative':>{_SHARE}}" * len(QUANTITIES)
        lines = [f"{'':5}{heads}".rstrip(), f"{'step':>5}{names}"]
        for index, (old, new) in enumerate(zip(self.old, self.new, strict=True)):
            inside = _EDGE <= index < count - _EDGE
            if inside and index % every and old.number not in worst:
                continue
            line = f"{old.number:5}"
            for quantity in QUANTITIES:
                share = self.difference(index, quantity)
                mark = "*" if share > self.tolerance else " "
                values = (
                    f"{getattr(old, quantity):#{_VALUE}.6g}{getattr(new, quantity):#{_VALUE}.6g}"
                )
                line += f"   {values}{share:{_SHARE - 1}.1e}{mark}"
            lines.append(line.rstrip())
        if len(lines) - 2 < count:
            lines.append(f"{len(lines) - 2} of {count} steps are shown.")
        return lines

    def verdict(self, source: str) -> list[str]:
        """Returns the largest differences, and what they mean.

        Args:
            source: where the tolerance is from, for the reader.
        """
        found = {name: self.largest(quantity) for quantity, name in QUANTITIES.items()}
        largest = ", ".join(f"{name} {v:.1e} at step {step}" for name, (v, step) in found.items())
        lines = [f"Largest relative difference: {largest}"]
        pairs = zip(self.old, self.new, strict=True)
        steps = [
            old.number
            for old, new in pairs
            if not all(math.isfinite(getattr(s, q)) for s in (old, new) for q in QUANTITIES)
        ]
        if steps:
            lines.append(
                f"Values are not finite at {len(steps)} of the steps, first at {steps[0]}."
            )
        verdict = "Within" if self.within else "Beyond"
        return [*lines, f"{verdict} the tolerance of {self.tolerance:g} ({source})."]

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values; those that are not finite as text, since JSON has none."""
        largest = {quantity: self.largest(quantity) for quantity in QUANTITIES}
        return {
            "tolerance": self.tolerance,
            "within": self.within,
            "largest": {
                quantity: {"relative_difference": _plain(value), "step": step}
                for quantity, (value, step) in largest.items()
            },
            "steps": [
                {"step": step.number, **{q: self._values(index, q) for q in QUANTITIES}}
                for index, step in enumerate(self.old)
            ],
        }

    def write_csv(self, file: Path) -> None:
        """Writes one line per step, in full precision."""
        with file.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            parts = ("old", "new", "relative_difference")
            writer.writerow(["step", *(f"{q}_{part}" for q in QUANTITIES for part in parts)])
            for index, step in enumerate(self.old):
                rows = (self._values(index, quantity) for quantity in QUANTITIES)
                writer.writerow([step.number, *(value for row in rows for value in row.values())])

    def _values(self, index: int, quantity: str) -> dict[str, float | str]:
        """Returns both values of a step and how far they are apart."""
        return {
            "old": _plain(getattr(self.old[index], quantity)),
            "new": _plain(getattr(self.new[index], quantity)),
            "relative_difference": _plain(self.difference(index, quantity)),
        }


def relative_difference(old: float, new: float) -> float:
    """Returns the difference in relation to the larger of the two; never NaN.

    Infinite where only one of them is finite. Two values that are the same infinity, or both not a
    number, do not differ.
    """
    if old == new or (math.isnan(old) and math.isnan(new)):
        return 0.0
    if not (math.isfinite(old) and math.isfinite(new)):
        return math.inf
    return abs(old - new) / max(abs(old), abs(new))


def tolerance_for(precision: str) -> float:
    """Returns the default for a training precision.

    Raises:
        ConfigError: nothing is known about the precision.
    """
    if precision not in TOLERANCES:
        raise ConfigError(
            f"There is no default tolerance for precision '{precision}'. It could not be said "
            f"whether the runs agree. Give --tolerance, or one of {', '.join(TOLERANCES)}."
        )
    return TOLERANCES[precision]


def read_steps(file: Path) -> tuple[Step, ...]:
    """Reads the steps in a file of JSON lines, as far as they are written."""
    if not file.is_file():
        return ()
    whole = file.read_text(encoding="utf-8").split("\n")[:-1]  # the last may be half written
    return tuple(Step(**json.loads(line)) for line in whole)


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
