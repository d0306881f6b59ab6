"""Draws the order in which the units of a model gather, compute and reduce in one step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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

__all__ = ["UnitEvent", "step_picture"]

_ROW, _MARK = 26.0, 14.0
_TOP = 76.0
_LONGEST_LABEL = 130.0
_KEYS: Mapping[str, Key] = {
    "gather": Key("all-gather", COLORS["blue"]),
    "forward": Key("forward", "#DDEEDD", edge=COLORS["green"]),
    "backward": Key("backward", "#FBE3C2", edge=COLORS["red"]),
    "reduce": Key("reduce-scatter", COLORS["purple"], hatch="////"),
}


@dataclass(frozen=True, slots=True)
class UnitEvent:
    """Something that a unit does, in the order in which it begins."""

    event: str
    """'gather', 'forward', 'backward' or 'reduce'"""
    unit: str
    """name; '' is the root"""


@drawn
def step_picture(events: Sequence[UnitEvent], title: str, notes: Sequence[str] = ()) -> Figure:
    """Draws one column for each event and one row for each unit.

    Collective: no. Needs matplotlib.

    Args:
        events: of one step on one rank, in order.
        title: of the drawing.
        notes: lines below it.

    Returns:
        The drawing, 460 points wide; wider for more than 40 events.
    """
    events = _computing(event for event in events if event.event in _KEYS)
    units = [*dict.fromkeys(event.unit for event in events)]
    labels = {unit: shortened(unit or "<root>", _LONGEST_LABEL) for unit in units}
    left = MARGIN + max(text_width(label) for label in labels.values()) + 8
    column = max(8.0, (WIDTH - left - MARGIN) / len(events))
    width = left + column * len(events) + MARGIN
    keys = [key for event, key in _KEYS.items() if any(one.event == event for one in events)]
    legend = _TOP + _ROW * len(units) + 28
    below = placed(keys, MARGIN, legend, width - MARGIN)[-1][2] + 22
    lines = [line for note in notes for line in wrapped(note, width - 2 * MARGIN)]
    sheet = Sheet(width, below + 16 * len(lines) + 6)
    sheet.text(MARGIN, 20, title, TITLE, weight="bold")
    sheet.text(MARGIN, 42, "Time goes to the right; one column for each event.", SMALL)
    _phases(sheet, events, left, column, _TOP + _ROW * len(units))
    for number, unit in enumerate(units):
        y = _TOP + _ROW * (number + 0.5)
        sheet.line([(left, y), (width - MARGIN, y)], PALE, zorder=0.5)
        sheet.text(MARGIN, y, labels[unit], SIZE)
    for number, event in enumerate(events):
        key = _KEYS[event.event]
        y = _TOP + _ROW * (units.index(event.unit) + 0.5)
        place = (left + column * number + 0.5, y - _MARK / 2, column - 1, _MARK)
        sheet.rect(place, key.color, hatch=key.hatch, edge=key.edge)
    sheet.legend(keys, MARGIN, legend, width - MARGIN)
    for number, line in enumerate(lines):
        sheet.text(MARGIN, below + 16 * number + 4, line, SMALL)
    return sheet.figure


def _computing(events: Iterable[UnitEvent]) -> list[UnitEvent]:
    """Puts a unit's own gather before its forward or backward.

    torch announces that a pass comes to a unit, and then gathers what the unit computes with.
    """
    found: list[UnitEvent] = []
    for event in events:
        announced = found[-1] if found else None
        own = announced is not None and announced.unit == event.unit and event.event == "gather"
        found.insert(len(found) - 1 if own else len(found), event)
    return found


def _phases(
    sheet: Sheet, events: Sequence[UnitEvent], left: float, column: float, bottom: float
) -> None:
    """Marks where the forward ends and the backward begins."""
    first = next((i for i, event in enumerate(events) if event.event == "backward"), len(events))
    # The gather that this backward waits for belongs to it.
    while first > 0 and events[first - 1].event == "gather":
        first -= 1
    split = left + column * first
    spans = (("forward pass", left, split), ("backward pass", split, left + column * len(events)))
    for name, start, end in spans:
        if end > start:
            sheet.text((start + end) / 2, _TOP - 12, name, SMALL, ha="center")
    sheet.line([(split, _TOP - 4), (split, bottom + 4)], INK, linestyle="--")
    sheet.text(left, bottom + 14, "first event", SMALL)
    sheet.text(left + column * len(events), bottom + 14, "last", SMALL, ha="right")
