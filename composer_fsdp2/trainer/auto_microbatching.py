"""`device_train_microbatch_size: auto` and its like for evaluation, under FSDP2.

Composer halves the size and tries the batch again when memory runs out. Its loop asks for handles
of hooks that keep ranks together, and takes them away when three batches in a row have fitted.
Ours is an `OOMGuard`; what the aborted attempt has changed is put back, so that the second one
computes what a run of that size would have.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from composer.core import State
from torch import nn
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.guards.joint_exit import joint_exit_of
from composer_fsdp2.guards.out_of_memory import OOMGuard
from composer_fsdp2.guards.watchdog import add_rank_report
from composer_fsdp2.parallel.batch_group import batch_group_of
from composer_fsdp2.ranks import any_rank
from composer_fsdp2.shard.torch_private.tensors import tree_leaves
from composer_fsdp2.shard.torch_private.units import device_of, param_groups
from composer_fsdp2.step.accumulation import reset
from composer_fsdp2.step.run import run_of
from composer_fsdp2.step.snapshot import Snapshot
from composer_fsdp2.trainer.config import asks_for_fsdp2
from composer_fsdp2.trainer.override_attribute import override_attribute

__all__ = [
    "clear_attempt",
    "count_thrashes",
    "evaluate",
    "guard_again",
    "leaving_together",
    "restore_unshard",
    "strip_auto_microbatch_size",
    "train_batch",
]

_ATTEMPTS = "_fsdp2_attempts"
"""attribute of a State"""
_THRASHES = 2
"""batches in a row with retried allocations, at which Composer lowers the size"""


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
    """Undoes the attempts at one batch after the other."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._device = _device_of(_units(state.model))
        self._stepped = False
        self.exit = joint_exit_of(self._device)
        for optimizer in state.optimizers:
            optimizer.register_step_pre_hook(self._before_step)

    def begin(self) -> None:
        """Keeps what another attempt at this batch would start from."""
        self._stepped = False
        self._guarded = bool(self._state.automicrobatch_fsdp_hook_handles)
        self._snapshot = Snapshot(self._device)
        self._snapshot.keep_buffers(self._state.model)
        for metric in (self._state.train_metrics or {}).values():
            metric.reset()  # as every attempt begins; what it had collected is not to stay alive
            self._snapshot.keep_metric(metric)
        self._keep_batch()

    def _keep_batch(self) -> None:
        """A microbatch is a view of its batch, which a transform may change in place."""
        tensors = [one for one in tree_leaves(self._state.batch) if isinstance(one, torch.Tensor)]
        # torch counts the changes of a tensor in place in its `_version`.
        self._versions = [] if self._guarded else [(one, one._version) for one in tensors]
        if self._guarded:
            self._snapshot.keep(tensors)

    def around_split(self, split: Callable[..., Any]) -> Callable[..., Any]:
        """The start of an attempt."""

        @functools.wraps(split)
        def beginning(*args: Any, **kwargs: Any) -> Any:
            if self.exit is None:
                return split(*args, **kwargs)
            self.exit.begin()
            with self.exit.attempt():
                return split(*args, **kwargs)

        return beginning

    def around_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Everything else of an attempt, and its end."""

        @functools.wraps(step)
        def together(*args: Any, **kwargs: Any) -> Any:
            if self.exit is None:
                return step(*args, **kwargs)
            with self.exit.attempt():
                result = step(*args, **kwargs)
                self.exit.end()
            return result

        return together

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # Composer's closure runs forward and backward inside `step`, in all precisions but amp_fp16
        # (there for optimizers that ask for it), so nothing is computed yet when a hook is called.
        closure = kwargs.get("closure")
        if closure is None:
            self._note_step(optimizer)
            return None

        def computed(**settings: Any) -> Any:
            loss = closure(**settings)
            self._note_step(optimizer)
            return loss

        return args, {**kwargs, "closure": computed}

    def _note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Forward and backward have fitted on this rank; no weight has changed."""
        if self.exit is not None and self.exit.attempting:
            self.exit.meet()
        if self._guarded:
            self._snapshot.keep_optimizer(optimizer)
        self._stepped = True

    def undo(self) -> None:
        """Makes the model and its optimizer what they were. Collective: yes.

        Raises:
            RuntimeError: on every rank, when something was changed that nobody had kept.
        """
        changed = any(tensor._version != version for tensor, version in self._versions)
        if any_rank(self._stepped and not self._guarded, self._device):
            raise RuntimeError(
                "Memory ran out in the optimizer's step, long after the microbatch size had been "
                "found. Part of the weights may be stepped and part not. Resume from the last "
                "checkpoint with a smaller device_train_microbatch_size."
            )
        if any_rank(changed, self._device):
            raise RuntimeError(
                "Memory ran out long after the microbatch size had been found, in a batch that was "
                "changed in place until then (microbatch_transforms, an algorithm). Resume from "
                "the last checkpoint with a smaller device_train_microbatch_size."
            )
        run = run_of(self._state.model)
        if run is not None:
            run.abort()
        self._snapshot.restore()
        if (group := batch_group_of(self._state.model)) is not None:
            group.begin()  # some ranks may have come to the end of its check
        if run is not None:
            run.accumulation.again()
        self.begin()


