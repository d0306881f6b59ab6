"""Resolves the `mixed_precision` setting to torch's policy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from composer_fsdp2.blocks.fp8 import Float8Plan, torchao_module
from composer_fsdp2.config.wrapping import DTYPES, PrecisionSpec
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.torch_private.units import (
    init_all_gather_extensions,
    local_shard,
    param_groups,
    params_of,
    sharded_param,
)

__all__ = ["cast_buffers", "compute_dtype", "gather_in_float8", "resolve_precision"]


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


# --- Shards that are cast to fp8 before they are gathered; see [Note: fp8] in `blocks.fp8`. ---


def gather_in_float8(model: nn.Module, units: Iterable[FSDPModule], plan: Float8Plan) -> None:
    """Has weights of the plan cast before they are sent. Collective: no; after sharding."""
    layers = {model.get_submodule(name).weight: name for name in plan.gathered}
    for group in (group for unit in units for group in param_groups(unit)):
        held = [param for param in params_of(group) if sharded_param(param) in layers]
        cast = _CastForGather([local_shard(param) for param in held])
        for index, param in enumerate(held):
            layer = model.get_submodule(layers[sharded_param(param)])
            cast.attach(index, layer)
            init_all_gather_extensions(param)


class _CastForGather:
    """Casts the weights that one collective gathers in fp8, with scales found for each gather.

    Whether they have changed cannot be told: in-place operations on a DTensor do not count up the
    version of the shard inside.
    """

    def __init__(self, shards: Sequence[Any]) -> None:
        self._shards = shards
        self._scales: dict[int, torch.Tensor] = {}

    def attach(self, index: int, layer: Any) -> None:
        """Gives a shard the methods that FSDP2 looks for around its gather. Collective: no.

        Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param.py#L687
        """
        kind = torchao_module("float8.fsdp_utils").WeightWithDynamicFloat8CastTensor
        shard, dtype = self._shards[index], layer.config.cast_config_weight.target_dtype
        cast = kind(shard.detach(), layer.linear_mm_config, dtype)

        # Torch counts the parameters of this method: with a single one, it gives the mesh alone.
        def before(mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:
            cast._precomputed_scale = self._scale_of(index, dtype, mesh)
            return cast.fsdp_pre_all_gather(mesh)

        shard.fsdp_pre_all_gather = before
        shard.fsdp_post_all_gather = cast.fsdp_post_all_gather

    @torch.no_grad()
    def _scale_of(self, index: int, dtype: torch.dtype, mesh: DeviceMesh) -> torch.Tensor:
        """Collective: yes, for the first weight of each gather, even if the last was dropped."""
        if index not in self._scales:
            largest = torch.stack(
                [torch.linalg.vector_norm(shard, float("inf")) for shard in self._shards]
            )
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
            scales = torchao_module("float8.float8_utils").amax_to_scale(largest, dtype)
            self._scales = dict(enumerate(scales.unbind()))
        return self._scales.pop(index)
