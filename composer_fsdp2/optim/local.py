"""Steps an optimizer on this rank's shards as plain tensors.

[Note: local step] Every operation on a DTensor costs some 50 microseconds of CPU, whatever its
size, and an element-wise optimizer computes the same bits on the plain tensors inside. So before a
step a hook makes a shallow copy of the optimizer whose `param_groups` and `state` hold this rank's
shards, torch runs the step of the class on that copy, and a hook after it brings back the values
that the step has set. The optimizer itself keeps its DTensors all the time: other hooks, schedulers
and checkpoints see nothing else, and a step that raises leaves nothing exchanged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from composer_fsdp2.errors import PlanError
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.torch_private.tensors import (
    TORCH_FUNCTION_OFF,
    is_plain,
    local_gradients,
    local_tensor,
    local_value,
    sharded_like,
)

if TYPE_CHECKING:
    from composer_fsdp2.optim.muon.groups import PlannedGroups

__all__ = ["LocalStep", "MatrixOptimizer", "class_step", "local_gradient"]


class MatrixOptimizer(torch.optim.Optimizer):
    """Forms its groups from the model, and steps shards with collectives of its own: Muon.

    Other rooms ask for this class, so that runs without Muon do not load its folder.
    """

    def plan_groups(self, tree: ModuleTree) -> PlannedGroups:
        """Returns the groups that the model's parameters will have. Collective: no."""
        raise NotImplementedError

    def assign_groups(self, planned: PlannedGroups) -> None:
        """Gives every parameter the group that was planned. Collective: no."""
        raise NotImplementedError

    def decide(self, model: nn.Module) -> None:
        """Forms the groups from the model, where they are still open. Collective: no."""
        raise NotImplementedError


class _Shard:
    """A sharded parameter and a plain one over its shard; in a step with gradient and state."""

    __slots__ = ("grad", "local", "param", "source", "state")

    def __init__(self, param: DTensor) -> None:
        self.param: Any = param
        self.source = local_tensor(param)
        # The plain parameter shares the shard's memory; a step leaves the DTensor's version alone.
        self.local = nn.Parameter(self.source, requires_grad=param.requires_grad)
        self.grad: Any = None
        """the gradient that the optimizer has, a DTensor"""
        self.state: Any = None
        """the optimizer's state of the parameter"""


