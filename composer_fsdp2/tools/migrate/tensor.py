"""Degrees of tensor parallelism, as other configurations write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.tools.migrate.report import SAME, Row, Status

__all__ = ["asks_for_nothing", "block_rows", "composer_rows", "degree_rows"]

_SETTING = "tensor_parallel"
_DIVIDES = (
    "attention and MLPs are divided as the model's plan says, or as is known for them; ranks of a "
    "group read the same batch"
)
_DEGREE = "tensor_parallel_degree"


def _is_degree(value: Any) -> bool:
    """A number above 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def degree_rows(key: str, nothing: Any) -> tuple[Row, ...]:
    """Rows of a key that is a degree.

    Args:
        key: of the dialect.
        nothing: values that ask for none.
    """
    return (
        Row(key, Status.NOT_NEEDED, "no tensor parallelism is asked for", nothing),
        Row(key, Status.CONVERTED, f"`{_SETTING}`: {_DIVIDES}", _is_degree, {_SETTING: SAME}),
    )


def asks_for_nothing(value: Any) -> bool:
    """A block without a size above 1."""
    if not isinstance(value, Mapping):
        return value in (None, False, 0, 1)
    sizes = (item for key, item in value.items() if "size" in str(key) or "stages" in str(key))
    inner = (item for item in value.values() if isinstance(item, Mapping))
    return all(map(asks_for_nothing, (*sizes, *inner)))


def block_rows(key: str) -> tuple[Row, ...]:
    """Rows of a key that is a degree, or DeepSpeed's block with one in it."""
    return (
        Row(key, Status.NOT_NEEDED, "no tensor parallelism is asked for", asks_for_nothing),
        Row(
            key,
            Status.CONVERTED,
            f"`{_SETTING}`: {_DIVIDES}",
            _holds_degree,
            lambda value: {_SETTING: _sizes(value)[0]},
        ),
        Row(key, Status.DECISION, "its size is no number", options=(f"{key}=2", f"{key}=null")),
    )


def _sizes(value: Any) -> list[Any]:
    if not isinstance(value, Mapping):
        return [value]
    inner = [_sizes(item) for item in value.values() if isinstance(item, Mapping)]
    own = [item for key, item in value.items() if key in ("autotp_size", "tp_size")]
    return [*own, *(size for sizes in inner for size in sizes)]


def _holds_degree(value: Any) -> bool:
    """A number above 1, or a block with one as its size."""
    sizes = _sizes(value)
    return len(set(map(str, sizes))) == 1 and _is_degree(sizes[0])


def _is_strategy(value: Any) -> bool:
    """A mapping with `strategy`."""
    return isinstance(value, Mapping) and value.get("strategy") is not None and _is_composers(value)


def _is_composers(value: Any) -> bool:
    """A mapping with a degree, and perhaps a `layer_plan`."""
    known = {"strategy", "degree", _DEGREE, "layer_plan"}
    return isinstance(value, Mapping) and known.issuperset(value) and _is_degree(_degree(value))


def _is_nothing(value: Any) -> bool:
    """Nothing, or a degree of 1."""
    return not value or (isinstance(value, Mapping) and _degree(value) == 1)


def _degree(value: Mapping[str, Any]) -> Any:
    return value.get(_DEGREE, value.get("degree"))


def _without_strategy(value: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"degree": _degree(value)}
    if value.get("layer_plan"):
        found["layer_plan"] = value["layer_plan"]
    return {_SETTING: found}


def composer_rows(key: str) -> tuple[Row, ...]:
    """Rows of Composer's `tp`, and LLM Foundry's `tp_config`.

    Args:
        key: as the dialect calls it.
    """
    return (
        Row(key, Status.NOT_NEEDED, "no tensor parallelism is asked for", _is_nothing),
        Row(
            key,
            Status.CHANGES,
            f"`{_SETTING}` without the strategy: {_DIVIDES}, where a strategy of LLM Foundry gave "
            "them different ones and weights outside of its layers drifted apart",
            _is_strategy,
            _without_strategy,
        ),
        Row(key, Status.CONVERTED, f"`{_SETTING}`: {_DIVIDES}", _is_composers, _without_strategy),
        Row(
            key,
            Status.DECISION,
            "it names no degree that is known, or more than a degree and a layer_plan",
            options=(f"fsdp2.{_SETTING}=2", "remove it"),
        ),
    )
