"""Tells a prepared model's listeners what Composer's loop does, and gives all ranks equal work.

Each method of the loop has one replacement here, named as the method is; see `patches.trainer`.
Models that are not sharded keep Composer's own loop.

[Note: unequal work] Forward and backward of a unit are collectives, so every rank has to run as
many microbatches as any other. Before each batch the ranks compare how many they have, host with
host ([Note: agreements] in `step.agreement`), and a rank with fewer begins with copies of its last
microbatch, or of another rank's, that weigh nothing: no gradient, no loss, no metric, no change of
buffers or random states. Callbacks and algorithms see them, because those may speak to other ranks.
A microbatch with `n` of the `N` samples of all `W` ranks (or tokens that are learned, as the
Trainer was told) weighs `n / (N / W)`, and FSDP2 averages over the ranks: together that is the mean
over all samples, whoever has them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from composer.core import DataSpec, Event, State, TrainerMode
from composer.devices import DeviceCPU
from composer.trainer import trainer as composers
from composer.utils import dist

from composer_fsdp2.errors import CheckpointError, ConfigError
from composer_fsdp2.guards.explain import explained, explained_reading
from composer_fsdp2.guards.leaving.out_of_memory import OOMGuard, is_out_of_memory
from composer_fsdp2.guards.order_check import OrderCheck
from composer_fsdp2.guards.watchdog import add_rank_report
from composer_fsdp2.step.accumulation import reset
from composer_fsdp2.step.agreement import agreement_of
from composer_fsdp2.step.run import Run, StepListener, run_of
from composer_fsdp2.step.snapshot import Snapshot
from composer_fsdp2.step.unused_parameters import UnusedParameters
from composer_fsdp2.trainer.dist_views import counting_groups
from composer_fsdp2.trainer.loop.attempts import (
    Attempt,
    exit_of,
    leaving_together,
    lower_size_that_thrashes,
    tensors_of,
)
from composer_fsdp2.trainer.loop.groups import refuse_auto
from composer_fsdp2.trainer.override_attribute import override_attribute

__all__ = [
    "eval_loop",
    "iterate",
    "predict",
    "train_batch",
    "train_loop",
    "train_microbatch",
    "train_microbatches",
]

_STEADY = 3
"""batches in a row that fit, after which nothing is kept for another attempt; Composer's number"""
_UNKNOWN = 2**62
"""stands for the length of a dataloader that has none"""
_END = object()


# --- Equal work. ---


