"""Holds parsers of values, and the rows of keys, that several trainers share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from composer_fsdp2.tools.migrate.report import (
    ADDED,
    CHANGES,
    CONVERTED,
    DECISION,
    NOT_NEEDED,
    RENAMED,
    SAME,
    UNSUPPORTED,
    Context,
    Entry,
    Row,
)

__all__ = [
    "OFF",
    "ON",
    "REPLICATE",
    "SHARD",
    "SHARDING_KEYS",
    "STATE_ON_CPU",
    "add_precision",
    "block_rows",
    "checkpointing_rows",
    "clipping_rows",
    "clipping_to",
    "composer_rows",
    "degree_rows",
    "expert_rows",
    "find_ranks",
    "first_keys",
    "is_count",
    "is_names",
    "is_nothing",
    "is_plain_number",
    "is_size",
    "min_num_params",
    "parallel_rows",
    "precision_row",
    "sequence_rows",
    "stages",
    "under",
    "wrap_classes",
]

SHARD, REPLICATE = "data_parallel_shard_degree", "data_parallel_replicate_degree"
SHARDING_KEYS = (
    *("fsdp_config", "fsdp", "deepspeed", "deepspeed_config"),
    *("strategy_config", "zero_optimization"),
)
"""each of them says by itself how a run is sharded"""
OFF = (False, None, "false")
ON = (True, "true")

_AC = "activation_checkpointing"
STATE_ON_CPU = {"optimizer_state": {"device": "cpu"}}


# --- Values. Docstrings describe them in the tables of the documentation. ---


def is_size(value: Any) -> bool:
    """A number above 1."""
    return type(value) is int and value > 1


def is_count(value: Any) -> bool:
    """A number above 0."""
    return type(value) is int and value > 0


def is_plain_number(value: Any) -> bool:
    """A number above 0."""
    try:
        return int(float(value)) > 0
    except (TypeError, ValueError, OverflowError):
        return False


def is_nothing(value: Any) -> bool:
    """Nothing, 0 or an empty list."""
    return value in (None, "", 0, "0", [])


def is_names(value: Any) -> bool:
    """A name or several."""
    return isinstance(value, str | list) and bool(value)


def _is_norm(value: Any) -> bool:
    """A number above 0."""
    return type(value) in (int, float) and value > 0


def _asks_for_nothing(value: Any) -> bool:
    """A block without a size above 1."""
    if not isinstance(value, Mapping):
        return value in (None, False, 0, 1)
    return all(
        _asks_for_nothing(item)
        for key, item in value.items()
        if isinstance(item, Mapping) or re.search("size|stages", str(key))
    )


def wrap_classes(value: Any) -> dict[str, Any]:
    """Returns classes of units, in a list or with commas between them."""
    names = value.split(",") if isinstance(value, str) else value
    return {"wrap_policy": {"classes": [str(name).strip() for name in names]}}


def min_num_params(value: Any) -> dict[str, Any]:
    """Returns the size of units."""
    return {"wrap_policy": {"min_num_params": int(float(value))}}


# --- Tables. ---


def under(prefix: str, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Returns a table inside a block."""
    return tuple(replace(row, key=f"{prefix}.{row.key}") for row in rows)


def first_keys(rows: tuple[Row, ...]) -> set[str]:
    """Returns the keys of a table, of those in a block the block's."""
    return {row.key.partition(".")[0] for row in rows}


