"""Reads the text of a Python file or notebook as the file itself declares; executes nothing."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
import warnings
from dataclasses import dataclass

__all__ = ["NOTEBOOK", "Source", "Unreadable"]

NOTEBOOK = ".ipynb"

_PYTHON_CELLS = ("capture", "memit", "mprun", "prun", "px", "time", "timeit", "writefile")
"""magics of a whole cell whose rest is Python"""
_TIMED = re.compile(r"^(\s*)%(?:time|timeit|prun|memit)\s+(?!-)(?=\S)", re.MULTILINE)
_ASSIGNED = re.compile(r"^(\s*[\w., \t\[\]'\"]+=\s*)[!%].*$", re.MULTILINE)
_COMMAND = re.compile(r"^([ \t]*)(?:[%!?].*|[\w.]+\?{1,2}[ \t]*)$", re.MULTILINE)


class Unreadable(Exception):
    """Says why a file is not Python."""


@dataclass(frozen=True, slots=True)
class Source:
    """Holds the code of a file; a notebook's cells follow each other, as they run."""

    text: str
    tree: ast.Module
    lines: tuple[str, ...]
    cells: tuple[tuple[int, int], ...] = ()
    """of a notebook: the number of lines before a cell, and its number"""
    problem: str | None = None
    """cells that are not Python"""

    @staticmethod
    def read(raw: bytes) -> Source:
        """Decodes as the file declares, and parses.

        Raises:
            Unreadable: Python itself could not read the file.
        """
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
            text = io.TextIOWrapper(io.BytesIO(raw), encoding).read()
        except SyntaxError as error:
            raise Unreadable(str(error.msg)) from None
        except (LookupError, ValueError) as error:
            raise Unreadable(str(error)) from None
        return Source.parse(text)

    @staticmethod
    def parse(text: str, *, awaits: bool = False) -> Source:
        """Parses a text, `await` outside functions allowed or not.

        Raises:
            Unreadable: it is not Python.
        """
        flags = ast.PyCF_ONLY_AST | (ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if awaits else 0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the file's own style
                tree = compile(text, "<unknown>", "exec", flags, dont_inherit=True)
        except SyntaxError as error:
            where = f"line {error.lineno}: " if error.lineno else ""
            raise Unreadable(f"{where}{error.msg}") from None
        except ValueError as error:
            raise Unreadable(str(error)) from None
        except (RecursionError, MemoryError):
            raise Unreadable("it is nested too deeply for Python's parser") from None
        return Source(text, tree, tuple(text.split("\n")))

    @staticmethod
    def read_notebook(raw: bytes) -> Source:
        """Reads the cells that hold Python; commands of the shell and of IPython become `pass`.

        Raises:
            Unreadable: it is no notebook, or one of another language.
        """
        try:
            data = json.loads(raw.decode("utf-8-sig"))
            cells = list(enumerate(data["cells"], 1))
            language = data.get("metadata", {}).get("language_info", {}).get("name", "python")
            codes = {n: "".join(c["source"]) for n, c in cells if c["cell_type"] == "code"}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise Unreadable(f"it is not a notebook: {error!r}") from None
        if language not in ("python", "ipython"):
            raise Unreadable(f"it is a notebook of {language}")
        text, starts, problems = "", list[tuple[int, int]](), list[str]()
        for number, code in codes.items():
            magic = re.match(r"\s*%%(\w+)", code)
            if magic and magic[1] not in _PYTHON_CELLS:
                continue
            plain = _COMMAND.sub(r"\1pass", _ASSIGNED.sub(r"\1None", _TIMED.sub(r"\1", code)))
            try:
                Source.parse(plain, awaits=True)
            except Unreadable as error:
                problems.append(f"cell {number}: {error}")
                continue
            starts.append((text.count("\n"), number))
            text += f"{plain}\n"
        whole = Source.parse(text, awaits=True)
        return Source(text, whole.tree, whole.lines, tuple(starts), "; ".join(problems) or None)

    def column(self, line: int, utf8: int) -> int:
        """Returns the characters before a place that `ast` counts in bytes of UTF-8."""
        return len(self.lines[line - 1].encode()[:utf8].decode(errors="ignore"))

    def place(self, line: int) -> tuple[int | None, int]:
        """Returns the cell of a line, `None` outside notebooks, and the line's number in it."""
        before = [(start, number) for start, number in self.cells if start < line]
        return (before[-1][1], line - before[-1][0]) if before else (None, line)
