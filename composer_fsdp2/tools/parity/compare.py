"""Compares what two runs recorded."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from composer_fsdp2.errors import ConfigError

__all__ = [
    "QUANTITIES",
    "TOLERANCES",
    "Comparison",
    "Difference",
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


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step, over all ranks."""

    number: int
    loss: float
    gradient_norm: float
    """before clipping"""


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest one of a quantity."""

    value: float
    step: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same steps of two runs.

    Args:
        old: steps of the old configuration.
        new: steps of the new one, as many and with the same numbers.
        tolerance: largest relative difference that passes.
    """

    old: tuple[Step, ...]
    new: tuple[Step, ...]
    tolerance: float

    def __post_init__(self) -> None:
        assert self.old
        assert [s.number for s in self.old] == [s.number for s in self.new]

    def difference(self, index: int, quantity: str) -> float:
        """Relative difference of a step, by its place."""
        old, new = self.old[index], self.new[index]
        return relative_difference(getattr(old, quantity), getattr(new, quantity))

    def largest(self, quantity: str) -> Difference:
        """Where a quantity differs most; the first such step."""
        found = [self.difference(index, quantity) for index in range(len(self.old))]
        worst = max(found)
        return Difference(worst, self.old[found.index(worst)].number)

    @property
    def within(self) -> bool:
        """Whether no difference is beyond the tolerance."""
        return all(self.largest(quantity).value <= self.tolerance for quantity in QUANTITIES)

    @property
    def not_finite(self) -> list[int]:
        """Numbers of the steps at which a run has a value that is not finite."""
        pairs = zip(self.old, self.new, strict=True)
        return [
            old.number
            for old, new in pairs
            if not all(math.isfinite(getattr(s, q)) for s in (old, new) for q in QUANTITIES)
        ]


def relative_difference(old: float, new: float) -> float:
    """Difference in relation to the larger of the two; never NaN.

    Infinite where only one of them is finite. Two values that are the same infinity, or both not a
    number, do not differ.
    """
    if math.isnan(old) and math.isnan(new):
        return 0.0
    if old == new:
        return 0.0
    if not (math.isfinite(old) and math.isfinite(new)):
        return math.inf
    return abs(old - new) / max(abs(old), abs(new))


def tolerance_for(precision: str) -> float:
    """The default for a training precision.

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
    """The steps in a file of JSON lines, as far as they are written."""
    if not file.is_file():
        return ()
    whole = file.read_text(encoding="utf-8").split("\n")[:-1]  # the last may be half written
    return tuple(Step(**json.loads(line)) for line in whole)
