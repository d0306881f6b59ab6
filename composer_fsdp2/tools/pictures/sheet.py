"""A page to draw on, with lengths in points, and the files it is written to.

[Note: same picture everywhere] A drawing depends on its value alone: matplotlib's own defaults
replace a user's, the font is the one matplotlib brings along, identifiers in an SVG come from a
fixed text, and no file holds a date. Text in an SVG stays text, so it can be searched and copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from composer_fsdp2.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLORS",
    "INK",
    "PALE",
    "SIZE",
    "SMALL",
    "TITLE",
    "WIDTH",
    "Key",
    "Sheet",
    "check_destination",
    "drawn",
    "placed",
    "shortened",
    "text_width",
    "wrapped",
    "write_figure",
]

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
}
INK, PALE = "#1A1A1A", "#D9D9D9"
"""of text and outlines; of lines in the background"""

WIDTH = 460.0
"""Points. A phone shows such a page at two thirds of its size, where `SMALL` can still be read."""
TITLE, SIZE, SMALL = 14.0, 12.0, 11.0
"""Points of text."""
MARGIN = 12.0

_STYLE: Mapping[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": SIZE,
    "hatch.linewidth": 1.0,
    "savefig.facecolor": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "composer-fsdp2",
}
_NO_DATE: Mapping[str, Mapping[str, None]] = {
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
    "ps": {"CreationDate": None},
    "eps": {"CreationDate": None},
}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Key:
    """One entry of a legend."""

    label: str
    color: str
    hatch: str | None = None
    edge: str | None = None


def _styled() -> AbstractContextManager[None]:
    """Sets matplotlib's defaults and ours for a block; see [Note: same picture everywhere]."""
    import matplotlib

    stack = ExitStack()
    stack.enter_context(matplotlib.rc_context())
    matplotlib.rcdefaults()
    style: Any = _STYLE  # its names are a type of their own in newer matplotlib
    matplotlib.rcParams.update(style)
    return stack  # pyright: ignore[reportReturnType]


def drawn(draw: Callable[..., _T]) -> Callable[..., _T]:
    """Decorates a function that draws, so that a user's style of matplotlib changes nothing."""

    @functools.wraps(draw)
    def styled(*args: Any, **kwargs: Any) -> _T:
        with _styled():
            return draw(*args, **kwargs)

    return styled


class Sheet:
    """A white page; x to the right and y down, in points.

    Args:
        width: of the page.
        height: of the page.
    """

    def __init__(self, width: float, height: float) -> None:
        from matplotlib.figure import Figure

        self.figure: Figure = Figure(figsize=(width / 72, height / 72), facecolor="white")
        self.axes: Axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_xlim(0, width)
        self.axes.set_ylim(height, 0)
        self.axes.set_axis_off()

    def rect(
        self,
        place: tuple[float, float, float, float],
        color: str,
        *,
        hatch: str | None = None,
        edge: str | None = None,
    ) -> None:
        """Draws a rectangle at `place`: x, y, width, height; hatched ones are white between."""
        from matplotlib.patches import Rectangle

        x, y, width, height = place
        self.axes.add_patch(
            Rectangle(
                (x, y),
                width,
                height,
                facecolor="white" if hatch else color,
                edgecolor=color if hatch else edge or "none",
                hatch=hatch,
                linewidth=1.8 if edge and not hatch else 0.8 if hatch else 0,
            )
        )
        if hatch and edge:
            self.axes.add_patch(
                Rectangle((x, y), width, height, facecolor="none", edgecolor=edge, linewidth=1.8)
            )

    def line(self, points: Iterable[tuple[float, float]], color: str = PALE, **style: Any) -> None:
        """Draws straight lines between points."""
        from matplotlib.lines import Line2D

        xs, ys = zip(*points, strict=True)
        looks: dict[str, Any] = {"linewidth": 1.0, **style}
        self.axes.add_line(Line2D(xs, ys, color=color, **looks))

    def arrow(self, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
        """Draws an arrow with two heads."""
        style = {"arrowstyle": "<->", "color": color, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
        self.axes.annotate("", end, start, arrowprops=style)

    def text(
        self, x: float, y: float, text: str, size: float = SIZE, color: str = INK, **style: Any
    ) -> None:
        """Writes a line, left of which is `x` and whose middle is `y`, if `style` does not say."""
        self.axes.text(x, y, text, **self._style(size, color, style))

    @staticmethod
    def _style(size: float, color: str, style: Mapping[str, Any]) -> dict[str, Any]:
        # Names hold dollar signs and underscores, which would be read as formulas.
        return {
            "fontsize": size,
            "color": color,
            "va": "center_baseline",
            "parse_math": False,
            **style,
        }

    def legend(self, keys: Iterable[Key], x: float, y: float, right: float) -> float:
        """Draws entries from left to right in as many lines as they take; returns y below them."""
        for key, left, top in placed(keys, x, y, right):
            self.rect((left, top, 16, 11), key.color, hatch=key.hatch, edge=key.edge)
            self.text(left + 21, top + 6, key.label, SMALL)
            y = top
        return y + 18


def placed(keys: Iterable[Key], x: float, y: float, right: float) -> list[tuple[Key, float, float]]:
    """Returns the places of a legend's entries."""
    found: list[tuple[Key, float, float]] = []
    left = x
    for key in keys:
        width = 21 + text_width(key.label, SMALL)
        if left > x and left + width > right:
            left, y = x, y + 18
        found.append((key, left, y))
        left += width + 14
    return found


def text_width(text: str, size: float = SIZE, *, bold: bool = False) -> float:
    """Returns the width of a line in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextToPath

    font = FontProperties(family="DejaVu Sans", size=size, weight="bold" if bold else "normal")
    return TextToPath().get_text_width_height_descent(text, font, ismath=False)[0]


def shortened(text: str, width: float, size: float = SIZE) -> str:
    """Returns the text, or as much of its beginning and end as fits into `width` points."""
    if text_width(text, size) <= width:
        return text
    keep = len(text)
    while keep > 2:
        keep -= 1
        shorter = f"{text[: keep // 3]}…{text[len(text) - (keep - keep // 3) :]}"
        if text_width(shorter, size) <= width:
            return shorter
    return "…"


def wrapped(text: str, width: float, size: float = SMALL) -> list[str]:
    """Returns the lines of a text, none wider than `width` points."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and text_width(longer, size) > width:
            lines.append(shortened(word, width, size))
        else:
            lines[-1] = shortened(longer, width, size)
    return lines


# --- Files. ---


def check_destination(file: Path, option: str = "--plot") -> None:
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
    known = Figure().canvas.get_supported_filetypes()
    if file.suffix.removeprefix(".").lower() not in known:
        raise ConfigError(
            f"{option} is '{file}', and matplotlib writes no files that end in '{file.suffix}'. "
            "The ending decides what kind of picture it is. Write one of .svg, .png, .pdf "
            f"({', '.join(f'.{name}' for name in sorted(known))} are known)."
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
    try:
        with _styled():
            figure.savefig(file, dpi=150, metadata=_NO_DATE.get(kind, {}))
    except OSError as error:
        raise ConfigError(
            f"The picture '{file}' cannot be written: {error.strerror}. Give another path."
        ) from None
