"""The values that settings can have, by type: booleans, numbers, words, patterns, mappings."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING
from pathlib import PurePath
from typing import Any

from composer_fsdp2.config.messages import ascii_repr, invalid_value, one_of, unknown_keys
from composer_fsdp2.config.setting import Check, Parse, ValueType, keep, settings_of
from composer_fsdp2.errors import ConfigError

__all__ = [
    "BOOLEAN",
    "FOLDER",
    "FOLDER_NAME",
    "NAMES",
    "PATTERNS",
    "check_patterns",
    "choice",
    "count",
    "is_number",
    "is_string",
    "mapping",
    "null_or",
    "one_or_more",
    "parse_list",
    "parse_mapping",
    "plain",
    "text",
    "with_methods",
]

_MOST = 2**63
"""No count of anything is larger, and Python does not write numbers of thousands of digits."""
_MOST_VALUES = 100_000
_DEEPEST = 50
_LONGEST_TEXT = 10_000
"""more than any settings have"""


def plain(value: Any) -> Any:
    """Copies nested mappings and sequences of any type into dicts and lists.

    Raises:
        ConfigError: something in it cannot be read, or is larger than any settings are.
    """
    return _Copy().of(value, 0)


class _Copy:
    """Copies one value, and counts what is in it."""

    def __init__(self) -> None:
        self._left = _MOST_VALUES

    def of(self, value: Any, depth: int) -> Any:
        """Returns the copy of a value that lies that deep."""
        self._left -= 1
        if depth > _DEEPEST or self._left < 0:
            what = f"nested more than {_DEEPEST} deep" if depth > _DEEPEST else "too many"
            raise ConfigError(
                f"The settings are {what}, or contain themselves. No settings need more than "
                f"{_MOST_VALUES} values. Write patterns, such as 'model.layers.*', for many names."
            )
        if isinstance(value, str):
            return self._text(str.__str__(value))
        if isinstance(value, Mapping):
            mapping: Mapping[Any, Any] = value
            pairs = self._items(mapping, lambda: mapping.items())
            return {self._text(self._key(key)): self.of(item, depth + 1) for key, item in pairs}
        if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
            sequence: Sequence[Any] = value
            return [self.of(item, depth + 1) for item in self._items(sequence, lambda: sequence)]
        return value

    def _items(self, value: Any, read: Callable[[], Iterable[Any]]) -> list[Any]:
        try:
            return list(itertools.islice(iter(read()), self._left + 1))
        except Exception as error:  # of whatever type it is, and of interpolations
            told = ascii_repr(" ".join(_text_of(error).split())).strip("'\"")
            raise ConfigError(
                f"A {type(value).__name__} among the settings cannot be read: {told}. Nothing in "
                "it could be applied. Write plain values, as YAML has them."
            ) from None

    def _text(self, text: str) -> str:
        if len(text) > _LONGEST_TEXT:
            raise ConfigError(
                f"A text of {len(text)} characters is among the settings. No name or pattern is so "
                "long. Correct it."
            )
        return text

    def _key(self, key: Any) -> str:
        try:
            return str.__str__(key) if isinstance(key, str) else str(key)
        except Exception:
            raise ConfigError(
                f"A {type(key).__name__} is a key of the settings and cannot be shown. It would "
                "have no effect. Write the name of a setting."
            ) from None


def _text_of(error: Exception) -> str:
    try:
        return str(error) or type(error).__name__
    except Exception:
        return type(error).__name__


def is_number(value: Any, least: int = 1) -> bool:
    """Whether it is a whole number of at least `least`, and not an absurd one."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < _MOST


def is_string(value: Any) -> bool:
    """Whether it is text that is not empty."""
    return isinstance(value, str) and bool(value)


# --- Single values ---

BOOLEAN = ValueType(expected="true or false", accepts=lambda value: isinstance(value, bool))


def choice(*words: str) -> ValueType:
    """One of these words."""
    return ValueType(expected=one_of(words), accepts=lambda value: value in words, choices=words)


def count(things: str, least: int = 1) -> ValueType:
    """A whole number of these things."""
    return ValueType(
        expected=f"a number of {things} >= {least}", accepts=lambda value: is_number(value, least)
    )


