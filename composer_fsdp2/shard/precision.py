"""From the `mixed_precision` setting to torch's policy, and the casts of a unit's inputs.

[Note: casting inputs] torch casts the inputs of a unit through its registry of containers, which
builds new ones. A key-value cache is such a container: the block would write into a copy, and
generation go wrong without a word. So tensors are cast here, in plain containers only.
Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_state.py#L223
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from composer_fsdp2.config.precision import DTYPES, PrecisionSpec
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.shard.torch_private.tensors import tree_map

__all__ = ["InputCast", "cast_buffers", "compute_dtype", "resolve_precision", "without_autocast"]


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


@functools.lru_cache(maxsize=64)
def resolve_precision(
    mixed_precision: str | PrecisionSpec,
    compute: torch.dtype | None,
    inner: bool = False,
    is_linear: bool = False,
) -> MixedPrecisionPolicy:
    """Resolves a preset or a spec.

    Args:
        mixed_precision: as `FSDP2Config.mixed_precision`.
        compute: dtype of the training precision; `None` keeps the parameters' own.
        inner: of a unit whose output stays in the model, and has the dtype it is computed in. Its
            inputs keep theirs unless the spec asks for the cast: FSDP1 cast what comes into the
            model alone, and MPT's blocks, for example, take slopes of ALiBi that have to be fp32.
        is_linear: of a linear layer that is a unit, as adapters are: it multiplies its input by a
            weight of the unit's dtype, or fails.
    """
    policy = _resolve(mixed_precision, compute)
    if not inner:
        return policy
    if is_linear:
        return dataclasses.replace(policy, output_dtype=None)
    asked = isinstance(mixed_precision, PrecisionSpec) and mixed_precision.cast_forward_inputs
    return dataclasses.replace(policy, output_dtype=None, cast_forward_inputs=bool(asked))


def _resolve(
    mixed_precision: str | PrecisionSpec, compute: torch.dtype | None
) -> MixedPrecisionPolicy:
    if isinstance(mixed_precision, PrecisionSpec):
        return MixedPrecisionPolicy(
            param_dtype=_dtype(mixed_precision.param_dtype),
            reduce_dtype=_dtype(mixed_precision.reduce_dtype),
            output_dtype=_dtype(mixed_precision.output_dtype),
            cast_forward_inputs=mixed_precision.cast_forward_inputs is not False,
        )
    if mixed_precision == "FULL" or compute is None:
        return MixedPrecisionPolicy()
    reduce = torch.float32 if mixed_precision == "DEFAULT" else compute
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else DTYPES[name]


def cast_buffers(module: nn.Module, precision: str | PrecisionSpec) -> None:
    """Casts a module's own floating point buffers, if the setting asks for it."""
    if not isinstance(precision, PrecisionSpec) or precision.buffer_dtype is None:
        return
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            module._buffers[name] = buffer.to(_dtype(precision.buffer_dtype))


def without_autocast(module: nn.Module, device_type: str) -> None:
    """Lets a module compute in the dtype of its weights where autocast would lower it."""
    method = module.forward

    @functools.wraps(method)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, enabled=False):
            return method(*args, **kwargs)

    module.forward = forward


@dataclasses.dataclass(frozen=True, slots=True)
class InputCast:
    """Casts floating point inputs to one dtype, or not at all; see [Note: casting inputs]."""

    dtype: torch.dtype | None

    @classmethod
    @functools.lru_cache(maxsize=64)
    def taken_from(cls, policy: MixedPrecisionPolicy) -> tuple[InputCast, MixedPrecisionPolicy]:
        """The cast a policy asks for, and the policy without it."""
        if policy.param_dtype is None or not policy.cast_forward_inputs:
            return cls(None), policy
        # With this field set, FSDP2 would cast in a pre-hook of its own, before ours.
        return cls(policy.param_dtype), dataclasses.replace(policy, cast_forward_inputs=False)

    def __call__(self, value: Any) -> Any:
        """Casts the tensors in a value; other containers than tuple, list and dict stay whole."""
        if self.dtype is None:
            return value
        # What nearly every unit is called with; the tree of torch costs 5 % of a small step.
        if type(value) is dict:
            return {key: self(item) for key, item in value.items()}
        if type(value) is tuple or type(value) is list:
            return type(value)(map(self, value))
        if _is_whole(value):
            return self._cast(value)
        return tree_map(self._cast, value, is_leaf=_is_whole)

    def _cast(self, value: Any) -> Any:
        # As FSDP2's own cast does: integers and complex numbers stay.
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self.dtype) if floating else value

    def before_forward(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A forward pre-hook with keyword arguments."""
        return self(args), self(kwargs)

    def before_method(self, module: nn.Module, name: str) -> None:
        """Does the same for another method of the module."""
        method = getattr(module, name)

        @functools.wraps(method)
        def casting(*args: Any, **kwargs: Any) -> Any:
            return method(*self(args), **self(kwargs))

        setattr(module, name, casting)


def _is_whole(value: object) -> bool:
    return not isinstance(value, tuple | list | dict)
