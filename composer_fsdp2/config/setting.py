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
it, and `TOY.of(settings)` reads its value.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import PurePath
from typing import Any, Generic, TypeVar

from composer_fsdp2.config.messages import ascii_repr, invalid_value, one_of, unknown_keys
from composer_fsdp2.errors import ConfigError

__all__ = [
    "BOOLEAN",
    "FOLDER",
    "FOLDER_NAME",
    "NAMES",
    "NULL",
    "PATTERNS",
    "REQUIRED",
    "Check",
    "Parse",
    "Setting",
    "ValueType",
    "check_patterns",
    "choice",
    "count",
    "is_number",
    "is_string",
    "mapping",
    "null_or",
    "one_or_more",
    "parse_list",
    "plain",
    "setting",
    "settings_of",
    "text",
    "with_methods",
]

T = TypeVar("T")

Parse = Callable[[str, Any, list[str]], Any]
"""Parses a raw value of YAML: key, raw value, list that errors are appended to."""
Check = Callable[[str, Any, list[str]], None]
"""Appends sentences about a wrong value to the list, and never raises."""
CheckTogether = Callable[[Mapping[str, Any], list[str]], None]
"""Likewise for a setting beside all others: values by name, list of errors."""


def _keep(_key: str, raw: Any, _errors: list[str]) -> Any:
    """Returns the raw value of YAML."""
    return raw


def _find_nothing(*_: Any) -> None:
    """Checks nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueType:
    """The values a setting can have."""

    expected: str
    """the valid values in words, for errors and tables"""
    accepts: Callable[[Any], bool]
    """whether a value is valid, as far as its type shows"""
    check_inside: Check = _find_nothing
    """checks the parts of an accepted value"""
    parse: Parse = _keep
    """returns a value that it cannot parse as it is, for the check"""
    choices: tuple[str, ...] = ()
    """words among the values, of which an error shows the nearest"""
    example: str = ""
    """a whole valid line, for settings that are mappings"""
    spec: type[Any] | None = None
    """the dataclass that a mapping becomes; its fields are the options"""

    def check(self, key: str, value: Any, errors: list[str]) -> None:
        """Appends sentences about a wrong value to `errors`."""
        try:
            if self.accepts(value):
                self.check_inside(key, value, errors)
                return
        except Exception:  # a value of any type can be given, and none of them may be compared
            pass
        errors.append(
            invalid_value(key, value, self.expected, choices=self.choices, example=self.example)
        )


@dataclass(frozen=True, kw_only=True)  # slots and Generic do not go together before Python 3.12
class Setting(Generic[T]):
    """Declares one setting."""

    name: str
    default: T
    values: ValueType
    meaning: str
    """for someone who looks for one fact; Markdown without line breaks"""
    check_together: CheckTogether = _find_nothing
    """finds other settings that exclude this setting"""
    see: str = ""
    """page of docs/ about the setting"""
    since: str = ""
    """first version with the setting; empty for 0.1.0, and for an option as old as its setting"""
    example: str = ""
    """valid YAML with a value that is no default; a mapping in flow style for several keys"""
    saves: str = ""
    """memory, bytes or time that the setting saves; a sentence"""
    costs: str = ""
    """the price of the setting; a sentence"""
    same_on_ranks: bool = True
    """whether the value's text is the same on all ranks; false for objects, shown by address"""

    def of(self, settings: Any) -> T:
        """Reads the value in an `FSDP2Config` of a setting that `declare_setting` added."""
        return settings.extra.get(self.name, self.default)


REQUIRED: Any = MISSING
"""default of a setting that has to be given"""


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
    return field(
        default=default,
        metadata={
            "values": values,
            "meaning": meaning,
            "check_together": check_together,
            "see": see,
            "same_on_ranks": same_on_ranks,
            "since": since,
            "example": example or values.example,
            "saves": saves,
            "costs": costs,
        },
    )


