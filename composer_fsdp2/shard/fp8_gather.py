"""Shards that are cast to fp8 before they are gathered; see [Note: fp8] in `blocks.fp8`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2.blocks.fp8 import Float8Plan, torchao_module
from composer_fsdp2.shard.torch_private.units import (
    init_all_gather_extensions,
    local_shard,
    param_groups,
    params_of,
    sharded_param,
)

__all__ = ["gather_in_float8"]


def gather_in_float8(model: nn.Module, units: Iterable[FSDPModule], plan: Float8Plan) -> None:
    """Has weights of the plan cast before they are sent. Collective: no; after sharding."""
    layers = {model.get_submodule(name).weight: name for name in plan.gathered}
    for group in (group for unit in units for group in param_groups(unit)):
        held = [param for param in params_of(group) if sharded_param(param) in layers]
        shards = [local_shard(param) for param in held]
        scales = _Scales(shards)
        for index, (param, shard) in enumerate(zip(held, shards, strict=True)):
            layer = model.get_submodule(layers[sharded_param(param)])
            _CastForGather(layer, shard, scales, index)
            init_all_gather_extensions(param)


class _Scales:
    """Finds scales of the weights that one collective gathers in fp8, anew for each gather.

    Whether they have changed cannot be told: in-place operations on a DTensor do not count up the
    version of the shard inside.
    """

    def __init__(self, shards: Sequence[torch.Tensor]) -> None:
        self._shards = shards
        self._found: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def of(self, index: int, dtype: torch.dtype, mesh: DeviceMesh) -> torch.Tensor:
        """Collective: yes, for the first weight of each gather, even if the last was dropped."""
        if index not in self._found:
            largest = torch.stack(
                [torch.linalg.vector_norm(shard, float("inf")) for shard in self._shards]
            )
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
            scales = torchao_module("float8.float8_utils").amax_to_scale(largest, dtype)
            self._found = dict(enumerate(scales.unbind()))
        return self._found.pop(index)


class _CastForGather:
    """Has the methods that FSDP2 looks for on a shard around its gather.

    Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param.py#L687
    """

    def __init__(self, layer: Any, shard: Any, scales: _Scales, index: int) -> None:
        kind = torchao_module("float8.fsdp_utils").WeightWithDynamicFloat8CastTensor
        self._scales, self._index = scales, index
        self._dtype = layer.config.cast_config_weight.target_dtype
        self._cast = kind(shard.detach(), layer.linear_mm_config, self._dtype)
        # Torch looks for methods of these names on the shard itself, and counts the parameters of
        # the first one: with a single one, it gives the mesh alone.
        shard.fsdp_pre_all_gather = self._before
        shard.fsdp_post_all_gather = self._cast.fsdp_post_all_gather

    def _before(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:
        self._cast._precomputed_scale = self._scales.of(self._index, self._dtype, mesh)
        return self._cast.fsdp_pre_all_gather(mesh)
