"""Draws numbers of runs: two loss curves, and bars and lines of measured figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer_fsdp2.tools.parity.compare import Comparison
from composer_fsdp2.tools.pictures.rows import elements_text
from composer_fsdp2.tools.pictures.sheet import (
    COLORS,
    INK,
    MARGIN,
    SIZE,
    SMALL,
    TITLE,
    WIDTH,
    Key,
    Sheet,
    drawn,
    placed,
    shortened,
    text_width,
    wrapped,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["bars_picture", "lines_picture", "losses_picture"]

_ROW, _BAR = 26.0, 15.0
_HATCHES = (None, "////", None, "\\\\\\\\", None)
_PALETTE = ("blue", "orange", "green", "purple", "sky")


@drawn
def losses_picture(comparison: Comparison, names: tuple[str, str], title: str) -> Figure:
    """Draws the losses of two runs, and below them how far apart they are.

    Collective: no. Needs matplotlib.

    Args:
        comparison: of the runs, as `composer-fsdp2 parity` makes it.
        names: of the old and the new run.
        title: of the drawing.

    Returns:
        The drawing, 460 points wide.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 72, 400 / 72), facecolor="white")
    figure.text(MARGIN / WIDTH, 1 - 20 / 400, title, fontsize=TITLE, weight="bold", va="center")
    above = figure.add_axes((0.17, 0.5, 0.79, 0.41))
    below = figure.add_axes((0.17, 0.18, 0.79, 0.21))
    steps = [step.number for step in comparison.old]
    # The new run is drawn over the old one, so the line below is wide.
    styles: tuple[dict[str, Any], ...] = (
        {"lw": 5, "color": COLORS["orange"]},
        {"lw": 1.6, "color": COLORS["blue"]},
    )
    runs = (comparison.old, comparison.new)
    for run, name, style in zip(runs, names, styles, strict=True):
        above.plot(steps, [step.loss for step in run], label=name, **style)
    _plain(above, "loss")
    above.legend(fontsize=SMALL, frameon=False)
    shares = [comparison.difference(index, "loss") for index in range(len(steps))]
    shown = [share if 0 < share < math.inf else math.nan for share in shares]
    below.plot(steps, shown, ".", color=COLORS["blue"], ms=4)
    _draw_tolerance(below, comparison.tolerance, steps[-1])
    finite = [share for share in shown if not math.isnan(share)] or [comparison.tolerance or 1.0]
    below.set_ylim(min(finite) / 10, (comparison.tolerance or max(finite)) * 30)
    below.set_yscale("log")
    above.set_xlim(*below.set_xlim(steps[0] - 1, steps[-1] + 1))
    equal = sum(share == 0 for share in shares)
    which = f"{equal} of {len(steps)}" if equal < len(steps) else f"All {equal}"
    note = f"{which} steps are equal to the last bit and have no dot."
    figure.text(MARGIN / WIDTH, 12 / 400, note, fontsize=SMALL, va="center")
    _plain(below, "relative\ndifference")
    below.set_xlabel("step", fontsize=SIZE)
    return figure


def _whole(value: float, _position: int | None) -> str:
    return f"{value:,.0f}"


def _draw_tolerance(axes: Axes, tolerance: float, last: int) -> None:
    """Marks what passes; nothing below a tolerance of 0 can be shown on this scale."""
    if tolerance > 0:
        axes.axhline(tolerance, color=COLORS["red"], lw=1.4, ls="--")
        axes.text(last, tolerance * 1.8, "tolerance", fontsize=SMALL, ha="right", va="bottom")


def _plain(axes: Axes, label: str) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=SMALL, color=INK)
    axes.minorticks_off()
    axes.set_ylabel(label, fontsize=SIZE)


