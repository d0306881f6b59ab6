"""The form in which a setting is declared: its default, its values and its meaning, in one place.

A field of a dataclass becomes a setting by its default::

    verbose: bool = setting(False, BOOLEAN, "logs the plan on rank 0")

The parser, the checks, the error texts, the Trainer's config class and docs/reference/settings.md
read the declaration. Fields of `schema.FSDP2Config` are the settings of a run, fields of other
dataclasses the options of a setting that is a mapping.

A transformation from elsewhere brings its setting with it and touches no file of the package::

    TOY = Setting(name="toy", default=0, values=count("toys", least=0), meaning="adds toys")
    declare_setting(TOY)

From then on `toy` stands under `parallelism_config.fsdp2` like any other key: it is parsed and
checked, a misspelt one is an error with its name, the tables and the Trainer's config class have
it, and `TOY.of(settings)` reads its value. `with declaring(TOY):` declares it for a block.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from composer_fsdp2.config.messages import invalid_value

__all__ = ["Check", "Parse", "Setting", "ValueType", "keep", "option", "setting", "settings_of"]

T = TypeVar("T")

Parse = Callable[[str, Any, list[str]], Any]
"""Turns what YAML gives into the value: key, raw value, list that errors are appended to."""
Check = Callable[[str, Any, list[str]], None]
"""Appends to the list what is wrong with a value, and never raises."""
CheckTogether = Callable[[Mapping[str, Any], list[str]], None]
"""Likewise for a setting beside all others: values by name, list of errors."""


def keep(_key: str, raw: Any, _errors: list[str]) -> Any:
    """Parses nothing: the value is what YAML gives."""
    return raw


def _find_nothing(*_: Any) -> None:
    """Checks nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueType:
    """The values a setting can have."""

    expected: str
    """these values in words, for errors and tables"""
    accepts: Callable[[Any], bool]
    """whether a value is one of them, as far as its type shows"""
    check_inside: Check = _find_nothing
    """checks the parts of an accepted value"""
    parse: Parse = keep
    choices: tuple[str, ...] = ()
    """words among the values, of which an error shows the nearest"""
    example: str = ""
    """a whole valid line, for settings that are mappings"""
    spec: type[Any] | None = None
    """the dataclass that a mapping becomes; its fields are the options"""

    def check(self, key: str, value: Any, errors: list[str]) -> None:
        """Appends to `errors` what is wrong with the value."""
        try:
            if self.accepts(value):
                self.check_inside(key, value, errors)
                return
        except Exception:  # a value of any type can be given, and none of them may be compared
            pass
        errors.append(
            invalid_value(key, value, self.expected, choices=self.choices, example=self.example)
        )

    def parsed(self, key: str, raw: Any, errors: list[str]) -> Any:
        """Parses a value; one that cannot be parsed is kept for the check."""
        try:
            return self.parse(key, raw, errors)
        except Exception:
            return raw


@dataclass(frozen=True, kw_only=True)  # slots and Generic do not go together before Python 3.12
class Setting(Generic[T]):
    """One setting."""

    name: str
    default: T
    values: ValueType
    meaning: str
    """for someone who looks for one fact; Markdown without line breaks"""
    check_together: CheckTogether = _find_nothing
    """finds other settings that it cannot stand beside"""
    see: str = ""
    """page of docs/ with more about it"""
    since: str = ""
    """first version that has it; empty for 0.1.0, or for an option that came with its setting"""
    example: str = ""
    """valid YAML with a value that is no default; a mapping in flow style for several keys"""
    saves: str = ""
    """memory, bytes or time that it saves; a sentence"""
    costs: str = ""
    """the price of it; a sentence"""
    same_on_ranks: bool = True
    """whether its text is the same on all ranks; false for objects, shown with their address"""

    def of(self, settings: Any) -> T:
        """Reads the value in an `FSDP2Config` of a setting that `declare_setting` added."""
        return settings.extra.get(self.name, self.default)


def setting(
    default: T,
    values: ValueType,
    meaning: str,
    *,
    check_together: CheckTogether = _find_nothing,
    see: str = "",
    same_on_ranks: bool = True,
    since: str = "",
    example: str = "",
    saves: str = "",
    costs: str = "",
) -> T:
    """Declares a field of a dataclass as a setting; the arguments are fields of `Setting`.

    `since` is needed for what a version after the first has added.
    """
    metadata = option(values, meaning) | {
        "check_together": check_together,
        "see": see,
        "same_on_ranks": same_on_ranks,
        "since": since,
        "example": example or values.example,
        "saves": saves,
        "costs": costs,
    }
    return field(default=default, metadata=metadata)


def option(values: ValueType, meaning: str) -> dict[str, Any]:
    """Metadata of a field that has to be given: `shards: int = field(metadata=option(...))`."""
    return {"values": values, "meaning": meaning}


@functools.cache
def settings_of(spec: type[Any]) -> Mapping[str, Setting[Any]]:
    """Reads the settings that a dataclass declares, in order; `MISSING` is no default."""
    return {
        found.name: Setting(name=found.name, default=found.default, **found.metadata)
        for found in dataclasses.fields(spec)
        if "values" in found.metadata
    }
