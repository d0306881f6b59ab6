"""Parameters that get a gradient on some ranks only, or on none.

[Note: unused parameters] FSDP2 reduces what has a gradient. Where ranks differ in that, it reduces
tensors of different sizes, or silently one parameter's gradient into another's. So a unit that took
part in backward reduces a zero where a parameter of its got nothing. The ranks then tell each other
what was used: a parameter that none of them used is left without a gradient, as in one process, so
that momentum and weight decay leave it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from composer_fsdp2.core.collectives import is_fake
from composer_fsdp2.core.recovery import param_groups

__all__ = ["pass_gradients", "reduce_unused"]


def reduce_unused(units: Mapping[str, FSDPModule], always: Collection[str]) -> None:
    """Makes units reduce every parameter of theirs on every rank.

    Collective: no; the end of a backward that reduces is, over the default group.

    Args:
        units: all of them, by name.
        always: names of those in which parameters may be left out. The others are watched in the
            first backward, and stay with them where ranks used different parameters.
    """
    if dist.get_world_size() > 1 and not is_fake():
        _Unused(units.values(), [units[name] for name in always])


class _Unused:
    def __init__(self, units: Iterable[FSDPModule], always: Iterable[FSDPModule]) -> None:
        self._always = {group for unit in always for group in param_groups(unit)}
        self._groups = [group for unit in units for group in param_groups(unit)]
        self._size = dist.get_world_size()
        self._watching = True
        self._ran: set[Any] = set()
        self._used: set[Any] = set()
        self._fresh: set[Any] = set()
        """had no gradient before the reductions that are still to be agreed on"""
        self._backward = -1
        for group in self._groups:
            group.post_backward = partial(self._post_backward, group, group.post_backward)
            group.forget_unused = self._forget
        for group in self._groups[:1]:
            group.agree_on_used = self._agree_on_used

    def _post_backward(self, group: Any, reduce: Callable[..., Any], *args: Any) -> Any:
        if self._watching or group in self._always:
            self._note(group)
            self._end_with_this_backward()
        return reduce(*args)

    def _note(self, group: Any) -> None:
        """Fills gradients in where the group is about to reduce. Collective: no."""
        if group._training_state.name == "PRE_BACKWARD":
            self._ran.add(group)
        params = [param for param in _trained(group) if hasattr(param, "_unsharded_param")]
        missing = [param for param in params if not _has_gradient(param)]
        self._used.update(set(params).difference(missing))
        if not group.reduce_grads or group not in self._ran:
            return
        self._ran.discard(group)
        self._fresh.update(param for param in params if param.sharded_param.grad is None)
        for param in missing:
            param._unsharded_param.grad = torch.zeros_like(param._unsharded_param)
        if any(param.unsharded_accumulated_grad is not None for param in params):
            # What came with an earlier microbatch has the dtype of the reduction already.
            for param in params:
                param.accumulate_unsharded_grad_if_needed()
                param.to_accumulated_grad_if_needed()

    def _end_with_this_backward(self) -> None:
        number = torch._C._current_graph_task_id()
        if number == self._backward:
            return
        self._backward = number
        # One that is put in later comes after those of all units, of several roots too.
        queue = Variable._execution_engine.queue_callback  # pyright: ignore
        queue(lambda: queue(self._settle))

    @torch.no_grad()
    def _settle(self) -> None:
        """Takes back the gradients that nobody computed. Collective: yes."""
        groups = [g for g in self._groups if self._watching or g in self._always]
        groups = [group for group in groups if _is_complete(group)]
        params = [param for group in groups for param in _trained(group)]
        if not params:
            return
        counts = self._groups[0].agree_on_used(params)
        for param, count in zip(params, counts, strict=True):
            if count == 0 and param in self._fresh:
                param.sharded_param.grad = None
        if self._watching:
            self._watching = False
            partly = {p for p, c in zip(params, counts, strict=True) if 0 < c < self._size}
            self._always.update(g for g in groups if partly.intersection(g.fsdp_params))
        self._used.difference_update(params)
        self._fresh.difference_update(params)

    def _agree_on_used(self, params: list[Any]) -> list[int]:
        """By how many ranks each was used. Collective: yes."""
        flags = [int(param in self._used) for param in params]
        counts = torch.tensor(flags, dtype=torch.int32, device=self._groups[0].device)
        dist.all_reduce(counts)
        return counts.tolist()

    def _forget(self) -> None:
        """Starts anew after a step that was aborted. Collective: no."""
        self._used.clear()
        self._fresh.clear()
        self._ran.clear()


def _trained(group: Any) -> list[Any]:
    """What autograd may give a gradient; it sees the gathered copies, once there are any."""
    params = group.fsdp_params
    return [p for p in params if getattr(p, "_unsharded_param", p.sharded_param).requires_grad]


def _has_gradient(param: Any) -> bool:
    return param.unsharded_accumulated_grad is not None or param._unsharded_param.grad is not None


def _is_complete(group: Any) -> bool:
    """Whether what it reduces is the gradient of the step, and not a part of it."""
    averaging = getattr(group._all_reduce_hook, "due", True)
    return group.reduce_grads and group.all_reduce_grads and averaging


def pass_gradients(units: Iterable[FSDPModule]) -> None:
    """Makes backward go through units although nothing before them is trained on this rank.

    Where a tower runs on another rank, backward goes through them there to reach it: their weights
    are gathered again, and their gradients are reduced as soon as it has passed.

    Collective: no. Costs the gradient of one input more on a rank without the tower.
    """
    for unit in units:
        assert isinstance(unit, nn.Module)
        # Before torch's own hook, which looks for inputs that need a gradient.
        unit.register_forward_pre_hook(_need_gradient, prepend=True, with_kwargs=True)


@torch.compiler.disable
def _need_gradient(
    _unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    inputs: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
    floating = [key for key, value in inputs.items() if _is_floating(value)]
    leaves = tree_leaves(inputs) if floating and torch.is_grad_enabled() else []
    if not leaves or any(_is_floating(leaf) and leaf.requires_grad for leaf in leaves):
        return None
    anchor = torch.zeros((), requires_grad=True)
    inputs[floating[0]] = _Anchored.apply(inputs[floating[0]], anchor)
    return tuple(inputs[place] for place in range(len(args))), {key: inputs[key] for key in kwargs}


def _is_floating(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


class _Anchored(torch.autograd.Function):
    """A copy that needs a gradient, and drops it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:  # pyright: ignore
        return None, None
