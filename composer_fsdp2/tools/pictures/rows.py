"""The rows of a drawing of a plan: units in their nesting, repeated ones in one row. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from composer_fsdp2.plan.wrap_plan import ShardUnit, WrapPlan

__all__ = ["MOST_ROWS", "Kind", "Row", "elements_text", "plan_rows"]

MOST_ROWS = 24
"""Rows of a drawing; the smallest units beyond are counted in one row."""

Kind = str
"""'root', 'embedding', 'head', 'block', 'fp32' or 'other'"""

_NUMBER = re.compile(r"\d+")
_REST = "smaller units"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Units that are drawn as one bar."""

    label: str
    """name relative to the row around it"""
    depth: int
    kind: Kind
    units: tuple[str, ...]
    """names of the units in this row"""
    smallest: int
    """elements of the smallest unit of this row"""
    largest: int
    total: int
    """elements of all units of this row"""
    frozen: int
    """elements of all units of this row that are not trained"""
    kept: bool
    """the parameters stay gathered from forward to backward"""
    ties: tuple[int, ...] = ()
    """numbers of the ties that this row owns, from 1"""


def plan_rows(plan: WrapPlan, frozen: Mapping[str, int], most: int = MOST_ROWS) -> list[Row]:
    """Returns the rows from the root down, in the order of the plan.

    Units are one row where their names differ in numbers only and their sizes and settings are
    equal. If that leaves too many rows, sizes may differ; if it still does, the smallest units are
    counted in a last row. Collective: no.

    Args:
        plan: of a model.
        frozen: elements that are not trained, by the name of the unit (its first module).
        most: number of rows.
    """
    rows = _Grouping(plan, frozen, exact=True).rows()
    if len(rows) > most:
        rows = _Grouping(plan, frozen, exact=False).rows()
    return _largest(rows, most) if len(rows) > most else rows


class _Grouping:
    """Puts the units of a plan into rows."""

    def __init__(self, plan: WrapPlan, frozen: Mapping[str, int], *, exact: bool) -> None:
        self.units = {unit.modules[0]: unit for unit in plan.units}
        self.frozen = frozen
        self.exact = exact
        self.blocks = {*plan.blocks()}
        self.children: dict[str | None, list[str]] = {}
        for name in self.units:
            self.children.setdefault(_around(name, self.units), []).append(name)
        owners = {name: unit.modules[0] for name, unit in plan.owner_of().items()}
        self.ties = [owners.get(names[0]) for names in plan.tied]

    def rows(self) -> list[Row]:
        """Returns all rows."""
        return [*self._below([None], 0)]

    def _below(self, parents: list[str | None], depth: int) -> Iterable[Row]:
        groups: dict[object, list[tuple[str, str]]] = {}
        for parent in parents:
            prefix = f"{parent}." if parent else ""
            for name in self.children.get(parent, ()):
                label = name.removeprefix(prefix)
                groups.setdefault(self._key(name, label), []).append((name, label))
        for members in groups.values():
            names = [name for name, _ in members]
            yield self._row(names, [label for _, label in members], depth)
            yield from self._below([*names], depth + 1)

    def _key(self, name: str, label: str) -> object:
        unit = self.units[name]
        settings = (unit.reshard_after_forward, str(unit.mixed_precision), self._kind(name))
        size = (unit.numel, self.frozen.get(name, 0)) if self.exact else ()
        tied = name in self.ties
        return _NUMBER.sub("*", label), settings, size, tied

    def _kind(self, name: str) -> Kind:
        unit = self.units[name]
        if unit.top_level:
            return "root"
        # `blocks` are found by what is around a unit, so a single embedding is among them.
        repeated = name in self.blocks and _NUMBER.search(name) is not None
        return unit.role or ("block" if repeated else "other")

    def _row(self, names: list[str], labels: list[str], depth: int) -> Row:
        units = [self.units[name] for name in names]
        sizes = [unit.numel for unit in units]
        return Row(
            label=_joined(labels) + _others(units[0]),
            depth=depth,
            kind=self._kind(names[0]),
            units=tuple(names),
            smallest=min(sizes),
            largest=max(sizes),
            total=sum(sizes),
            frozen=sum(self.frozen.get(name, 0) for name in names),
            kept=units[0].reshard_after_forward is False,
            ties=tuple(n for n, owner in enumerate(self.ties, 1) if owner in names),
        )


def _around(name: str, units: Mapping[str, ShardUnit]) -> str | None:
    """Returns the unit that a unit lies in."""
    while name:
        name = name.rpartition(".")[0]
        if name in units:
            return name
    return None


def _others(unit: ShardUnit) -> str:
    """Returns the other modules of a unit that has several."""
    return "".join(f" + {name}" for name in unit.modules[1:])


def _joined(labels: list[str]) -> str:
    """Returns one name for names that differ in numbers only: `blocks.0-31`."""
    different = [*dict.fromkeys(label or "<root>" for label in labels)]
    if len(different) == 1:
        return different[0]
    columns = [*zip(*(_NUMBER.findall(label) for label in different), strict=True)]
    varying = [i for i, column in enumerate(columns) if len({*column}) > 1]
    if len(varying) > 1:
        return _NUMBER.sub("*", different[0])
    ranges = _ranges(sorted(int(number) for number in columns[varying[0]]))
    parts = iter(range(len(columns)))
    return _NUMBER.sub(lambda m: ranges if next(parts) == varying[0] else m[0], different[0])


def _ranges(numbers: list[int]) -> str:
    """Returns `0-2,5` for 0, 1, 2 and 5; more than three ranges are shortened."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in found]
    return ",".join(texts if len(texts) <= 3 else [texts[0], "...", texts[-1]])


def _largest(rows: list[Row], most: int) -> list[Row]:
    """Keeps the rows with the most elements and those around them; counts the others in one."""
    by_size = sorted(range(len(rows)), key=lambda i: -rows[i].total)
    kept: set[int] = set()
    for index in by_size:
        new = {index, *_rows_around(rows, index)} - kept
        if len(kept) + len(new) < most:
            kept |= new
    others = [row for index, row in enumerate(rows) if index not in kept]
    count = sum(len(row.units) for row in others)
    rest = replace(
        others[0],
        label=f"{count} {_REST}",
        depth=0,
        kind="other",
        units=tuple(name for row in others for name in row.units),
        smallest=min(row.smallest for row in others),
        largest=max(row.largest for row in others),
        total=sum(row.total for row in others),
        frozen=sum(row.frozen for row in others),
        kept=False,
        ties=tuple(sorted(number for row in others for number in row.ties)),
    )
    return [row for index, row in enumerate(rows) if index in kept] + [rest]


def _rows_around(rows: list[Row], index: int) -> list[int]:
    found: list[int] = []
    depth = rows[index].depth
    for before in range(index - 1, -1, -1):
        if rows[before].depth < depth:
            found.append(before)
            depth = rows[before].depth
    return found


def elements_text(count: float) -> str:
    """Returns a number in three digits: `768`, `12.3 K`, `7.09 M`, `1.21 B`."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= 0.9995 * size:
            value = count / size
            digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{count:.0f}"
