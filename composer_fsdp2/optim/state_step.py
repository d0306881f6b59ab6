"""Steps an optimizer one bucket after the other, with state that is kept in another form.

[Note: buckets] The whole state in the optimizer's own form would be what the setting saves. So a
step goes through the parameters in buckets: the state of a bucket is read into new memory, the
optimizer's class makes its step for these parameters alone through a twin, and what it has left is
kept again. With state in CPU memory, the next bucket is on its way while one is stepped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from composer_fsdp2.optim.group_shards import GroupShards, are_same
from composer_fsdp2.optim.local_shard import LocalShard
from composer_fsdp2.optim.state_form import Stored
from composer_fsdp2.optim.state_kept import KeptState, Policy, is_moment
from composer_fsdp2.optim.state_move import Traffic
from composer_fsdp2.optim.twin import Twins
from composer_fsdp2.optim.written_through import WrittenThrough
from composer_fsdp2.shard.torch_private.tensors import local_tensor

__all__ = ["KeptSteps"]

AT_ONCE = 2**24
"""elements of a bucket; one parameter may have more"""

Step = Callable[[torch.optim.Optimizer], Any]
Bucket = list[tuple[LocalShard, Tensor]]
"""shards and their gradients"""


class _Split(NamedTuple):
    """The parameters of a group: those whose state is kept in another form, and those left."""

    params: list[Any]
    ours: GroupShards
    left: list[Any]


class KeptSteps:
    """The state of one optimizer in the form of a policy, and the steps of what it keeps.

    Collective: no.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        policy: Policy,
        step: Step,
        *,
        at_once: int | None = None,
    ) -> None:
        """Takes the step of the optimizer's class without hooks, and the elements of a bucket."""
        self._policy, self._step, self._at_once = policy, step, at_once or AT_ONCE
        self._split: dict[int, _Split] = {}
        self._traffic: Traffic | None = None
        self._loading: dict[Any, dict[Any, Any]] = {}
        self._handles = (
            optimizer.register_state_dict_post_hook(self._saved),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        )
        self.keep_all(optimizer)

    def remove(self) -> None:
        """State dicts and loads are torch's own again."""
        for handle in self._handles:
            handle.remove()

    def takes(self, param: Any) -> TypeGuard[DTensor]:
        """Whether a parameter's state is kept here."""
        return self._policy.takes(param)

    def keep_all(self, optimizer: torch.optim.Optimizer) -> None:
        """Brings the state that there is into its form."""
        for param, state in list(optimizer.state.items()):
            if self.takes(param) and state and not isinstance(state, KeptState):
                self._keep(optimizer, param, state)

    # --- The step. ---

    def leave(self, number: int, params: list[Any]) -> list[Any]:
        """Returns the parameters of group `number` that are not kept here."""
        known = self._split.get(number)
        if known is None or not are_same(known.params, params):
            ours = GroupShards(param for param in params if self.takes(param))
            left = [param for param in params if not self.takes(param)]
            known = self._split[number] = _Split(list(params), ours, left)
        return known.left

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        twins: Twins,
        number: int,
        group: dict[Any, Any],
    ) -> None:
        """Steps what is kept here of group `number`, as `leave` has divided it."""
        ours = self._split[number].ours
        ours.read({}, same_state=True)  # their state is read bucket by bucket
        increment_version(ours.with_gradient)
        pairs = list(zip(ours.shards, ours.grads, strict=True))
        ours.release()
        given = [(shard, grad) for shard, grad in pairs if grad is not None]
        buckets = list(_cut(given, self._at_once))
        traffic = self._traffic_of(ours.shards)
        for bucket, states in traffic.fetched(buckets, lambda b: self._read(optimizer, b)):
            made = self._step_bucket(optimizer, twins, group, bucket, states)
            with traffic.sending(made):
                for (shard, _), state in zip(bucket, made, strict=True):
                    if state is not None:
                        self._keep(optimizer, shard.param, state)
        traffic.finish()

    def _step_bucket(
        self,
        optimizer: torch.optim.Optimizer,
        twins: Twins,
        group: dict[Any, Any],
        bucket: Bucket,
        states: list[dict[Any, Any] | None],
    ) -> list[dict[Any, Any] | None]:
        """Steps these parameters alone, and returns the state that they have then."""
        held: dict[Any, dict[Any, Any]] = defaultdict(dict)
        for (shard, grad), state in zip(bucket, states, strict=True):
            shard.local.grad = grad
            if state is not None:
                held[shard.local] = state
        contents = ([WrittenThrough(group, {"params": [s.local for s, _ in bucket]})], held)
        try:
            self._step(twins.make(optimizer, lambda: contents))
        finally:
            for shard, _ in bucket:
                shard.local.grad = None
        for shard, _ in bucket:
            shard.check_memory(optimizer)
        made = [held.get(shard.local) for shard, _ in bucket]
        # The twin is held until the end of the step, and with it what it has.
        held.clear()
        return made

    def _read(
        self, optimizer: torch.optim.Optimizer, bucket: Bucket
    ) -> list[dict[Any, Any] | None]:
        return [_local(optimizer.state.get(shard.param), shard) for shard, _ in bucket]

    def _keep(self, optimizer: torch.optim.Optimizer, param: Any, state: Mapping[Any, Any]) -> None:
        kept = optimizer.state.get(param)
        if not isinstance(kept, KeptState) or kept.policy != self._policy:
            kept = optimizer.state[param] = KeptState(param, self._policy)
        for key in kept.keys() - state.keys():
            del kept[key]
        counted = state.get("step", 0)
        counted = counted if isinstance(counted, (Tensor, int)) else int(counted)
        for key, value in state.items():
            kept.keep(key, value, counted)

    def _traffic_of(self, shards: list[LocalShard]) -> Traffic:
        if self._traffic is None and shards:
            self._traffic = Traffic.of(local_tensor(shards[0].param).device, self._policy.on_cpu)
        return self._traffic or Traffic()

    # --- Checkpoints. ---

    def _saved(self, _optimizer: Any, state_dict: dict[str, Any]) -> None:
        state_dict["state"] = {
            key: state.for_checkpoint() if isinstance(state, KeptState) else state
            for key, state in state_dict["state"].items()
        }

    def _before_load(
        self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Takes out what is kept here, which torch would bring to the device all at once."""
        self._loading = {}
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        held = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        params = dict(zip(saved, held, strict=False))
        states: dict[Any, Any] = {}
        for key, state in state_dict["state"].items():
            param = params.get(key)
            if not self.takes(param) or not isinstance(state, Mapping):
                states[key] = state
                continue
            moments = {k: value for k, value in state.items() if is_moment(value, param)}
            states[key] = {k: value for k, value in state.items() if k not in moments}
            self._loading[param] = {k: moments.get(k) for k in state}
        return {**state_dict, "state": states}

    @torch.no_grad()
    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        loading, self._loading = self._loading, {}
        for param, moments in loading.items():
            rest = optimizer.state.get(param, {})
            local = local_tensor(param)
            state: dict[Any, Any] = {
                key: rest[key] if value is None else value.to(local.dtype)
                for key, value in moments.items()
            }
            optimizer.state.pop(param, None)
            if state:
                self._keep(optimizer, param, state)


def _local(state: Mapping[Any, Any] | None, shard: LocalShard) -> dict[Any, Any] | None:
    """A parameter's state as its step is to see it, in memory of its own where it is kept."""
    if not state:
        return None
    if isinstance(state, KeptState):
        return {
            key: state.read(value) if isinstance(value, Stored) else value
            for key, value in state.stored().items()
        }
    found: dict[Any, Any] = {}
    for key, value in state.items():
        moment = is_moment(value, shard.param)
        found[key] = local_tensor(value) if moment and hasattr(value, "placements") else value
    return found


def _cut(given: Iterable[tuple[LocalShard, Tensor]], at_once: int) -> Iterator[Bucket]:
    bucket: Bucket = []
    elements = 0
    for shard, grad in given:
        size = shard.local.numel()
        if bucket and elements + size > at_once:
            yield bucket
            bucket, elements = [], 0
        bucket.append((shard, grad))
        elements += size
    if bucket:
        yield bucket
