"""Which modules become FSDP units, single units' settings, and mixed precision."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from composer_fsdp2.config.messages import raise_errors
from composer_fsdp2.config.setting import (
    BOOLEAN,
    ValueType,
    check_patterns,
    choice,
    count,
    is_number,
    mapping,
    null_or,
    plain,
    setting,
)

__all__ = [
    "DTYPES",
    "PRECISION",
    "RESHARD",
    "WRAP_POLICY",
    "PrecisionSpec",
    "Reshard",
    "Selector",
    "UnitSettings",
    "WrapPolicy",
    "parse_unit_settings",
]

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "torch.float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "torch.bfloat16": torch.bfloat16,
    "amp_bf16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "torch.float16": torch.float16,
    "amp_fp16": torch.float16,
    # Composer computes amp_fp8 runs in bf16: torch has no fp8 parameters to gather.
    "amp_fp8": torch.bfloat16,
}
_PRESETS = ("DEFAULT", "PURE", "FULL")


_DTYPE = null_or(
    ValueType(
        expected="fp32, bf16 or fp16",
        accepts=lambda value: isinstance(value, str) and value in DTYPES,
        parse=lambda _key, raw, _errors: str(raw) if isinstance(raw, torch.dtype) else raw,
        choices=("fp32", "bf16", "fp16"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSpec:
    """Mixed precision of one unit; `None` keeps the parameters' own dtype."""

    param_dtype: str | None = setting(
        None, _DTYPE, "dtype in which parameters are gathered and used"
    )
    reduce_dtype: str | None = setting(None, _DTYPE, "dtype of the gradient reduction")
    output_dtype: str | None = setting(
        None,
        _DTYPE,
        "dtype of the floating point outputs of the unit's forward; set for the whole run, it is "
        "that of the top-level units alone, because blocks hand their outputs to each other",
    )
    buffer_dtype: str | None = setting(
        None,
        _DTYPE,
        "dtype that floating point buffers are cast to for good, in checkpoints too",
    )
    cast_forward_inputs: bool | None = setting(
        None,
        null_or(BOOLEAN),
        "casts floating point inputs to `param_dtype`: of every unit, of none, or (null) as FSDP1 "
        "did, of the top-level units; beside these of units with a `mixed_precision` of their own, "
        "and of linear layers that are units",
    )


PRECISION = mapping(
    PrecisionSpec,
    expected="DEFAULT, PURE, FULL or a mapping",
    others=choice(*_PRESETS),
    parse=lambda _key, raw, _errors: raw.upper() if isinstance(raw, str) else raw,
    example="mixed_precision: {param_dtype: bf16, reduce_dtype: fp32}",
)


Reshard = bool | int | Literal["auto"]

RESHARD = ValueType(
    expected="true, false, auto, or a number of ranks >= 1",
    accepts=lambda value: isinstance(value, bool) or value == "auto" or is_number(value),
    choices=("auto", "true", "false"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSettings:
    """Settings of single units; a field left `None` follows the run's."""

    reshard_after_forward: Reshard | None = setting(
        None, null_or(RESHARD), "as for the run; null is what the run says"
    )
    mixed_precision: str | PrecisionSpec | None = setting(
        None, null_or(PRECISION), "as for the run; null is what the run says"
    )


@dataclass(frozen=True, slots=True)
class Selector:
    """A pattern that picks modules and the settings of the units made of them."""

    pattern: str
    settings: UnitSettings = field(default_factory=UnitSettings)


_UNIT = mapping(UnitSettings, empty=(None, True), example="{reshard_after_forward: false}")


def _parse_selectors(key: str, raw: Any, errors: list[str]) -> Any:
    """Parses a pattern, a list of patterns, or a mapping from pattern to unit settings."""
    if raw is None:
        return ()
    written = [raw] if isinstance(raw, str) else raw
    if isinstance(written, list) and all(isinstance(item, str) for item in written):
        written = dict.fromkeys(written)
    if not isinstance(written, dict) or not written:
        return raw
    return tuple(
        Selector(pattern, _UNIT.parse(f"{key}.{pattern}", settings, errors))
        for pattern, settings in written.items()
    )


def _check_selectors(key: str, value: tuple[Selector, ...], errors: list[str]) -> None:
    check_patterns(key, tuple(selector.pattern for selector in value), errors)
    for selector in value:
        _UNIT.check(f"{key}.{selector.pattern}", selector.settings, errors)


_SELECTORS = ValueType(
    expected="a list of patterns, or a mapping of pattern: settings",
    accepts=lambda value: isinstance(value, tuple) and all(type(v) is Selector for v in value),
    check_inside=_check_selectors,
    parse=_parse_selectors,
)


_TOGGLE = mapping(
    UnitSettings,
    empty=(True,),
    expected="true, false, null or a mapping",
    others=ValueType(expected="false", accepts=lambda value: value is None or value is False),
    example="{reshard_after_forward: false}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapPolicy:
    """Which modules become FSDP units, as far as the configuration says so."""

    classes: tuple[Selector, ...] = setting(
        (), _SELECTORS, "class names; every instance becomes a unit"
    )
    names: tuple[Selector, ...] = setting(
        (),
        _SELECTORS,
        "module names: a glob (`model.layers.*`), or `re:` and a regular expression",
    )
    min_num_params: int | None = setting(
        None,
        null_or(count("elements")),
        "smallest number of elements that makes a module a unit, counted without nested units",
    )
    embeddings: UnitSettings | Literal[False] | None = setting(
        None,
        _TOGGLE,
        "input embeddings as units of their own; null where that saves memory and moves no more "
        "bytes, `false` never",
    )
    lm_head: UnitSettings | Literal[False] | None = setting(
        None,
        _TOGGLE,
        "the output head as a unit of its own; null and `false` as for `embeddings`",
    )
    min_unit_bytes: int | None = setting(
        None,
        null_or(count("bytes")),
        "a smaller unit joins the one around it, unless it has settings of its own",
    )
    max_unit_bytes: int | None = setting(
        None,
        null_or(count("bytes")),
        "the most that one collective gathers; the largest modules of a larger unit become units "
        "of their own",
    )

    @property
    def selects_blocks(self) -> bool:
        """Whether the policy names the blocks, so that the model's own hooks are not asked."""
        return bool(self.classes or self.names) or self.min_num_params is not None


WRAP_POLICY = mapping(
    WrapPolicy,
    empty=(None,),
    example="wrap_policy: {classes: [LlamaDecoderLayer], max_unit_bytes: 1000000000}",
)


def parse_unit_settings(where: str, raw: Any) -> UnitSettings:
    """Parses the settings of one unit, as `fsdp_wrap_fn` returns them.

    Raises:
        ConfigError: for an unknown key or an impossible value; `where` names the place.
    """
    errors: list[str] = []
    settings = _UNIT.parse(where, plain(raw), errors)
    _UNIT.check(where, settings, errors)
    raise_errors(errors)
    return settings
