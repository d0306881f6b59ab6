"""Puts names and lists of names into messages."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["child_name", "listed"]


def listed(names: Iterable[str], most: int = 5, quote: str = "'") -> str:
    """Returns the first names, and how many there are besides: `'a', 'b' and 3 more`."""
    found = [f"{quote}{name}{quote}" for name in names]
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def child_name(path: str, name: str) -> str:
    """Returns the full name of a child; the path of the root is empty."""
    return f"{path}.{name}" if path else name
