"""The shards of one group of parameters, read before each step.

[Note: read at once] Next to a step of fused AdamW, which takes 7 microseconds for a small
parameter, everything that is done for each parameter in Python counts. So what rarely changes is
kept, and looked at only to see that it is the same: lists of objects are compared by identity
inside the interpreter, some 30 nanoseconds an object.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from composer_fsdp2.optim.local_shard import LocalShard, local_gradient
from composer_fsdp2.shard.torch_private.tensors import (
    TORCH_FUNCTION_OFF,
    layouts_of,
    local_gradients,
    local_tensors,
)

__all__ = ["GroupShards", "are_same"]

_grad, _requires_grad = attrgetter("grad"), attrgetter("requires_grad")


def are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether both hold the same objects in the same order; they may not be comparable."""
    return len(some) == len(others) and all(map(is_, some, others))


class GroupShards:
    """This rank's parts of the parameters of one group, with their gradients during a step."""

    def __init__(self, params: Iterable[Any]) -> None:
        self.params = list(params)
        self.shards = [LocalShard(param) for param in self.params]
        self.version = 0
        """changes with every tensor but gradients that something else than a step has exchanged"""
        self.grads: Sequence[torch.Tensor | None] = []
        self.has_gradient: list[bool] = []
        """another object whenever its contents are others"""
        self.with_gradient: list[Any] = []
        """parameters, as the optimizer has them"""
        self.recalled: Any = None
        """what was made of these tensors; forgotten when one is exchanged or a gradient missing"""
        self._sharded = [param for param in self.params if isinstance(param, DTensor)]
        self._sources: list[Any] = []
        self._required: list[bool] = []
        self._layouts: list[Any] = []
        """of the last gradients, if each parameter had one that was divided as it is itself"""
        self._state_is_read = False
        self._given: Sequence[Any] = ()
        self._chosen: tuple[Any, ...] = ()

    def read(self, state: Mapping[Any, Any], *, same_state: bool) -> None:
        """Takes the tensors of this moment; `same_state` says that the state is as it was read."""
        with TORCH_FUNCTION_OFF():  # an attribute of a DTensor takes half the time
            grads = list(map(_grad, self.params))
            required = self._required
            if self.recalled is None:  # what torch's optimizers recall does not depend on it
                required = list(map(_requires_grad, self._sharded))
        sources = local_tensors(self._sharded)
        if not are_same(sources, self._sources) or required != self._required:
            self._sources, self._required = sources, required
            for shard in self.shards:
                shard.read_param()
            same_state = False
        if not same_state or not self._state_is_read:
            self._read_state(state)
        self._take_gradients(grads)

    def _take_gradients(self, grads: Sequence[Any]) -> None:
        layouts = layouts_of(grads)
        if self._layouts and are_same(layouts, self._layouts):
            self.grads = local_tensors(grads)
            return
        self.grads = local_gradients(self.params, grads, local_gradient)
        has_gradient = [grad is not None for grad in self.grads]
        if has_gradient != self.has_gradient:
            self.has_gradient, self.recalled = has_gradient, None
            held = zip(self.params, has_gradient, strict=True)
            self.with_gradient = [param for param, has in held if has]
        # FSDP2 gives all gradients of a parameter one object as their layout.
        as_they_are = all(layouts) and are_same(self.grads, local_tensors(grads))
        self._layouts = layouts if as_they_are else []

    def _read_state(self, state: Mapping[Any, Any]) -> None:
        self.recalled = None
        for shard in self.shards:
            shard.read_state(state.get(shard.param))
        self._state_is_read = True
        if any(shard.changed for shard in self.shards):
            self.version += 1
            for shard in self.shards:
                shard.changed = False

    @property
    def is_all_sharded(self) -> bool:
        """Whether no parameter is a plain tensor, whose gradient may be of any kind."""
        return len(self._sharded) == len(self.params)

    def gradients(self, places: Sequence[int] | None) -> list[torch.Tensor]:
        """The gradients at these places, all by default, without those that are missing."""
        grads = self.grads if places is None else [self.grads[at] for at in places]
        if self._layouts:
            return list(grads)  # pyright: ignore[reportReturnType]
        return [grad for grad in grads if grad is not None]

    def choose(self, places: Sequence[int] | None) -> list[Any]:
        """Returns the plain parameters at these places, all by default.

        They are those that `give_gradients` gives theirs. `places` is not changed later.
        """
        if self._chosen[:2] != (self.version, places):
            chosen = range(len(self.shards)) if places is None else places
            own = [at for at in chosen if self.shards[at].is_sharded]
            plain = [self.shards[at].local for at in chosen]
            self._chosen = (self.version, places, plain, own, [self.shards[a].local for a in own])
        return list(self._chosen[2])

    def give_gradients(self) -> None:
        """Puts the gradients where a step looks for them."""
        _, _, _, own, self._given = self._chosen
        grads = self.grads
        for at, local in zip(own, self._given, strict=True):
            local.grad = grads[at]

    def release(self) -> None:
        """Lets go of the gradients."""
        for local in self._given:
            local.grad = None
        self._given, self.grads = (), []