def _attempts_of(state: State) -> _Attempts:
    if not hasattr(state, _ATTEMPTS):
        setattr(state, _ATTEMPTS, _Attempts(state))
    return getattr(state, _ATTEMPTS)


@contextmanager
def leaving_together(trainer: Any, evaluator: Any = None) -> Generator[None]:
    """Around training or evaluation in which a smaller microbatch may be tried. Collective: yes."""
    units = _units(trainer.state.model)
    auto = trainer.state.auto_microbatching or getattr(evaluator, "auto_microbatching", False)
    exit_ = joint_exit_of(_device_of(units)) if auto and units else None
    if exit_ is None:
        yield
        return
    with exit_.watching():
        yield


@add_rank_report()
def train_batch(
    original: Callable[..., Mapping[str, torch.Tensor]], trainer: Any, *args: Any, **kwargs: Any
) -> Mapping[str, torch.Tensor]:
    """Replaces `Trainer._train_batch`. Collective: yes."""
    state: State = trainer.state
    run = run_of(state.model) if state.auto_microbatching else None
    if run is None:
        return original(trainer, *args, **kwargs)
    searching = not trainer.first_train_batch_complete
    if searching and not state.automicrobatch_fsdp_hook_handles:
        state.fsdp_modules = dict(run.units)
        state.automicrobatch_fsdp_hook_handles = [OOMGuard(run, agree=False)]
    attempts, spec = _attempts_of(state), trainer._train_data_spec
    attempts.begin()
    with ExitStack() as stack:
        split = attempts.around_split(spec.split_batch)
        stack.enter_context(override_attribute(spec, "split_batch", split))
        # The scaler's step is around the optimizer's, where there is one.
        scaled = trainer._use_grad_scaling(state.precision, state.scaler)
        steppers: list[Any] = [state.scaler] if scaled else [*state.optimizers]
        for stepping in steppers:
            step = attempts.around_step(stepping.step)
            stack.enter_context(override_attribute(stepping, "step", step))
        return original(trainer, *args, **kwargs)


def guard_again(original: Callable[..., list[Any]], modules: Any, sync_hook: Any) -> list[Any]:
    """Replaces `_readd_fsdp_sync_hooks`."""
    runs = {id(run): run for module in modules.values() if (run := run_of(module)) is not None}
    guards = [OOMGuard(run, agree=False) for run in runs.values()]
    return guards or original(modules, sync_hook)


def restore_unshard(
    original: Callable[[bool], None], auto_microbatch_size_found: bool = False
) -> None:
    """Replaces `patch_unshard_for_automicrobatching`, of which nothing is FSDP2's."""
    missing = not hasattr(inspect.getmodule(original), "original_unshard")
    if not (auto_microbatch_size_found and missing):
        original(auto_microbatch_size_found)


def clear_attempt(original: Callable[[State], None], state: State) -> None:
    """Replaces `_clear_incomplete_train_states`. Collective: yes."""
    original(state)
    if hasattr(state, _ATTEMPTS):
        getattr(state, _ATTEMPTS).undo()


def count_thrashes(original: Callable[..., int], state: State, thrashes: int, retries: int) -> int:
    """Replaces `_update_num_consecutive_thrashes`. Collective: yes.

    At two batches in a row in which an allocation had to be tried again, Composer lowers the size
    and trains on the second one once more, though its step is done. Here the size is for the next.
    """
    found, size = original(state, thrashes, retries), state.device_train_microbatch_size
    if found < _THRASHES or not _units(state.model):
        return found
    if size is not None and size > 1:
        state.device_train_microbatch_size = size // 2
        warnings.warn(
            "CUDA out of memory or excessive memory allocation retries detected. Train microbatch "
            f"size will be decreased from {size} -> {size // 2} in the next batch.",
            RuntimeWarning,
            stacklevel=2,
        )
    return 0


