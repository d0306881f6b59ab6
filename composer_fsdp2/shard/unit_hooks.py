"""Hooks that a unit of FSDP2 has from its sharding on, around its forward and in backward.

Everything else that happens in a step is a listener of a run (`step.run`). These are there without
a run too, in a model that only `apply_plan` has sharded: without them backward would be missed, or
inputs and gradients would be other numbers.

[Note: unseen results] torch learns that backward has come to a unit from the tensors that its
forward returns. The loss may depend on others: kept in an attribute, by a hook, in an object of the
user's own. Backward then comes to a module of the unit unannounced. In the first step of training
each module with parameters tells when backward is about to compute with it. If torch had not heard
of it by then, the unit's modules go on telling. Parameters that stay gathered tell when they get a
gradient. `StaleGathers` is the guard behind both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from composer_fsdp2.plan.module_tree import own_parameters
from composer_fsdp2.shard.containers import (
    NO_CONTAINERS,
    Exchange,
    GivenContainers,
    InputCast,
    items_of,
    tensors_in,
)
from composer_fsdp2.torch_private.tensors import (
    TORCH_FUNCTION_OFF,
    is_view,
    tree_leaves,
    unsafe_view,
)
from composer_fsdp2.torch_private.units import (
    Inputs,
    announce_backward,
    backward_number,
    exchange_inputs,
    free_after_forward,
    frees_after_forward,
    gather_again,
    gathered_param,
    hear_backward,
    is_gathered,
    is_root,
    lazy_init,
    param_groups,
    params_of,
)

__all__ = ["UnitHooks", "force_backward_through"]


class UnitHooks:
    """Has the hooks of one unit, and knows the calls of it that run. Collective: no.

    Args:
        module: the unit, not sharded yet.
        cast: of its inputs.
    """

    def __init__(self, module: Any, cast: InputCast) -> None:
        self._module, self._cast, self._frozen = module, cast, False
        self._calls: list[GivenContainers | None] = []
        self._telling: list[Any] = []
        """handles of hooks of modules that tell of backward"""
        self._told = self._told_first = False
        """whether any module has, and before torch had heard of it"""
        self._hooked: set[nn.Parameter] = set()
        self._frees: list[tuple[Any, Any]] = []
        # Hooks after a forward run in the order of registration, and FSDP2's own puts its gradient
        # hooks on the tensors that this one returns. Called after an error too.
        module.register_forward_hook(self._after_forward, always_call=True)

    def attach(self, members: Iterable[nn.Module], full: str | None, frozen: bool) -> None:
        """Hooks the unit, now that it is sharded.

        Args:
            members: modules whose nearest unit it is.
            full: type of the device on which autocast must not lower its dtype, if anywhere.
            frozen: whether it trains nothing, and torch was told not to gather it in backward.
        """
        module = self._module
        exchange_inputs(module, self._mark, self._move)
        # Before FSDP2's own, which is prepended too.
        module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
        if full is not None:
            # No hook: a context that a pre-hook enters would not be left after every error.
            module.forward = torch.autocast(full, enabled=False)(module.forward)
        if self._cast.dtype is not None or self._cast.device is not None:
            # Runs after FSDP2's own, which is prepended and moves inputs to the device. Also when a
            # forward is run again in backward, where FSDP2 of torch 2.7 returns before its cast.
            module.register_forward_pre_hook(self._cast_inputs, with_kwargs=True)
        self._frozen = frozen
        module.register_forward_hook(self._after_torch)
        for member in members:
            if any(True for _ in own_parameters(member)):
                self._telling.append(member.register_forward_pre_hook(self._tell_of_recall))
                self._telling.append(member.register_forward_hook(self._have_told, prepend=True))

    def hook_method(self, name: str) -> None:
        """Has another method of the unit gather, and treat its inputs, as `forward` does."""
        module, method = self._module, getattr(self._module, name)

        @functools.wraps(method)
        def casting(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._cast_inputs(module, args, kwargs)
            return method(*args, **kwargs)

        # Torch's wrapper goes around it, and runs no hooks but FSDP2's own.
        setattr(module, name, casting)
        register_fsdp_forward_method(module, name)
        gathering = getattr(module, name)

        @functools.wraps(method)
        def treating(*args: Any, **kwargs: Any) -> Any:
            self._begin(args, kwargs)
            output = None
            try:
                output = gathering(*args, **kwargs)
            finally:
                self._end(output)
            return output

        setattr(module, name, treating)

    # --- Before a forward, in this order. ---

    def _before_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and is_root(module) is None:
            # The first forward may make shards anew, which the optimizer steps.
            with torch.inference_mode(False):
                lazy_init(module)
        gather_again(module)
        self._begin(args, kwargs)

    def _begin(self, args: Any, kwargs: Any) -> None:
        # Nearly every unit gets tensors alone.
        given = [value for value in (*args, *kwargs.values()) if type(value) not in NO_CONTAINERS]
        self._calls.append(GivenContainers(given) if given else None)
        if self._told and not self._told_first and torch.is_grad_enabled():
            while self._telling:
                self._telling.pop().remove()

    def _move(self, device: torch.device, args: Any, kwargs: Any) -> Inputs:
        return self._exchange(InputCast(device=device), args, kwargs)

    def _mark(
        self, mark: Callable[[Any], Sequence[torch.Tensor]], args: Any, kwargs: Any
    ) -> Inputs:
        """Marks inputs that need a gradient.

        Those in containers too if there are no others. Autograd runs later nodes first: when it
        comes to one mark of a call, it has been everywhere in the unit.
        """
        if not torch.is_grad_enabled():
            return args, kwargs
        values = (*args, *kwargs.values())
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        inside = () if any(tensor.requires_grad for tensor in tensors) else tensors_in(values)
        needing = [tensor for tensor in (*tensors, *inside) if tensor.requires_grad]
        if not needing:
            return args, kwargs
        marked = dict(zip(map(id, needing), mark(tuple(needing)), strict=True))
        if not inside:
            return (
                tuple(marked.get(id(value), value) for value in args),
                {key: marked.get(id(value), value) for key, value in kwargs.items()},
            )
        return self._exchange(lambda leaf: marked.get(id(leaf), leaf), args, kwargs)

    def _cast_inputs(self, _module: nn.Module, args: Any, kwargs: Any) -> Inputs:
        return self._exchange(self._cast, args, kwargs)

    def _exchange(self, other: Callable[[Any], Any], args: Any, kwargs: Any) -> Inputs:
        exchange = Exchange(other)
        inputs = tuple(map(exchange, args)), {key: exchange(item) for key, item in kwargs.items()}
        if exchange.pairs:
            call = self._calls[-1] = self._calls[-1] or GivenContainers([])
            call.exchanges.append(exchange)
        return inputs

    # --- After a forward. ---

    def _after_forward(self, module: Any, _args: object, output: object) -> object:
        given = self._end(output)
        self._gather_once_backward_needs_it(output)
        if not isinstance(output, torch.Tensor):
            # Older torch does not look for tensors in dataclasses.
            leaves = [leaf for leaf in tree_leaves(output) if not isinstance(leaf, torch.Tensor)]
            if torch.is_grad_enabled():
                hear_backward(module, tensors_in(leaves))
            if isinstance(output, Iterator) or callable(output):
                # It may compute with the parameters later.
                self._frees = [
                    (group, frees_after_forward(group)) for group in param_groups(module)
                ]
                for group, _ in self._frees:
                    free_after_forward(group, False)
        elif isinstance(module, nn.Linear) and is_view(output):
            # Some models scale their logits in place. Nothing else holds what is behind the view.
            return unsafe_view(output)
        return _guarded_output(output, given)

    def _end(self, output: object) -> Iterable[int]:
        """Gives the caller's containers back; returns their addresses."""
        call = self._calls.pop() if self._calls else None
        if call is None:
            return ()
        call.give_back()
        if torch.is_grad_enabled():
            new = call.new_tensors()
            hear_backward(self._module, new)
            self._gather_once_backward_needs_it(new)
            if any(isinstance(exchange.other, InputCast) for exchange in call.exchanges):
                call.again_in_backward((*new, *tensors_in(output)))
        return call.containers

    def _gather_once_backward_needs_it(self, results: object) -> None:
        """Turns the gather of a frozen unit in backward on, for good: it may run again before."""
        needs = self._frozen and torch.is_grad_enabled()
        if needs and any(map(_may_need_gradient, tree_leaves(results))):
            self._module.set_unshard_in_backward(True)

    def _after_torch(self, module: Any, *_: object) -> None:
        if torch.compiler.is_compiling():
            return
        for group, how in self._frees:
            free_after_forward(group, how)
        self._frees = []
        for group in param_groups(module) if torch.is_grad_enabled() else ():
            for param in map(gathered_param, params_of(group)) if is_gathered(group) else ():
                if param.requires_grad and param not in self._hooked:
                    self._hooked.add(param)
                    param.register_hook(self._announce)

    # --- In backward; see [Note: unseen results]. ---

    def _tell_of_recall(self, *_: object) -> None:
        if torch.compiler.is_compiling() or backward_number() < 0:
            return
        if not all(map(is_gathered, param_groups(self._module))):
            # A part of the unit is computed again, for which gradients are on. Elsewhere they are
            # in backward(create_graph=True) alone.
            with torch.no_grad():
                self._tell()

    def _have_told(self, _module: nn.Module, _args: object, output: object) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or backward_number() >= 0:
            return
        with TORCH_FUNCTION_OFF():  # of logits that are not there
            nodes = [tensor.grad_fn for tensor in tensors_in(output)]
        for node in nodes:
            if node is not None:
                # Called after the hooks of the tensor, which may be what the unit returns.
                node.register_prehook(self._tell)

    def _tell(self, *_: object) -> None:
        self._told = True
        if announce_backward(self._module):
            self._told_first = True

    def _announce(self, _gradient: object) -> None:
        announce_backward(self._module)


