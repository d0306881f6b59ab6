"""One row of the table of uses of FSDP1 in Python code: how it is found and what it becomes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = [
    "BLOCK",
    "GET_MODEL",
    "GET_OPTIMIZER",
    "IS_FSDP2",
    "SET_OPTIMIZER",
    "STATE_DICT",
    "CodeRow",
    "Found",
    "Kind",
    "Replacement",
    "named",
]


class Kind(str, Enum):
    """Conditions of a use."""

    REPLACE = "replace"
    """one word changes; the report shows what to write in the place of each use"""
    BY_HAND = "by hand"
    NOTHING = "nothing to do"
    """goes on working under FSDP2; listed so that nobody has to wonder"""


class Found(str, Enum):
    """How a row's names are recognised."""

    NAME = "name"
    """imported from one of `homes`, whatever it is called in the file"""
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
    """a number, or the values, read out of what comes from `parameters()` or `state_dict()`"""


@dataclass(frozen=True, slots=True)
class Replacement:
    """Another function that is called the same way."""

    module: str
    name: str
    arguments: tuple[tuple[str, str], ...] = ()
    """keywords that are called something else, old and new"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRow:
    """One line of the table."""

    title: str
    found: Found
    names: tuple[str, ...]
    kind: Kind
    use: str
    """what to write instead"""
    reason: str
    homes: tuple[str, ...] = ()
    """modules for `NAME`, else qualified names of what the names belong to"""
    owners: tuple[str, ...] = ()
    harmless: tuple[Any, ...] = ()
    """literal values of an argument or key that need nothing"""
    position: int | None = None
    """of an argument that may be given without its name"""
    distinctive: bool = False
    """nothing else is called so: worth a 'perhaps' where it cannot be known"""
    replacement: Replacement | None = None
    strangers: tuple[str, ...] = ()
    """last names of objects that have a method of the same name themselves"""

    def qualified(self) -> Iterator[str]:
        """All full names of a `NAME` or `CHECK`."""
        return (f"{home}.{name}" for home, name in itertools.product(self.homes, self.names))


def named(
    *names: str, homes: tuple[str, ...], use: str, reason: str, distinctive: bool = False
) -> CodeRow:
    """Returns the row of names that are imported and have to be replaced by hand."""
    return CodeRow(
        title=names[0],
        found=Found.NAME,
        names=names,
        homes=homes,
        kind=Kind.BY_HAND,
        use=use,
        reason=reason,
        distinctive=distinctive,
    )


# --- What to write instead, where several rows say the same. ---

STATE_DICT = "torch.distributed.checkpoint.state_dict"
GET_MODEL = f"{STATE_DICT}.get_model_state_dict(model, options=StateDictOptions(...))"
GET_OPTIMIZER = (
    f"{STATE_DICT}.get_optimizer_state_dict(model, optimizer, options=StateDictOptions(...))"
)
SET_OPTIMIZER = (
    f"{STATE_DICT}.set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(...))"
)
IS_FSDP2 = "isinstance(module, torch.distributed.fsdp.FSDPModule)"
BLOCK = "parallelism_config={'fsdp2': {...}}"
