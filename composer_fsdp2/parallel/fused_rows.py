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
    "FusedRowsForm",
    "cut_in_order",
    "fused_rows_form_of",
    "group_dividing",
    "part_of",
    "rows_of",
    "set_order",
    "shape_in_model",
    "show_usual_form",
    "show_usual_order",
    "show_usual_order_of_states",
    "show_usual_states",
    "to_model_order",
    "to_ranks_order",
    "whole_to_part",
    "without_order",
]

_ORDER = "_fsdp2_row_order"
"""attribute of a parameter, for `fused_rows_form_of`"""

States = Mapping[int, Mapping[Any, Any]]
"""state of each parameter, by its number in the state dict of the optimizer"""
_Change = Callable[[Mapping[int, tuple[Any, Any]], States], States]


@dataclass(frozen=True, slots=True)
class FusedRowsForm:
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


def set_order(param: nn.Parameter, order: FusedRowsForm) -> None:
    """Remembers the order on a parameter; sharding carries attributes over."""
    setattr(param, _ORDER, order)


def fused_rows_form_of(param: object) -> FusedRowsForm | None:
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


def rows_of(count: int, ranks: int, rank: int) -> range:
    """Returns the rows of a rank. A rank past the end has none, as with `torch.chunk` and FSDP2.

    Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_common.py#L121
    """
    step = -(-count // ranks)
    return range(min(rank * step, count), min((rank + 1) * step, count))


def part_of(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """This rank's part of a whole tensor, as a copy. Collective: no.

    FSDP2 divides what a rank of a tensor group holds, which its placement says.
    """
    part = whole.detach()
    for axis in cut_in_order(placements):
        dim: int | None = getattr(placements[axis], "dim", None)
        if dim is None:
            continue
        rows = rows_of(part.shape[dim], mesh.size(axis), mesh.get_local_rank(axis))
        part = part.narrow(dim, rows.start, len(rows))
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
    order = fused_rows_form_of(param)
    return param.shape if order is None else order.shape_in_model(param.shape)


def whole_to_part(whole: torch.Tensor, like: DTensor) -> DTensor:
    """This rank's part of a whole tensor of the model, divided like a parameter. Collective: no."""
    order = fused_rows_form_of(like)
    whole = whole if order is None else order.to_ranks(whole)
    return part_of(whole, like.device_mesh, like.placements)


@torch.no_grad()
def to_model_order(value: Any, order: FusedRowsForm | None, _like: Any = None) -> Any:
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
def to_ranks_order(value: Any, order: FusedRowsForm | None, like: torch.Tensor | None) -> Any:
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


# --- State dicts ---


def show_usual_form(
    module: nn.Module, show: Callable[..., None], load: Callable[..., None]
) -> None:
    """Shows state dicts of a module in the form of a model that is not divided.

    Collective: no, but each state dict is from then on, as the functions are.

    Args:
        module: of the model.
        show: changes a state dict that is made, as a hook of torch does.
        load: changes one that is about to be loaded.
    """
    module.register_state_dict_post_hook(show)
    module.register_load_state_dict_pre_hook(load)


def show_usual_states(
    optimizer: torch.optim.Optimizer, form_of: Callable[[Any], Any], show: _Change, load: _Change
) -> None:
    """Does for an optimizer what `show_usual_form` does for a module.

    Collective: no, but each state dict is from then on, as the functions are.

    Args:
        optimizer: whose parameters are sharded.
        form_of: how ranks hold a parameter, `None` for one that is as everybody knows it.
        show: returns what a state dict shows, given parameters and their forms by the numbers that
            the state dict has for them, and what each rank holds.
        load: returns what each rank loads, given the same of a state dict.
    """
    if any(form_of(param) for group in optimizer.param_groups for param in group["params"]):
        optimizer.register_state_dict_post_hook(functools.partial(_with_states, form_of, show))
        optimizer.register_load_state_dict_pre_hook(functools.partial(_with_states, form_of, load))


def _with_states(
    form_of: Callable[[Any], Any],
    change: _Change,
    optimizer: torch.optim.Optimizer,
    saved: dict[str, Any],
) -> dict[str, Any]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    named = zip(numbers, params, strict=True)
    forms = {n: (param, form) for n, param in named if (form := form_of(param)) is not None}
    return {**saved, "state": change(forms, saved["state"])}


def show_usual_order(module: nn.Module) -> None:
    """Has state dicts of a module show the order of the model; see [Note: order of rows].

    Collective: no, but each state dict is from then on, over the ranks of a fused parameter.
    """
    params = module._parameters.items()
    orders = {
        name: order for name, param in params if (order := fused_rows_form_of(param)) is not None
    }
    if orders:
        # The orders are kept for the hooks: a gathered parameter is another object in the place of
        # the one that has the attribute.
        show_usual_form(
            module,
            functools.partial(_change, to_model_order, orders),
            functools.partial(_change, to_ranks_order, orders),
        )


def _change(
    change: Callable[..., Any],
    orders: Mapping[str, FusedRowsForm],
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


def show_usual_order_of_states(optimizer: torch.optim.Optimizer) -> None:
    """Has state dicts of an optimizer show the order of the model; see [Note: order of rows].

    Collective: no, but each state dict is from then on, over the ranks of the parameters.
    """
    show_usual_states(
        optimizer,
        fused_rows_form_of,
        functools.partial(_in_order, to_model=True),
        functools.partial(_in_order, to_model=False),
    )


def _in_order(
    forms: Mapping[int, tuple[Any, FusedRowsForm]], states: States, *, to_model: bool
) -> States:
    """Returns states whose tensors for fused parameters are in the other order."""
    change = to_model_order if to_model else to_ranks_order
    changed = dict(states)
    for number, (param, order) in forms.items():
        # Other tensors of a state are no rows: a step, or a moment that is factored.
        before = param.shape if to_model else order.shape_in_model(param.shape)
        if number in states:
            changed[number] = {
                key: change(value, order, param)
                if isinstance(value, torch.Tensor) and value.shape == before
                else value
                for key, value in states[number].items()
            }
    return changed
