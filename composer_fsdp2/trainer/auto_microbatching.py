"""`device_train_microbatch_size: auto` and its like for evaluation, under FSDP2.

Composer halves the size and tries the batch again when memory runs out. Its loop asks for handles
of hooks that keep ranks together, and takes them away when three batches in a row have fitted.
Ours is an `OOMGuard`; what the aborted attempt has changed is put back, so that the second one
computes what a run of that size would have.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from composer.core import State
from torch import nn
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.ranks import any_rank
from composer_fsdp2.runtime.oom import OOMGuard, Snapshot, reset, sync_oom
from composer_fsdp2.runtime.watchdog import add_rank_report
from composer_fsdp2.shard.torch_private.units import device_of, param_groups
from composer_fsdp2.trainer.config import asks_for_fsdp2
from composer_fsdp2.trainer.override_attribute import override_attribute

__all__ = [
    "clear_attempt",
    "evaluate",
    "guard_again",
    "restore_unshard",
    "strip_auto_microbatch_size",
    "train_batch",
]

_ATTEMPTS = "_fsdp2_attempts"
"""attribute of a State"""


@contextmanager
def strip_auto_microbatch_size(
    init: Callable[..., None], trainer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Generator[inspect.BoundArguments]:
    """Gives the arguments of `Trainer.__init__` without an `auto` that Composer would refuse.

    It starts with the batch of a rank either way. Allowed on a CPU too, where memory does not run
    out in a way that could be caught: a run can be tried there as it is.
    """
    given = inspect.signature(init).bind(trainer, *args, **kwargs)
    asked = given.arguments
    auto = asked.get("device_train_microbatch_size") == "auto"
    auto = auto and asks_for_fsdp2(asked.get("parallelism_config"))
    if auto:
        if asked.get("profiler") is not None:
            raise ConfigError(
                "device_train_microbatch_size is 'auto' and there is a profiler. It would record "
                "attempts that are thrown away. Find the size in a short run, and write it here."
            )
        asked["device_train_microbatch_size"] = None
    yield given
    if auto:
        trainer.state.auto_microbatching = True


class _Attempts:
    """What undoes the attempts at one batch after the other."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._device = _device_of(_units(state.model))
        self._stepped = False
        self.begin()
        for optimizer in state.optimizers:
            optimizer.register_step_pre_hook(self._before_step)

    def begin(self) -> None:
        """Keeps what another attempt at this batch would start from."""
        self._stepped = False
        self._guarded = bool(self._state.automicrobatch_fsdp_hook_handles)
        self._snapshot = Snapshot(self._device)
        if self._guarded:
            self._snapshot.keep(self._state.model.buffers())

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = kwargs.get("closure")
        if closure is None:
            self._note_step(optimizer)
            return None

        def computed(**settings: Any) -> Any:
            loss = closure(**settings)
            self._note_step(optimizer)  # forward and backward are over
            return loss

        return args, {**kwargs, "closure": computed}

    def _note_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._stepped = True
        if self._guarded:
            self._snapshot.keep_optimizer(optimizer)

    def undo(self) -> None:
        """Makes the model and its optimizer what they were. Collective: yes.

        Raises:
            RuntimeError: on every rank, when a step was aborted that nobody had expected to be.
        """
        if any_rank(self._stepped and not self._guarded, self._device):
            raise RuntimeError(
                "Memory ran out in the optimizer's step, long after the microbatch size had been "
                "found. Part of the weights may be stepped and part not. Resume from the last "
                "checkpoint with a smaller device_train_microbatch_size."
            )
        reset(_units(self._state.model).values())
        self._snapshot.restore()
        self.begin()


@add_rank_report()
def train_batch(
    original: Callable[..., Mapping[str, torch.Tensor]], trainer: Any, *args: Any, **kwargs: Any
) -> Mapping[str, torch.Tensor]:
    """Stands in for `Trainer._train_batch`. Collective: yes."""
    state: State = trainer.state
    if state.auto_microbatching and (units := _units(state.model)):
        searching = not trainer.first_train_batch_complete
        if searching and not state.automicrobatch_fsdp_hook_handles:
            state.fsdp_modules = units
            state.automicrobatch_fsdp_hook_handles = [OOMGuard(units.values())]
        if not hasattr(state, _ATTEMPTS):
            setattr(state, _ATTEMPTS, _Attempts(state))
        getattr(state, _ATTEMPTS).begin()
    return original(trainer, *args, **kwargs)


def guard_again(original: Callable[..., list[Any]], modules: Any, sync_hook: Any) -> list[Any]:
    """Stands in for `_readd_fsdp_sync_hooks`."""
    units = [module for module in modules.values() if isinstance(module, FSDPModule)]
    return [OOMGuard(units)] if units else original(modules, sync_hook)


def restore_unshard(
    original: Callable[[bool], None], auto_microbatch_size_found: bool = False
) -> None:
    """Stands in for `patch_unshard_for_automicrobatching`, of which nothing is FSDP2's."""
    missing = not hasattr(inspect.getmodule(original), "original_unshard")
    if not (auto_microbatch_size_found and missing):
        original(auto_microbatch_size_found)


def clear_attempt(original: Callable[[State], None], state: State) -> None:
    """Stands in for `_clear_incomplete_train_states`. Collective: yes."""
    original(state)
    if hasattr(state, _ATTEMPTS):
        getattr(state, _ATTEMPTS).undo()


@add_rank_report()
def evaluate(
    original: Callable[..., None], trainer: Any, evaluator: Any, *args: Any, **kwargs: Any
) -> None:
    """Stands in for `Trainer._eval_loop`. Collective: yes."""
    model, units = trainer._original_model, _units(trainer.state.model)
    if not evaluator.auto_microbatching or not units:
        original(trainer, evaluator, *args, **kwargs)
        return
    standing = trainer.state.automicrobatch_fsdp_hook_handles
    guards = [] if standing else [OOMGuard(units.values())]
    forward = model.eval_forward

    @functools.wraps(forward)
    def together(*inputs: Any, **settings: Any) -> Any:
        try:
            with sync_oom(_device_of(units)):
                return forward(*inputs, **settings)
        except torch.OutOfMemoryError:
            reset(units.values())
            raise

    try:
        # A model that is a unit itself gathers around an attribute of this name.
        with override_attribute(model, "eval_forward", together):
            original(trainer, evaluator, *args, **kwargs)
    finally:
        for guard in guards:
            guard.remove()


def _units(model: nn.Module) -> dict[str, FSDPModule]:
    return {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}


def _device_of(units: Mapping[str, FSDPModule]) -> torch.device:
    """Where they compute, which is not where offloaded shards are."""
    return next(device_of(group) for unit in units.values() for group in param_groups(unit))