def text(what: str) -> ValueType:
    """Text that is not empty."""
    return ValueType(expected=what, accepts=is_string)


def with_methods(what: str, *methods: str) -> ValueType:
    """An object of a class that is not imported here, or LLM Foundry's `{name: {options}}`."""

    def accepts(value: Any) -> bool:
        if isinstance(value, Mapping):
            options = next(iter(value.values()), None)
            return len(value) == 1 and isinstance(options, Mapping)
        has_them = all(callable(getattr(value, method, None)) for method in methods)
        return has_them and not isinstance(value, type)

    return ValueType(
        expected=f"{what} (the object; in LLM Foundry {{name: {{options}}}})", accepts=accepts
    )


def null_or(values: ValueType) -> ValueType:
    """The same values, or null."""

    def accepts(value: Any) -> bool:
        return value is None or values.accepts(value)

    def check_inside(key: str, value: Any, errors: list[str]) -> None:
        if value is not None:
            values.check_inside(key, value, errors)

    return dataclasses.replace(
        values,
        expected=f"{values.expected}, or null",
        accepts=accepts,
        check_inside=check_inside,
    )


def _is_path(value: Any) -> bool:
    """Whether a system could have such a path."""
    encodable = is_string(value) and not any("\ud800" <= char <= "\udfff" for char in value)
    return encodable and "\0" not in value


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


def one_or_more(_key: str, raw: Any, _errors: list[str]) -> Any:
    """Parses null as nothing, and a single word as a list of one."""
    if raw is None:
        return ()
    return (raw,) if isinstance(raw, str) else tuple(raw) if isinstance(raw, list) else raw


def _parse_names(key: str, raw: Any, errors: list[str]) -> Any:
    return () if raw is None else parse_list(key, raw, errors)


def check_patterns(key: str, patterns: Sequence[Any], errors: list[str]) -> None:
    """Globs, or `re:` and a regular expression."""
    for pattern in patterns:
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
    parse=_parse_names,
)
PATTERNS = ValueType(
    expected="a list of patterns",
    accepts=lambda value: isinstance(value, tuple),
    check_inside=check_patterns,
    parse=parse_list,
)


# --- Mappings ---


def _nothing(_value: Any) -> bool:
    return False


def mapping(
    spec: type[Any],
    *,
    example: str,
    expected: str = "a mapping",
    others: Callable[[Any], bool] = _nothing,
    choices: tuple[str, ...] = (),
    parse: Parse = keep,
    check_options: Check | None = None,
) -> ValueType:
    """A mapping that becomes a dataclass whose fields are declared by `setting`.

    Args:
        spec: the dataclass.
        example: a whole valid line.
        expected: names the mapping and the other values, if there are any.
        others: whether a value that is no mapping can stand there too.
        choices: words among those.
        parse: is called first; a mapping that it returns is parsed as the dataclass.
        check_options: checks options that are valid alone against each other.
    """

    def parse_both(key: str, raw: Any, errors: list[str]) -> Any:
        return parse_mapping(spec, key, parse(key, raw, errors), errors)

    def check_inside(key: str, value: Any, errors: list[str]) -> None:
        if not isinstance(value, spec):
            return
        for name, declared in settings_of(spec).items():
            declared.values.check(f"{key}.{name}", getattr(value, name), errors)
        if check_options is not None:
            check_options(key, value, errors)

    return ValueType(
        expected=expected,
        accepts=lambda value: isinstance(value, spec) or others(value),
        check_inside=check_inside,
        parse=parse_both,
        choices=choices,
        example=example,
        spec=spec,
    )


def parse_mapping(spec: type[Any], key: str, raw: Any, errors: list[str]) -> Any:
    """Parses a mapping of options; anything else stays for the check."""
    if not isinstance(raw, dict):
        return raw
    known = settings_of(spec)
    errors += unknown_keys([name for name in raw if name not in known], known, key)
    values = {
        name: declared.values.parsed(f"{key}.{name}", raw.get(name), errors)
        for name, declared in known.items()
        if name in raw or declared.default is MISSING  # null, which the check does not accept
    }
    return spec(**values)
