"""Degrees of sequence and context parallelism, as other configurations write them."""

from __future__ import annotations

from typing import Any

from composer_fsdp2.tools.migrate.report import Context, Row, Status

__all__ = ["add_degree", "moved_rows", "sequence_rows"]

_SETTING = "sequence_parallel"
_NO_NUMBER = "its value is no number"
_DIVIDES = "each sequence is divided between ranks next to each other, which read the same batch"


def _is_degree(value: Any) -> bool:
    """A number above 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def sequence_rows(key: str, nothing: Any = (1, None), method: str = "auto") -> tuple[Row, ...]:
    """Rows of a key that is a degree.

    Args:
        key: of the dialect.
        nothing: values that ask for none.
        method: the exchange that the dialect means; `auto` where it is one that is not here.
    """
    name = key.rpartition(".")[2]
    return (
        Row(key, Status.NOT_NEEDED, "no sequence is divided", nothing),
        Row(
            key,
            Status.CONVERTED,
            f"`{_SETTING}`: {_DIVIDES}",
            _is_degree,
            lambda value: {_SETTING: {"degree": value, "method": method}},
        ),
        Row(key, Status.DECISION, _NO_NUMBER, options=(f"{name}=2", f"{name}=1")),
    )


def moved_rows(*keys: str) -> tuple[Row, ...]:
    """Rows of a degree that stands elsewhere than the sharding, which `add_degree` writes out.

    Args:
        keys: where it stands.
    """
    where = "becomes `sequence_parallel` beside the sharding of this model; remove it here"
    return tuple(
        row
        for key in keys
        for row in (
            Row(key, Status.NOT_NEEDED, "no sequence is divided", (1, None)),
            Row(key, Status.CONVERTED, where, _is_degree),
            Row(key, Status.DECISION, _NO_NUMBER, options=("write a number", "remove it")),
        )
    )


def add_degree(context: Context, key: str, value: Any, method: str) -> None:
    """Writes out a degree that stands elsewhere in the file; one at the site counts before it."""
    if _is_degree(value) and key not in context.entries:
        settings = {"degree": value, "method": method}
        context.add(f"`{key}`: {_DIVIDES}", **{_SETTING: settings})
