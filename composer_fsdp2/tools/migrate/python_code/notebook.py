"""The Python of a Jupyter notebook, cell by cell; nothing of it is executed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from composer_fsdp2.tools.migrate.python_code.source import Source, Unreadable

__all__ = ["SUFFIX", "Cell", "read_cells"]

SUFFIX = ".ipynb"

_OF_PYTHON = ("capture", "memit", "mprun", "prun", "px", "time", "timeit", "writefile")
"""magics of a whole cell whose rest is Python"""
_CELL_MAGIC = re.compile(r"\s*%%(\w+)")
_TIMED = re.compile(r"^(\s*)%(?:time|timeit|prun|memit)\s+(?!-)(?=\S)", re.MULTILINE)
_ASSIGNED = re.compile(r"^(\s*[\w., \t\[\]'\"]+=\s*)[!%].*$", re.MULTILINE)
_COMMAND = re.compile(r"^([ \t]*)(?:[%!?].*|[\w.]+\?{1,2}[ \t]*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell with code, and why it could not be read."""

    number: int
    """as a reader counts all cells, from 1"""
    source: Source | None
    problem: str | None = None


def read_cells(raw: bytes) -> list[Cell]:
    """Reads the cells that hold Python; commands of the shell and of IPython are left out.

    Raises:
        Unreadable: it is no notebook, or one of another language.
    """
    try:
        data = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"it is not a notebook: {error}") from None
    cells = list(_code_cells(data))
    language = _language(data)
    if language not in ("python", "ipython", ""):
        raise Unreadable(f"it is a notebook of {language}")
    return [_read(number, text) for number, text in cells]


def _read(number: int, text: str) -> Cell:
    magic = _CELL_MAGIC.match(text)
    if magic is not None:
        if magic[1] not in _OF_PYTHON:
            return Cell(number, None)
        # The line stays, so that the others keep their numbers.
        text = "\n" * text[: magic.start(1)].count("\n") + "#" + text.lstrip()
    plain = _COMMAND.sub(r"\1pass", _ASSIGNED.sub(r"\1None", _TIMED.sub(r"\1", text)))
    try:
        return Cell(number, Source.parse(plain, awaits=True))
    except Unreadable as error:
        return Cell(number, None, str(error))


def _code_cells(data: Any) -> Iterator[tuple[int, str]]:
    sheets = data.get("worksheets") if isinstance(data, Mapping) else None
    holders = sheets if isinstance(sheets, list) else [data]
    found = [h["cells"] for h in holders if isinstance(h, Mapping) and "cells" in h]
    if not found or not all(isinstance(cells, list) for cells in found):
        raise Unreadable("it is not a notebook: it has no cells")
    for number, cell in enumerate((cell for cells in found for cell in cells), 1):
        if isinstance(cell, Mapping) and cell.get("cell_type") == "code":
            text = cell.get("source", cell.get("input", ""))
            lines = text if isinstance(text, list) else [text]
            yield number, "".join(str(line) for line in lines)


def _language(data: Mapping[str, Any]) -> str:
    """As the notebook names it; "" where it does not."""
    about: Any = data.get("metadata")
    about = about if isinstance(about, Mapping) else {}
    for key, name in (("language_info", "name"), ("kernelspec", "language")):
        inner = about.get(key)
        if isinstance(inner, Mapping) and inner.get(name):
            return str(inner[name]).lower()
    return ""
