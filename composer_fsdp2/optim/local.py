"""Steps an optimizer on this rank's shards as plain tensors.

[Note: local step] Every operation on a DTensor costs some 50 microseconds of CPU, whatever its
size, and an element-wise optimizer computes the same bits on the plain tensors inside. So before a
step `before` makes a shallow copy of the optimizer whose `param_groups` and `state` hold this
rank's shards, torch runs the step of the class on that copy, and `after` brings back what the step
has set. The optimizer itself keeps its DTensors all the time: other hooks, schedulers and
checkpoints see nothing else, and a step that raises leaves nothing exchanged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from composer_fsdp2.errors import PlanError
from composer_fsdp2.shard.sharded_tensor import sharded_like
from composer_fsdp2.shard.torch_private.tensors import (
    TORCH_FUNCTION_OFF,
    local_gradients,
    local_tensor,
)

__all__ = [
    "LocalShards",
    "after",
    "before",
    "copy_with",
    "hook_local_step",
    "local_gradient",
    "local_value",
    "take_settings",
    "whole_value",
]


class _Shard:
    """A sharded parameter and its plain one, during a step with the gradient and the state."""

    __slots__ = ("address", "grad", "held", "is_trained", "local", "param", "source")

    def __init__(self, param: DTensor) -> None:
        self.param: Any = param
        self.source = local_tensor(param)
        self.is_trained = param.requires_grad
        # It shares the shard's memory; a step on it leaves the DTensor's version as it is.
        self.local = nn.Parameter(self.source, requires_grad=self.is_trained)
        self.address = self.local.data_ptr()
        self.grad: Any = None
        """as the optimizer has it"""
        self.held: Any = None
        """the optimizer's state of the parameter"""

    def renew(self) -> None:
        """Takes the tensors of this moment; FSDP2's first forward exchanges the shard's."""
        param = self.param
        source = local_tensor(param)
        if self.source is not source:
            self.local.grad, self.local.data, self.source = None, source, source
            self.address = self.local.data_ptr()
        if self.is_trained is not param.requires_grad:
            self.is_trained = param.requires_grad
            self.local.requires_grad_(self.is_trained)
        self.grad = param.grad


class LocalShards:
    """Plain parameters over the memory of an optimizer's shards, kept from step to step.

    Args:
        leaves_out: says of a parameter that somebody else steps it.
    """

    def __init__(self, leaves_out: Callable[[Any], bool] | None = None) -> None:
        self._leaves_out = leaves_out
        # By id: to hash a tensor is a call in Python. Each entry holds the parameter.
        self._known: dict[int, _Shard] = {}
        self.stepping: list[_Shard] = []
        """of the step that is being made"""

    def takes(self, param: Any) -> bool:
        """Whether a parameter is stepped here."""
        return self._leaves_out is None or not self._leaves_out(param)

    def plain(self, param: Any) -> Any:
        """Returns the plain parameter of one that is stepped next; not sharded, it is its own."""
        if not isinstance(param, DTensor):
            return param
        shard = self._known.get(id(param))
        if shard is None:
            shard = self._known[id(param)] = _Shard(param)
        self.stepping.append(shard)
        return shard.local

    def give_gradients(self) -> None:
        """Puts gradients where the step looks; again after a closure has computed others."""
        with TORCH_FUNCTION_OFF():  # an attribute of a DTensor takes half the time
            for shard in self.stepping:
                shard.renew()
        params, grads = [s.param for s in self.stepping], [s.grad for s in self.stepping]
        found = local_gradients(params, grads, local_gradient)
        for shard, grad in zip(self.stepping, found, strict=True):
            shard.local.grad = grad
        # torch counts no change of a local tensor for the DTensor around it, which others ask.
        # Before the step, because a step that breaks off has changed some already.
        increment_version([shard.param for shard in self.stepping if shard.grad is not None])

    def finish(self) -> None:
        """Lets go of the gradients, which would outlive `zero_grad`, and of replaced memory.

        Raises:
            PlanError: a hook has replaced a gradient after it was read.
        """
        replaced = False
        with TORCH_FUNCTION_OFF(), torch.no_grad():
            for shard in self.stepping:
                replaced = replaced or shard.param.grad is not shard.grad
                if shard.grad is not None:
                    if shard.local.grad is None:
                        shard.param.grad = None  # the step clears gradients itself
                    shard.local.grad = shard.grad = None
                if shard.local.data_ptr() != shard.address:
                    # It assigns to `param.data`; FSDP2 gathers the memory that is in the DTensor.
                    shard.source.copy_(shard.local)
                    shard.local.data = shard.source
        self.stepping = []
        if replaced:
            raise PlanError(
                "A hook before the optimizer's step has replaced gradients of sharded parameters "
                "(`param.grad = value`), and was registered after prepare_fully_shard. The step "
                "used the gradients from before the hook. Change them in place "
                "(`param.grad.mul_(factor)`), register the hook before prepare_fully_shard, or "
                "write local_step: false."
            )


