"""The text of a Python file, read as the file itself declares."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from dataclasses import dataclass

__all__ = ["Source", "Unreadable"]

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")


class Unreadable(Exception):
    """Why the text of a file is not Python."""


@dataclass(frozen=True, slots=True)
class Source:
    """A Python file."""

    text: str
    tree: ast.Module
    lines: tuple[str, ...]
    """with their ends"""

    @staticmethod
    def read(raw: bytes) -> Source:
        """Decodes as the file declares, and parses.

        Raises:
            Unreadable: when Python itself could not read it.
        """
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
            text = raw.decode(encoding)
        except SyntaxError as error:
            raise Unreadable(str(error.msg)) from None
        except (LookupError, ValueError) as error:
            raise Unreadable(str(error)) from None
        return Source.parse(text)

    @staticmethod
    def parse(text: str, *, awaits: bool = False) -> Source:
        """Parses a text, `await` outside functions allowed or not.

        Raises:
            Unreadable: when it is not Python.
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
        return Source(text, tree, tuple(_LINE.findall(text)))

    def column(self, line: int, utf8: int) -> int:
        """Characters before a place that `ast` counts in bytes of UTF-8."""
        return len(self.lines[line - 1].encode()[:utf8].decode(errors="ignore"))
