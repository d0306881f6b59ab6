"""Computes norms of sharded tensors from local shards, many of them in one reduction.

[Note: one reduction] A sum over a sharded tensor is the sum over its shards. Tensors that are
sharded alike are added up first, to one number for each mesh, which one all-reduce completes. Its
layout depends on the parameters and not on which of them have a gradient: a rank without a gradient
sends a zero, and no rank waits. Replicas are not added up: in HSDP the all-reduce goes over the
shard axis alone, and a plain tensor needs none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Replicate

from composer_fsdp2.parallel.form import form_of
from composer_fsdp2.torch_private.tensors import (
    TORCH_FUNCTION_OFF,
    layouts_of,
    local_part,
    local_tensor,
)

__all__ = [
    "Groups",
    "Shards",
    "clip_by_unit_norm_",
    "clip_grad_norm_",
    "clip_grad_value_",
    "gradient_norm",
    "groups_of",
    "norm_of",
    "whole_metrics",
]


Groups = tuple[dist.ProcessGroup, ...]
"""process groups over which a sum of a tensor's elements has to be reduced; none if it is full"""


def groups_of(tensor: torch.Tensor, *, rows: bool = False) -> Groups:
    """Returns the process groups that share a tensor, or the list of its experts.

    Args:
        tensor: sharded or not; the parameter of an expert, because its gradient has no form.
        rows: returns the groups that share a single row, or a full vector.
    """
    if not isinstance(tensor, DTensor):
        return ()
    if not rows and (groups := form_of(tensor).groups) is not None:
        return groups
    between_rows = rows and tensor.ndim > 1
    return _groups(
        tensor,
        lambda placement: (
            not placement.is_replicate()
            and not placement.is_partial()
            and not (between_rows and getattr(placement, "dim", None) == 0)
        ),
    )


def _groups(tensor: DTensor, divides: Callable[[Placement], bool]) -> Groups:
    """Returns the process groups of the mesh axes whose placement `divides`."""
    return tuple(
        tensor.device_mesh.get_group(axis)
        for axis, placement in enumerate(tensor.placements)
        if divides(placement)
    )


