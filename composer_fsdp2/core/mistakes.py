"""Sentences about wrong settings, and the checks that all parts of a configuration share.

Each check appends to `errors` and never raises.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = [
    "check_bool",
    "check_patterns",
    "is_count",
    "is_string",
    "nearest",
    "parse_spec",
    "shown",
    "unknown_key",
    "wrong",
]


_MOST = 2**63
"""No count of anything is larger, and Python does not write numbers of thousands of digits."""


def shown(value: Any) -> str:
    """A value in ASCII, where letters that look alike and characters nobody sees differ."""
    try:
        text = ascii(value)
    except ValueError:
        text = f"a {type(value).__name__} with thousands of digits"
    return text if len(text) <= 200 else f"{text[:200]}..."


def nearest(word: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """Describes the known name closest to a misspelt one, or '' when none is close."""
    close = difflib.get_close_matches(str(word), [str(name) for name in known], n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""


def unknown_key(key: str, known: Mapping[str, Any], where: str) -> str:
    """A key that does not exist."""
    name = shown(key).strip("'")
    hint = nearest(name, known) or f" Valid keys: {', '.join(sorted(known))}."
    return f"'{name}' is not a key of {where}. It would have no effect.{hint}"


def parse_spec(spec: Callable[..., Any], key: str, raw: Any, errors: list[str]) -> Any:
    """A dataclass from a mapping of its fields; what is no mapping stays for the check."""
    if not isinstance(raw, dict):
        return raw
    known = {field.name: None for field in dataclasses.fields(spec)}  # pyright: ignore
    errors += [unknown_key(name, known, key) for name in raw if name not in known]
    return spec(**{name: value for name, value in raw.items() if name in known})


def wrong(key: str, value: Any, expected: str) -> str:
    """A value a key cannot have."""
    return f"'{key}' is {shown(value)}, but it takes {expected}. Write {key}: <{expected}>."


def check_bool(key: str, value: Any, errors: list[str]) -> None:
    """True or false, nothing that stands for them."""
    if not isinstance(value, bool):
        errors.append(wrong(key, value, "true or false"))


def is_count(value: Any) -> bool:
    """Whether it is a whole number of at least one, and not an absurd one."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < _MOST


def is_string(value: Any) -> bool:
    """Whether it is text that is not empty."""
    return isinstance(value, str) and bool(value)


def check_patterns(where: str, patterns: Sequence[Any], errors: list[str]) -> None:
    """Globs, or `re:` and a regular expression."""
    for pattern in patterns:
        if not is_string(pattern):
            errors.append(wrong(where, pattern, "patterns that are not empty"))
        elif pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except (re.error, OverflowError, RecursionError) as error:
                errors.append(
                    f"'{where}' holds {shown(pattern)}, which is no regular expression ({error}). "
                    "It could match nothing. Correct it, or write a glob without 're:'."
                )
