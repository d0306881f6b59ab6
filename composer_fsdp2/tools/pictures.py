"""Draws plans, steps and comparisons with matplotlib, which is imported to draw alone.

[Note: same picture everywhere] A drawing depends on its values alone: matplotlib's defaults replace
a user's style, the font is the one that matplotlib brings along, identifiers in an SVG come from a
fixed text, and no file holds a date. Text in an SVG stays text, so it can be searched and copied.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.plan.patterns import outer_names
from composer_fsdp2.plan.wrap_plan import ShardUnit, WrapPlan
from composer_fsdp2.tools.parity import QUANTITIES, RunComparison, warmed_up

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from composer_fsdp2.estimate.forecast import Forecast

__all__ = [
    "COLORS",
    "MOST_ROWS",
    "PictureRow",
    "check_picture_path",
    "comparison_picture",
    "elements_text",
    "own_style",
    "plan_picture",
    "plan_rows",
    "write_figure",
]

MOST_ROWS = 24
"""Rows of a drawing of a plan; the smallest units beyond are counted in one row."""

# Source: Okabe and Ito, "Color Universal Design", https://jfly.uni-koeln.de/color/, whose colours
# people with any kind of colour blindness can tell apart.
COLORS: Mapping[str, str] = {
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "purple": "#CC79A7",
    "sky": "#56B4E9",
    "red": "#D55E00",
    "grey": "#8C8C8C",
    "yellow": "#F0E442",
    "black": "#000000",
}
_KINDS: Mapping[str, tuple[str, str]] = {
    "root": ("root", COLORS["orange"]),
    "embedding": ("embedding", COLORS["green"]),
    "block": ("block", COLORS["blue"]),
    "head": ("head", COLORS["purple"]),
    "fp32": ("computes in fp32", COLORS["sky"]),
    "other": ("other unit", COLORS["grey"]),
}
"""kind of a unit -> its name in the legend, and its colour"""
_MEMORY: Mapping[str, str] = {
    "parameters": "blue",
    "buffers": "grey",
    "gradients": "orange",
    "optimizer": "green",
    "gathered": "sky",
    "activations": "purple",
    "logits": "red",
    "backward": "yellow",
    "step": "black",
    "other": "grey",
}
"""kind of memory -> its colour"""
_STYLE: Mapping[str, Any] = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 11.0,
    "legend.frameon": False,
    "savefig.facecolor": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "composer-fsdp2",
    # Names hold dollar signs and underscores, which would be read as formulas.
    "text.parse_math": False,
}
_NUMBER = re.compile(r"\d+")
_NOTES = 4
"""ties that are written out, and lines about names that are left out"""


@contextmanager
def own_style() -> Generator[None]:
    """Sets matplotlib's defaults and ours for a block; see [Note: same picture everywhere]."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)  # pyright: ignore[reportArgumentType, reportCallIssue]
        yield


# --- A plan. ---


@dataclass(frozen=True, slots=True)
class PictureRow:
    """Holds units that are drawn as one bar."""

    label: str
    depth: int
    """number of units around them"""
    kind: str
    """'root', 'embedding', 'head', 'block', 'fp32' or 'other'"""
    units: tuple[ShardUnit, ...]
    frozen: int
    """elements of all units of this row that are not trained"""
    ties: tuple[int, ...]
    """numbers of the ties that this row owns, from 1"""

    @property
    def total(self) -> int:
        """Elements of all units of this row."""
        return sum(unit.numel for unit in self.units)

    @property
    def kept(self) -> bool:
        """Whether the parameters stay gathered from forward to backward."""
        return self.units[0].reshard_after_forward is False and self.units[0].numel > 0


def plan_picture(
    plan: WrapPlan,
    frozen: Mapping[str, int] | None = None,
    title: str = "FSDP2 units",
    step: Forecast | None = None,
) -> Figure:
    """Draws one bar for each unit, or for units that are repeated, by its number of elements.

    Collective: no. Needs matplotlib.

    Args:
        plan: units to draw.
        frozen: elements that are not trained, by the name of the unit (its first module).
        title: of the drawing; the numbers of units and parameters stand below it.
        step: whose memory is drawn below the units.
    """
    from matplotlib.figure import Figure

    rows = plan_rows(plan, frozen or {})
    # Lines below the drawing: ties, and parameters that are left out.
    lines = [f"tie {n}: {' = '.join(names)}" for n, names in enumerate(plan.tied[:_NOTES], 1)]
    if len(plan.tied) > _NOTES:
        lines.append(f"and {len(plan.tied) - _NOTES} more ties")
    if plan.ignored:
        why = "frozen, on every rank" if plan.replicated_bytes else "left out by ignored_params"
        lines.append(f"{why} ({len(plan.ignored)}): {', '.join(plan.ignored)}")
    wrapped = (textwrap.wrap(line, 84, max_lines=_NOTES, placeholder=" ...") for line in lines)
    notes = "\n".join(line for block in wrapped for line in block)
    height = 1.8 + 0.3 * len(rows) + 0.17 * notes.count("\n")  # in inches
    below = 0 if step is None else 4.2
    with own_style():
        figure = Figure(figsize=(7.5, height + below), layout="constrained")
        parts: Any = [figure]
        if step is not None:
            parts = figure.subfigures(2, 1, height_ratios=(height, below))
            _draw_step(parts[1], step)
        _draw_units(parts[0], plan, rows, notes, title)
    return figure


