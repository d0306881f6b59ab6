"""What the configuration says about the inside of blocks: recomputed, compiled, in tiles or fp8."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from composer_fsdp2.core.mistakes import (
    check_bool,
    check_patterns,
    is_count,
    is_string,
    parse_spec,
    shown,
    wrong,
)

__all__ = [
    "ActivationSpec",
    "ChunkingSpec",
    "CompileSpec",
    "Float8Spec",
    "TilingSpec",
    "check_activation",
    "check_block_combinations",
    "check_chunking",
    "check_compile",
    "check_float8",
    "check_tiling",
    "parse_activation",
    "parse_chunking",
    "parse_compile",
    "parse_float8",
    "parse_tiling",
]

Target = int | str | tuple[int | str, ...]

_RANGE = re.compile(r"(first|middle|last)-[0-9]{1,9}|(range-)?[0-9]{1,9}-[0-9]{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSpec:
    """Which modules are computed again in backward, and what of them is kept."""

    classes: tuple[str, ...] = ()
    """class names; every instance is chosen"""
    names: tuple[str, ...] = ()
    """module names: a glob, or `re:` and a regular expression"""
    every: int | None = None
    """only in every n-th block, counted in each list of blocks, the first one included"""
    target: Target | None = None
    """only in these blocks, in LLM Foundry's words: a number, ids, `first-n`, `middle-n`,
    `last-n`, `range-i-j` or `i-j` (without j); several in a list or with commas"""
    mode: Literal["full", "selective"] = "full"
    """`selective` keeps the results of matrix products, convolutions and attention"""
    preserve_rng_state: bool = True
    """whether dropout drops the same again; false is faster, for blocks without randomness"""
    memory_budget: float | None = None
    """the compiler chooses: 1 keeps what it wants, 0 keeps the inputs of a block alone"""

    @property
    def chooses(self) -> bool:
        """Whether it says itself which modules, so that the model's own function is not asked."""
        return bool(self.classes or self.names) or (self.every, self.target) != (None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileSpec:
    """`torch.compile` of each block; the fields are its arguments."""

    backend: str = "inductor"
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TilingSpec:
    """MLPs that are run on one part of the sequence after the other."""

    shards: int
    """number of parts"""
    classes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    """which modules; those called mlp, ffn or feed_forward when both are empty"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkingSpec:
    """A head and its loss on one part of the tokens after the other."""

    chunks: int
    """number of parts"""
    names: tuple[str, ...] = ()
    """which heads; those the model names, and modules called lm_head, when empty"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Spec:
    """Linear layers that multiply in fp8, by torchao."""

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """torchao's: one scale a tensor is fastest; one a row is closer, and the last one keeps the
    gradient of the weight out of fp8"""
    all_gather: bool = False
    """weights are cast before they are sent: half the bytes of bf16"""
    names: tuple[str, ...] = ()
    """globs, or `re:`, of linear layers; without, the trainable ones of the blocks that are large
    enough to gain by it"""
    emulate: bool = False
    """rounds to fp8 and multiplies in the dtype of the run, on any device, to see the loss"""


def parse_activation(key: str, raw: Any, errors: list[str]) -> Any:
    """True, false, or a mapping."""
    return _parse(ActivationSpec, key, raw, errors) if isinstance(raw, dict) else raw


def parse_compile(key: str, raw: Any, errors: list[str]) -> Any:
    """True, false, or a mapping."""
    if not isinstance(raw, dict):
        return raw
    values = dict(raw)
    if values.pop("blocks", True) is not True:
        errors.append(
            f"'{key}.blocks' is {shown(raw['blocks'])}, but blocks are what is compiled here. "
            f"Nothing would be. Write {key}: false, "
            "or compile_config of the Trainer for the whole model."
        )
    return _parse(CompileSpec, key, values, errors)


def parse_float8(key: str, raw: Any, errors: list[str]) -> Any:
    """True, false, or a mapping."""
    return _parse(Float8Spec, key, raw, errors) if isinstance(raw, dict) else raw


def _parse_parts(
    spec: Callable[..., Any], number: str, key: str, raw: Any, errors: list[str]
) -> Any:
    """Null, or a mapping that says into how many parts."""
    return _parse(spec, key, {number: None, **raw}, errors) if isinstance(raw, dict) else raw


parse_tiling = functools.partial(_parse_parts, TilingSpec, "shards")
parse_chunking = functools.partial(_parse_parts, ChunkingSpec, "chunks")


def _parse(spec: Callable[..., Any], key: str, raw: Mapping[str, Any], errors: list[str]) -> Any:
    values = {name: _frozen(value) for name, value in raw.items()}
    for name in values.keys() & {"classes", "names"}:
        value = values[name]
        values[name] = () if value is None else (value,) if isinstance(value, str) else value
    return parse_spec(spec, key, values, errors)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _has_fields(spec: type[Any], key: str, value: Any, errors: list[str]) -> bool:
    """Whether there are fields to check, and not `true` or `false`, or something wrong."""
    if isinstance(value, spec):
        return True
    if not isinstance(value, bool):
        keys = ", ".join(field.name for field in dataclasses.fields(spec))
        errors.append(f"{wrong(key, value, 'true, false or a mapping')} Its keys are {keys}.")
    return False


def check_activation(key: str, value: Any, errors: list[str]) -> None:
    """Checks every field, and that they can hold together."""
    if not _has_fields(ActivationSpec, key, value, errors):
        return
    _check_choice(key, value, errors)
    if value.every is not None and not is_count(value.every):
        errors.append(wrong(f"{key}.every", value.every, "a number of blocks >= 1"))
    if value.target is not None and not _is_target(value.target):
        errors.append(wrong(f"{key}.target", value.target, _TARGETS))
    if value.mode not in ("full", "selective"):
        errors.append(wrong(f"{key}.mode", value.mode, "full or selective"))
    check_bool(f"{key}.preserve_rng_state", value.preserve_rng_state, errors)
    if value.every is not None and value.target is not None:
        errors.append(
            f"'{key}' has both 'every' and 'target'. Each of them says which blocks. "
            "Leave one of them out."
        )
    _check_budget(key, value, errors)


_TARGETS = "a number, first-n, middle-n, last-n, range-i-j, i-j, or a list of ids and these"


def _is_target(target: Any) -> bool:
    if isinstance(target, str):
        return all(_RANGE.fullmatch(part) for part in target.replace(" ", "").split(","))
    if isinstance(target, tuple):
        return bool(target) and all(
            _is_target(part) if isinstance(part, str) else _is_id(part) for part in target
        )
    return is_count(target)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_budget(key: str, value: ActivationSpec, errors: list[str]) -> None:
    budget: Any = value.memory_budget
    if budget is None:
        return
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 <= budget <= 1:
        errors.append(wrong(f"{key}.memory_budget", budget, "a number from 0 to 1"))
    if value != ActivationSpec(memory_budget=budget):
        errors.append(
            f"'{key}.memory_budget' stands beside other settings. With a budget the compiler "
            "chooses what is computed again, so they would have no effect. Leave the others out, "
            "or the budget."
        )


def _check_choice(key: str, value: Any, errors: list[str]) -> None:
    for name in ("classes", "names"):
        _check_patterns(f"{key}.{name}", getattr(value, name), errors)


def _check_patterns(key: str, patterns: Any, errors: list[str]) -> None:
    if isinstance(patterns, tuple):
        check_patterns(key, patterns, errors)
    else:
        errors.append(wrong(key, patterns, "a list of patterns"))


def check_compile(key: str, value: Any, errors: list[str]) -> None:
    """Checks every field; torch knows which backends and modes there are."""
    if not _has_fields(CompileSpec, key, value, errors):
        return
    if not is_string(value.backend):
        errors.append(wrong(f"{key}.backend", value.backend, "the name of a backend"))
    if value.mode is not None and not is_string(value.mode):
        errors.append(wrong(f"{key}.mode", value.mode, "a mode of torch.compile"))
    check_bool(f"{key}.fullgraph", value.fullgraph, errors)
    if value.dynamic is not None:
        check_bool(f"{key}.dynamic", value.dynamic, errors)


def check_float8(key: str, value: Any, errors: list[str]) -> None:
    """Checks every field."""
    if not _has_fields(Float8Spec, key, value, errors):
        return
    if value.recipe not in _RECIPES:
        errors.append(wrong(f"{key}.recipe", value.recipe, " or ".join(_RECIPES)))
    _check_patterns(f"{key}.names", value.names, errors)
    check_bool(f"{key}.all_gather", value.all_gather, errors)
    check_bool(f"{key}.emulate", value.emulate, errors)
    if value.all_gather is True and value.recipe != "tensorwise":
        errors.append(
            f"'{key}.all_gather' is true with recipe {value.recipe}. Shards can only be cast with "
            "one scale for the whole weight. Write recipe: tensorwise, or all_gather: false."
        )


_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def _check_parts(spec: type[Any], number: str, key: str, value: Any, errors: list[str]) -> None:
    """Checks every field of what `_parse_parts` made."""
    if value is None:
        return
    fields = [field.name for field in dataclasses.fields(spec)]
    if not isinstance(value, spec):
        errors.append(wrong(key, value, f"a mapping with {', '.join(fields)}"))
        return
    for name in fields:
        if name != number:
            _check_patterns(f"{key}.{name}", getattr(value, name), errors)
    count: Any = getattr(value, number)
    if not is_count(count) or count < 2:
        errors.append(wrong(f"{key}.{number}", count, "a number of parts >= 2"))


check_tiling = functools.partial(_check_parts, TilingSpec, "shards")
check_chunking = functools.partial(_check_parts, ChunkingSpec, "chunks")


def check_block_combinations(values: Mapping[str, Any], errors: list[str]) -> None:
    """Settings of blocks that are fine alone and cannot hold together."""
    activation, compiled = values.get("activation_checkpointing"), values.get("compile", False)
    budget = getattr(activation, "memory_budget", None)
    if budget is not None and not compiled:
        errors.append(
            "'activation_checkpointing.memory_budget' is set without 'compile'. Only the compiler "
            "can keep to it. Write compile: true, or leave the budget out."
        )
    if compiled and values.get("tiled_mlp") is not None:
        errors.append(
            "'tiled_mlp' and 'compile' are both set. A compiled block orders its own computation, "
            "and nothing would keep it from making all tiles at once. Leave one of them out."
        )
    if values.get("fp8") and values.get("tiled_mlp") is not None:
        errors.append(
            "'fp8' and 'tiled_mlp' are both set. Scales are of the whole input of a layer, so that "
            "tiles would round otherwise than the whole. Leave one of them out."
        )
    if getattr(values.get("fp8"), "all_gather", False) and values.get("cpu_offload"):
        errors.append(
            "'fp8.all_gather' and 'cpu_offload' are both set. Shards in CPU memory are sent to the "
            "GPU before they are cast, where torch loses track of the cast. Leave one of them out."
        )