class _Even(StepListener):
    """Splits batches into equally many microbatches on every rank, with a copy of a DataSpec.

    Added microbatches come first: what a batch leaves behind is that of a real one, and evaluation
    takes a sampler's duplicates off the last.

    Args:
        run: whose ranks agree on the number of microbatches.
        spec: is copied, so that the user's own stays as it is.
        unused: is told when a rank asks to compare which parameters were used.
    """

    def __init__(self, run: Run, spec: DataSpec, unused: UnusedParameters | None = None) -> None:
        super().__init__(run)
        self._given, self._unused, self._agreement = spec, unused, agreement_of(run.device)
        self.added: list[Any] = []
        """microbatches of this batch that weigh nothing"""
        self.left = 0
        """how many added microbatches have not run"""
        self.only_added = False
        """whether this rank has no microbatch of its own"""
        self.adding = False
        """whether an added microbatch runs"""
        self.spec = copy.copy(spec)
        self.spec.split_batch = self.split

    def split(self, batch: Any, size: int | float) -> Sequence[Any]:
        """Replaces `DataSpec.split_batch` of a whole batch. Collective: yes."""
        parts, unused = self.parts(batch, size), self._unused
        asks = int(unused is not None and unused.must_compare)
        minus_least, most, compare = self._agreement.maximum([-len(parts), len(parts), asks])
        if unused is not None and compare:
            unused.compare()
        self.left, self.only_added = most - len(parts), not parts and most > 0
        example = parts[-1] if parts else None
        if most and not minus_least:  # a rank has none, and takes one of the last rank that has any
            rank = dist.get_global_rank()
            _, giver = self._agreement.min_max(rank if parts else -1)
            # A pickled CUDA tensor would be put on the giver's device by every rank that gets it.
            box = [DeviceCPU().batch_to_device(example) if rank == giver else None]
            dist.broadcast_object_list(box, src=giver)
            example = parts[-1] if parts else box[0]
        self.added = [copy.deepcopy(example) for _ in range(self.left)]  # before one has run
        return [*self.added, *parts]

    def updated(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `update_metric` of the model, which leaves added microbatches out."""

        @functools.wraps(update)
        def updated(*args: Any, **kwargs: Any) -> Any:
            return None if self.adding else update(*args, **kwargs)

        return updated

    def parts(self, batch: Any, size: int | float) -> Sequence[Any]:
        """Returns the microbatches of this rank that count."""
        if not self._given.get_num_samples_in_batch(batch):
            return []
        return self._given.split_batch(batch, size)


class EvenTraining(_Even):
    """Trains on equally many microbatches on every rank; see [Note: unequal work]."""

    def __init__(self, run: Run, spec: DataSpec, on_tokens: bool) -> None:
        super().__init__(run, spec, run.listener(UnusedParameters))
        self._on_tokens = on_tokens
        self.spec.get_num_samples_in_batch = self._counted(spec.get_num_samples_in_batch)
        self.spec.get_num_tokens_in_batch = self._counted(spec.get_num_tokens_in_batch)

    def _counted(self, count: Callable[..., Any]) -> Callable[..., Any]:
        """Counts nothing in added microbatches; the number keeps its type."""

        @functools.wraps(count)
        def counted(batch: Any, *args: Any, **kwargs: Any) -> Any:
            added = self.adding or any(batch is added_batch for added_batch in self.added)
            return count(batch, *args, **kwargs) * (not added)

        return counted

    def parts(self, batch: Any, size: int | float) -> Sequence[Any]:
        """Leaves out microbatches without a token to learn, where tokens are counted."""
        parts = super().parts(batch, size)
        if not self._on_tokens:
            return parts
        # The loss of a microbatch without any may be 0 / 0, and NaN times a weight of 0 is NaN.
        tokens = self._given.get_num_tokens_in_batch
        return [part for part in parts if tokens(part, token_type="loss_generating")]


class _Evaluation(_Even):
    """Evaluates equally many microbatches on every rank, and each batch again until it fits.

    Args:
        run: whose ranks agree on the number of microbatches.
        spec: the evaluator's DataSpec, which is copied.
        metrics: where the size of a microbatch is `auto`: those that an attempt adds to.
    """

    def __init__(self, run: Run, spec: DataSpec, metrics: Mapping[str, Any] | None) -> None:
        super().__init__(run, spec)
        self._metrics = metrics
        self._exit = None if metrics is None else exit_of(run)
        self._running: Any = None
        self._kept: Snapshot | None = None
        self.spec.microbatch_transforms = self.together(self._transform)

    def together(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a part of an attempt: a function that all ranks leave when memory runs out."""
        return call if self._exit is None else self._exit.attempt()(call)

    def split(self, batch: Any, size: int | float) -> Sequence[Any]:
        """Replaces `DataSpec.split_batch`; an attempt ends after its last microbatch."""
        if batch is self._running:  # to take a sampler's duplicates off
            return self._given.split_batch(batch, size)
        if self._metrics is None:
            return super().split(batch, size)
        if self._kept is None:
            self._kept = Snapshot(self.run.device)
            self._kept.keep_buffers(self.run.model)
            self._kept.keep(tensors_of(batch))
            for metric in self._metrics.values():
                self._kept.keep_metric(metric)
        else:  # this batch again; on every rank, as some may have left units gathered
            reset(self.run.units.values())
            self._kept.restore()
        if self._exit is not None:
            self._exit.begin()
        return _Ending(self.together(super().split)(batch, size), self.together(self._end))

    def _end(self) -> None:
        if self._exit is not None:
            self._exit.end()
        self._kept = None

    def _transform(self, microbatch: Any) -> Any:
        """Replaces `DataSpec.microbatch_transforms`, which each microbatch goes through."""
        self.adding, self.left = self.left > 0, max(0, self.left - 1)
        self._running = self._given.microbatch_transforms(microbatch)
        return self._running


class _Ending(list[Any]):
    """Microbatches, and a function that is called when the last of them has been evaluated."""

    def __init__(self, microbatches: Sequence[Any], end: Callable[[], None]) -> None:
        super().__init__(microbatches)
        self._at_end = end

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        self._at_end()


# --- Training. ---


def _run_of(trainer: Any) -> Run:
    """Returns the run of a model that is sharded, as the table of patches asks."""
    run = run_of(trainer.state.model)
    assert run is not None
    return run


def train_loop(original: Callable[..., None], trainer: Any) -> None:
    """Replaces `Trainer._train_loop`. Collective: yes.

    Raises:
        ConfigError: on every rank, when one has no data at all.
        CheckpointError: on every rank, when averages would be trained.
    """
    state: State = trainer.state
    run = _run_of(trainer)
    if run.batch_group is not None:
        run.batch_group.begin()
    with explained_reading(), leaving_together(run, state.auto_microbatching):
        # See [Note: EMA in checkpoints]; all ranks have loaded the same.
        if (path := run.averages_from) is not None:
            raise CheckpointError(
                f"'{path}' was saved with the algorithm EMA: its model is the averages, and its "
                "optimizer has the state of the trained weights beside them. Training would go on "
                "from the averages with the state of other weights. Add EMA to the Trainer's "
                "algorithms (and leave state/algorithms out of load_ignore_keys); or start anew "
                "from the averages with load_weights_only: true; or take the trained weights, "
                f"which the checkpoint holds: `composer-fsdp2 checkpoint convert {path} NEW.pt "
                "--to full --weights trained`."
            )
        # An epoch is equally long for all: schedules and intervals count in its batches.
        length = _UNKNOWN if state.dataloader_len is None else int(state.dataloader_len)
        least, most = agreement_of(run.device).min_max(length)
        if least == 0:
            raise ConfigError(
                "A rank has no batch of training data. The others would wait for it, and no epoch "
                "would train anything. Deal the samples with composer.utils.dist.get_sampler, or "
                "give that rank data."
            )
        if least < most:
            state.dataloader_len = least
            rest = "an unknown number" if most == _UNKNOWN else str(most)
            if dist.get_global_rank() == 0:
                warnings.warn(
                    f"One rank has {least} batches of training data, and another {rest}. Every "
                    f"epoch ends after {least} on all ranks, and what others have more is left "
                    "out. Deal the samples with composer.utils.dist.get_sampler to train on all "
                    "of them.",
                    stacklevel=4,
                )
        if state.auto_microbatching:  # each rank starts with the batch size of its own dataloader
            size: Any = state.device_train_microbatch_size
            _, state.device_train_microbatch_size = agreement_of(run.device).min_max(size)
        even = EvenTraining(
            run, trainer._train_data_spec, on_tokens=trainer.accumulate_train_batch_on_tokens
        )
        run.listen(even)
        try:
            with override_attribute(trainer, "_train_data_spec", even.spec):
                original(trainer)
        finally:
            run.stop_listening(even)


def iterate(
    _original: Callable[..., Iterator[Any]], trainer: Any, mode: TrainerMode
) -> Iterator[Any]:
    """Replaces `Trainer._iter_dataloader`. Collective: yes, for every batch.

    Raises:
        PlanError: on every rank, when ranks ran different units in the batch before, or when ranks
            that compute one batch together read different ones.
    """
    state: State = trainer.state
    run = _run_of(trainer)
    group = run.batch_group
    assert state.dataloader is not None
    length = None if state.dataloader_len is None else int(state.dataloader_len)
    batches, training = itertools.islice(state.dataloader, length), mode == TrainerMode.TRAIN
    order, finished = run.listener(OrderCheck) if training else None, 0
    while not finished:
        if training:
            trainer.engine.run_event(Event.BEFORE_DATALOADER)
        batch = next(batches, _END)
        term = 0 if group is None or batch is _END else group.difference_term(batch)
        # One collective tells how many ranks have no batch, and all that has to be compared.
        numbers = [int(batch is _END), term, *((0, 0) if order is None else order.terms())]
        finished, differs, total, squares = agreement_of(run.device).total(numbers)
        if order is not None:
            order.check(total, squares)
        if not finished:
            if differs and group is not None:
                group.raise_different(batch)
            yield batch
    if training:
        # A profiler's marker of the dataloader has to end before the next epoch starts it again.
        trainer.engine.run_marker_only_event(Event.AFTER_DATALOADER)
    if finished < dist.get_world_size() and dist.get_global_rank() == 0:
        warnings.warn(
            f"The data of {finished} of {dist.get_world_size()} ranks ended before that of the "
            f"others ('{state.dataloader_label}'). All ranks end here, and what the others have "
            "more is left out. Give every rank equally many batches to use all of them.",
            stacklevel=3,
        )


@add_rank_report()
def train_batch(
    original: Callable[..., Mapping[str, torch.Tensor]], trainer: Any, use_grad_scaling: bool
) -> Mapping[str, torch.Tensor]:
    """Replaces `Trainer._train_batch`: tries a batch with less until it fits on every rank.

    Collective: yes.
    """
    state: State = trainer.state
    run = run_of(state.model) if state.auto_microbatching else None
    if run is None:
        return original(trainer, use_grad_scaling)
    batch, tried, losses = state.batch, 0, None
    while losses is None:
        fitted = trainer.num_consecutive_non_OOM_batches
        searching = fitted < _STEADY or not trainer.first_train_batch_complete
        attempt, tried = Attempt(trainer, run, searching), tried + 1
        try:
            losses = attempt.compute(batch, use_grad_scaling)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        if losses is None:  # outside of `except`: an error keeps alive what it should free
            trainer.num_consecutive_thrashes = trainer.num_consecutive_non_OOM_batches = 0
            state.batch = batch
            composers._adjust_device_train_microbatch_size(state)
            attempt.undo()
    if torch.cuda.is_available():
        if tried == 1:
            lower_size_that_thrashes(trainer)
        trainer.cumulative_alloc_retries = torch.cuda.memory_stats()["num_alloc_retries"]
    trainer.num_consecutive_non_OOM_batches += 1
    trainer.logger.log_metrics(
        {"trainer/device_train_microbatch_size": state.device_train_microbatch_size}
    )
    trainer.first_train_batch_complete = True
    return losses


def train_microbatches(
    original: Callable[..., torch.Tensor], trainer: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Replaces `Trainer._train_microbatches`."""
    run = _run_of(trainer)
    even = run.listener(EvenTraining)
    if even is not None:  # perhaps again: an optimizer may call its closure often
        even.left, even.adding = len(even.added), False
    with run.accumulation.batch():
        loss = original(trainer, *args, **kwargs)
    # An optimizer that runs the batch itself, as SAM does, takes a loss of 0 for a failure, and
    # would go on on the other ranks alone.
    only_added = even is not None and even.only_added
    return torch.full_like(loss, math.nan) if only_added else loss


def train_microbatch(
    original: Callable[..., Mapping[str, torch.Tensor]],
    trainer: Any,
    use_grad_scaling: bool,
    current_batch_size: Any,
    is_final_microbatch: bool,
) -> Mapping[str, torch.Tensor]:
    """Replaces `Trainer._train_microbatch`."""
    run, arguments = _run_of(trainer), (use_grad_scaling, current_batch_size, is_final_microbatch)
    even = run.listener(EvenTraining)
    with explained(run), run.accumulation.microbatch(last=is_final_microbatch):
        if even is None or not even.left:
            return original(trainer, *arguments)
        # What an added microbatch changes is taken back, and none of its metrics count.
        snapshot = Snapshot(run.device)
        snapshot.keep_buffers(trainer.state.model)
        even.left, even.adding = even.left - 1, True
        model = trainer._original_model
        try:
            with override_attribute(model, "update_metric", even.updated(model.update_metric)):
                losses = original(trainer, *arguments)
        finally:
            even.adding = False
            snapshot.restore()
    return {name: torch.zeros_like(loss) for name, loss in losses.items()}


# --- Evaluation. ---


def predict(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `Trainer.predict`. Collective: yes."""
    run = _run_of(trainer)
    with explained(run), run.evaluating():
        return original(trainer, *args, **kwargs)


@add_rank_report()
def eval_loop(
    original: Callable[..., None],
    trainer: Any,
    evaluator: Any,
    metrics: Any,
    subset_num_batches: int | None = None,
) -> None:
    """Replaces `Trainer._eval_loop`. Collective: yes.

    Raises:
        ConfigError: on every rank, where `auto` cannot be used.
    """
    state, model = trainer.state, trainer._original_model
    run, auto = _run_of(trainer), evaluator.auto_microbatching
    refuse_auto(run.batch_group, evaluator)
    with (
        counting_groups(run.batch_group),
        leaving_together(run, state.auto_microbatching or auto),
        explained(run),
        run.evaluating(),
        contextlib.ExitStack() as stack,
    ):
        even = _Evaluation(run, evaluator.dataloader, metrics if auto else None)
        changed = [
            (evaluator, "dataloader", even.spec),
            (model, "update_metric", even.together(even.updated(model.update_metric))),
            # Composer adds FSDP1's hooks after an evaluation where this list is empty.
            (state, "automicrobatch_fsdp_hook_handles", [None]),
        ]
        if auto:
            stack.callback(OOMGuard(run, agree=False).remove)
            parts = [
                # A model that is a unit itself gathers around an attribute of this name.
                (model, "eval_forward"),
                (state.device, "batch_to_device"),
                (trainer.engine, "run_event"),
            ]
            changed += [(owner, name, even.together(getattr(owner, name))) for owner, name in parts]
        for change in changed:
            stack.enter_context(override_attribute(*change))
        original(trainer, evaluator, metrics, subset_num_batches)
