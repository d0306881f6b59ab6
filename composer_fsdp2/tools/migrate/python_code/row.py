"""Declares a row of the table of uses in Python code: how it is found and what it becomes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

__all__ = ["CodeRow", "Found", "Kind", "named"]


class Kind(str, Enum):
    """Says how much work a use is."""

    REPLACE = "replace"
    """one word changes; the report shows the new line of each use"""
    BY_HAND = "by hand"
    NOTHING = "nothing to do"
    """goes on working under FSDP2; listed so that nobody has to wonder"""


class Found(str, Enum):
    """Says how a row's names are recognised."""

    NAME = "name"
    """imported from one of `homes`, under any name in the file"""
    CHECK = "type check"
    """such a name as the class of `isinstance` or `issubclass`"""
    MEMBER = "method"
    """of an object that is known to be one of `homes`, or of the class itself"""
    ATTRIBUTE = "attribute"
    """of any object, with `owners` of one whose last name is among them"""
    ARGUMENT = "argument"
    """of a call of one of `homes`"""
    KEY = "key"
    """of a mapping that is an argument named `owners` of a call of one of `homes`"""
    TEXT = "text"
    """inside a string"""
    VARIABLE = "environment variable"
    READ = "read"
    """a number, or the values, read out of `parameters()`, `state_dict()` or `.grad`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRow:
    """Describes one line of the table."""

    title: str
    found: Found
    names: tuple[str, ...]
    kind: Kind = Kind.BY_HAND
    use: str
    """code to write instead"""
    reason: str
    homes: tuple[str, ...] = ()
    """modules for `NAME`, else qualified names of the owners of the names"""
    owners: tuple[str, ...] = ()
    harmless: tuple[Any, ...] = ()
    """literal values of an argument or key that need nothing"""
    position: int | None = None
    """of an argument that may be given without its name"""
    distinctive: bool = False
    """nothing else is called so: worth a 'perhaps' where its origin is not known"""
    strangers: tuple[str, ...] = ()
    """last names of objects that have a method of the same name themselves"""
    replacement: str = ""
    """full name of a function that is called the same way"""
    keywords: Mapping[str, str] = field(default_factory=dict)
    """arguments that the other function calls something else, old and new"""

    def qualified(self) -> Iterator[str]:
        """Returns all full names of the row; the bare names where it has no homes."""
        if not self.homes:
            return iter(self.names)
        return (f"{home}.{name}" for home, name in itertools.product(self.homes, self.names))


def named(*names: str, **fields: Any) -> CodeRow:
    """Returns the row of names that are imported."""
    return CodeRow(title=names[0], found=Found.NAME, names=names, **fields)
