"""Draws the plan of a model: its units as bars, in their nesting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from composer_fsdp2.plan.wrap_plan import WrapPlan
from composer_fsdp2.tools.pictures.rows import Kind, Row, elements_text, plan_rows
from composer_fsdp2.tools.pictures.sheet import (
    COLORS,
    INK,
    MARGIN,
    PALE,
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
    from matplotlib.figure import Figure

__all__ = ["plan_picture"]

_KINDS: Mapping[Kind, tuple[str, str]] = {
    "root": ("root", COLORS["orange"]),
    "embedding": ("embedding", COLORS["green"]),
    "block": ("block", COLORS["blue"]),
    "head": ("head", COLORS["purple"]),
    "fp32": ("computes in fp32", COLORS["sky"]),
    "other": ("other unit", COLORS["grey"]),
}
_HATCH = "////"
_ROW, _BAR, _INDENT = 24.0, 14.0, 14.0
_LONGEST_LABEL, _LONGEST_TITLE = 260.0, WIDTH - 2 * MARGIN
_LEAST_BAR = 90.0
"""points of the longest bar, whatever the texts around it"""
_NOTES = 4
"""ties, and lines about one of them, that are written out"""


@drawn
def plan_picture(
    plan: WrapPlan, frozen: Mapping[str, int] | None = None, title: str = ""
) -> Figure:
    """Draws one bar for each unit, or for units that are repeated, by its number of elements.

    Collective: no. Needs matplotlib.

    Args:
        plan: of a model.
        frozen: elements that are not trained, by the name of the unit (its first module).
        title: of the drawing; the numbers of units and parameters stand below it.

    Returns:
        The drawing, at least 460 points wide; wider for long names.
    """
    rows = plan_rows(plan, frozen or {})
    labels = [shortened(row.label, _LONGEST_LABEL) for row in rows]
    values = [_value(row) for row in rows]
    left = MARGIN + max(
        _INDENT * row.depth + text_width(label) for row, label in zip(rows, labels, strict=True)
    )
    widths = [text_width(value, SMALL) + 6 for value in values]
    room = max(WIDTH - left - 8 - MARGIN, _LEAST_BAR + max(widths))
    width = left + 8 + room + MARGIN
    keys, notes = _keys(rows), _notes(plan, width - 2 * MARGIN)
    top = 62.0
    legend = top + _ROW * len(rows) + 12
    below = placed(keys, MARGIN, legend, width - MARGIN)[-1][2] + 22
    sheet = Sheet(width, below + 16 * len(notes) + 6)
    _head(sheet, plan, title or "FSDP2 units")
    # A short bar may have a long text beside it, so each row has its own limit.
    scale = min(
        (room - beside) / max(1, _bar(row)) for row, beside in zip(rows, widths, strict=True)
    )
    for index, (row, label, value) in enumerate(zip(rows, labels, values, strict=True)):
        y = top + _ROW * (index + 0.5)
        _stems(sheet, rows, index, top)
        sheet.text(MARGIN + _INDENT * row.depth, y, label)
        length = _draw_bar(sheet, row, left + 8, y, scale)
        sheet.text(left + 8 + length + 6, y, value, SMALL)
    sheet.legend(keys, MARGIN, legend, width - MARGIN)
    for number, note in enumerate(notes):
        sheet.text(MARGIN, below + 16 * number + 4, note, SMALL)
    return sheet.figure


def _head(sheet: Sheet, plan: WrapPlan, title: str) -> None:
    units = [unit for unit in plan.units if unit.params]
    numbers = (
        f"{len(units)} {'unit' if len(units) == 1 else 'units'}, "
        f"{elements_text(sum(unit.numel for unit in units))} parameters. A bar is one unit."
    )
    sheet.text(MARGIN, 20, shortened(title, _LONGEST_TITLE, TITLE + 1), TITLE, weight="bold")
    sheet.text(MARGIN, 42, numbers, SMALL)


def _bar(row: Row) -> float:
    """Returns the elements that the bar shows: of one unit, the mean where sizes differ."""
    return row.total / len(row.units)


def _value(row: Row) -> str:
    if not row.total:
        return "no parameters"
    size = elements_text(row.smallest)
    if row.smallest != row.largest:
        size += f" to {elements_text(row.largest)}"
    count = f" \N{MULTIPLICATION SIGN} {len(row.units)}" if len(row.units) > 1 else ""
    still = "" if not row.frozen else ", frozen" if row.frozen == row.total else ", part frozen"
    ties = "".join(f", tie {number}" for number in row.ties[:2])
    more = ", ..." if len(row.ties) > 2 else ""
    return f"{size}{count}{still}{ties}{more}"


def _draw_bar(sheet: Sheet, row: Row, x: float, y: float, scale: float) -> float:
    """Draws the trained and the frozen part; returns the length of both."""
    if not row.total:
        return 0.0
    color = _KINDS[row.kind][1]
    length = max(_bar(row) * scale, 2.0)
    still = length * row.frozen / row.total if row.total else 0.0
    top = y - _BAR / 2
    if length - still > 0:
        sheet.rect((x, top, length - still, _BAR), color)
    if still:
        sheet.rect((x + length - still, top, still, _BAR), color, hatch=_HATCH)
    if row.kept:
        sheet.line(
            [(x, top), (x + length, top), (x + length, top + _BAR), (x, top + _BAR), (x, top)],
            INK,
            linewidth=1.6,
        )
    return length


def _stems(sheet: Sheet, rows: list[Row], index: int, top: float) -> None:
    """Draws the lines that lead from the row around this one to it."""
    row = rows[index]
    if row.depth == 0:
        return
    around = next(i for i in range(index, -1, -1) if rows[i].depth < row.depth)
    x = MARGIN + _INDENT * (row.depth - 1) + 4
    y = top + _ROW * (index + 0.5)
    sheet.line(
        [(x, top + _ROW * (around + 0.5) + SIZE / 2 + 2), (x, y), (x + 8, y)], PALE, zorder=0.5
    )


def _keys(rows: list[Row]) -> list[Key]:
    """Returns the legend: what occurs in the drawing and nothing else."""
    kinds = {row.kind for row in rows}
    keys = [Key(label, color) for kind, (label, color) in _KINDS.items() if kind in kinds]
    if any(row.frozen for row in rows):
        keys.append(Key("frozen", INK, hatch=_HATCH))
    if any(row.kept for row in rows):
        keys.append(Key("kept until backward", "white", edge=INK))
    return keys


def _notes(plan: WrapPlan, width: float) -> list[str]:
    """Returns what is written below the drawing."""
    lines: list[str] = []
    for number, names in enumerate(plan.tied[:_NOTES], 1):
        lines += wrapped(f"tie {number}: {' = '.join(names)}", width)[:_NOTES]
    if len(plan.tied) > _NOTES:
        lines.append(f"and {len(plan.tied) - _NOTES} more ties")
    if plan.ignored:
        names = wrapped(f"left out by ignored_params: {', '.join(plan.ignored)}", width)
        lines += names[:_NOTES]
        if len(names) > _NOTES:
            lines.append(f"{len(plan.ignored)} names in all")
    return lines
