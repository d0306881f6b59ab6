"""Draws a mesh as a grid of ranks: a row is a copy of the model, a column holds one shard."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from composer_fsdp2.plan.mesh_shape import REPLICATE_AXIS, SHARD_AXIS, MeshShape
from composer_fsdp2.tools.pictures.sheet import (
    COLORS,
    INK,
    MARGIN,
    PALE,
    SIZE,
    SMALL,
    TITLE,
    WIDTH,
    Sheet,
    drawn,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["mesh_picture"]

_MOST = 8
"""rows and columns that are drawn; the last of more stands for those left out"""
_CELL = 46.0
_LEFT, _TOP = 96.0, 88.0


@drawn
def mesh_picture(shape: MeshShape, title: str = "Mesh of ranks") -> Figure:
    """Draws which rank holds which shard of which replica, and who talks to whom.

    Collective: no. Needs matplotlib.

    Args:
        shape: degrees of the mesh, `(dp_replicate, dp_shard)` or `(dp_shard,)`. Ranks of a tensor
            group are one cell.
        title: of the drawing.

    Returns:
        The drawing, 460 points wide. More than 8 rows or columns are shortened.
    """
    replicas = shape.replicate or 1
    rows, columns = _shown(replicas), _shown(shape.shard)
    cell = (WIDTH - _LEFT - MARGIN) / len(columns)
    below = _TOP + _CELL * len(rows)
    both = replicas > 1
    sheet = Sheet(WIDTH, below + (70 if both else 46))
    sheet.text(MARGIN, 20, title, TITLE, weight="bold")
    sheet.text(MARGIN, 42, _degrees(shape), SMALL)
    for j, shard in enumerate(columns):
        x = _LEFT + cell * (j + 0.5)
        label = "…" if shard is None else f"shard {shard}" if cell > 62 else str(shard)
        sheet.text(x, _TOP - 14, label, SMALL, ha="center")
    if cell <= 62:
        sheet.text(MARGIN, _TOP - 14, "shard", SMALL)
    for i, replica in enumerate(rows):
        y = _TOP + _CELL * i
        label = "…" if replica is None else f"replica {replica}"
        sheet.text(MARGIN, y + _CELL / 2, label, SMALL)
        for j, shard in enumerate(columns):
            here = None
            if replica is not None and shard is not None:
                here = (replica * shape.shard + shard) * shape.tensor
            _draw_cell(sheet, (_LEFT + cell * j, y), cell, here, shape.tensor)
    _arrows(sheet, below, both=both)
    return sheet.figure


def _shown(count: int) -> list[int | None]:
    """Returns the numbers that are drawn; `None` is for those left out."""
    if count <= _MOST:
        return [*range(count)]
    return [*range(_MOST - 2), None, count - 1]


def _degrees(shape: MeshShape) -> str:
    return f"{shape.describe()}: {math.prod(shape.axes.values())} ranks"


def _draw_cell(
    sheet: Sheet, place: tuple[float, float], width: float, rank: int | None, tensor: int
) -> None:
    """Draws a rank, or the ranks that divide each layer of one shard."""
    x, y = place
    if rank is None:
        sheet.text(x + width / 2, y + _CELL / 2, "…", SIZE, ha="center")
        return
    sheet.rect((x + 3, y + 3, width - 6, _CELL - 6), "#E8F1F8", edge=COLORS["blue"])
    size = SIZE if width > 44 else SMALL
    text = f"rank {rank}" if width > 62 else str(rank)
    if tensor > 1:
        text = f"{rank}-{rank + tensor - 1}"
    sheet.text(x + width / 2, y + _CELL / 2, text, size, ha="center")


def _arrows(sheet: Sheet, below: float, *, both: bool) -> None:
    """Writes along which axis the ranks communicate."""
    y = below + 14
    sheet.arrow((_LEFT + 3, y), (WIDTH - MARGIN - 3, y), COLORS["red"])
    middle = (_LEFT + WIDTH - MARGIN) / 2
    sheet.text(
        middle, y + 16, f"{SHARD_AXIS}: all-gather, reduce-scatter", SMALL, ha="center", color=INK
    )
    if both:
        x = _LEFT - 10
        sheet.arrow((x, _TOP + 3), (x, below - 3), COLORS["green"])
        sheet.line([(x, below - 4), (x, y + 38), (x + 12, y + 38)], COLORS["green"], linewidth=1.6)
        sheet.text(x + 18, y + 38, f"{REPLICATE_AXIS}: all-reduce of gradients", SMALL)
    else:
        sheet.line([(MARGIN, below + 2), (_LEFT - 10, below + 2)], PALE)