def before(optimizer: torch.optim.Optimizer, shards: LocalShards) -> torch.optim.Optimizer:
    """Returns a copy of the optimizer that holds this rank's shards. Collective: no."""
    shards.stepping = []
    groups = [
        {**group, "params": [shards.plain(p) for p in group["params"] if shards.takes(p)]}
        for group in optimizer.param_groups
    ]
    shards.give_gradients()
    # Of parameters that are not sharded, and facts of all parameters under a word.
    others = {key: held for key, held in optimizer.state.items() if not isinstance(key, DTensor)}
    state: dict[Any, Any] = defaultdict(dict, others)
    for shard in shards.stepping:
        shard.held = optimizer.state.get(shard.param)
        if shard.held is not None:
            values = {key: local_value(value, shard.param) for key, value in shard.held.items()}
            state[shard.local] = values
    return copy_with(optimizer, groups, state)


def after(
    optimizer: torch.optim.Optimizer, stepped: torch.optim.Optimizer, shards: LocalShards
) -> None:
    """Gives the optimizer what a step has set in the copy that `before` made. Collective: no.

    Raises:
        PlanError: a hook has replaced a gradient in between.
    """
    left = dict(stepped.state)
    for shard in shards.stepping:
        values, held = left.pop(shard.local, None), shard.held
        shard.held = None
        if values is None:
            if held is not None:
                del optimizer.state[shard.param]
            continue
        if held is None:
            held = optimizer.state[shard.param] = {}
        for name in held.keys() - values.keys() if len(held) > len(values) else ():
            del held[name]
        for name, value in values.items():
            known = held.get(name)
            if known is not value and (
                not isinstance(known, DTensor) or local_tensor(known) is not value
            ):
                held[name] = whole_value(value, shard.param)
    optimizer.state.update(left)
    take_settings(optimizer, stepped)
    shards.finish()


def copy_with(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: dict[Any, Any]
) -> torch.optim.Optimizer:
    """Returns a shallow copy of an optimizer that has other groups and other state."""
    made = object.__new__(type(optimizer))
    made.__dict__ = {**vars(optimizer), "param_groups": groups, "state": state}
    return made


def take_settings(optimizer: torch.optim.Optimizer, stepped: torch.optim.Optimizer) -> None:
    """Takes over attributes and settings of groups from a copy that has made its step."""
    for name, value in vars(stepped).items():
        if name not in ("param_groups", "state"):
            vars(optimizer)[name] = value
    for group, other in zip(optimizer.param_groups, stepped.param_groups, strict=True):
        group.update({key: value for key, value in other.items() if key != "params"})


def local_value(value: Any, param: DTensor) -> Any:
    """Returns a value of the state as a step on this rank's shard needs it."""
    if not isinstance(value, DTensor):
        return value
    if value.placements != param.placements:
        value = value.redistribute(param.device_mesh, param.placements)
    return local_tensor(value)


def whole_value(value: Any, param: DTensor) -> Any:
    """Returns a value that a step has set in the form in which the optimizer holds it."""
    if type(value) is not torch.Tensor or value.ndim == 0:
        return value
    return sharded_like(value, param) if value.shape == local_tensor(param).shape else value


def local_gradient(param: Any) -> torch.Tensor | None:
    """Returns this rank's part of a gradient, divided as the parameter is."""
    grad = param.grad
    if not isinstance(grad, DTensor):
        return grad
    # FSDP2's have the parameter's own; a gradient set by hand may lie in another way.
    if grad.placements != param.placements or grad.device_mesh is not param.device_mesh:
        grad = grad.redistribute(param.device_mesh, param.placements)
    return local_tensor(grad)


def hook_local_step(
    optimizer: torch.optim.Optimizer,
    shards: LocalShards,
    step_others: Callable[[torch.optim.Optimizer], None] = lambda _: None,
) -> None:
    """Has an optimizer step this rank's shards from now on. Collective: no.

    Args:
        optimizer: gets a hook before and one after its step.
        shards: of its parameters.
        step_others: called after a step, for the parameters that `shards` leaves out.
    """
    copies: list[torch.optim.Optimizer] = []

    def start(
        stepping: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if stepping in copies:
            return None  # the step of a parent class, which the copy has called
        copies[:] = [before(stepping, shards)]

        def with_gradients(closure: Any) -> Any:
            def run(*inner: Any, **named: Any) -> Any:
                found = closure(*inner, **named)
                shards.give_gradients()
                return found

            return run if callable(closure) else closure

        # torch calls the step with what a pre-hook returns, its `self` included.
        rest = tuple(with_gradients(value) for value in args[1:])
        return (copies[0], *rest), {key: with_gradients(value) for key, value in kwargs.items()}

    def end(stepping: torch.optim.Optimizer, *_: Any) -> None:
        if stepping not in copies:
            after(stepping, copies.pop(), shards)
            step_others(stepping)

    optimizer.register_step_pre_hook(start)
    optimizer.register_step_post_hook(end)
