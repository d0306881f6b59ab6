"""Steps an optimizer on this rank's shards as plain tensors.

[Note: twin] Every operation on a DTensor costs some 50 microseconds of CPU, whatever its size. An
element-wise optimizer computes the same bits on the plain tensors inside. So a hook before the step
exchanges the object that the step gets: a twin that has the optimizer's class and attributes, but
whose `param_groups` and `state` hold this rank's shards. What the step writes into them is written
into the optimizer's own at once, wrapped where it has the parameter's shape. The optimizer itself
is never changed, so that other hooks, schedulers and checkpoints see DTensors, and a step that
raises leaves nothing half exchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from composer_fsdp2.optim.group_shards import GroupShards, are_same
from composer_fsdp2.optim.local_shard import LocalShard
from composer_fsdp2.optim.packing import Packing
from composer_fsdp2.optim.recalled import LocalGroup
from composer_fsdp2.optim.state_step import KeptSteps
from composer_fsdp2.optim.twin import Twins
from composer_fsdp2.optim.written_through import MISSING, Mutable

__all__ = ["LocalStep"]


class LocalStep:
    """The plain tensors of one optimizer, and the hooks that hand them to its step.

    Collective: no, and neither is a step of an element-wise optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        packing: Packing | None = None,
        methods: Mapping[str, Callable[..., Any]] | None = None,
        kept: KeptSteps | None = None,
    ) -> None:
        """Takes what steps small parameters together, and what keeps state in another form."""
        self._optimizer = weakref.ref(optimizer)
        self._twins = Twins(type(optimizer), methods or {})
        self._packing, self._kept = packing, kept
        self._groups: dict[int, GroupShards] = {}
        self._states = States(self._optimizer)
        self._stepped: list[tuple[Any, ...]] = []
        self._held_state: _HeldState | None = None
        self._recalled: list[Any] = []
        """of each group, before the step"""
        self._is_checked = False
        self._handles = (
            optimizer.register_step_pre_hook(self.before),
            optimizer.register_step_post_hook(self._after),
        )

    def remove(self) -> None:
        """The optimizer steps DTensors again."""
        for handle in self._handles:
            handle.remove()
        if self._kept is not None:
            self._kept.remove()
        self.release()

    def before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Hook before a step: hands it the twin."""
        if optimizer is not self._optimizer():
            return None  # a step within the step, which has the twin already
        # Torch calls no post-hooks after a step that raised.
        if self.release():
            self._held_state = None
        contents = _Contents(optimizer, self)
        rest, kwargs = list(args[1:]), dict(kwargs)
        # Gradients are there when the closure has run.
        if rest and callable(rest[0]):
            rest[0] = contents.after_closure(rest[0])
        elif callable(kwargs.get("closure")):
            kwargs["closure"] = contents.after_closure(kwargs["closure"])
        # Torch calls the step with what a pre-hook returns, its `self` included.
        return (self._twins.make(optimizer, contents), *rest), kwargs

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer is not self._optimizer():
            return
        self.release()
        if not self._is_checked:  # a step does what its first does
            self._is_checked = True
            for shard in chain.from_iterable(held.shards for held in self._groups.values()):
                shard.check_memory(optimizer)
        # State that the step has made is not what was read, and may be taken back.
        if self._held_state is not None and self._may_have_made(optimizer.state):
            self._held_state = None

    def _may_have_made(self, state: Mapping[Any, Any]) -> bool:
        recalled = [held.recalled for held in self._groups.values()]
        if self._kept is None and all(recalled) and are_same(recalled, self._recalled):
            return False  # the step was handed its lists, state included
        return self._held_state is not None and not self._held_state.counts(state.values())

    def release(self) -> bool:
        """Lets go of gradients, which would outlive `zero_grad`; returns if a step had them."""
        if not self._twins.forget():
            return False
        self.drop_gradients()
        return True

    def ask_again(self) -> None:
        """The step gets groups and state anew."""
        self._twins.ask_again()

    def drop_gradients(self) -> None:
        """Takes the gradients from the plain parameters."""
        for held in self._groups.values():
            held.release()

    def read(self, optimizer: torch.optim.Optimizer, *, pack: bool) -> tuple[list[Any], States]:
        """The groups and the state of this moment, in plain tensors.

        With `pack`, small parameters have made their step when this returns, and are left out. So
        have those whose state is kept in another form.
        """
        same_state = self._has_same_state(optimizer.state)
        groups: list[Any] = []
        stepped: list[tuple[Any, ...]] = []
        for number, group in enumerate(optimizer.param_groups):
            params = group["params"]
            if self._kept is not None:
                params = self._kept.leave(number, params)
                if pack:
                    self._kept.step(optimizer, self._twins, number, group)
            held = self._held(number, params)
            local_group = LocalGroup(group, held)
            held.read(optimizer.state, same_state=same_state)
            # torch counts no change of a local tensor for the DTensor around it, which others ask.
            # Before the step, because one that breaks off has changed some already.
            increment_version(held.with_gradient)
            left: list[int] | None = None
            if self._packing is not None and pack:
                left = self._packing.step(optimizer, self._twins, number, local_group, held)
            local_group.places = left
            local_group["params"].extend(held.choose(left))
            if held.recalled is None:
                held.give_gradients()
            stepped.append((held, held.version, left))
            groups.append(local_group)
        self._recalled = [held.recalled for held, _, _ in stepped]
        if not same_state or stepped != self._stepped:
            self._stepped = stepped
            self._states = States(self._optimizer)
            for held, _, left in stepped:
                for at in range(len(held.shards)) if left is None else left:
                    self._states.add(held.shards[at])
        return groups, self._states

    def _held(self, number: int, params: list[Any]) -> GroupShards:
        held = self._groups.get(number)
        if held is None or not are_same(held.params, params):
            held = self._groups[number] = GroupShards(params)
        return held

    def _has_same_state(self, state: Mapping[Any, Any]) -> bool:
        """Whether the state holds the objects of the last time. See [Note: read at once]."""
        dicts, held = list(state.values()), self._held_state
        try:
            if held is not None and are_same(dicts, held.dicts) and held.is_current():
                return True
            self._held_state = _HeldState(dicts)
        except TypeError:  # facts of all parameters under a word
            self._held_state = None
        return False


class _HeldState:
    """The objects that an optimizer's state held when it was read. See [Note: read at once]."""

    __slots__ = ("_values", "_views", "dicts")

    def __init__(self, dicts: list[Any]) -> None:
        self.dicts = dicts
        self._views: list[Any] = list(map(dict.values, dicts))
        self._values = list(self._now())

    def _now(self) -> Iterator[Any]:
        # With an end, so that one of two that are compared cannot be a part of the other.
        return chain(chain.from_iterable(self._views), (MISSING,))

    def is_current(self) -> bool:
        """Whether each dictionary holds the same objects."""
        return all(map(is_, self._now(), self._values))

    def counts(self, dicts: Iterable[Any]) -> bool:
        """Whether these hold as many objects."""
        try:
            return sum(map(len, dicts)) == len(self._values) - 1
        except TypeError:
            return False


