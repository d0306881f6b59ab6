"""Mixed precision, of a run or of one unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from composer_fsdp2.config.setting import BOOLEAN, ValueType, choice, mapping, null_or, setting

__all__ = ["DTYPES", "PRECISION", "PrecisionSpec"]

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


def _dtype_name(_key: str, raw: Any, _errors: list[str]) -> Any:
    return str(raw) if isinstance(raw, torch.dtype) else raw


_DTYPE = null_or(
    ValueType(
        expected="fp32, bf16 or fp16",
        accepts=lambda value: isinstance(value, str) and value in DTYPES,
        parse=_dtype_name,
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
