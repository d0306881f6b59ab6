"""Norms of sharded tensors, from local shards: many of them in one reduction.

[Note: one reduction] A sum over a sharded tensor is the sum of what its shards add up to. Tensors
that are sharded alike are added up first, and what is left is one number a mesh, which one
all-reduce completes. Its layout depends on the parameters and not on which of them have a gradient:
a rank without one sends a zero, and no rank waits. Copies are not added up: in HSDP the all-reduce
goes over the shard axis alone, and a plain tensor needs none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from composer_fsdp2.parallel.expert.held import is_elsewhere
from composer_fsdp2.parallel.expert.mesh import divided_between
from composer_fsdp2.shard.device_mesh import whole_mesh
from composer_fsdp2.shard.torch_private.tensors import (
    TORCH_FUNCTION_OFF,
    layouts_of,
    local_tensor,
)

__all__ = [
    "Groups",
    "Shards",
    "clip_by_unit_norm_",
    "gradient_norm",
    "groups_of",
    "local_part",
    "norm_of",
    "whole_metrics",
]

Groups = tuple[ProcessGroup, ...]
"""over which a sum of a tensor's elements still has to be taken; none for a whole tensor"""


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, sharing its memory; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def groups_of(tensor: torch.Tensor) -> Groups:
    """The process groups between whose ranks a tensor is divided, or the experts that it is of."""
    if not isinstance(tensor, DTensor):
        return ()
    of_experts = divided_between(whole_mesh(tensor.device_mesh))
    if of_experts is not None:
        return of_experts
    return _groups(tensor.device_mesh, tensor.placements, _divides)


def _divides(placement: Placement) -> bool:
    return not placement.is_replicate() and not placement.is_partial()


def _groups(
    mesh: DeviceMesh, placements: Sequence[Placement], divides: Callable[[Placement], bool]
) -> Groups:
    return tuple(mesh.get_group(axis) for axis, place in enumerate(placements) if divides(place))


