"""Prints every version of a tested row, as pip takes it: `python -m composer_fsdp2.pins newest`.

It needs nothing but Python, for it is called before anything else is installed. Composer and LLM
Foundry pin torch and transformers below what they work with here, and pip has no way around a pin
but `--no-deps` with a complete list.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["ROWS", "lines_of", "row_of", "text_of", "versions_of"]

_PACKED = Path(__file__).parent / "versions"
_FOLDER = _PACKED if _PACKED.is_dir() else Path(__file__).parents[1] / ".ci"
ROWS = ("stable", "newest", "latest")
"""rows of the README's table whose lists are complete"""
_COMPANIONS = re.compile("cuda|nvidia|triton")
"""packages of which each torch needs versions of its own"""


def lines_of(row: str) -> list[str]:
    """Returns `name==version` of every package that a row installs, with pip's markers.

    Without torch's own companions where the row has another torch than the list it is made from.

    Args:
        row: a name of `stacks.txt`.

    Raises:
        KeyError: there is no such row.
    """
    stacks = [line.split() for line in _read("stacks.txt")]
    pins, overrides = {name: (pins, overrides) for name, pins, overrides, *_ in stacks}[row]
    pinned = _pinned(pins)
    changed = {} if overrides == "-" else _pinned(overrides)
    if changed.get("torch", pinned["torch"]) != pinned["torch"]:
        pinned = {name: lines for name, lines in pinned.items() if not _COMPANIONS.match(name)}
    return sorted(line for lines in (pinned | changed).values() for line in lines)


def versions_of(row: str, names: Iterable[str]) -> dict[str, str]:
    """Returns the versions of packages that are the same for every Python."""
    versions = dict(line.split("==") for line in lines_of(row) if ";" not in line)
    return {name: versions[name] for name in names}


def row_of(versions: Mapping[str, str]) -> str | None:
    """Returns the row that has these versions of packages."""
    return next((row for row in ROWS if versions_of(row, versions) == versions), None)


def _pinned(file: str) -> dict[str, list[str]]:
    """Returns the lines of a list by package: a package may have a line for each Python."""
    pinned: dict[str, list[str]] = {}
    for line in _read(file):
        pinned.setdefault(line.partition("==")[0], []).append(line)
    return pinned


def _read(file: str) -> list[str]:
    lines = (_FOLDER / file).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def text_of(row: str) -> str:
    """Returns the list of a row.

    Raises:
        SystemExit: with a sentence, where there is no such row.
    """
    try:
        return "\n".join(lines_of(row))
    except KeyError:
        raise SystemExit(f"There is no row '{row}'. Write one of: {', '.join(ROWS)}.") from None


if __name__ == "__main__":
    print(text_of(sys.argv[1] if len(sys.argv) == 2 else ""))