def find_ranks(data: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Returns ranks in all and per node, as Accelerate's launcher says them."""
    ranks, nodes = data.get("num_processes"), data.get("num_machines", 1)
    if not (is_count(ranks) and is_count(nodes)):
        return None, None
    return ranks, None if ranks % nodes else ranks // nodes


# --- Parallelism. ---

_DIVIDES = (
    "attention and MLPs are divided as the model's plan says, or as is known for them; ranks of a "
    "group read the same batch"
)
_TENSOR, _EXPERT = "tensor_parallel", "expert_parallel"


def degree_rows(key: str, nothing: Any) -> tuple[Row, ...]:
    """Returns the rows of a degree of tensor parallelism; `nothing` is what asks for none."""
    return (
        Row(key, NOT_NEEDED, "no tensor parallelism is asked for", nothing),
        Row(key, CONVERTED, f"`{_TENSOR}`: {_DIVIDES}", is_size, {_TENSOR: SAME}),
    )


def _tensor_size(value: Any) -> Any:
    """Returns the degree in DeepSpeed's block, or the value itself."""
    while isinstance(value, Mapping):
        names = ("autotp_size", "tp_size", "tp", "tensor_parallel")
        value = next((value[name] for name in names if name in value), 1)
    return value


def _has_tensor_size(value: Any) -> bool:
    """A number above 1, or a block with one as its size."""
    return is_size(_tensor_size(value))


def block_rows(key: str) -> tuple[Row, ...]:
    """Returns the rows of a degree of tensor parallelism, or DeepSpeed's block with one in it."""
    return (
        Row(key, NOT_NEEDED, "no tensor parallelism is asked for", _asks_for_nothing),
        Row(
            key,
            CONVERTED,
            f"`{_TENSOR}`: {_DIVIDES}",
            _has_tensor_size,
            lambda value: {_TENSOR: _tensor_size(value)},
        ),
        Row(key, DECISION, "its size is no number", options=("=2", "=null")),
    )


def _composers_degree(value: Any) -> Any:
    return value.get("tensor_parallel_degree", value.get("degree"))


def _is_composers(value: Any) -> bool:
    """A mapping with a degree, and perhaps a `layer_plan`."""
    return (
        isinstance(value, Mapping)
        and value.keys() <= {"strategy", "degree", "tensor_parallel_degree", "layer_plan"}
        and is_size(_composers_degree(value))
    )


def _is_strategy(value: Any) -> bool:
    """A mapping with `strategy`."""
    return _is_composers(value) and value.get("strategy") is not None


def _is_composers_nothing(value: Any) -> bool:
    """Nothing, or a degree of 1."""
    return not value or (isinstance(value, Mapping) and _composers_degree(value) == 1)


def _without_strategy(value: Mapping[str, Any]) -> dict[str, Any]:
    plan = {"layer_plan": value["layer_plan"]} if value.get("layer_plan") else {}
    return {_TENSOR: {"degree": _composers_degree(value), **plan}}


def composer_rows(key: str) -> tuple[Row, ...]:
    """Returns the rows of Composer's `tp`, and LLM Foundry's `tp_config`."""
    return (
        Row(key, NOT_NEEDED, "no tensor parallelism is asked for", _is_composers_nothing),
        Row(
            key,
            CHANGES,
            f"`{_TENSOR}` without the strategy: {_DIVIDES}, where a strategy of LLM Foundry gave "
            "them different ones and weights outside of its layers drifted apart",
            _is_strategy,
            _without_strategy,
        ),
        Row(key, CONVERTED, f"`{_TENSOR}`: {_DIVIDES}", _is_composers, _without_strategy),
        Row(
            key,
            DECISION,
            "it names no degree that is known, or more than a degree and a layer_plan",
            options=(f"fsdp2.{_TENSOR}=2", "remove it"),
        ),
    )


def sequence_rows(key: str, nothing: Any = (1, None), method: str = "auto") -> tuple[Row, ...]:
    """Returns the rows of a degree of sequence or context parallelism.

    Args:
        key: the dialect's name of the setting.
        nothing: values that ask for none.
        method: the exchange that the dialect means; `auto` where FSDP2 has another one.
    """
    return (
        Row(key, NOT_NEEDED, "no sequence is divided", nothing),
        Row(
            key,
            CONVERTED,
            "`sequence_parallel`: each sequence is divided between ranks next to each other, which "
            "read the same batch",
            is_size,
            lambda value: {"sequence_parallel": {"degree": value, "method": method}},
        ),
        Row(key, DECISION, "its value is no number", options=("=2", "=1")),
    )


def expert_rows(key: str) -> tuple[Row, ...]:
    """Returns the rows of a degree of expert parallelism."""
    return (
        Row(key, NOT_NEEDED, "no expert parallelism is asked for", _asks_for_nothing),
        Row(
            key,
            CONVERTED,
            f"`{_EXPERT}`: ranks next to each other hold the experts of a layer between them",
            is_size,
            lambda value: {_EXPERT: {"degree": value}},
        ),
        Row(key, DECISION, "its value is no number", options=("=2", "=1")),
    )


def parallel_rows(key: str, kind: str) -> tuple[Row, ...]:
    """Returns the rows of a kind of parallelism that FSDP2 runs do not have."""
    return (
        Row(key, NOT_NEEDED, f"no {kind} is asked for", _asks_for_nothing),
        Row(key, UNSUPPORTED, f"{kind} does not go with FSDP2 yet", options=("=null",)),
    )


def stages(key: str) -> tuple[Row, ...]:
    """Returns the rows of DeepSpeed's stage."""
    two = {"reshard_after_forward": False}
    return (
        Row(key, CONVERTED, "ZeRO-3", (3, "3"), {"reshard_after_forward": "auto"}),
        Row(
            key,
            CONVERTED,
            "ZeRO-2: gradients and optimizer are sharded, parameters kept until after backward",
            (2, "2"),
            two,
        ),
        Row(
            key,
            CHANGES,
            "gradients are sharded too, as in ZeRO-2: less memory, the same result",
            (1, "1"),
            two,
        ),
        Row(
            key, CONVERTED, "a whole copy on every rank", (0, "0"), {SHARD: 1, REPLICATE: -1, **two}
        ),
    )


# --- Precision. ---


def precision_row(key: str, dtype: str, value: Any) -> Row:
    """Returns the row of a precision, which the trainer has to know too."""
    return Row(
        key,
        CONVERTED,
        "parameters and gradient reduction in this dtype, as Accelerate has it; buffers keep their "
        "own dtype, which FSDP1 cast",
        (value,),
        {"mixed_precision": {"param_dtype": dtype, "reduce_dtype": dtype}},
        trainer={"precision": f"amp_{dtype}"},
    )


def add_precision(context: Context, keys: tuple[str, ...], trainer: str) -> None:
    """Writes out a precision that the file leaves to its trainer, whose default is another one."""
    said = (context.entries[key] for key in keys if key in context.entries)
    if "precision" not in context.parent and not any(e.is_open or e.beside for e in said):
        reason = f"without a precision {trainer} computes in fp32, and LLM Foundry in amp_bf16"
        path, beside = (*context.site.parent, "precision"), {"precision": "fp32"}
        context.added.append(Entry(path, None, ADDED, reason, beside=beside))


# --- Training: checkpointing of activations and clipping. ---


def clipping_rows(key: str) -> tuple[Row, ...]:
    """Returns the rows of the largest norm of gradients."""
    return (
        Row(key, NOT_NEEDED, "0 clips nothing", (0, 0.0, None)),
        Row(
            key,
            RENAMED,
            "`algorithms.gradient_clipping` of LLM Foundry, for the norm over all ranks",
            _is_norm,
            trainer=clipping_to,
        ),
    )


def clipping_to(norm: float) -> dict[str, Any]:
    """Returns the keys of LLM Foundry that clip the norm over all ranks."""
    clipping = {"clipping_type": "norm", "clipping_threshold": norm}
    return {"algorithms": {"gradient_clipping": clipping}}


def checkpointing_rows(key: str, on: bool = True) -> tuple[Row, ...]:
    """Returns the rows of a key that switches the recomputation of activations.

    Args:
        key: the dialect's name of the setting.
        on: its value that switches recomputation on; the other one switches it off.
    """
    reason = f"`{_AC}`" if on else f"`{_AC}`, the other way round"
    return (
        Row(key, RENAMED, reason, (on,), {_AC: True}),
        Row(key, RENAMED, reason, (not on,), {_AC: False}),
        Row(key, NOT_NEEDED, "null leaves it to the trainer", (None,)),
    )
