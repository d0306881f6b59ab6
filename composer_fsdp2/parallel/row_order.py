"""The order in which ranks hold rows of divided layers, and the one of checkpoints.

[Note: order of rows] Query, key and value of a fused projection lie one after the other. A rank of
a tensor group needs its heads of each, so each block is cut by itself, and what one rank holds lies
together: the parameter has the same rows in another order. Everybody else is shown the order of the
model. State dicts of the model and of the optimizer are put back into it, and what is loaded is
taken from it.

[Note: padding] FSDP2 shards what a rank of a tensor group holds, and torch does so evenly alone. So
each rank's part ends in rows of zeros where its size is not a multiple of the ranks that share it.
What is computed with them is cut off, so their gradients are zero, and no state dict shows them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from composer_fsdp2.plan.mesh_shape import TENSOR_AXIS

__all__ = [
    "RowOrder",
    "cut_in_order",
    "group_dividing",
    "order_of",
    "part_of",
    "set_order",
    "shape_in_model",
    "show_usual_order",
    "show_usual_state",
    "to_model_order",
    "to_ranks_order",
    "whole_to_part",
    "without_order",
]

_ORDER = "_fsdp2_row_order"
"""attribute of a parameter, for `order_of`"""


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The order in which ranks hold what lies in blocks along one dimension."""

    blocks: tuple[int, ...]
    """sizes, each a multiple of the degree"""
    degree: int
    dim: int
    padding: int = 0
    """rows of zeros at the end of each rank's part; see [Note: padding]"""

    @property
    def rows(self) -> int:
        """Rows of the model that each rank holds."""
        return sum(self.blocks) // self.degree

    def runs(self) -> list[tuple[int, int, int]]:
        """Where rows lie one after the other in both orders: begin here, in the model, and count.

        Rows that are in none of them are padding.
        """
        found: list[tuple[int, int, int]] = []
        for rank in range(self.degree):
            here, start = rank * (self.rows + self.padding), 0
            for size in self.blocks:
                share = size // self.degree
                found.append((here, start + rank * share, share))
                here, start = here + share, start + size
        return found

    def to_ranks(self, whole: torch.Tensor) -> torch.Tensor:
        """The whole tensor in the ranks' order, with padding."""
        shape = list(whole.shape)
        shape[self.dim] = self.degree * (self.rows + self.padding)
        found = whole.new_zeros(shape)
        for here, there, count in self.runs():
            found.narrow(self.dim, here, count).copy_(whole.narrow(self.dim, there, count))
        return found

    def to_model(self, whole: torch.Tensor) -> torch.Tensor:
        """The whole tensor in the model's order, without padding."""
        found = whole.new_empty(self.shape_in_model(whole.shape))
        for here, there, count in self.runs():
            found.narrow(self.dim, there, count).copy_(whole.narrow(self.dim, here, count))
        return found

    def shape_in_model(self, shape: torch.Size) -> torch.Size:
        """The shape that everybody else is shown."""
        return torch.Size((*shape[: self.dim], sum(self.blocks), *shape[self.dim + 1 :]))


def set_order(param: nn.Parameter, order: RowOrder) -> None:
    """Remembers the order on a parameter; sharding carries attributes over."""
    setattr(param, _ORDER, order)


def order_of(param: object) -> RowOrder | None:
    """Returns the order of a parameter's rows, `None` where it is that of the model."""
    return getattr(param, _ORDER, None)


