"""Hooks that a unit of FSDP2 has from its sharding on: around its forward, and after a reduction.

Everything else that happens in a step is a listener of a run (`step.run`). These are there without
a run too, in a model that only `apply_plan` has sharded: without them backward would be missed, or
inputs and gradients would be other numbers.

[Note: containers] A module may append its loss to a list that it is given, put keys and values
into a dict that later layers read, or write its result into its batch. torch makes a new container
of each that a unit is given: to mark tensors behind which backward has left the unit, to move those
of the root, and to cast. What the unit puts into it would be lost. So tensors are exchanged here,
in the caller's own containers, for as long as the unit runs. Afterwards each tensor that the unit
left alone is the caller's again, and what the unit has put there is an output of it.
Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_state.py#L214
https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py#L564

[Note: unseen results] torch learns that backward has come to a unit from the tensors that its
forward returns. The loss may depend on others: kept in an attribute, by a hook, in an object of the
user's own. Backward then comes to a module of the unit unannounced. In the first step of training
each module with parameters tells when backward is about to compute with it. If torch had not heard
of it by then, the unit's modules go on telling. Parameters that stay gathered tell when they get a
gradient. `StaleGathers` is the guard behind both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.nn.utils.rnn import PackedSequence

from composer_fsdp2.plan.module_tree import own_parameters
from composer_fsdp2.torch_private.tensors import (
    TORCH_FUNCTION_OFF,
    is_namedtuple,
    is_view,
    register_first_forward_hook,
    tree_leaves,
    unsafe_view,
)
from composer_fsdp2.torch_private.units import (
    Inputs,
    after_backward,
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

__all__ = [
    "AverageOverReplicas",
    "AveragingFactor",
    "InputCast",
    "UnitHooks",
    "force_backward_through",
]


@dataclasses.dataclass(frozen=True, slots=True)
class InputCast:
    """Casts floating point tensors, and moves tensors, if at all."""

    dtype: torch.dtype | None = None
    device: str | torch.device | None = None
    """device of inputs where shards are in CPU memory: a model that asks for the device of
    its weights (`hidden.to(head.weight.device)`) has moved them there"""

    def __call__(self, value: Any) -> Any:
        """Returns another tensor; any other value as it is."""
        if isinstance(value, PackedSequence):
            return value if self.device is None else value.to(self.device)
        if not isinstance(value, torch.Tensor):
            return value
        # As FSDP2's own cast does: integers and complex numbers stay.
        return value.to(self.device, self.dtype if value.is_floating_point() else None)


class UnitHooks:
    """Holds the hooks of one unit, and its calls that run. Collective: no.

    Args:
        module: the unit, not sharded yet.
        cast: casts and moves the unit's inputs.
    """

    def __init__(self, module: Any, cast: InputCast) -> None:
        self._module, self._cast, self._frozen = module, cast, False
        self._calls: list[_Call | None] = []
        self._backward_hooks: list[Any] = []
        """handles of hooks of modules that announce backward"""
        self._announced = self._announced_first = False
        """whether any module has announced backward, and before torch had heard of it"""
        self.units: Sequence[Any] = (module,)
        """of the model, parents before children"""
        self._hooked: set[nn.Parameter] = set()
        self._reshards: list[tuple[Any, Any]] = []
        # Hooks after a forward run in the order of registration, and FSDP2's own puts its gradient
        # hooks on the tensors that this one returns. Called after an error too.
        module.register_forward_hook(self._after_forward, always_call=True)

    def attach(self, members: Iterable[nn.Module], full: str | None, frozen: bool) -> None:
        """Registers the hooks of the unit after it is sharded.

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
                self._backward_hooks.append(
                    member.register_forward_pre_hook(self._note_recomputation)
                )
                self._backward_hooks.append(register_first_forward_hook(member, self._hook_outputs))

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
            self._hear_results(output)
            return output

        setattr(module, name, treating)

    # --- Before a forward, in this order. ---

    def _before_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        gather_again(module)
        self._begin(args, kwargs)

    def _begin(self, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and is_root(self._module) is None:
            # The first forward may make shards anew, which the optimizer steps.
            with torch.inference_mode(False):
                # Not this unit alone, which may be called before the model: torch takes the first
                # unit that is initialised for the root, and refuses those around it later.
                for unit in self.units:
                    lazy_init(unit)
        # Nearly every unit gets tensors alone.
        containers = [
            value for value in (*args, *kwargs.values()) if type(value) not in _NO_CONTAINERS
        ]
        self._calls.append(_Call(containers) if containers else None)
        if self._announced and not self._announced_first and torch.is_grad_enabled():
            while self._backward_hooks:
                self._backward_hooks.pop().remove()

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
        inside = () if any(tensor.requires_grad for tensor in tensors) else _tensors_in(values)
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
        exchange = _ContainerExchange(other)
        inputs = tuple(map(exchange, args)), {key: exchange(item) for key, item in kwargs.items()}
        if exchange.pairs:
            call = self._calls[-1] = self._calls[-1] or _Call([])
            call.exchanges.append(exchange)
        return inputs

    # --- After a forward. ---

    def _after_forward(self, module: Any, _args: object, output: object) -> object:
        container_ids = self._end(output)
        self._hear_results(output)
        if not isinstance(output, torch.Tensor):
            if isinstance(output, Iterator) or callable(output):
                # It may compute with the parameters later.
                self._reshards = [
                    (group, frees_after_forward(group)) for group in param_groups(module)
                ]
                for group, _ in self._reshards:
                    free_after_forward(group, False)
        elif isinstance(module, nn.Linear) and is_view(output):
            # Some models scale their logits in place. Nothing else holds what is behind the view.
            return unsafe_view(output)
        return _guarded_output(output, container_ids)

    def _hear_results(self, output: object) -> None:
        """Learns from the results of a call when backward comes to the unit."""
        self._gather_once_backward_needs_it(output)
        if torch.is_grad_enabled() and not isinstance(output, torch.Tensor):
            # Older torch does not look for tensors in dataclasses.
            leaves = [leaf for leaf in tree_leaves(output) if not isinstance(leaf, torch.Tensor)]
            hear_backward(self._module, _tensors_in(leaves))

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
                call.again_in_backward((*new, *_tensors_in(output)))
        return call.containers

    def _gather_once_backward_needs_it(self, results: object) -> None:
        """Has a frozen unit gather in backward, from now on: it may run again before."""
        needs = self._frozen and torch.is_grad_enabled()
        # Gradients may come back through unknown objects too, which may hold tensors.
        if needs and any(
            leaf.requires_grad
            if isinstance(leaf, torch.Tensor)
            else not isinstance(leaf, type(None) | bool | int | float | complex | str | bytes)
            for leaf in tree_leaves(results)
        ):
            self._module.set_unshard_in_backward(True)

    def _after_torch(self, module: Any, *_: object) -> None:
        if torch.compiler.is_compiling():
            return
        for group, how in self._reshards:
            free_after_forward(group, how)
        self._reshards = []
        for group in param_groups(module) if torch.is_grad_enabled() else ():
            for param in map(gathered_param, params_of(group)) if is_gathered(group) else ():
                if param.requires_grad and param not in self._hooked:
                    self._hooked.add(param)
                    param.register_hook(self._announce)

    # --- In backward; see [Note: unseen results]. ---

    def _note_recomputation(self, *_: object) -> None:
        if torch.compiler.is_compiling() or backward_number() < 0:
            return
        if not all(map(is_gathered, param_groups(self._module))):
            # A part of the unit is computed again, for which gradients are on. Elsewhere they are
            # in backward(create_graph=True) alone.
            with torch.no_grad():
                self._note_backward()

    def _hook_outputs(self, _module: nn.Module, _args: object, output: object) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or backward_number() >= 0:
            return
        with TORCH_FUNCTION_OFF():  # of logits that are not there
            nodes = [tensor.grad_fn for tensor in _tensors_in(output)]
        for node in nodes:
            if node is not None:
                # Called after the hooks of the tensor, which may be what the unit returns.
                node.register_prehook(self._note_backward)

    def _note_backward(self, *_: object) -> None:
        self._announced = True
        if announce_backward(self._module):
            self._announced_first = True

    def _announce(self, _gradient: object) -> None:
        announce_backward(self._module)


def _guarded_output(output: Any, container_ids: Iterable[int]) -> Any:
    """Has torch refuse a change in place of a view that the unit returns.

    Such a change drops the hook by which FSDP2 learns that backward has come:
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_state.py#L318
    A list or dict stays the same; one that the unit was given is left alone.
    """
    if isinstance(output, torch.Tensor):
        view = torch.is_grad_enabled() and output.requires_grad and is_view(output)
        return _Returned.apply(output) if view else output
    if type(output) is tuple:
        return tuple(_guarded_output(item, container_ids) for item in output)
    if type(output) in (list, dict) and id(output) not in container_ids:
        for key, item in _items(output):
            if (other := _guarded_output(item, container_ids)) is not item:
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


# --- Containers. ---

_NO_CONTAINERS = frozenset((torch.Tensor, nn.Parameter, type(None), bool, int, float, str))


class _Call:
    """Knows the containers that a call of a unit was given, and the tensors in them."""

    def __init__(self, values: list[Any]) -> None:
        self._inputs = values
        self.exchanges: list[_ContainerExchange] = []
        walk = _ContainerExchange(_same)
        if torch.is_grad_enabled():
            walk(values)
        self._before, self.containers = walk.tensors, walk.containers

    def give_back(self) -> None:
        """Puts the caller's tensors back where the unit has left their replacements."""
        for exchange in reversed(self.exchanges):
            exchange.put({id(now): before for before, now in exchange.pairs})

    def again_in_backward(self, outputs: Iterable[torch.Tensor]) -> None:
        """Exchanges tensors once more while backward runs, for recomputation."""

        def again(_gradient: object) -> None:
            for exchange in self.exchanges:
                exchange.put({id(before): now for before, now in exchange.pairs})
            after_backward(self.give_back)

        for output in outputs:
            if output.requires_grad:
                output.register_hook(again)

    def new_tensors(self) -> list[torch.Tensor]:
        """Returns the tensors that the unit has put into the containers."""
        return [tensor for tensor in _tensors_in(self._inputs) if id(tensor) not in self._before]


class _ContainerExchange:
    """Puts other tensors into containers, which stay the same objects, until they are given back.

    Tuples are made anew. Knows tuples, lists, dicts, deques and dataclasses.

    Args:
        other: returns another tensor for a tensor, or the same one.
    """

    def __init__(self, other: Callable[[Any], Any]) -> None:
        self.other = other
        self.tensors: dict[int, torch.Tensor] = {}
        self.containers: dict[int, Any] = {}
        self.pairs: list[tuple[Any, Any]] = []
        """the item that was in a container, and the item that is there now"""

    def __call__(self, value: Any) -> Any:
        """Returns the value, or its replacement."""
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = value
            return self.other(value)
        if type(value) is tuple or is_namedtuple(value):
            items = list(map(self, value))
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return tuple(items) if type(value) is tuple else type(value)(*items)
        if isinstance(value, list | dict | deque):
            if id(value) not in self.containers:
                self.containers[id(value)] = value
                for key, item in _items(value):
                    if (other := self(item)) is not item:
                        value[key] = other
                        self.pairs.append((item, other))
            return value
        if dataclasses.is_dataclass(value) and hasattr(value, "__dict__"):
            self(vars(value))
            return value
        return self.other(value)

    def put(self, others: dict[int, Any]) -> None:
        """Replaces items of the containers by others.

        Args:
            others: id of an item -> the item that replaces it.
        """
        for container in self.containers.values():
            for key, item in _items(container):
                if id(item) in others:
                    container[key] = others[id(item)]


def _same(value: Any) -> Any:
    return value


def _items(container: Any) -> list[tuple[Any, Any]]:
    return list(container.items() if isinstance(container, dict) else enumerate(container))


def _tensors_in(value: Any) -> list[torch.Tensor]:
    walk = _ContainerExchange(_same)
    walk(value)
    return list(walk.tensors.values())


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
    return tuple(inputs[index] for index in range(len(args))), {key: inputs[key] for key in kwargs}


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


# --- Reductions. ---


class AveragingFactor:
    """Makes a sum over the shards an average, in place.

    Args:
        size: ranks over which the backend takes a sum where FSDP2 asks for an average.
        sources: ranks whose tokens a gradient on one rank is of, as that of an expert is.
    """

    def __init__(self, size: int, sources: int = 1) -> None:
        self.size, self._sources = size, sources

    def __call__(self, reduced: torch.Tensor) -> None:
        """Divides. Collective: no."""
        _use_in_this_stream(reduced)
        if self._sources > 1:
            # Not torch's own factor, which divides twice where one rank has all of a gradient:
            # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py
            reduced.div_(self._sources)
        # FSDP2 asks for an average of these two only; others it sums and divides itself.
        # https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py#L554
        if self.size > 1 and reduced.dtype in (torch.float32, torch.bfloat16):
            reduced.div_(self.size)


def _use_in_this_stream(reduced: torch.Tensor) -> None:
    """Keeps a reduced gradient until the stream of its hook is done with it.

    The memory is of the stream that reduces. Torch adds it to gradients of earlier microbatches on
    this stream, and frees it; the next reduction could write there before the sum has read it.

    Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py#L449
    """
    if reduced.device.type != "cpu":
        reduced.record_stream(torch.get_device_module(reduced.device).current_stream())


class AverageOverReplicas:
    """Averages the reduced gradients of one unit over the replicas of the model, in place.

    Args:
        group: one rank of every replica.
        before: is called first, with the result of the reduce-scatter over the shards.
    """

    def __init__(
        self, group: dist.ProcessGroup, before: Callable[[torch.Tensor], None] | None
    ) -> None:
        self._group = group
        self.before = before
        self.due = True
        """false keeps gradients on this rank until a call with true, as torch's own HSDP does"""
        self.waiting: torch.Tensor | None = None

    def __call__(self, reduced: torch.Tensor) -> None:
        """Averages, or keeps gradients until the average is due. Collective: yes, when due."""
        _use_in_this_stream(reduced)
        if self.before is not None:
            self.before(reduced)
        if self.waiting is not None:
            reduced += self.waiting
        if not self.due:
            self.waiting = reduced.clone()
            # FSDP adds the result of this hook to the gradients of the shards.
            # https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py#L449
            reduced.zero_()
            return
        self.waiting = None
        # A sum, which every backend has: some of those that come here refuse an average.
        dist.all_reduce(reduced, group=self._group)
        reduced.div_(self._group.size())
