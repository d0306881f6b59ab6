"""Parameters that get a gradient on some ranks only, or on none.

[Note: unused parameters] FSDP2 reduces the parameters that have a gradient. Where ranks differ in
that, it reduces tensors of different sizes, or silently adds one parameter's gradient to another's.
So every unit that took part in backward reduces a zero where a parameter got no gradient. That is
local, and costs nothing where all have one. What needs the other ranks is only whether nobody used
a parameter: it is left without a gradient then, as in one process, so that momentum and weight
decay leave it alone.

Units with experts or a tower compare that in a collective after each backward, and so do the units
in which the first backward left anything out. Elsewhere nothing is sent. A rank that has to fill in
a zero there says so in the store of the process group before it reduces. When its reduction is
done, every rank has begun that reduction, so every rank that filled in too has said so. If all
have, nobody used the parameter. `must_compare` asks for the collective from then on.

Source: what torch reduces is the parameters with a gradient,
https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py#L397
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
from composer_fsdp2.runtime.agreement import agreement_of
from composer_fsdp2.runtime.events import Event
from composer_fsdp2.shard.torch_private.tensors import default_store, tree_leaves
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
    will_get_gradient,
    wrap_post_backward,
)

__all__ = ["UnusedParameters", "force_backward_through", "reduce_unused"]

_READ = 2**32
"""counts, beside the ranks that wrote a key of the store, those that have read it"""


def reduce_unused(
    units: Mapping[str, FSDPModule], always: Collection[str]
) -> UnusedParameters | None:
    """Makes units reduce every parameter of theirs on every rank.

    Collective: no; the end of a backward that reduces is, over the default group, for `always` and
    in the first step.

    Args:
        units: all of them, by name.
        always: names of those that hold experts or a tower, which ranks often leave out.

    Returns:
        What watches them, or None where there are no other ranks, or no parameters.
    """
    if dist.get_world_size() == 1 or is_fake() or not any(map(param_groups, units.values())):
        return None
    return UnusedParameters(units, always)


class UnusedParameters:
    """Has units reduce every parameter of theirs on every rank; see [Note: unused parameters].

    Args:
        units: all of them, by name.
        always: names of those that compare what was used after each backward.
    """

    def __init__(self, units: Mapping[str, FSDPModule], always: Collection[str]) -> None:
        self._of_unit = {name: param_groups(unit) for name, unit in units.items()}
        self._given = {group for name in always for group in self._of_unit[name]}
        self._always = set(self._given)
        self._groups = [group for groups in self._of_unit.values() for group in groups]
        self._size = dist.get_world_size()
        self._agreement = agreement_of(device_of(self._groups[0]))
        self._comparing = True
        """whether the next backward compares all units"""
        self.must_compare = False
        """whether this rank filled in zeros where no rank compares"""
        self._ran: set[Any] = set()
        self._used: set[Any] = set()
        self._fresh: set[Any] = set()
        """had no gradient before the reductions that are still to be agreed on"""
        self._told: dict[Any, str] = {}
        """those of which the store knows that this rank filled in a zero, with their keys"""
        self._uses: dict[Any, int] = {}
        """forwards since the last backward"""
        self._backward = -1
        self._complete = 0
        """number of the backward for the store's keys, the same on all ranks"""
        self._indices = {id(param): n for n, param in enumerate(self._params(self._groups))}
        self._prefix = _unique_prefix()
        for group in self._groups:
            wrap_post_backward(group, partial(self._post_backward, group))
            group.forget_unused = self._forget
        for group in self._groups[:1]:
            group.agree_on_used = self._agree_on_used

    def compare(self) -> None:
        """Has the next backward compare all units; every rank calls it. Collective: no."""
        self._comparing = True
        self.must_compare = False

    def hear(self, event: Event, name: str) -> None:
        """Counts how often a unit runs. Collective: no."""
        if event == "forward" and torch.is_grad_enabled():
            for group in self._of_unit[name]:
                self._uses[group] = self._uses.get(group, 0) + 1

    def _post_backward(self, group: Any, reduce: Callable[..., Any], *args: Any) -> Any:
        self._note(group)
        self._end_with_this_backward()
        return reduce(*args)

    def _note(self, group: Any) -> None:
        """Fills gradients in where the group is about to reduce. Collective: no."""
        # Torch also calls this at the end of backward, for units that backward did not reach.
        if runs_backward(group):
            self._ran.add(group)
        params = [param for param in trained_params(group) if has_run(param)]
        missing = [param for param in params if not has_gradient(param)]
        self._used.update(set(params).difference(missing))
        if not reduces(group) or group not in self._ran:
            return
        self._ran.discard(group)
        self._fresh.update(param for param in params if sharded_param(param).grad is None)
        if missing and not self._compares(group):
            if self._uses.get(group, 0) > 1:
                # It comes here as often as it ran, and the first time before its gradients.
                missing = [param for param in missing if not will_get_gradient(param)]
            self.must_compare = self.must_compare or bool(missing)
            if _is_complete(group):
                self._tell(missing)
        if missing:
            add_zero_gradients(params, missing)

    def _compares(self, group: Any) -> bool:
        return self._comparing or group in self._always

    def _tell(self, missing: Iterable[Any]) -> None:
        """Says which of them nobody may have used. Collective: no, and before the reduction."""
        for param in missing:
            if param in self._fresh and param not in self._used and param not in self._told:
                self._told[param] = f"{self._prefix}/{self._complete}/{self._indices[id(param)]}"
                default_store().add(self._told[param], 1)

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
        self._complete += 1
        self._uses.clear()
        self._take_back_told()
        complete = [group for group in self._groups if _is_complete(group)]
        groups = [group for group in complete if self._compares(group)]
        params = self._params(groups)
        if params:
            counts = self._agree(params)
            for param, count in zip(params, counts, strict=True):
                if count == 0 and param in self._fresh:
                    sharded_param(param).grad = None
            if self._comparing:
                self._comparing = False
                left_out = {p for p, c in zip(params, counts, strict=True) if c < self._size}
                self._always.update(g for g in groups if left_out.intersection(params_of(g)))
        for waiting in (self._used, self._fresh):
            if len(complete) == len(self._groups):
                waiting.clear()
            else:
                waiting.difference_update(self._params(complete))

    def _take_back_told(self) -> None:
        """Of what this rank filled in, what all others did too. Collective: no."""
        if not self._told:
            return
        # A reduction that is done has heard of every rank, and every rank spoke before its own.
        _wait_for(device_of(self._groups[0]))
        for param, key in self._told.items():
            read, told = divmod(default_store().add(key, _READ), _READ)
            if told == self._size:
                sharded_param(param).grad = None
            if read == told:
                default_store().delete_key(key)  # nobody is left to read it
        self._told.clear()

    def _agree(self, params: list[Any]) -> list[int]:
        """By how many ranks each was used, and one number of the backward. Collective: yes."""
        flags = [int(param in self._used) for param in params]
        number = 0 if dist.get_rank() else self._complete
        *counts, number = self._groups[0].agree_on_used([*flags, number])
        if self._comparing:
            # After a step that was aborted ranks may be a backward apart, and old keys be left.
            self._complete = number + 2
        return counts

    def _agree_on_used(self, numbers: list[int]) -> list[int]:
        """The sum over the ranks; an `OOMGuard` goes around it. Collective: yes."""
        return self._agreement.total(numbers)

    def _forget(self) -> None:
        """Starts anew after a step that was aborted. Collective: no."""
        self._used.clear()
        self._fresh.clear()
        self._ran.clear()
        self._told.clear()
        self._uses.clear()
        # What the others have heard in that step this rank may have not: all are compared again.
        self._always = set(self._given)
        self._comparing = True

    @staticmethod
    def _params(groups: Iterable[Any]) -> list[Any]:
        return [param for group in groups for param in trained_params(group)]


def _unique_prefix() -> str:
    """Of the store's keys: ranks prepare the same models in the same order."""
    rank = dist.get_rank()
    return f"fsdp2/unused/{default_store().add(f'fsdp2/unused/{rank}', 1)}"


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        # At the end of backward torch has this stream wait for the reductions, not the host.
        torch.get_device_module(device).current_stream(device).synchronize()


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
        # https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py#L564
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
        # Of a view, or of the input as it is, autograd would refuse changes in place later.
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:  # pyright: ignore
        return None, None
