"""Fused projections: the order of their rows, on the ranks and in checkpoints.

[Note: order of rows] Query, key and value of a fused projection lie one after the other. A rank of
a tensor group needs its heads of each, so each block is cut by itself, and what one rank holds lies
together: the parameter has the same rows in another order. Everybody else is shown the order of the
model. State dicts of the model and of the optimizer are put back into it, and what is loaded is
taken from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

__all__ = ["RowOrder", "order_of", "part_of", "show_usual_order", "show_usual_state"]

_ORDER = "_fsdp2_row_order"
"""attribute of a parameter, for `order_of`"""


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The order in which ranks hold what lies in blocks along one dimension."""

    blocks: tuple[int, ...]
    degree: int
    dim: int

    def indices(self) -> torch.Tensor:
        """Where each row of the ranks' order is in the model's order."""
        starts = [sum(self.blocks[:index]) for index in range(len(self.blocks))]
        parts = [
            torch.arange(
                start + rank * size // self.degree, start + (rank + 1) * size // self.degree
            )
            for rank in range(self.degree)
            for start, size in zip(starts, self.blocks, strict=True)
        ]
        return torch.cat(parts)

    def to_ranks(self, whole: torch.Tensor) -> torch.Tensor:
        """The whole tensor in the ranks' order."""
        return whole.index_select(self.dim, self.indices().to(whole.device))

    def to_model(self, whole: torch.Tensor) -> torch.Tensor:
        """The whole tensor in the model's order."""
        return whole.index_select(self.dim, self.indices().argsort().to(whole.device))

    def note(self, param: nn.Parameter) -> None:
        """Remembers it on a parameter; sharding carries attributes over."""
        setattr(param, _ORDER, self)


def order_of(param: object) -> RowOrder | None:
    """Returns the order of a parameter's rows, `None` where it is that of the model."""
    return getattr(param, _ORDER, None)


def part_of(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """This rank's part of a whole tensor, as a copy. Collective: no.

    The innermost axis is cut first: FSDP2 divides what a rank of a tensor group holds.
    """
    part = whole.detach()
    for axis in reversed(range(mesh.ndim)):
        dim: int | None = getattr(placements[axis], "dim", None)
        if dim is None:
            continue
        count, rank = mesh.size(axis), mesh.get_local_rank(axis)
        step = -(-part.shape[dim] // count)
        start = min(rank * step, part.shape[dim])
        part = part.narrow(dim, start, min(step, part.shape[dim] - start))
    return DTensor.from_local(
        part.clone(memory_format=torch.contiguous_format),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


@torch.no_grad()
def _reordered(value: Any, order: RowOrder, *, to_model: bool) -> Any:
    """The same tensor in the other order. Collective: yes, for a DTensor."""
    if not isinstance(value, torch.Tensor):
        return value
    change = order.to_model if to_model else order.to_ranks
    if not isinstance(value, DTensor):
        return change(value)
    return part_of(change(value.full_tensor()), value.device_mesh, value.placements)


def show_usual_order(module: nn.Module, orders: Mapping[str, RowOrder]) -> None:
    """Has state dicts of a module show the order of the model; see [Note: order of rows].

    Collective: no, but each state dict is from then on, over the ranks of the parameter.

    Args:
        module: holds fused parameters.
        orders: by attribute.
    """

    def after_saving(_: nn.Module, state: dict[str, Any], prefix: str, *_args: Any) -> None:
        for name, order in orders.items():
            if isinstance(value := state.get(prefix + name), torch.Tensor):
                state[prefix + name] = _reordered(value, order, to_model=True)

    def before_loading(
        _: nn.Module, state: dict[str, Any], prefix: str, *_args: Any, **_kwargs: Any
    ) -> None:
        for name, order in orders.items():
            if prefix + name in state:
                state[prefix + name] = _reordered(state[prefix + name], order, to_model=False)

    module.register_state_dict_post_hook(after_saving)
    module.register_load_state_dict_pre_hook(before_loading)


def show_usual_state(optimizer: torch.optim.Optimizer) -> None:
    """Has state dicts of an optimizer show the order of the model; see [Note: order of rows].

    Collective: no, but each state dict is from then on, over the ranks of the parameters.
    """
    if not any(order_of(p) for group in optimizer.param_groups for p in group["params"]):
        return

    def after_saving(held: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return _with_state(held, state, to_model=True)

    def before_loading(held: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return _with_state(held, state, to_model=False)

    optimizer.register_state_dict_post_hook(after_saving)
    optimizer.register_load_state_dict_pre_hook(before_loading)


def _with_state(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], *, to_model: bool
) -> dict[str, Any]:
    """A state dict whose entries for fused parameters are in the other order."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    changed = dict(state["state"])
    for number, param in zip(numbers, params, strict=True):
        order = order_of(param)
        if order is None or number not in changed:
            continue
        changed[number] = {
            key: _reordered(value, order, to_model=to_model)
            if isinstance(value, torch.Tensor) and value.shape == param.shape
            else value
            for key, value in changed[number].items()
        }
    return {**state, "state": changed}
