"""Computes digests of functions, by which a replacement knows the source it was written for.

[Note: fingerprints] A fingerprint is of what Python executes. Comments, docstrings, line breaks,
quotes and the way a function is indented do not count, so a corrected word of a docstring changes
nothing. It is the same on every Python: later versions add fields to the syntax tree that are empty
for older sources, and empty fields are left out.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
from collections.abc import Iterator
from typing import Any

__all__ = ["fingerprint", "fingerprint_text"]

_LENGTH = 16
# `kind` is the u of u"", `ctx` follows from where a name is, `type_comment` is a comment.
_NOT_CODE = frozenset({"ctx", "kind", "type_comment"})


@functools.cache
def fingerprint(item: Any) -> str:
    """Returns the fingerprint of a function, a class or a module; see [Note: fingerprints].

    Kept for the process: finding the sources takes most of the time of an installation.

    Raises:
        OSError: its source cannot be found.
        TypeError: it is nothing that has a source.
    """
    return fingerprint_text(inspect.getsource(item))


def fingerprint_text(source: str) -> str:
    """Returns the fingerprint of source text, which may be indented as a method is."""
    # Removing the indentation would change strings that go over several lines.
    indented = source.startswith((" ", "\t"))
    tree = ast.parse(f"if True:\n{source}" if indented else source)
    body = tree.body[0].body if indented and isinstance(tree.body[0], ast.If) else tree.body
    return hashlib.sha256("".join(_walk(body)).encode()).hexdigest()[:_LENGTH]


def _walk(value: Any) -> Iterator[str]:
    """Yields a canonical text of a syntax tree, piece by piece."""
    if isinstance(value, ast.AST):
        yield f"({type(value).__name__}"
        for name, inner in ast.iter_fields(value):
            if name not in _NOT_CODE and inner is not None and inner != []:
                yield f" {name}="
                yield from _walk(_joined(inner) if isinstance(value, ast.JoinedStr) else inner)
        yield ")"
    elif isinstance(value, list):
        yield "["
        for inner in value:
            text = inner.value if isinstance(inner, ast.Expr) else None
            # A string that nobody uses is a docstring, or prose below an attribute.
            if not (isinstance(text, ast.Constant) and isinstance(text.value, str)):
                yield from _walk(inner)
        yield "]"
    else:
        yield f"{type(value).__name__} {value!r}"


def _joined(parts: list[ast.expr]) -> list[ast.expr]:
    """Joins neighbouring texts of an f-string, which Python 3.12 keeps apart."""
    joined: list[ast.expr] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, ast.Constant) and isinstance(last, ast.Constant):
            joined[-1] = ast.Constant(value=f"{last.value}{part.value}")
        elif not (isinstance(part, ast.Constant) and part.value == ""):
            joined.append(part)
    return joined