def _draw_units(
    figure: Any, plan: WrapPlan, rows: Sequence[PictureRow], notes: str, title: str
) -> None:
    from matplotlib.patches import Patch

    axes = figure.subplots()
    for y, row in enumerate(rows):
        # The mean of a row whose units differ in size.
        size, color = row.total / len(row.units), _KINDS[row.kind][1]
        trained = size * (1 - row.frozen / max(row.total, 1))
        axes.barh(y, trained, color=color)
        axes.barh(y, size - trained, left=trained, color="white", edgecolor=color, hatch="////")
        if row.kept:
            axes.barh(y, size, fill=False, edgecolor="black", linewidth=1.6)
        axes.annotate(_value(row), (size, y), (6, 0), textcoords="offset points", va="center")
    # Padded with spaces that an SVG keeps, so that right-aligned labels begin at their depth.
    labels = ["\N{NO-BREAK SPACE}" * 2 * row.depth + _shortened(row.label) for row in rows]
    longest = max(map(len, labels))
    padded = [label.ljust(longest, "\N{NO-BREAK SPACE}") for label in labels]
    axes.set_yticks(range(len(rows)), padded, family="DejaVu Sans Mono", size=9)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xticks([])
    sizes = [unit.numel for unit in plan.units if unit.params]
    units = f"{len(sizes)} unit{'s' * (len(sizes) != 1)}, {elements_text(sum(sizes))}"
    figure.suptitle(
        f"{_shortened(title, 60)}\n{units} parameters. A bar is one unit.", x=0.01, ha="left"
    )
    kinds = {row.kind for row in rows}
    keys = [Patch(color=c, label=name) for kind, (name, c) in _KINDS.items() if kind in kinds]
    if any(row.frozen for row in rows):
        keys.append(Patch(facecolor="white", edgecolor="black", hatch="////", label="frozen"))
    if any(row.kept for row in rows):
        keys.append(Patch(fill=False, edgecolor="black", label="kept until backward"))
    figure.legend(
        handles=keys,
        title=notes,
        title_fontsize=10,
        loc="outside lower left",
        alignment="left",
        ncols=4,
    )


def _draw_step(figure: Any, step: Forecast) -> None:
    """Draws the most memory between two events of a step, by kind."""
    from composer_fsdp2.estimate.report import NAMES
    from composer_fsdp2.text import size_text

    def written(size: float, _: int) -> str:
        return size_text(size)

    axes = figure.subplots()
    events = [window.label[0] for window in step.windows]
    drawn = [kind for kind in NAMES if any(window.kinds.get(kind) for window in step.windows)]
    axes.stackplot(
        range(len(events)),
        *([window.kinds.get(kind, 0) for window in step.windows] for kind in drawn),
        labels=[NAMES[kind] for kind in drawn],
        colors=[COLORS[_MEMORY[kind]] for kind in drawn],
    )
    # The beginning of each phase is named.
    phases = [n for n, event in enumerate(events) if event in ("forward", "backward", "step")]
    starts = [n for last, n in pairwise([0, *phases]) if events[last] != events[n]]
    axes.set_xticks(starts, [events[n] for n in starts], rotation=40, ha="right", size=9)
    axes.yaxis.set_major_formatter(written)
    figure.suptitle(
        f"Memory of a rank over one step: {size_text(step.peak_bytes)} at most, {step.moment}",
        x=0.01,
        ha="left",
    )
    figure.legend(loc="outside lower left", ncols=3)