class _Contents:
    """`param_groups` and `state` of a twin: read when its step first asks for them."""

    __slots__ = ("_has_gradients", "_held", "_local_step", "_optimizer")

    def __init__(self, optimizer: torch.optim.Optimizer, local_step: LocalStep) -> None:
        self._optimizer, self._local_step = optimizer, local_step
        self._held: tuple[list[Any], States] | None = None
        self._has_gradients = True

    def after_closure(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """The closure, which computes the gradients: they are read anew after it."""
        self._has_gradients = False

        def run(*args: Any, **kwargs: Any) -> Any:
            found = closure(*args, **kwargs)
            self._has_gradients = True
            if self._held is not None:
                # The step may hold the groups it asked for: their parameters stay the same.
                self._local_step.drop_gradients()
                self._local_step.ask_again()
                self._held = None
                self()
            return found

        return run

    def __call__(self) -> tuple[list[Any], States]:
        if self._held is None:
            with torch.no_grad():
                self._held = self._local_step.read(self._optimizer, pack=self._has_gradients)
        return self._held


class States(Mutable):
    """The state by plain parameter, made when first asked for, as torch's is."""

    __slots__ = ("_optimizer", "_shards")

    def __init__(self, optimizer: Callable[[], torch.optim.Optimizer | None]) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._shards: dict[nn.Parameter, LocalShard] = {}

    @property
    def _whole(self) -> Any:
        """The optimizer's own state."""
        optimizer = self._optimizer()
        return {} if optimizer is None else optimizer.state

    def add(self, shard: LocalShard) -> None:
        """Takes up a parameter, with the state it has."""
        self._shards[shard.local] = shard
        if shard.held is not None:
            dict.__setitem__(self, shard.local, shard.local_state)

    def __missing__(self, local: nn.Parameter) -> Any:
        shard = self._shards.get(local)
        if shard is None:  # no parameter: some optimizers keep facts of all under a word
            return self._whole[local]
        shard.read_state(self._whole[shard.param])
        dict.__setitem__(self, local, shard.local_state)
        return shard.local_state

    def __setitem__(self, local: nn.Parameter, value: Any) -> None:
        state = self[local]
        state.clear()
        state.update(value)

    def __delitem__(self, local: nn.Parameter) -> None:
        dict.__delitem__(self, local)
        shard = self._shards.get(local)
        self._whole.pop(local if shard is None else shard.param, None)