class LocalStep:
    """Has an optimizer step this rank's shards from now on; see [Note: local step].

    Collective: no.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # By id: to hash a tensor is a call in Python. Each entry holds the parameter.
        self._shards: dict[int, _Shard] = {}
        self._stepping: list[_Shard] = []
        """shards of the step that is being made"""
        self._copy: torch.optim.Optimizer | None = None
        self._seen: list[dict[str, Any]] = []
        """settings, as the optimizer and its copy had them when they were last compared"""
        # Composer's makes `step` on the device and reads it for each parameter, where the host
        # waits every time. torch's own keep it on the CPU, unless a kernel of theirs reads it.
        self._reads_steps = type(optimizer).__name__ == "DecoupledAdamW"
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def params_of(self, group: Mapping[str, Any]) -> Sequence[Any]:
        """Returns the parameters of a group that are stepped together."""
        return group["params"]

    def read(self, param: DTensor, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """Returns the state of a parameter for a step of its shard."""
        return {key: local_value(value, param) for key, value in state.items()}

    def write(
        self, optimizer: torch.optim.Optimizer, param: DTensor, state: Any, values: dict[Any, Any]
    ) -> None:
        """Gives a parameter the state that a step of its shard has left."""
        if state is None:
            state = optimizer.state[param] = {}
        for name, value in values.items():
            current = state.get(name)
            if current is value or (
                isinstance(current, DTensor) and local_tensor(current) is value
            ):
                continue
            is_moment = is_plain(value) and value.ndim > 0
            if is_moment and value.shape == local_tensor(param).shape:
                value = sharded_like(value, param)
            state[name] = value
        if len(state) > len(values):
            for name in state.keys() - values.keys():
                del state[name]

    def begin(
        self,
        optimizer: torch.optim.Optimizer,
        params: Sequence[Sequence[Any]],
        others: Mapping[Any, Any],
    ) -> torch.optim.Optimizer:
        """Returns a shallow copy of the optimizer that holds this rank's shards.

        Args:
            optimizer: over sharded parameters.
            params: for each group the parameters that are stepped.
            others: state under keys that are no sharded parameters.
        """
        self._stepping, self._seen = [], _settings_of(optimizer)
        groups: list[dict[str, Any]] = []
        for group, chosen in zip(optimizer.param_groups, params, strict=True):
            plain: list[Any] = []
            for param in chosen:
                if isinstance(param, DTensor):
                    shard = self._shards.get(id(param))
                    if shard is None:
                        shard = self._shards[id(param)] = _Shard(param)
                    self._stepping.append(shard)
                    param = shard.local
                plain.append(param)
            groups.append({**group, "params": plain})
        self._give_gradients()
        state: dict[Any, Any] = defaultdict(dict, others)
        for shard in self._stepping:
            shard.state = optimizer.state.get(shard.param)
            if shard.state is not None:
                state[shard.local] = self.read(shard.param, shard.state)
        copy = object.__new__(type(optimizer))
        copy.__dict__ = {**vars(optimizer), "param_groups": groups, "state": state}
        return copy

    def end(self, optimizer: torch.optim.Optimizer, copy: torch.optim.Optimizer) -> None:
        """Gives the optimizer the values that a step has set in the copy that `begin` made.

        What others have set in the optimizer meanwhile, such as a learning rate, stays. Drops
        references to gradients, which would outlive `zero_grad`, and to replaced memory.

        Raises:
            PlanError: a hook has replaced a gradient after it was read.
        """
        state, replaced = dict(copy.state), False
        with TORCH_FUNCTION_OFF(), torch.no_grad():
            for shard in self._stepping:
                param, local = shard.param, shard.local
                values = state.pop(local, None)
                if values is not None:
                    if self._reads_steps and isinstance(values.get("step"), torch.Tensor):
                        values["step"] = values["step"].cpu()
                    self.write(optimizer, param, shard.state, values)
                elif shard.state is not None:
                    del optimizer.state[param]
                replaced = replaced or param.grad is not shard.grad
                if shard.grad is not None:
                    if local.grad is None:
                        param.grad = None  # the step clears gradients itself
                    local.grad = shard.grad = None
                shard.state = None
                if local.data_ptr() != shard.source.data_ptr():
                    # It assigns to `param.data`; FSDP2 gathers the memory that is in the DTensor.
                    shard.source.copy_(local)
                    local.data = shard.source
        self._stepping = []
        optimizer.state.update(state)
        self._carry(copy, optimizer)
        if replaced:
            raise PlanError(
                "A hook before the optimizer's step has replaced gradients of sharded parameters "
                "(`param.grad = value`), and was registered after prepare_fully_shard. The step "
                "used the gradients from before the hook. Change them in place "
                "(`param.grad.mul_(factor)`), register the hook before prepare_fully_shard, or "
                "write local_step: false."
            )

    def _carry(self, source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
        """Gives one optimizer the settings that have changed in the other."""
        owners = [vars(target), *target.param_groups]
        for seen, settings, owner in zip(self._seen, _settings_of(source), owners, strict=False):
            changed = {k: v for k, v in settings.items() if k not in seen or seen[k] is not v}
            seen.update(changed)
            owner.update(changed)

    def _give_gradients(self) -> None:
        """Gives plain parameters their gradients; again after a closure has computed others."""
        with TORCH_FUNCTION_OFF():  # an attribute of a DTensor takes half the time
            for shard in self._stepping:
                source, local = local_tensor(shard.param), shard.local
                if shard.source is not source:  # FSDP2's first forward exchanges it
                    local.grad, local.data, shard.source = None, source, source
                if local.requires_grad is not shard.param.requires_grad:
                    local.requires_grad_(shard.param.requires_grad)
                shard.grad = shard.param.grad
        params, grads = [s.param for s in self._stepping], [s.grad for s in self._stepping]
        local_grads = local_gradients(params, grads, local_gradient)
        for shard, grad in zip(self._stepping, local_grads, strict=True):
            shard.local.grad = grad
        # torch counts no change of a local tensor for the DTensor around it, which others ask.
        # Before the step, because a step that breaks off has changed some already.
        increment_version([shard.param for shard in self._stepping if shard.grad is not None])

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if optimizer is self._copy:
            return None  # the step of a parent class, which the copy has called
        # State of parameters that are not sharded, and facts of all parameters under a word.
        state = optimizer.state.items()
        others = {key: value for key, value in state if not isinstance(key, DTensor)}
        self._copy = self.begin(optimizer, [*map(self.params_of, optimizer.param_groups)], others)

        def with_gradients(closure: Any) -> Any:
            def run(*inner: Any, **named: Any) -> Any:
                # Gradients of the batch before would stay beside those that the closure computes.
                for shard in self._stepping:
                    shard.local.grad = shard.grad = None
                loss = closure(*inner, **named)
                self._give_gradients()
                if self._copy is not None:
                    # Composer's Trainer calls most callbacks in here, and one may set a rate.
                    self._carry(optimizer, self._copy)
                return loss

            return run if callable(closure) else closure

        # torch calls the step with what a pre-hook returns, its `self` included.
        rest = tuple(with_gradients(value) for value in args[1:])
        return (self._copy, *rest), {key: with_gradients(value) for key, value in kwargs.items()}

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._copy is not None and optimizer is not self._copy:
            copy, self._copy = self._copy, None
            self.end(optimizer, copy)
            self.step_alone(optimizer)

    def step_alone(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps the parameters that `params_of` leaves out, after all others."""


def _settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Returns an optimizer's attributes, and those of each group, without tensors it steps."""
    kept = ("param_groups", "state", "params")
    owners = [vars(optimizer), *optimizer.param_groups]
    return [{k: v for k, v in owner.items() if k not in kept} for owner in owners]


def local_gradient(param: Any) -> torch.Tensor | None:
    """Returns this rank's part of a gradient, divided as the parameter is."""
    grad = param.grad
    if not isinstance(grad, DTensor):
        return grad
    # FSDP2's gradients have the parameter's placements; a gradient set by hand may have others.
    if grad.placements != param.placements or grad.device_mesh is not param.device_mesh:
        grad = grad.redistribute(param.device_mesh, param.placements)
    return local_tensor(grad)


def class_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Returns the step of the optimizer's class, without the hooks around it."""
    step: Any = type(optimizer).step
    # torch wraps the step of a class once, and marks it as `hooked`.
    return step.__wrapped__ if hasattr(step, "hooked") else step