def _guarded_output(output: Any, given: Iterable[int]) -> Any:
    """Has torch refuse a change in place of a view that the unit returns.

    Such a change drops the hook by which FSDP2 learns that backward has come:
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_state.py#L318
    A list or dict stays the same; one that the unit was given is left alone.
    """
    if isinstance(output, torch.Tensor):
        view = torch.is_grad_enabled() and output.requires_grad and is_view(output)
        return _Returned.apply(output) if view else output
    if type(output) is tuple:
        return tuple(_guarded_output(item, given) for item in output)
    if type(output) in (list, dict) and id(output) not in given:
        for key, item in items_of(output):
            if (other := _guarded_output(item, given)) is not item:
                output[key] = other
    return output


class _Returned(torch.autograd.Function):
    """Returns the same tensor, which torch lets nobody change in place."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        # Autograd lets nobody change a view in place that was made inside a custom Function.
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return grad


def _may_need_gradient(leaf: object) -> bool:
    """Whether a gradient can come back through it; an unknown object may hold such a tensor."""
    if isinstance(leaf, torch.Tensor):
        return leaf.requires_grad
    return not isinstance(leaf, type(None) | bool | int | float | complex | str | bytes)


# --- Units beside a tower. ---


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
    """Makes a copy that needs a gradient, and drops the gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        # Of a view, or of the input as it is, autograd would refuse changes in place later.
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:  # pyright: ignore
        return None, None
