"""Sentences about invalid settings."""

from __future__ import annotations

import difflib
import itertools
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
    "unknown_keys",
]

_LONGEST = 200
_LONGEST_TEXT = 1500
_LONGEST_WORD = 100
"""a longer word is no misspelling of a key"""
_MOST_ERRORS, _MOST_KEYS = 20, 10


def ascii_repr(value: Any) -> str:
    """Returns a value as YAML writes it, in ASCII, so that letters that look alike differ."""
    try:
        return shortened(_written(value), _LONGEST)
    except Exception as error:  # Python refuses to write numbers of thousands of digits
        too_long = isinstance(error, RecursionError | ValueError)
        why = "too long to show" if too_long else "that cannot be shown"
        return f"a {type(value).__name__} {why}"


def _written(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        pairs = itertools.islice(value.items(), _LONGEST)  # what is shown of it is shorter
        texts = (
            (key if isinstance(key, str) and key.isascii() and key.isidentifier() else ascii(key))
            + f": {_written(item)}"
            for key, item in pairs
        )
        return f"{{{', '.join(texts)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value[:_LONGEST]))}]"
    return ascii(value)


def shortened(text: str, most: int = _LONGEST_TEXT) -> str:
    """Cuts a text at a length that a person reads."""
    return text if len(text) <= most else f"{text[:most]}..."


def one_of(names: Sequence[str]) -> str:
    """Joins names for a sentence: `a, b or c`."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def nearest(word: str, choices: Iterable[str]) -> str:
    """Returns a question with the known name closest to a misspelt one, or '' when none is."""
    names = {str(name).lower(): str(name) for name in choices}
    if len(str(word)) > _LONGEST_WORD or str(word) in names.values():
        return ""
    close = difflib.get_close_matches(str(word).lower(), list(names), n=1, cutoff=0.6)
    return f" Did you mean '{names[close[0]]}'?" if close else ""


def unknown_keys(keys: Sequence[str], valid: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yields a sentence about each unknown key, and one sentence if there are more of them."""
    for name in (ascii_repr(key).strip("'") for key in keys[:_MOST_KEYS]):
        hint = nearest(name, valid) or f" Valid keys: {', '.join(sorted(valid))}."
        yield f"'{name}' is not a key of {where}. It would have no effect.{hint}"
    if len(keys) > _MOST_KEYS:
        yield f"{len(keys) - _MOST_KEYS} more are not keys of {where} either."


def invalid_value(
    key: str, value: Any, expected: str, *, choices: Sequence[str] = (), example: str = ""
) -> str:
    """Returns the sentence about a value that a setting cannot have.

    Args:
        key: the setting; dots lead into mappings.
        value: as the user wrote it.
        expected: the values that the setting takes, in words.
        choices: words among them, of which the nearest is shown.
        example: a whole valid line, for settings that are mappings.
    """
    name = shortened(key if key.isprintable() and key.isascii() else ascii(key)[1:-1], _LONGEST)
    shown = f", for example `{example}`" if example else ""
    hint = nearest(value, choices) if isinstance(value, str) else ""
    return f"{name}: {ascii_repr(value)} is invalid. Expected {expected}{shown}.{hint}"


def raise_errors(errors: Sequence[str]) -> None:
    """Raises the messages as one numbered error, if there are any.

    Raises:
        ConfigError: numbered where there are several.
    """
    shown = [shortened(text) for text in errors[:_MOST_ERRORS]]
    if len(shown) == 1:
        raise ConfigError(shown[0])
    if shown:
        lines = [f"  {number}. {text}" for number, text in enumerate(shown, 1)]
        more = len(errors) - len(shown)
        lines += [f"  and {more} more."] if more else []
        raise ConfigError(f"{len(errors)} settings are wrong:\n" + "\n".join(lines))