def plan_rows(plan: WrapPlan, frozen: Mapping[str, int]) -> list[PictureRow]:
    """Returns the rows from the root down.

    Units are one row where their names differ in numbers only and their sizes and settings are
    equal. If that leaves too many rows, sizes may differ; if it still does, the smallest units are
    counted in a last row. Collective: no.

    Args:
        plan: units to draw.
        frozen: elements that are not trained, by the name of the unit (its first module).
    """
    order = {unit.module: index for index, unit in enumerate(plan.units)}
    blocks, owners = {*plan.blocks()}, plan.owner_of()
    ties: dict[str, tuple[int, ...]] = {}
    for number, names in enumerate(plan.tied, 1):
        if owner := owners.get(names[0]):  # and not left out of the plan
            ties[owner.module] = (*ties.get(owner.module, ()), number)

    def around(unit: ShardUnit) -> list[int]:
        """Returns the indices of the units around a unit, then its own index."""
        names = ["", *reversed([*outer_names(unit.module)])]
        return [order[name] for name in names if name in order]

    def kind(unit: ShardUnit) -> str:
        # `blocks` are found by what is around a unit, so a single embedding is among them.
        repeated = unit.module in blocks and _NUMBER.search(unit.module) is not None
        return "root" if unit.top_level else unit.role or ("block" if repeated else "other")

    groups: dict[object, list[ShardUnit]] = {}
    for exact in (True, False):
        groups.clear()
        for unit in sorted(plan.units, key=around):
            name = unit.module
            settings = (unit.reshard_after_forward, str(unit.mixed_precision), kind(unit))
            size = (unit.numel, frozen.get(name, 0)) if exact else ()
            key = (_NUMBER.sub("*", name), settings, size, ties.get(name))
            groups.setdefault(key, []).append(unit)
        if len(groups) <= MOST_ROWS:
            break

    def row(units: Sequence[ShardUnit]) -> PictureRow:
        names = [unit.module for unit in units]
        label = _joined(names)
        still = sum(frozen.get(name, 0) for name in names)
        tied = tuple(number for name in names for number in ties.get(name, ()))
        return PictureRow(
            label, len(around(units[0])) - 1, kind(units[0]), tuple(units), still, tied
        )

    rows = [row(units) for units in groups.values()]
    if len(rows) <= MOST_ROWS:
        return rows
    largest = sorted(rows, key=lambda item: -item.total)[: MOST_ROWS - 1]
    small = [item for item in rows if item not in largest]
    units = tuple(unit for item in small for unit in item.units)
    still, tied = (
        sum(item.frozen for item in small),
        tuple(n for item in small for n in item.ties),
    )
    rest = PictureRow(f"{len(units)} smaller units", 0, "other", units, still, tied)
    return [*(item for item in rows if item in largest), rest]


def _joined(names: Sequence[str]) -> str:
    """Returns one name for names that differ in numbers only: `blocks.0-31`."""
    ranges: list[str] = []
    for column in zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True):
        numbers = sorted({*column})
        first, last = numbers[0], numbers[-1]
        listed = ",".join(map(str, numbers if len(numbers) <= 4 else [first, "...", last]))
        is_whole = last - first + 1 == len(numbers) > 1
        ranges.append(f"{first}-{last}" if is_whole else listed)
    texts = iter(ranges)
    return _NUMBER.sub(lambda _: next(texts), names[0]) or "<root>"


def _value(row: PictureRow) -> str:
    if not row.total:
        return "no parameters"
    sizes = [unit.numel for unit in row.units]
    size = " to ".join(dict.fromkeys(elements_text(end) for end in (min(sizes), max(sizes))))
    count = f" \N{MULTIPLICATION SIGN} {len(sizes)}" if len(sizes) > 1 else ""
    notes = [f"tie {number}" for number in row.ties[:2]] + ["..."] * (len(row.ties) > 2)
    if row.frozen:
        notes.insert(0, "frozen" if row.frozen == row.total else "part frozen")
    return ", ".join([f"{size}{count}", *notes])


def _shortened(text: str, longest: int = 40) -> str:
    return text if len(text) <= longest else f"{text[: longest // 3]}…{text[-longest * 2 // 3 :]}"