# --- Evaluation. ---


class _EvaluatedBatches:
    """Undoes attempts at the batches of an evaluation, one after the other."""

    def __init__(self, trainer: Any, units: Mapping[str, FSDPModule], metrics: Any) -> None:
        self._state: State = trainer.state
        self._units, self._metrics = units, metrics
        self._device = _device_of(units)
        self._exit = joint_exit_of(self._device)
        self._running: Any = None
        self._kept: Snapshot | None = None

    def split(self, original: Callable[..., Any], batch: Any, size: Any) -> Any:
        """Replaces `DataSpec.split_batch`; the attempt ends after the last microbatch."""
        if batch is self._running:  # to take a sampler's duplicates off
            return original(batch, size)
        if self._kept is not None:  # this batch again
            # On every rank: one that came to the end has kept what the others have dropped.
            reset(self._units.values())
            self._kept.restore()
        else:
            self._kept = self._snapshot(batch)
        if self._exit is None:
            return _Ending(original(batch, size), self._end)
        self._exit.begin()
        return _Ending(self.together(original)(batch, size), self._end)

    def _snapshot(self, batch: Any) -> Snapshot:
        kept = Snapshot(self._device)
        kept.keep_buffers(self._state.model)
        kept.keep(one for one in tree_leaves(batch) if isinstance(one, torch.Tensor))
        for metric in self._metrics.values():
            kept.keep_metric(metric)
        return kept

    def _end(self) -> None:
        if self._exit is not None:
            with self._exit.attempt():
                self._exit.end()
        self._kept = None

    def together(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """One of the things that are done with a microbatch."""

        @functools.wraps(call)
        def together(*args: Any, **kwargs: Any) -> Any:
            if self._exit is None or not self._exit.attempting:
                return call(*args, **kwargs)
            try:
                with self._exit.attempt():
                    return call(*args, **kwargs)
            except torch.OutOfMemoryError:
                reset(self._units.values())
                raise

        return together

    def transform(self, original: Callable[..., Any], microbatch: Any) -> Any:
        """Replaces `DataSpec.microbatch_transforms`."""
        self._running = original(microbatch)
        return self._running


class _Ending(Sequence[Any]):
    """Microbatches, and what is done when the last one has been evaluated."""

    def __init__(self, microbatches: Sequence[Any], end: Callable[[], None]) -> None:
        self._microbatches, self._at_end = microbatches, end

    def __len__(self) -> int:
        return len(self._microbatches)

    def __getitem__(self, index: Any) -> Any:
        return self._microbatches[index]

    def __iter__(self) -> Iterator[Any]:
        yield from self._microbatches
        self._at_end()


@add_rank_report()
def evaluate(
    original: Callable[..., None],
    trainer: Any,
    evaluator: Any,
    metrics: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Replaces `Trainer._eval_loop`. Collective: yes."""
    model, units = trainer._original_model, _units(trainer.state.model)
    run = run_of(trainer.state.model)
    if not evaluator.auto_microbatching or run is None:
        original(trainer, evaluator, metrics, *args, **kwargs)
        return
    batches, spec = _EvaluatedBatches(trainer, units, metrics), copy.copy(evaluator.dataloader)
    spec.split_batch = functools.partial(batches.split, spec.split_batch)
    transform = functools.partial(batches.transform, spec.microbatch_transforms)
    spec.microbatch_transforms = batches.together(transform)
    state = trainer.state
    guards = [] if state.automicrobatch_fsdp_hook_handles else [OOMGuard(run, agree=False)]
    parts = [
        # A model that is a unit itself gathers around an attribute of this name.
        (model, "eval_forward"),
        (model, "update_metric"),
        (state.device, "batch_to_device"),
        (trainer.engine, "run_event"),
    ]
    try:
        with ExitStack() as stack:
            stack.enter_context(override_attribute(evaluator, "dataloader", spec))
            for owner, name in parts:
                call = batches.together(getattr(owner, name))
                stack.enter_context(override_attribute(owner, name, call))
            original(trainer, evaluator, metrics, *args, **kwargs)
    finally:
        for guard in guards:
            guard.remove()


def _units(model: nn.Module) -> dict[str, FSDPModule]:
    return {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}


def _device_of(units: Mapping[str, FSDPModule]) -> torch.device:
    """Where they compute, which is not where offloaded shards are."""
    return next(device_of(group) for unit in units.values() for group in param_groups(unit))
