"""Sentences about invalid settings."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from composer_fsdp2.errors import ConfigError

__all__ = [
    "ascii_repr",
    "invalid_value",
    "nearest",
    "one_of",
    "raise_errors",
    "shortened",
    "unknown_key",
    "unknown_keys",
]

_LONGEST = 200
_LONGEST_TEXT = 1500
_LONGEST_WORD = 100
"""a longer one is no misspelling of anything"""
_MOST_ERRORS, _MOST_KEYS = 20, 10


def ascii_repr(value: Any) -> str:
    """Returns a value as YAML writes it, in ASCII, so that letters that look alike differ."""
    try:
        text = "".join(_until(_written(value), _LONGEST))
    except Exception as error:  # Python refuses to write numbers of thousands of digits
        too_long = isinstance(error, RecursionError | ValueError)
        why = "too long to show" if too_long else "that cannot be shown"
        text = f"a {type(value).__name__} {why}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _until(parts: Iterable[str], most: int) -> Iterator[str]:
    """The first parts, up to one that goes beyond `most` characters."""
    for part in parts:
        yield part
        most -= len(part)
        if most < 0:
            return


def _written(value: Any) -> Iterator[str]:
    if value is None:
        yield "null"
    elif isinstance(value, bool):
        yield str(value).lower()
    elif isinstance(value, dict):
        yield "{"
        for number, (key, item) in enumerate(value.items()):
            yield f"{', ' if number else ''}{_key(key)}: "
            yield from _written(item)
        yield "}"
    elif isinstance(value, list | tuple):
        yield "["
        for number, item in enumerate(value):
            yield ", " if number else ""
            yield from _written(item)
        yield "]"
    else:
        yield ascii(value)


def _key(key: Any) -> str:
    return key if isinstance(key, str) and key.isascii() and key.isidentifier() else ascii(key)


def shortened(text: str, most: int = _LONGEST_TEXT) -> str:
    """Cuts a text at a length that a person reads."""
    return text if len(text) <= most else f"{text[:most]}..."


def one_of(names: Sequence[str]) -> str:
    """Joins names for a sentence: `a, b or c`."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns a question with the known name closest to a misspelt one, or '' when none is."""
    if len(str(word)) > _LONGEST_WORD:
        return ""
    names = {str(name).lower(): str(name) for name in known}
    if str(word) in names.values():
        return ""
    close = difflib.get_close_matches(str(word).lower(), list(names), n=1, cutoff=0.6)
    return f" Did you mean '{names[close[0]]}'?" if close else ""


def unknown_key(key: str, known: Mapping[str, Any], where: str) -> str:
    """Returns the sentence about a key that does not exist."""
    name = ascii_repr(key).strip("'")
    hint = nearest(name, known) or f" Valid keys: {', '.join(sorted(known))}."
    return f"'{name}' is not a key of {where}. It would have no effect.{hint}"


def unknown_keys(keys: Sequence[str], known: Mapping[str, Any], where: str) -> list[str]:
    """Returns a sentence about each key that does not exist, and one about those beyond."""
    sentences = [unknown_key(key, known, where) for key in keys[:_MOST_KEYS]]
    if len(keys) > _MOST_KEYS:
        sentences.append(f"{len(keys) - _MOST_KEYS} more are not keys of {where} either.")
    return sentences


def invalid_value(
    key: str, value: Any, expected: str, *, choices: Sequence[str] = (), example: str = ""
) -> str:
    """Returns the sentence about a value that a setting cannot have.

    Args:
        key: the setting; dots lead into mappings.
        value: as it was given.
        expected: the values it can have.
        choices: words among them, of which the nearest is shown.
        example: a whole valid line, for settings that are mappings.
    """
    name = shortened(key if key.isprintable() and key.isascii() else ascii(key)[1:-1], _LONGEST)
    shown = f", for example `{example}`" if example else ""
    hint = nearest(value, choices) if isinstance(value, str) else ""
    return f"{name}: {ascii_repr(value)} is invalid. Expected {expected}{shown}.{hint}"


def raise_errors(errors: Sequence[str]) -> None:
    """Raises all of them as one error, if there are any.

    Raises:
        ConfigError: numbered where there are several.
    """
    if not errors:
        return
    if len(errors) == 1:
        raise ConfigError(shortened(errors[0]))
    shown = [shortened(text) for text in errors[:_MOST_ERRORS]]
    lines = "\n".join(f"  {number}. {text}" for number, text in enumerate(shown, 1))
    if len(errors) > _MOST_ERRORS:
        lines += f"\n  and {len(errors) - _MOST_ERRORS} more."
    raise ConfigError(f"{len(errors)} settings are wrong:\n{lines}")
