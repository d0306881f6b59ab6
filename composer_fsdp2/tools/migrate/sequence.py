"""Degrees of sequence and context parallelism, as other configurations write them."""

from __future__ import annotations

from typing import Any

from composer_fsdp2.tools.migrate.report import Row, Status

__all__ = ["sequence_rows"]

_SETTING = "sequence_parallel"
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
    return (
        Row(key, Status.NOT_NEEDED, "no sequence is divided", nothing),
        Row(
            key,
            Status.CONVERTED,
            f"`{_SETTING}`: {_DIVIDES}",
            _is_degree,
            lambda value: {_SETTING: {"degree": value, "method": method}},
        ),
        Row(key, Status.DECISION, "its value is no number", options=(f"{key}=2", f"{key}=1")),
    )