@drawn
def lines_picture(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    title: str,
    labels: tuple[str, str],
    notes: Sequence[str] = (),
) -> Figure:
    """Draws measured lines, both axes by powers of two.

    Collective: no. Needs matplotlib.

    Args:
        lines: name of a line -> its points (x, y), all above 0.
        title: of the drawing.
        labels: of the axis to the right and of the one upwards.
        notes: lines below it.

    Returns:
        The drawing, 460 points wide.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    below = [line for note in notes for line in wrapped(note, WIDTH - 2 * MARGIN)]
    height = 330 + 16 * len(below)
    figure = Figure(figsize=(WIDTH / 72, height / 72), facecolor="white")
    figure.text(MARGIN / WIDTH, 1 - 20 / height, title, fontsize=TITLE, weight="bold", va="center")
    bottom = (48 + 16 * len(below)) / height
    axes = figure.add_axes((0.15, bottom, 0.81, 1 - 40 / height - bottom))
    for number, (name, points) in enumerate(lines.items()):
        x, y = zip(*points, strict=True)
        color, dashes = COLORS[_PALETTE[number % len(_PALETTE)]], ("-", "--")[number % 2]
        axes.plot(x, y, label=name, lw=1.8, marker="o", ms=4, color=color, ls=dashes)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(_whole))
    _plain(axes, labels[1])
    axes.set_xlabel(labels[0], fontsize=SIZE)
    axes.legend(fontsize=SMALL, frameon=False)
    for number, line in enumerate(reversed(below)):
        figure.text(MARGIN / WIDTH, (12 + 16 * number) / height, line, fontsize=SMALL, va="center")
    return figure


@drawn
def bars_picture(
    bars: Mapping[str, Mapping[str, float]],
    title: str,
    notes: Sequence[str] = (),
    text_of: Callable[[float], str] = elements_text,
) -> Figure:
    """Draws one bar for each figure, divided into its parts.

    Collective: no. Needs matplotlib.

    Args:
        bars: label of a bar -> name of a part -> its size; parts have the same order in each.
        title: of the drawing.
        notes: lines below it.
        text_of: writes the sum at the end of a bar.

    Returns:
        The drawing, 460 points wide.
    """
    parts = [*dict.fromkeys(part for sizes in bars.values() for part in sizes)]
    looks = {
        part: Key(part, COLORS[_PALETTE[i % len(_PALETTE)]], _HATCHES[i % len(_HATCHES)])
        for i, part in enumerate(parts)
    }
    labels = {bar: shortened(bar, 190) for bar in bars}
    left = MARGIN + max(text_width(label) for label in labels.values()) + 8
    sums = {bar: sum(sizes.values()) for bar, sizes in bars.items()}
    right = max(text_width(text_of(total), SMALL) for total in sums.values()) + 6
    scale = (WIDTH - left - right - MARGIN) / max(sums.values())
    keys = [*looks.values()] if len(parts) > 1 else []
    legend = 40 + _ROW * len(bars) + 8
    below = placed(keys, MARGIN, legend, WIDTH - MARGIN)[-1][2] + 22 if keys else legend
    lines = [line for note in notes for line in wrapped(note, WIDTH - 2 * MARGIN)]
    sheet = Sheet(WIDTH, below + 16 * len(lines) + 6)
    sheet.text(MARGIN, 20, title, TITLE, weight="bold")
    for number, (bar, sizes) in enumerate(bars.items()):
        x, y = left, 40 + _ROW * (number + 0.5)
        sheet.text(MARGIN, y, labels[bar])
        for part, size in sizes.items():
            look = looks[part]
            sheet.rect((x, y - _BAR / 2, size * scale, _BAR), look.color, hatch=look.hatch)
            x += size * scale
        sheet.text(x + 5, y, text_of(sums[bar]), SMALL)
    sheet.legend(keys, MARGIN, legend, WIDTH - MARGIN)
    for number, line in enumerate(lines):
        sheet.text(MARGIN, below + 16 * number + 4, line, SMALL)
    return sheet.figure