def elements_text(count: float) -> str:
    """Returns a number in three digits: `768`, `12.3 K`, `7.09 M`, `1.21 B`."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= 0.9995 * size:
            value = count / size
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:#.3g} {unit}"
    return f"{count:.0f}"


# --- Two runs. ---


def comparison_picture(
    comparison: RunComparison,
    names: tuple[str, str],
    title: str = "",
    quantities: Sequence[str] = tuple(QUANTITIES),
) -> Figure:
    """Draws both curves of each quantity, and below them how far they are apart.

    Runs that were timed have seconds a step beside that, and the peak memory of each rank below.

    Collective: no. Needs matplotlib.

    Args:
        comparison: of the runs, as `composer-fsdp2 parity` makes it.
        names: of the old and the new run, for the legend.
        title: text above the drawing.
        quantities: attributes of the steps.
    """
    from matplotlib.figure import Figure

    with own_style():
        columns = len(quantities) + comparison.is_timed
        figure = Figure(figsize=(2.5 + 4.5 * columns, 5.5), layout="constrained")
        figure.suptitle(title)
        curves: Any = figure
        if comparison.is_timed:
            parts: Any = figure.subfigures(1, 2, width_ratios=(len(quantities), 1))
            curves = parts[0]
            _draw_performance(parts[1], comparison, names)
        axes = curves.subplots(2, len(quantities), sharex=True, height_ratios=(2, 1), squeeze=False)
        numbers = [step.number for step in comparison.old]
        for (above, below), quantity in zip(axes.T, quantities, strict=True):
            # The new run is drawn over the old one, so the line below is wide.
            old, new, shares = zip(*comparison.values(quantity), strict=True)
            above.plot(numbers, old, label=names[0], lw=5, color=COLORS["orange"])
            above.plot(numbers, new, label=names[1], lw=1.6, color=COLORS["blue"])
            above.set_ylabel(QUANTITIES[quantity])
            above.legend()
            # Steps that are equal to the last bit have no dot on a logarithmic axis.
            shown = [share if 0 < share < math.inf else math.nan for share in shares]
            below.plot(numbers, shown, ".", color=COLORS["blue"])
            tolerance = comparison.tolerance
            if tolerance > 0:
                below.axhline(tolerance, color=COLORS["red"], ls="--", label="tolerance")
                below.legend()
            visible = [value for value in (*shown, tolerance) if value > 0] or [1.0]
            equal = sum(share == 0 for share in shares)
            below.set(
                yscale="log",
                ylim=(min(visible) / 10, max(visible) * 10),
                ylabel="relative\ndifference",
                xlabel=f"step ({equal} of {len(shares)} are equal and have no dot)",
            )
            below.yaxis.set_major_formatter("{x:.0e}")
    return figure


def _draw_performance(figure: Any, comparison: RunComparison, names: tuple[str, str]) -> None:
    """Draws seconds of each step after the warm-up, and bars of the peak memory of each rank."""
    above, below = figure.subplots(2, 1, height_ratios=(2, 1))
    runs = zip(
        (comparison.old, comparison.new), comparison.peak_bytes, names, (-0.2, 0.2), strict=True
    )
    for (steps, peaks, name, offset), color in zip(runs, ("orange", "blue"), strict=True):
        timed = [(step.number, step.seconds) for step in warmed_up(steps)]
        above.plot(*zip(*timed, strict=True), label=name, lw=1.6, color=COLORS[color])
        positions = [rank + offset for rank in range(len(peaks))]
        below.bar(positions, [peak / 1024**3 for peak in peaks], width=0.4, color=COLORS[color])
    above.set(ylabel="seconds a step", xlabel="step")
    above.set_ylim(bottom=0)
    above.legend()
    below.set(
        ylabel="peak memory\nin GiB", xlabel="rank", xticks=range(len(comparison.peak_bytes[0]))
    )


# --- Files. ---


def check_picture_path(file: Path, option: str = "--plot") -> None:
    """Checks that a picture can be written, before anything is planned for it.

    Raises:
        ConfigError: matplotlib is not installed or does not write such files, or the folder is not
            there.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            f"{option} is given, and matplotlib is not installed. It draws the picture. Install it "
            "with: pip install 'composer-fsdp2[plot]'"
        ) from None
    endings = Figure().canvas.get_supported_filetypes()
    if file.suffix.removeprefix(".").lower() not in endings:
        raise ConfigError(
            f"{option} is '{file}', and matplotlib writes no files that end in '{file.suffix}'. "
            "The ending decides what kind of picture it is. Write one of .svg, .png, .pdf "
            f"({', '.join(f'.{name}' for name in sorted(endings))} are known)."
        )
    if not file.parent.is_dir():
        raise ConfigError(
            f"{option} is '{file}', and there is no folder '{file.parent}'. The picture would have "
            "no place. Make the folder, or give another path."
        )


def write_figure(figure: Figure, file: Path) -> None:
    """Writes a drawing; the ending of the name decides the kind of file.

    Raises:
        ConfigError: the file cannot be written.
    """
    kind = file.suffix.removeprefix(".").lower()
    dated = {"svg": "Date", "pdf": "CreationDate", "ps": "CreationDate", "eps": "CreationDate"}
    try:
        with own_style():
            figure.savefig(file, dpi=150, metadata={dated[kind]: None} if kind in dated else {})
    except OSError as error:
        raise ConfigError(
            f"The picture '{file}' cannot be written: {error.strerror}. Give another path."
        ) from None
