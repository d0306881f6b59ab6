"""Settings of blocks: activation checkpointing, compile, fp8, tiled MLP, chunked loss."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from composer_fsdp2.config.messages import ascii_repr
from composer_fsdp2.config.setting import (
    BOOLEAN,
    NULL,
    PATTERNS,
    REQUIRED,
    ValueType,
    choice,
    count,
    is_number,
    mapping,
    null_or,
    one_or_more,
    parse_list,
    setting,
    text,
)

__all__ = [
    "ACTIVATION",
    "CHUNKING",
    "COMPILE",
    "FLOAT8",
    "TILING",
    "ActivationSpec",
    "ChunkingSpec",
    "CompileSpec",
    "Float8Spec",
    "TilingSpec",
    "check_activation_together",
    "check_fp8_together",
    "check_tiling_together",
]

_RANGE = re.compile(r"(first|middle|last)-[0-9]{1,9}|(range-)?[0-9]{1,9}-[0-9]{1,9}")
_PATTERNS = replace(PATTERNS, parse=one_or_more)

# --- activation_checkpointing ---


def _is_target(target: Any) -> bool:
    if isinstance(target, str):
        return all(_RANGE.fullmatch(part) for part in target.replace(" ", "").split(","))
    if isinstance(target, tuple):
        return bool(target) and all(
            _is_target(part) if isinstance(part, str) else is_number(part, 0) for part in target
        )
    return is_number(target)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSpec:
    """Settings of modules that are computed again in backward.

    Example:
        >>> from composer_fsdp2 import ActivationSpec
        >>> ActivationSpec(every=2).mode
        'full'
    """

    classes: tuple[str, ...] = setting((), _PATTERNS, "class names; every instance is chosen")
    names: tuple[str, ...] = setting(
        (), _PATTERNS, "module names: a glob, or `re:` and a regular expression"
    )
    every: int | None = setting(
        None,
        null_or(count("blocks")),
        "only in every n-th block, counted in each list of blocks, the first one included",
    )
    target: int | str | tuple[int | str, ...] | None = setting(
        None,
        null_or(
            ValueType(
                expected="a number, first-n, middle-n, last-n, range-i-j, i-j, or a list of ids "
                "and these",
                accepts=_is_target,
                parse=parse_list,
            )
        ),
        "only in these blocks, in LLM Foundry's words: a number, ids, `first-n`, `middle-n`, "
        "`last-n`, `range-i-j` or `i-j` (without j); several in a list or with commas",
    )
    mode: Literal["full", "selective"] = setting(
        "full",
        choice("full", "selective"),
        "`selective` keeps the results of matrix products, convolutions and attention",
    )
    preserve_rng_state: bool = setting(
        True,
        BOOLEAN,
        "dropout drops the same again; `false` is faster, for blocks without randomness",
    )
    memory_budget: float | None = setting(
        None,
        null_or(
            ValueType(
                expected="a number from 0 to 1",
                accepts=lambda value: type(value) in (int, float) and 0 <= value <= 1,
            )
        ),
        "the compiler chooses what is computed again: 1 keeps what it wants, 0 keeps the inputs "
        "of a block alone",
    )


def _check_activation(key: str, value: ActivationSpec, errors: list[str]) -> None:
    if value.every is not None and value.target is not None:
        errors.append(
            f"'{key}' has both 'every' and 'target'. Each of them says which blocks. "
            "Leave one of them out."
        )
    budget = value.memory_budget
    if budget is not None and value != ActivationSpec(memory_budget=budget):
        errors.append(
            f"'{key}.memory_budget' stands beside other settings. With a budget the compiler "
            "chooses what is computed again, so they would have no effect. Leave the others out, "
            "or the budget."
        )


ACTIVATION = mapping(
    ActivationSpec,
    expected="true, false or a mapping",
    others=BOOLEAN,
    check_options=_check_activation,
    example="activation_checkpointing: {every: 2, mode: selective}",
)


def check_activation_together(values: Mapping[str, Any], errors: list[str]) -> None:
    """Refuses a memory budget without the compiler, which alone has budgets."""
    budget = getattr(values["activation_checkpointing"], "memory_budget", None)
    if budget is not None and not values["compile"]:
        errors.append(
            "'activation_checkpointing.memory_budget' is set without 'compile'. Only the compiler "
            "can keep to it. Write compile: true, or leave the budget out."
        )


# --- compile ---


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileSpec:
    """`torch.compile` of each block; the fields are its arguments."""

    backend: str = setting("inductor", text("the name of a backend"), "a backend torch knows")
    mode: str | None = setting(
        None, null_or(text("a mode of torch.compile")), "a mode of inductor without CUDA graphs"
    )
    fullgraph: bool = setting(False, BOOLEAN, "a block that is not one graph is an error")
    dynamic: bool | None = setting(
        None, null_or(BOOLEAN), "compiles for any size; null is torch's own choice"
    )


def _check_blocks_key(key: str, raw: Any, errors: list[str]) -> Any:
    """Takes out `blocks: true`, which is the only way to compile."""
    if not isinstance(raw, dict):
        return raw
    values = dict(raw)
    if values.pop("blocks", True) is not True:
        errors.append(
            f"{key}.blocks: {ascii_repr(raw['blocks'])} is invalid, because blocks are what is "
            f"compiled here. Nothing would be. Write {key}: false, "
            "or compile_config of the Trainer for the whole model."
        )
    return values


COMPILE = mapping(
    CompileSpec,
    expected="true, false or a mapping",
    others=BOOLEAN,
    parse=_check_blocks_key,
    example="compile: {backend: inductor, dynamic: true}",
)


# --- tiled_mlp and chunked_loss ---


@dataclass(frozen=True, slots=True, kw_only=True)
class TilingSpec:
    """Settings of MLPs that run on one tile of the sequence after the other."""

    shards: int = setting(REQUIRED, count("parts", 2), "number of parts")
    classes: tuple[str, ...] = setting((), _PATTERNS, "class names of the modules")
    names: tuple[str, ...] = setting(
        (),
        _PATTERNS,
        "names of the modules; without `classes` and `names`, those called mlp, ffn or "
        "feed_forward",
    )


TILING = mapping(
    TilingSpec,
    expected="null or a mapping",
    others=NULL,
    example="tiled_mlp: {shards: 4}",
)


def check_tiling_together(values: Mapping[str, Any], errors: list[str]) -> None:
    """Refuses tiles in a compiled block, which has its own order."""
    if values["compile"] and values["tiled_mlp"] is not None:
        errors.append(
            "'tiled_mlp' and 'compile' are both set. A compiled block orders its own computation, "
            "and nothing would keep it from making all tiles at once. Leave one of them out."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkingSpec:
    """Settings of a head and loss that run on one chunk of tokens after the other."""

    chunks: int = setting(
        REQUIRED, count("parts"), "number of parts; 1 with `tensor_parallel` alone"
    )
    names: tuple[str, ...] = setting(
        (),
        _PATTERNS,
        "names of the heads; without, those the model names, and modules called lm_head",
    )


CHUNKING = mapping(
    ChunkingSpec,
    expected="null or a mapping",
    others=NULL,
    example="chunked_loss: {chunks: 8}",
)


# --- fp8 ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Spec:
    """Linear layers that multiply in fp8, by torchao."""

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = setting(
        "tensorwise",
        choice("tensorwise", "rowwise", "rowwise_with_gw_hp"),
        "torchao's: one scale a tensor is fastest; one a row is closer, and the last one keeps "
        "the gradient of the weight out of fp8",
    )
    all_gather: bool = setting(
        False, BOOLEAN, "casts weights before they are sent: half the bytes of bf16"
    )
    names: tuple[str, ...] = setting(
        (),
        _PATTERNS,
        "globs, or `re:`, of linear layers; without, the trainable ones of the blocks that are "
        "large enough to gain by it",
    )
    emulate: bool = setting(
        False,
        BOOLEAN,
        "rounds to fp8 and multiplies in the dtype of the run, on any device, to see the loss",
    )


def _check_float8(key: str, value: Float8Spec, errors: list[str]) -> None:
    if value.all_gather is True and value.recipe != "tensorwise":
        errors.append(
            f"'{key}.all_gather' is true with recipe {ascii_repr(value.recipe)}. Shards can only "
            "be cast with one scale for the whole weight. Write recipe: tensorwise, or "
            "all_gather: false."
        )


FLOAT8 = mapping(
    Float8Spec,
    expected="true, false or a mapping",
    others=BOOLEAN,
    check_options=_check_float8,
    example="fp8: {recipe: rowwise}",
)


def check_fp8_together(values: Mapping[str, Any], errors: list[str]) -> None:
    """Refuses parts of inputs, whose scales differ, and casts of shards outside the device."""
    if values["fp8"] and values["tiled_mlp"] is not None:
        errors.append(
            "'fp8' and 'tiled_mlp' are both set. Scales are of the whole input of a layer, so that "
            "tiles would round otherwise than the whole. Leave one of them out."
        )
    if getattr(values["fp8"], "all_gather", False) and values["cpu_offload"]:
        errors.append(
            "'fp8.all_gather' and 'cpu_offload' are both set. Shards in CPU memory are sent to the "
            "GPU before they are cast, where torch loses track of the cast. Leave one of them out."
        )