@functools.cache
def settings_of(spec: type[Any]) -> Mapping[str, Setting[Any]]:
    """Reads the settings that a dataclass declares, in order; `MISSING` is no default."""
    return {
        field.name: Setting(name=field.name, default=field.default, **field.metadata)
        for field in fields(spec)
        if "values" in field.metadata
    }


# --- Values. ---

_MOST = 2**63
"""No count of anything is larger, and Python does not write numbers of thousands of digits."""
_MOST_VALUES = 200_000
_DEEPEST = 50
_LONGEST_TEXT = 10_000
"""more than any settings have"""


def plain(value: Any) -> Any:
    """Copies nested mappings and sequences of any type into dicts and lists.

    Raises:
        ConfigError: something in it cannot be read, or is larger than any settings are.
    """
    budget = iter(range(_MOST_VALUES))

    def copied(value: Any, depth: int) -> Any:
        if depth > _DEEPEST or next(budget, None) is None:
            raise ConfigError(
                f"The settings hold more than {_MOST_VALUES} values, are nested more than "
                f"{_DEEPEST} deep, or contain themselves. No run needs that. Write patterns, such "
                "as 'model.layers.*', for many names."
            )
        if isinstance(value, str):
            if len(value) > _LONGEST_TEXT:
                raise ConfigError(
                    f"A text of {len(value)} characters is among the settings. No name or pattern "
                    "is so long. Correct it."
                )
            return str.__str__(value)
        if isinstance(value, Mapping):
            pairs: Any = value.items()
            return {
                copied(key if isinstance(key, str) else str(key), depth): copied(item, depth + 1)
                for key, item in pairs
            }
        if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
            return [copied(item, depth + 1) for item in value]
        return value

    try:
        return copied(value, 0)
    except ConfigError:
        raise
    except Exception as error:  # OmegaConf reads late: interpolations fail here
        raise ConfigError(
            f"The settings cannot be read: {ascii_repr(error)}. Nothing in them could be "
            "applied. Write plain values, as YAML has them."
        ) from None


def is_number(value: Any, least: int = 1) -> bool:
    """Whether a value is a whole number of at least `least`, and not an absurd one."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < _MOST


def is_string(value: Any) -> bool:
    """Whether a value is text that is not empty."""
    return isinstance(value, str) and bool(value)


# --- Single values ---

BOOLEAN = ValueType(expected="true or false", accepts=lambda value: isinstance(value, bool))
NULL = ValueType(expected="null", accepts=lambda value: value is None)


def choice(*words: str) -> ValueType:
    """Takes one of a few words."""
    return ValueType(expected=one_of(words), accepts=lambda value: value in words, choices=words)


def count(unit: str, least: int = 1) -> ValueType:
    """Takes a whole number."""
    return ValueType(
        expected=f"a number of {unit} >= {least}", accepts=lambda value: is_number(value, least)
    )


def text(expected: str) -> ValueType:
    """Takes text that is not empty."""
    return ValueType(expected=expected, accepts=is_string)


def with_methods(kind: str, *methods: str) -> ValueType:
    """Takes an object of a class not imported here, or LLM Foundry's `{name: {options}}`."""

    def accepts(value: Any) -> bool:
        if isinstance(value, Mapping):
            options = next(iter(value.values()), None)
            return len(value) == 1 and isinstance(options, Mapping)
        has_them = all(callable(getattr(value, method, None)) for method in methods)
        return has_them and not isinstance(value, type)

    return ValueType(
        expected=f"{kind} (the object; in LLM Foundry {{name: {{options}}}})", accepts=accepts
    )


def null_or(values: ValueType) -> ValueType:
    """Takes the same values, or null."""

    def accepts(value: Any) -> bool:
        return value is None or values.accepts(value)

    return replace(values, expected=f"{values.expected}, or null", accepts=accepts)


def _is_path(value: Any) -> bool:
    """Whether a system could have the path; encoding fails for lone surrogates."""
    return is_string(value) and b"\0" not in value.encode()