def _reduced(
    values: Sequence[torch.Tensor],
    groups: Sequence[Groups],
    operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> list[torch.Tensor]:
    """Adds up partial sums, or takes their maximum, over groups: one collective for each group.

    Args:
        values: partial results of this rank.
        groups: for each value the process groups over which it is reduced, one after the other.
        operation: sum or maximum.
    """
    reduced = list(values)
    for group in dict.fromkeys(group for of_value in groups for group in of_value):
        indices = [index for index, of_value in enumerate(groups) if group in of_value]
        if dist.get_world_size(group) == 1:
            continue
        device = reduced[indices[0]].device
        flat = torch.cat([reduced[index].flatten().to(device) for index in indices])
        dist.all_reduce(flat, op=operation, group=group)
        parts = flat.split([reduced[index].numel() for index in indices])
        for index, part in zip(indices, parts, strict=True):
            reduced[index] = part.view_as(reduced[index]).to(reduced[index])
    return reduced


# --- The norm of all gradients ---


class Shards:
    """This rank's shards of the gradients of parameters, by the process groups that share them.

    Each parameter is looked at once: with small shards, looking is most of the cost of a norm.
    """

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self.grads: list[torch.Tensor] = []
        """local tensors, some of them without elements"""
        self.terms: dict[Groups, list[torch.Tensor]] = {}
        """local tensors to take norms of; an empty list if other ranks alone may have gradients"""
        params = list(params)
        with TORCH_FUNCTION_OFF():  # an attribute of a DTensor takes half the time
            grads = list(map(attrgetter("grad"), params))
            tensors = [p if grad is None else grad for p, grad in zip(params, grads, strict=True)]
            self.dtypes = set(map(attrgetter("dtype"), tensors))
            self.device = tensors[0].device if tensors else torch.device("cpu")
        terms_of: dict[Any, tuple[list[torch.Tensor], bool]] = {}
        for param, grad, layout in zip(params, grads, layouts_of(tensors), strict=True):
            placed = () if layout is None else layout.placements
            # By the mesh's value: torch hands out equal meshes whose objects and groups differ.
            across = form_of(param).groups
            key = None if layout is None else (layout.mesh, placed, across)
            if key not in terms_of:
                is_sum = any(map(Placement.is_partial, placed))
                divided = groups_of(param) if grad is None or across else groups_of(grad)
                terms_of[key] = self.terms.setdefault(divided, []), is_sum
            terms, is_sum = terms_of[key]
            if grad is not None:
                local = grad if layout is None else local_tensor(grad)
                self.grads.append(local)
                if is_sum:
                    # The ranks hold terms of a sum, whose norms say nothing.
                    placements = [Replicate() if p.is_partial() else p for p in placed]
                    local = local_tensor(grad.redistribute(placements=placements))
                terms.append(local)


@torch.no_grad()
def gradient_norm(
    params: Iterable[torch.Tensor], norm_type: float = 2.0, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Returns the norm of all gradients as if they were one vector, the same on all ranks.

    Collective: yes, over the meshes of the parameters; see [Note: one reduction]. Ranks give the
    same parameters in the same order.

    Args:
        params: sharded, full, or both; a missing gradient counts as zeros.
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
    """Returns the norm of gradients, as `gradient_norm` does. Collective: yes.

    Args:
        shards: this rank's shards of the gradients.
        norm_type: p of the p-norm, above 0; also infinite.
        foreach: whether torch computes many norms at once; by default where it can.
        dtype: dtype of the sum, as in `gradient_norm`.
    """
    p = float(norm_type)
    if not p > 0:
        raise ValueError(
            f"norm_type is {norm_type}, and a norm over all gradients needs an order above 0. "
            "Others are no norms, and empty shards would change them. Write 2.0, or inf for the "
            "largest absolute value."
        )
    few_bits = any(dtype_of_grad.itemsize < 4 for dtype_of_grad in shards.dtypes)
    parts: list[torch.Tensor] = []
    for tensors in shards.terms.values() or [[]]:
        # `vector_norm` refuses an empty tensor for the infinite order.
        filled = [tensor for tensor in tensors if tensor.numel() > 0]
        if not filled:
            norm = torch.zeros((), device=shards.device)
        elif dtype is None and not few_bits:
            norm = torch.nn.utils.get_total_norm(filled, p, foreach=foreach)
        else:
            # torch would round the norm of each tensor to the tensor's few bits.
            norms = [
                torch.linalg.vector_norm(
                    tensor, p, dtype=dtype or (torch.float32 if tensor.itemsize < 4 else None)
                ).to(shards.device, torch.float64)
                for tensor in filled
            ]
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
    reduced = torch.stack(_reduced(parts, list(shards.terms) or [()], operation))
    if math.isinf(p):
        largest, is_nan = reduced.amax(dim=0)
        total = torch.where(is_nan > 0, math.nan, largest)
    else:
        total = reduced.sum().pow(1 / p)
    wide = shards.dtypes & {torch.float64, torch.complex128}
    return total.to(dtype or (torch.float64 if wide else torch.float32))


# --- Norms of units ---


@torch.no_grad()
def clip_by_unit_norm_(params: Iterable[torch.Tensor], threshold: float) -> None:
    """Scales down gradients whose norm exceeds `threshold` times that of their weights.

    Collective: yes, over the meshes of the parameters; see [Note: one reduction]. Norms are those
    of rows (everything but dimension 0), and of a full vector. Rows of a matrix that is sharded by
    rows need no communication; other rows and vectors take one reduction per mesh.

    Source: Brock et al., High-Performance Large-Scale Image Recognition Without Normalization.
    """
    clipped: list[tuple[torch.Tensor, Groups]] = []
    for param in params:
        if form_of(param).is_remote:
            continue
        groups = groups_of(param, rows=True)
        # The other ranks may have a gradient where this one has none.
        if param.grad is not None or (groups and param.requires_grad):
            clipped.append((param, groups))
    pairs = [(p, torch.zeros_like(p) if p.grad is None else p.grad) for p, _ in clipped]
    squares: list[torch.Tensor] = []
    for tensor in itertools.chain.from_iterable(pairs):
        local = local_part(tensor.detach())
        square = local.to(torch.promote_types(local.dtype, torch.float32)).square()
        dims = tuple(range(1, tensor.ndim))
        squares.append(square.sum(dim=dims, keepdim=True) if dims else square.sum())
    of_squares = [groups for _, groups in clipped for _ in range(2)]
    norms = [total.sqrt() for total in _reduced(squares, of_squares)]
    for (param, _), weight_norm, grad_norm in zip(clipped, norms[::2], norms[1::2], strict=True):
        if param.grad is not None:
            scale = weight_norm.mul_(threshold).div_(grad_norm)
            scale = scale.nan_to_num_(nan=1.0).clamp_(max=1.0)
            local_part(param.grad).mul_(scale.to(param.grad.dtype))


# --- Numbers to log ---


@torch.no_grad()
def whole_metrics(
    metrics: Mapping[str, Any], local: Mapping[str, Groups] | None = None
) -> dict[str, Any]:
    """Returns the numbers of metrics that were computed with sharded tensors, or with local shards.

    Collective: yes, over the meshes of the metrics; ranks hold the same names in the same order.
    Norms, of which there is one per parameter, are reduced together, and all numbers come to the
    host at once.

    Args:
        metrics: tensors, or values that stay as they are.
        local: process groups that share the tensor, for metrics that are 2-norms of local shards.
    """
    groups = dict(local or {})
    for name, value in metrics.items():
        placements = value.placements if isinstance(value, DTensor) else ()
        partial: list[Any] = [placement for placement in placements if placement.is_partial()]
        # torch's placement for norms: each rank holds the norm of its part, and squares add up.
        if partial and all(getattr(placement, "norm_type", None) == 2 for placement in partial):
            groups[name] = _groups(value, Placement.is_partial)
    squares = [local_part(metrics[name]).double().square() for name in groups]
    norms = [square.sqrt() for square in _reduced(squares, [*groups.values()])]
    numbers = {**metrics, **dict(zip(groups, norms, strict=True))}
    numbers = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in numbers.items()}
    tensors = {n: v for n, v in numbers.items() if isinstance(v, torch.Tensor)}
    single = [n for n, v in tensors.items() if v.is_floating_point() and v.numel() == 1]
    if single:
        device = numbers[single[0]].device
        flat = [numbers[name].reshape(()).to(device, torch.float64) for name in single]
        numbers.update(zip(single, torch.stack(flat).tolist(), strict=True))
    return {n: v.item() if isinstance(v, torch.Tensor) else v for n, v in numbers.items()}


# --- Clipping of gradients on local shards. ---


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clips the norm of all gradients, as if they were one vector: the signature of torch's own.

    Local shards are enough, with one number sent for each mesh, where
    `torch.nn.utils.clip_grad_norm_` goes through a DTensor for each gradient. Parameters may be
    sharded over several meshes, which torch's own refuses, and some may be plain tensors, which
    count once.

    Collective: yes, over the meshes of the parameters. Every rank gives the same parameters in the
    same order; a parameter may have no gradient on some of them.

    Args:
        parameters: a tensor or several, whose gradients are scaled in place.
        max_norm: the largest norm that is left as it is.
        norm_type: p of the p-norm, above 0; `float("inf")` for the largest absolute value.
        error_if_nonfinite: refuse a norm that is infinite or NaN. The host then waits for the
            device.
        foreach: use the implementation for many tensors at once; by default where there is one.

    Returns:
        The norm before clipping, over all ranks: a plain tensor, in float64 if a parameter is and
        else in float32. torch's own returns a DTensor, whose `item()` may be a part of the norm.

    Raises:
        RuntimeError: the norm is infinite or NaN and `error_if_nonfinite` is true. The gradients
            stay as they are.
        ValueError: `norm_type` is not above 0.

    Source: the factor is torch's,
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/nn/utils/clip_grad.py#L109

    Example:
        >>> import torch, composer_fsdp2
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = composer_fsdp2.prepare_fully_shard(model, None, {}, device="cpu")
        >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
        >>> composer_fsdp2.clip_grad_norm_(model.parameters(), max_norm=1.0)
        tensor(5.)
    """
    shards = Shards([parameters] if isinstance(parameters, torch.Tensor) else parameters)
    total = norm_of(shards, norm_type, foreach=foreach)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The norm of order {norm_type} of all gradients is non-finite ({total.item()}), so "
            "clipping would make every gradient 0 or NaN. Look for the step whose loss is not "
            "finite, or pass error_if_nonfinite=False to scale by it all the same."
        )
    torch.nn.utils.clip_grads_with_norm_(_holders(shards.grads), max_norm, total, foreach)
    return total


@torch.no_grad()
def clip_grad_value_(parameters: Iterable[torch.Tensor], clip_value: float) -> None:
    """Clips each element of the gradients. Collective: no."""
    torch.nn.utils.clip_grad_value_(_holders(Shards(parameters).grads), clip_value)


def _holders(grads: Iterable[torch.Tensor]) -> list[Any]:
    """Returns objects that have a gradient as `grad`, all that torch reads of parameters."""
    return [SimpleNamespace(grad=grad) for grad in grads]