def _reduced(
    values: Sequence[torch.Tensor],
    groups: Sequence[Groups],
    operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> list[torch.Tensor]:
    """Values with what is missing from the other ranks, one collective for each process group.

    Values may be overwritten.
    """
    found = list(values)
    for group in dict.fromkeys(group for several in groups for group in several):
        places = [index for index, several in enumerate(groups) if group in several]
        if dist.get_world_size(group) == 1:
            continue
        if len(places) == 1:
            dist.all_reduce(found[places[0]], op=operation, group=group)
            continue
        device = found[places[0]].device
        flat = torch.cat([found[index].flatten().to(device) for index in places])
        dist.all_reduce(flat, op=operation, group=group)
        parts = flat.split([found[index].numel() for index in places])
        for index, part in zip(places, parts, strict=True):
            found[index] = part.view_as(found[index]).to(found[index])
    return found


# --- The norm of all gradients ---


class Shards:
    """This rank's shards of the gradients of parameters, by what they are divided between.

    Each parameter is looked at once: next to small shards, that is most of what a norm costs.
    """

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self.grads: list[torch.Tensor] = []
        """local tensors, some of them without elements"""
        self.terms: dict[Groups, list[torch.Tensor]] = {}
        """the same, to take norms of; with nothing in it, where other ranks may have a gradient"""
        self.dtypes: set[torch.dtype] = set()
        self.device = torch.device("cpu")
        held = list(params)
        with TORCH_FUNCTION_OFF():  # an attribute of a DTensor takes half the time
            grads = list(map(attrgetter("grad"), held))
            found = [p if grad is None else grad for p, grad in zip(held, grads, strict=True)]
            self.dtypes.update(map(attrgetter("dtype"), found))
        last: Any = self  # no layout
        terms, is_sum = list[torch.Tensor](), False
        layouts = layouts_of(found)
        for tensor, grad, layout in zip(found, grads, layouts, strict=True):
            if layout is not last:
                if last is self or not _are_alike(layout, last):
                    self.device = self.device if self.terms else tensor.device
                    terms = self.terms.setdefault(groups_of(tensor), [])
                    is_sum = _is_sum(layout)
                last = layout
            if grad is not None:
                local = grad if layout is None else local_tensor(grad)
                self.grads.append(local)
                terms.append(local_tensor(_summed_up(grad)) if is_sum else local)


def _are_alike(one: Any, other: Any) -> bool:
    """Whether tensors with these layouts are divided between the same ranks in the same way."""
    if one is None or other is None:
        return one is other
    # torch hands out layouts of equal meshes again, whose objects differ.
    same_mesh = one.mesh is other.mesh or one.mesh == other.mesh
    return same_mesh and one.placements == other.placements


def _is_sum(layout: Any) -> bool:
    return layout is not None and any(map(Placement.is_partial, layout.placements))


def _summed_up(grad: DTensor) -> DTensor:
    """A gradient of which the ranks hold terms of a sum, whose norms say nothing."""
    whole = [Replicate() if place.is_partial() else place for place in grad.placements]
    return grad.redistribute(placements=whole)


@torch.no_grad()
def gradient_norm(
    params: Iterable[torch.Tensor], norm_type: float = 2.0, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Norm of the gradients of parameters as if they were one vector, the same on all ranks.

    Collective: yes, over the meshes of the parameters; see [Note: one reduction]. Ranks give the
    same parameters in the same order.

    Args:
        params: sharded, whole, or both; a missing gradient counts as zeros.
        norm_type: p of the p-norm, above 0; also infinite.
        dtype: in which the elements are added up; by default the gradients' own, or float32 where
            that has fewer bits.

    Returns:
        A plain tensor without dimensions, in `dtype`, or in float64 if a parameter is and else in
        float32.

    Raises:
        ValueError: the order is not above 0.
    """
    return norm_of(Shards(params), norm_type, dtype=dtype)


def norm_of(
    shards: Shards,
    norm_type: float,
    *,
    foreach: bool | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """As `gradient_norm`; `foreach` is that of `torch.nn.utils.clip_grad_norm_`."""
    p = float(norm_type)
    if not p > 0:
        raise ValueError(
            f"norm_type is {norm_type}, and a norm over all gradients needs an order above 0. "
            "Others are no norms, and empty shards would change them. Write 2.0, or inf for the "
            "largest absolute value."
        )
    few_bits = any(found.itemsize < 4 for found in shards.dtypes)
    parts: list[torch.Tensor] = []
    for tensors in shards.terms.values() or [[]]:
        # `vector_norm` refuses an empty tensor for the infinite order.
        held = [tensor for tensor in tensors if tensor.numel() > 0]
        if not held:
            norm = torch.zeros((), device=shards.device)
        elif dtype is None and not few_bits:
            norm = torch.nn.utils.get_total_norm(held, p, foreach=foreach)
        else:
            # torch would round the norm of each tensor to the tensor's few bits.
            norms = [_precise_norm(tensor, p, dtype).to(shards.device) for tensor in held]
            norm = torch.linalg.vector_norm(torch.stack(norms), p)
        # In float64, so that powers of large norms stay finite.
        norm = norm.to(shards.device, torch.float64)
        if math.isinf(p):
            # A maximum over ranks may pass over a NaN.
            number = norm.nan_to_num(nan=0.0, posinf=math.inf)
            parts.append(torch.stack([number, norm.isnan().double()]))
        else:
            parts.append(norm.pow(p).reshape(1))
    operation: Any = dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM
    found = torch.stack(_reduced(parts, list(shards.terms) or [()], operation))
    if math.isinf(p):
        largest, is_nan = found.amax(dim=0)
        total = torch.where(is_nan > 0, math.nan, largest)
    else:
        total = found.sum().pow(1 / p)
    wide = shards.dtypes & {torch.float64, torch.complex128}
    return total.to(dtype or (torch.float64 if wide else torch.float32))


def _precise_norm(tensor: torch.Tensor, p: float, dtype: torch.dtype | None) -> torch.Tensor:
    few = torch.float32 if tensor.dtype.itemsize < 4 else None
    return torch.linalg.vector_norm(tensor, p, dtype=dtype or few).double()


# --- Norms of units ---


@torch.no_grad()
def clip_by_unit_norm_(params: Iterable[torch.Tensor], threshold: float) -> None:
    """Scales down gradients whose norm exceeds `threshold` times that of their weights.

    Collective: yes, over the meshes of the parameters; see [Note: one reduction]. Norms are those
    of rows (everything but dimension 0), and of a whole vector. Rows of a matrix that is sharded by
    rows need no communication; all else takes one reduction per mesh.

    Source: Brock et al., High-Performance Large-Scale Image Recognition Without Normalization.
    """
    held: list[tuple[torch.Tensor, Groups]] = []
    for param in params:
        if is_elsewhere(param):
            continue
        groups = _row_groups(param)
        # The other ranks may have a gradient where this one has none.
        if param.grad is not None or (groups and param.requires_grad):
            held.append((param, groups))
    squares = [_unit_squares(tensor) for param, _ in held for tensor in (param, _grad_of(param))]
    totals = _reduced(squares, [groups for _, groups in held for _ in range(2)])
    norms = [total.sqrt() for total in totals]
    for (param, _), weight_norm, grad_norm in zip(held, norms[::2], norms[1::2], strict=True):
        if param.grad is not None:
            limit = weight_norm.mul_(threshold).div_(grad_norm)
            scale = limit.nan_to_num_(nan=1.0).clamp_(max=1.0)
            local_part(param.grad).mul_(scale.to(param.grad.dtype))


def _grad_of(param: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad


def _unit_squares(tensor: torch.Tensor) -> torch.Tensor:
    local = local_part(tensor.detach())
    squares = local.to(torch.promote_types(local.dtype, torch.float32)).square()
    if tensor.ndim <= 1:
        return squares.sum()
    return squares.sum(dim=tuple(range(1, tensor.ndim)), keepdim=True)


def _row_groups(tensor: torch.Tensor) -> Groups:
    """The process groups between whose ranks a row (or a vector) is divided."""
    if not isinstance(tensor, DTensor):
        return ()

    def divides(placement: Placement) -> bool:
        by_rows = tensor.ndim > 1 and getattr(placement, "dim", None) == 0
        return _divides(placement) and not by_rows

    return _groups(tensor.device_mesh, tensor.placements, divides)


# --- Numbers to log ---


@torch.no_grad()
def whole_metrics(
    metrics: Mapping[str, Any], local: Mapping[str, Groups] | None = None
) -> dict[str, Any]:
    """The numbers of metrics that were computed with sharded tensors, or with local shards.

    Collective: yes, over the meshes of the metrics; ranks hold the same names in the same order.
    Norms, of which there is one per parameter, are reduced together, and all numbers come to the
    host at once.

    Args:
        metrics: tensors, or values that stay as they are.
        local: of metrics that are 2-norms of this rank's shards, what they are divided between.
    """
    groups = dict(local or {})
    for name, value in metrics.items():
        if isinstance(value, DTensor) and _is_norm(value):
            groups[name] = _groups(value.device_mesh, value.placements, Placement.is_partial)
    squares = [local_part(metrics[name]).double().square() for name in groups]
    norms = [square.sqrt() for square in _reduced(squares, [*groups.values()])]
    found = dict(zip(groups, norms, strict=True))
    whole = {name: _whole(found.get(name, value)) for name, value in metrics.items()}
    single = [name for name, value in whole.items() if _is_number(value)]
    if single:
        device = whole[single[0]].device
        flat = [whole[name].reshape(()).to(device, torch.float64) for name in single]
        whole.update(zip(single, torch.stack(flat).tolist(), strict=True))
    return {n: v.item() if isinstance(v, torch.Tensor) else v for n, v in whole.items()}


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() == 1


def _is_norm(value: DTensor) -> bool:
    partial = [placement for placement in value.placements if placement.is_partial()]
    return bool(partial) and all(map(_is_two_norm, partial))


def _is_two_norm(placement: Placement) -> bool:
    # Of torch's placement for norms: each rank holds the norm of its part, and squares add up.
    return getattr(cast("Any", placement), "norm_type", None) == 2
