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
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2.ranks import is_fake
from composer_fsdp2.shard.torch_private.tensors import tree_leaves
from composer_fsdp2.shard.torch_private.units import (
    add_zero_gradients,
    after_backward,
    all_reduce_hook,
    all_reduces,
    backward_number,
    device_of,
    has_gradient,
    has_run,
    param_groups,
    params_of,
    reduces,
    runs_backward,
    sharded_param,
    trained_params,
    wrap_post_backward,
)

__all__ = ["force_backward_through", "reduce_unused"]


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
            wrap_post_backward(group, partial(self._post_backward, group))
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
        if runs_backward(group):
            self._ran.add(group)
        params = [param for param in trained_params(group) if has_run(param)]
        missing = [param for param in params if not has_gradient(param)]
        self._used.update(set(params).difference(missing))
        if not reduces(group) or group not in self._ran:
            return
        self._ran.discard(group)
        self._fresh.update(param for param in params if sharded_param(param).grad is None)
        add_zero_gradients(params, missing)

    def _end_with_this_backward(self) -> None:
        number = backward_number()
        if number == self._backward:
            return
        self._backward = number
        # One that is put in later comes after those of all units, of several roots too.
        after_backward(lambda: after_backward(self._settle))

    @torch.no_grad()
    def _settle(self) -> None:
        """Takes back the gradients that nobody computed. Collective: yes."""
        groups = [g for g in self._groups if self._watching or g in self._always]
        groups = [group for group in groups if _is_complete(group)]
        params = [param for group in groups for param in trained_params(group)]
        if not params:
            return
        counts = self._groups[0].agree_on_used(params)
        for param, count in zip(params, counts, strict=True):
            if count == 0 and param in self._fresh:
                sharded_param(param).grad = None
        if self._watching:
            self._watching = False
            partly = {p for p, c in zip(params, counts, strict=True) if 0 < c < self._size}
            self._always.update(g for g in groups if partly.intersection(params_of(g)))
        self._used.difference_update(params)
        self._fresh.difference_update(params)

    def _agree_on_used(self, params: list[Any]) -> list[int]:
        """By how many ranks each was used. Collective: yes."""
        flags = [int(param in self._used) for param in params]
        counts = torch.tensor(flags, dtype=torch.int32, device=device_of(self._groups[0]))
        dist.all_reduce(counts)
        return counts.tolist()

    def _forget(self) -> None:
        """Starts anew after a step that was aborted. Collective: no."""
        self._used.clear()
        self._fresh.clear()
        self._ran.clear()


def _is_complete(group: Any) -> bool:
    """Whether what it reduces is the gradient of the step, and not a part of it."""
    return all_reduces(group) and getattr(all_reduce_hook(group), "due", True)


def force_backward_through(units: Iterable[FSDPModule]) -> None:
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
