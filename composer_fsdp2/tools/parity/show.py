"""A comparison as text, as JSON, as CSV and as a picture."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

from composer_fsdp2.tools.parity.compare import QUANTITIES, Comparison, Difference

__all__ = ["as_dict", "describe", "describe_verdict", "write_csv", "write_picture"]

_ROWS = 40
_EDGE = 3
_VALUE, _SHARE = 12, 11


def describe(comparison: Comparison) -> list[str]:
    """A table of at most 100 columns; of a long run every so manieth step and the worst ones."""
    width = 2 * _VALUE + _SHARE
    heads = "".join(f"   {name:^{width}}".rstrip().ljust(width + 3) for name in QUANTITIES.values())
    names = f"   {'old':>{_VALUE}}{'new':>{_VALUE}}{'relative':>{_SHARE}}" * len(QUANTITIES)
    rows = _rows_shown(comparison)
    lines = [f"{'':5}{heads}".rstrip(), f"{'step':>5}{names}"]
    lines += [_row(comparison, index) for index in rows]
    if len(rows) < len(comparison.old):
        lines.append(f"{len(rows)} of {len(comparison.old)} steps are shown.")
    return lines


def _row(comparison: Comparison, index: int) -> str:
    old, new = comparison.old[index], comparison.new[index]
    cells = [f"{old.number:5}"]
    for quantity in QUANTITIES:
        difference = comparison.difference(index, quantity)
        mark = "*" if difference > comparison.tolerance else " "
        cells.append(
            f"   {getattr(old, quantity):#{_VALUE}.6g}{getattr(new, quantity):#{_VALUE}.6g}"
            f"{difference:{_SHARE - 1}.1e}{mark}"
        )
    return "".join(cells).rstrip()


def _rows_shown(comparison: Comparison) -> list[int]:
    count = len(comparison.old)
    if count <= _ROWS:
        return list(range(count))
    every = math.ceil(count / (_ROWS - 2 * _EDGE))
    worst = {comparison.largest(quantity).step for quantity in QUANTITIES}
    first = range(_EDGE)
    return [
        index
        for index, step in enumerate(comparison.old)
        if index in first or index >= count - _EDGE or index % every == 0 or step.number in worst
    ]


def describe_verdict(comparison: Comparison, source: str) -> list[str]:
    """The largest differences, and what they mean.

    Args:
        comparison: of the runs.
        source: where the tolerance is from, for the reader.
    """
    found = {name: comparison.largest(quantity) for quantity, name in QUANTITIES.items()}
    largest = ", ".join(f"{name} {_size(worst)}" for name, worst in found.items())
    lines = [f"Largest relative difference: {largest}"]
    if comparison.not_finite:
        steps = comparison.not_finite
        lines.append(f"Values are not finite at {len(steps)} of the steps, first at {steps[0]}.")
    verdict = "Within" if comparison.within else "Beyond"
    lines.append(f"{verdict} the tolerance of {comparison.tolerance:g} ({source}).")
    return lines


def _size(worst: Difference) -> str:
    return f"{worst.value:.1e} at step {worst.step}"


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """Plain values; those that are not finite as text, since JSON has none."""
    steps = [
        {
            "step": old.number,
            **{
                quantity: {
                    "old": _plain(getattr(old, quantity)),
                    "new": _plain(getattr(comparison.new[index], quantity)),
                    "relative_difference": _plain(comparison.difference(index, quantity)),
                }
                for quantity in QUANTITIES
            },
        }
        for index, old in enumerate(comparison.old)
    ]
    largest = {
        quantity: {"relative_difference": _plain(worst.value), "step": worst.step}
        for quantity, worst in ((q, comparison.largest(q)) for q in QUANTITIES)
    }
    return {
        "tolerance": comparison.tolerance,
        "within": comparison.within,
        "largest": largest,
        "steps": steps,
    }


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def write_csv(comparison: Comparison, file: Path) -> None:
    """One line per step, in full precision."""
    columns = [f"{q}_{part}" for q in QUANTITIES for part in ("old", "new", "relative_difference")]
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["step", *columns])
        for index, (old, new) in enumerate(zip(comparison.old, comparison.new, strict=True)):
            values = [
                value
                for q in QUANTITIES
                for value in (getattr(old, q), getattr(new, q), comparison.difference(index, q))
            ]
            writer.writerow([old.number, *map(repr, values)])


def write_picture(comparison: Comparison, file: Path, names: tuple[str, str]) -> bool:
    """Both curves of each quantity, and below them how far they are apart.

    Args:
        comparison: of the runs.
        file: a PNG.
        names: of the old and the new run, for the legend.

    Returns:
        Whether it was written; matplotlib may not be installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(QUANTITIES), sharex=True, height_ratios=(2, 1))
    numbers = [step.number for step in comparison.old]
    for column, (quantity, title) in enumerate(QUANTITIES.items()):
        above, below = axes[:, column]
        for steps, name, style in zip((comparison.old, comparison.new), names, "-:", strict=True):
            above.plot(numbers, [getattr(s, quantity) for s in steps], style, lw=2, label=name)
        above.set_title(title)
        above.legend()
        shares = [comparison.difference(index, quantity) for index in range(len(numbers))]
        shown = [share if 0 < share < math.inf else math.nan for share in shares]
        below.plot(numbers, shown, "k.-")
        below.axhline(comparison.tolerance, color="tab:red", lw=1, label="tolerance")
        below.set_yscale("log")
        below.set_ylim(_range([*shown, comparison.tolerance]))
        below.set_title("relative difference", fontsize="medium")
        below.set_xlabel("step")
        below.legend()
    figure.savefig(file, dpi=100)
    return True


def _range(values: list[float]) -> tuple[float, float]:
    """Limits of a logarithmic axis with room around what it can show."""
    found = [value for value in values if value > 0] or [1.0]
    return min(found) / 10, max(found) * 10
