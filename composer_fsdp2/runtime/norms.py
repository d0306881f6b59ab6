"""Norms of sharded tensors: many of them in one reduction."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

__all__ = ["clip_by_unit_norm_", "local_part", "whole_metrics"]

_Axes = tuple[DeviceMesh, tuple[int, ...]]
"""the axes of a mesh over which a sum still has to be taken"""


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, sharing its memory; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_by_unit_norm_(params: Iterable[torch.Tensor], threshold: float) -> None:
    """Scales down gradients whose norm exceeds `threshold` times that of their weights.

    Collective: yes, over the meshes of the parameters. Norms are those of rows (everything but
    dimension 0), and of a whole vector. Rows of a matrix that is sharded by rows need no
    communication; all else takes one reduction per mesh.

    Source: Brock et al., High-Performance Large-Scale Image Recognition Without Normalization.
    """
    held = [(param, param.grad) for param in params if param.grad is not None]
    tensors = [tensor for pair in held for tensor in pair]
    squares = [_unit_squares(tensor) for tensor in tensors]
    norms = [total.sqrt_() for total in _summed(squares, [_split_axes(t) for t in tensors])]
    for (_, grad), weight_norm, grad_norm in zip(held, norms[::2], norms[1::2], strict=True):
        scale = weight_norm.mul_(threshold).div_(grad_norm).nan_to_num_(nan=1.0).clamp_(max=1.0)
        local_part(grad).mul_(scale.to(grad.dtype))


def _unit_squares(tensor: torch.Tensor) -> torch.Tensor:
    local = local_part(tensor.detach())
    squares = local.to(torch.promote_types(local.dtype, torch.float32)).square()
    if tensor.ndim <= 1:
        return squares.sum()
    return squares.sum(dim=tuple(range(1, tensor.ndim)), keepdim=True)


def _split_axes(tensor: torch.Tensor) -> _Axes | None:
    """Axes over which a row (or a vector) is divided; None if this rank holds it whole."""
    if not isinstance(tensor, DTensor):
        return None
    axes = tuple(
        axis
        for axis, placement in enumerate(tensor.placements)
        if placement.is_shard() and (tensor.ndim <= 1 or not placement.is_shard(dim=0))
    )
    return (tensor.device_mesh, axes) if axes else None


def _summed(values: list[torch.Tensor], axes: Sequence[_Axes | None]) -> list[torch.Tensor]:
    """Takes the sums that are missing, in place. Collective: yes."""
    together: dict[tuple[_Axes, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for value, where in zip(values, axes, strict=True):
        if where is not None:
            together[where, value.dtype].append(value)
    for ((mesh, dims), _), parts in together.items():
        flat = torch.cat([part.flatten() for part in parts])
        for dim in dims:
            dist.all_reduce(flat, group=mesh.get_group(dim))
        for part, total in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
            part.copy_(total.view_as(part))
    return values


@torch.no_grad()
def whole_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of metrics that were computed with sharded tensors.

    Collective: yes, over the meshes of the metrics; ranks hold the same names in the same order.
    Norms, of which there is one per parameter, are reduced together.
    """
    norms = {name: v for name, v in metrics.items() if isinstance(v, DTensor) and _is_norm(v)}
    squares = [value.to_local().double().square() for value in norms.values()]
    axes = [(v.device_mesh, _partial_axes(v)) for v in norms.values()]
    found = dict(
        zip(norms, torch.stack(_summed(squares, axes)).tolist(), strict=True) if norms else ()
    )
    return {
        name: math.sqrt(found[name]) if name in found else _number(value)
        for name, value in metrics.items()
    }


def _is_norm(value: DTensor) -> bool:
    partial = [placement for placement in value.placements if placement.is_partial()]
    return bool(partial) and all(map(_is_two_norm, partial))


def _is_two_norm(placement: Placement) -> bool:
    return getattr(placement, "norm_type", None) == 2


def _partial_axes(value: DTensor) -> tuple[int, ...]:
    return tuple(axis for axis, place in enumerate(value.placements) if place.is_partial())


def _number(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.item() if isinstance(value, torch.Tensor) else value
