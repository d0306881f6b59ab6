"""From the `mixed_precision` setting to torch's policy."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from composer_fsdp2.core.config import DTYPES, PrecisionSpec
from composer_fsdp2.errors import ConfigError

__all__ = ["compute_dtype", "resolve_precision"]


def compute_dtype(precision: str) -> torch.dtype:
    """The dtype a training precision computes in.

    Raises:
        ConfigError: for a precision that is not supported.
    """
    if precision not in DTYPES:
        raise ConfigError(
            f"precision '{precision}' is not supported under FSDP2. Parameters have to be gathered "
            "in some dtype, and none is known for it. Use fp32, amp_bf16 or amp_fp16."
        )
    return DTYPES[precision]


def resolve_precision(
    mixed_precision: str | PrecisionSpec, compute: torch.dtype | None
) -> MixedPrecisionPolicy:
    """Resolves a preset or a spec.

    Args:
        mixed_precision: as `FSDP2Config.mixed_precision`.
        compute: dtype of the training precision; `None` keeps the parameters' own.
    """
    if isinstance(mixed_precision, PrecisionSpec):
        return MixedPrecisionPolicy(
            param_dtype=_dtype(mixed_precision.param_dtype),
            reduce_dtype=_dtype(mixed_precision.reduce_dtype),
            output_dtype=_dtype(mixed_precision.output_dtype),
            cast_forward_inputs=mixed_precision.cast_forward_inputs,
        )
    if mixed_precision == "FULL" or compute is None:
        return MixedPrecisionPolicy()
    reduce = torch.float32 if mixed_precision == "DEFAULT" else compute
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else DTYPES[name]
