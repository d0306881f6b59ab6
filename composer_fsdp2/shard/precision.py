"""Resolves the `mixed_precision` setting to torch's policy."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from composer_fsdp2.config.wrapping import DTYPES, PrecisionSpec
from composer_fsdp2.errors import ConfigError

__all__ = ["cast_buffers", "compute_dtype", "resolve_precision"]


def compute_dtype(precision: str) -> torch.dtype:
    """Returns the dtype a training precision computes in.

    Raises:
        ConfigError: for a precision that is not supported.
    """
    if precision not in DTYPES:
        raise ConfigError(
            f"precision '{precision}' is not supported under FSDP2. Parameters have to be gathered "
            "in some dtype, and none is known for it. Use fp32, amp_bf16 or amp_fp16."
        )
    return DTYPES[precision]


@functools.lru_cache(maxsize=64)
def resolve_precision(
    mixed_precision: str | PrecisionSpec,
    compute: torch.dtype | None,
    inner: bool = False,
    is_linear: bool = False,
) -> MixedPrecisionPolicy:
    """Returns torch's policy for a preset or a spec.

    Args:
        mixed_precision: a preset (`FULL`, `DEFAULT`, `PURE`), or dtypes.
        compute: dtype of the training precision; `None` keeps the parameters' own.
        inner: whether the unit's output stays in the model, and has the dtype it is computed in.
            Inputs keep theirs unless the spec asks for the cast: FSDP1 cast the inputs of the model
            alone, and MPT's blocks, for example, take slopes of ALiBi that have to be fp32.
        is_linear: whether the unit is a linear layer, as adapters are: it multiplies its input by a
            weight of the unit's dtype, or fails.
    """
    asks_for_cast = False
    if isinstance(mixed_precision, PrecisionSpec):
        asks_for_cast = bool(mixed_precision.cast_forward_inputs)
        policy = MixedPrecisionPolicy(
            param_dtype=_dtype(mixed_precision.param_dtype),
            reduce_dtype=_dtype(mixed_precision.reduce_dtype),
            output_dtype=_dtype(mixed_precision.output_dtype),
            cast_forward_inputs=mixed_precision.cast_forward_inputs is not False,
        )
    elif mixed_precision == "FULL" or compute is None:
        policy = MixedPrecisionPolicy()
    else:
        # As FSDP1 under Composer: DEFAULT adds gradients up in fp32, PURE in the dtype of the run.
        reduce = torch.float32 if mixed_precision == "DEFAULT" else compute
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    if not inner:
        return policy
    casts = policy.cast_forward_inputs if is_linear else asks_for_cast
    return dataclasses.replace(policy, output_dtype=None, cast_forward_inputs=casts)


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else DTYPES[name]


def cast_buffers(module: nn.Module, precision: str | PrecisionSpec) -> None:
    """Casts a module's own floating point buffers, if the setting asks for it."""
    if not isinstance(precision, PrecisionSpec) or precision.buffer_dtype is None:
        return
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            module._buffers[name] = buffer.to(_dtype(precision.buffer_dtype))