def without_order(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of a parameter, for a tensor in its place that is as the model has it.

    Collective: no. State dicts leave such a tensor as it is.
    """
    return {name: None if name == _ORDER else value for name, value in attributes.items()}


def _is_strided(placement: Placement) -> bool:
    """Whether an axis divides what the axes to its right have divided before."""
    # The class is private: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/tensor/placement_types.py#L375
    return hasattr(placement, "split_factor")


def cut_in_order(placements: Sequence[Placement]) -> list[int]:
    """Returns the axes of a mesh, those first that divide what others divide once more."""
    return sorted(range(len(placements)), key=lambda axis: _is_strided(placements[axis]))


def part_of(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """This rank's part of a whole tensor, as a copy. Collective: no.

    FSDP2 divides what a rank of a tensor group holds, which its placement says.
    """
    part = whole.detach()
    # A rank past the end has an empty part, as `torch.chunk` and FSDP2 have it:
    # https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_common.py#L121
    for axis in cut_in_order(placements):
        dim: int | None = getattr(placements[axis], "dim", None)
        if dim is None:
            continue
        count, rank = mesh.size(axis), mesh.get_local_rank(axis)
        step = -(-part.shape[dim] // count)
        start = min(rank * step, part.shape[dim])
        part = part.narrow(dim, start, min(step, part.shape[dim] - start))
    # The shape is given because torch would take all parts to be as large as this one. Its check
    # would be a collective, and ranks have cut the same tensor.
    return DTensor.from_local(
        # A copy: a view would keep the whole tensor.
        part.clone(memory_format=torch.contiguous_format),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def group_dividing(param: object) -> dist.ProcessGroup | None:
    """Returns the ranks that divide a parameter's layer, `None` where none do. Collective: no."""
    if isinstance(param, DTensor) and TENSOR_AXIS in (param.device_mesh.mesh_dim_names or ()):
        return param.device_mesh.get_group(TENSOR_AXIS)
    return None


def shape_in_model(param: torch.Tensor) -> torch.Size:
    """Returns the shape of a parameter before layers were divided. Collective: no."""
    order = order_of(param)
    return param.shape if order is None else order.shape_in_model(param.shape)


def whole_to_part(whole: torch.Tensor, like: DTensor) -> DTensor:
    """This rank's part of a whole tensor of the model, divided like a parameter. Collective: no."""
    order = order_of(like)
    whole = whole if order is None else order.to_ranks(whole)
    return part_of(whole, like.device_mesh, like.placements)


@torch.no_grad()
def to_model_order(value: Any, order: RowOrder | None, _like: Any = None) -> Any:
    """Returns a tensor as the model has it. Collective: yes, for a DTensor with an order."""
    if order is None:
        return value
    if not isinstance(value, DTensor):
        return order.to_model(value)
    places: Sequence[Placement] = value.placements
    if order.padding:  # torch knows no uneven strided placements
        places = [Shard(getattr(p, "dim", 0)) if _is_strided(p) else p for p in places]
    return part_of(order.to_model(value.full_tensor()), value.device_mesh, places)


@torch.no_grad()
def to_ranks_order(value: Any, order: RowOrder | None, like: torch.Tensor | None) -> Any:
    """Returns a tensor of the model as the ranks have it. Collective: yes, as `to_model_order`."""
    if order is None:
        return value
    if not isinstance(value, DTensor):
        return order.to_ranks(value)
    if order.padding and like is not None and value.shape == like.shape:
        return value  # divided already
    whole = order.to_ranks(value.full_tensor())
    same = like if isinstance(like, DTensor) else value
    return part_of(whole, same.device_mesh, same.placements).to(value.device)


def show_usual_order(module: nn.Module) -> None:
    """Has state dicts of a module show the order of the model; see [Note: order of rows].

    Collective: no, but each state dict is from then on, over the ranks of a fused parameter.
    """
    found = {name: order_of(param) for name, param in module._parameters.items()}
    orders = {name: order for name, order in found.items() if order is not None}
    if orders:
        # The orders are kept for the hooks: a gathered parameter is another object in the place of
        # the one that has the attribute.
        module.register_state_dict_post_hook(functools.partial(_change, to_model_order, orders))
        module.register_load_state_dict_pre_hook(functools.partial(_change, to_ranks_order, orders))


def _change(
    change: Callable[..., Any],
    orders: Mapping[str, RowOrder],
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    *_args: Any,
    **_kwargs: Any,
) -> None:
    for name, order in orders.items():
        own, value = module._parameters[name], state.get(prefix + name)
        # A tensor in the place of a summoned parameter is in the model's order.
        if getattr(own, _ORDER, "") is not None and isinstance(value, torch.Tensor):
            state[prefix + name] = change(value, order, own)


def show_usual_state(optimizer: torch.optim.Optimizer) -> None:
    """Has state dicts of an optimizer show the order of the model; see [Note: order of rows].

    Collective: no, but each state dict is from then on, over the ranks of the parameters.
    """
    if any(order_of(p) for group in optimizer.param_groups for p in group["params"]):
        to_model = functools.partial(_with_state, to_model=True)
        optimizer.register_state_dict_post_hook(to_model)
        to_ranks = functools.partial(_with_state, to_model=False)
        optimizer.register_load_state_dict_pre_hook(to_ranks)


def _with_state(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], *, to_model: bool
) -> dict[str, Any]:
    """A state dict whose entries for fused parameters are in the other order."""
    change = to_model_order if to_model else to_ranks_order
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    changed = dict(state["state"])
    for number, param in zip(numbers, params, strict=True):
        if (order := order_of(param)) is None or number not in changed:
            continue
        # Other tensors of a state are no rows: a step, or a moment that is factored.
        before = param.shape if to_model else order.shape_in_model(param.shape)
        changed[number] = {
            key: change(value, order, param)
            if isinstance(value, torch.Tensor) and value.shape == before
            else value
            for key, value in changed[number].items()
        }
    return {**state, "state": changed}
