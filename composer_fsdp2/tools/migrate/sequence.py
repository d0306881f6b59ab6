"""Degrees of sequence and context parallelism, as other configurations write them."""

from __future__ import annotations

from typing import Any

from composer_fsdp2.tools.migrate.report import Context, Row, Status

__all__ = ["add_degree", "count_among_shards", "moved_rows", "sequence_rows"]

_SETTING = "sequence_parallel"
_SHARD = "data_parallel_shard_degree"
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


def count_among_shards(context: Context) -> None:
    """Counts ranks that divide a sequence among those that hold shards, as here.

    Accelerate and axolotl count them apart: `dp_shard_size` 2 beside `cp_size` 4 are 8 shards.
    """
    given = (entry.settings.get(_SETTING) for entry in context.entries.values())
    degree = next((settings["degree"] for settings in given if settings), 1)
    for entry in context.entries.values():
        is_size = entry.row is not None and entry.row.key.endswith("shard_size")
        if degree > 1 and is_size and _SHARD in entry.settings:
            shards = entry.settings[_SHARD] * degree
            reason = f"`{_SHARD}`; the {degree} ranks of a sequence hold shards too, and count here"
            entry.become(Status.CONVERTED, reason, **{_SHARD: shards})