def _check_inside_folder(key: str, value: str, errors: list[str]) -> None:
    if PurePath(value).is_absolute() or ".." in PurePath(value).parts:
        errors.append(
            f"{key}: {ascii_repr(value)} leads out of save_folder. Only checkpoints inside "
            "it are found again. Write a name, such as ep{epoch}-ba{batch}."
        )


FOLDER = ValueType(expected="the path of a folder", accepts=_is_path)
FOLDER_NAME = ValueType(
    expected="the name of a folder", accepts=_is_path, check_inside=_check_inside_folder
)


# --- Lists ---


def parse_list(_key: str, raw: Any, _errors: list[str]) -> Any:
    """Parses a list to a tuple; anything else stays for the check."""
    return tuple(raw) if isinstance(raw, list) else raw


def one_or_more(key: str, raw: Any, errors: list[str]) -> Any:
    """Parses null as an empty list, and a single word as a list of one."""
    return (raw,) if isinstance(raw, str) else _list_or_null(key, raw, errors)


def _list_or_null(key: str, raw: Any, errors: list[str]) -> Any:
    return () if raw is None else parse_list(key, raw, errors)


def check_patterns(key: str, patterns: Any, errors: list[str]) -> None:
    """Checks globs, and `re:` with a regular expression; another value than a tuple holds none."""
    for pattern in patterns if isinstance(patterns, tuple) else ():
        if not is_string(pattern):
            errors.append(invalid_value(key, pattern, "patterns that are not empty"))
        elif pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except (re.error, OverflowError, RecursionError) as error:
                errors.append(
                    f"'{key}' holds {ascii_repr(pattern)}, which is no regular expression "
                    f"({error}). It could match nothing. Correct it, or write a glob without 're:'."
                )


NAMES = ValueType(
    expected="a list of names",
    accepts=lambda value: isinstance(value, tuple) and all(map(is_string, value)),
    parse=_list_or_null,
)
PATTERNS = ValueType(
    expected="a list of patterns",
    accepts=lambda value: isinstance(value, tuple),
    check_inside=check_patterns,
    parse=parse_list,
)


# --- Mappings ---

_NOTHING = ValueType(expected="", accepts=lambda _value: False)


def mapping(
    spec: type[Any],
    *,
    example: str,
    expected: str = "a mapping",
    others: ValueType = _NOTHING,
    empty: tuple[bool | None, ...] = (),
    parse: Parse = _keep,
    check_options: Check | None = None,
) -> ValueType:
    """Takes a mapping that becomes a dataclass whose fields are declared by `setting`.

    Args:
        spec: class of the result.
        example: a whole valid line.
        expected: names the mapping and the other values, if there are any.
        others: values that may stand there instead of a mapping.
        empty: values that mean a mapping without keys.
        parse: is called first; a mapping that it returns is parsed as the dataclass.
        check_options: checks options that are valid alone against each other.
    """
    settings = settings_of(spec)

    def parse_options(key: str, raw: Any, errors: list[str]) -> Any:
        raw = parse(key, {} if any(raw is value for value in empty) else raw, errors)
        if not isinstance(raw, dict):  # stays for the check
            return raw
        errors += unknown_keys([name for name in raw if name not in settings], settings, key)
        values = {
            name: declared.values.parse(f"{key}.{name}", raw.get(name), errors)
            for name, declared in settings.items()
            if name in raw or declared.default is MISSING  # null, which the check does not accept
        }
        return spec(**values)

    def check_inside(key: str, value: Any, errors: list[str]) -> None:
        if not isinstance(value, spec):
            return
        for name, declared in settings.items():
            declared.values.check(f"{key}.{name}", getattr(value, name), errors)
        if check_options is not None:
            check_options(key, value, errors)

    return ValueType(
        expected=expected,
        accepts=lambda value: isinstance(value, spec) or others.accepts(value),
        check_inside=check_inside,
        parse=parse_options,
        choices=others.choices,
        example=example,
        spec=spec,
    )
