"""Ranks whose work is not equal: fewer microbatches, an empty batch, an earlier end of the data.

[Note: unequal work] Forward and backward of a unit are collectives, so every rank has to run as
many microbatches as any other. Before each batch the ranks compare how many they have, host with
host ([Note: agreements] in `step.agreement`), and one with fewer begins with copies of its last
one, or of another rank's, that weigh nothing: no gradient, no loss, no metric, no change of buffers
or random states. Callbacks and algorithms see them, because those may speak to other ranks. A
microbatch with `n` of the `N` samples of all `W` ranks (or tokens that are learned, as the Trainer
was told) weighs `n / (N / W)`, and FSDP2 averages over the ranks: together that is the mean over
all samples, whoever has them.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from composer.core import DataSpec, Event, State, TrainerMode
from composer.devices import DeviceCPU
from composer.utils import dist

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.guards.order_check import OrderCheck
from composer_fsdp2.step.agreement import Agreement, agreement_of
from composer_fsdp2.step.run import run_of
from composer_fsdp2.step.snapshot import Snapshot
from composer_fsdp2.step.unused_parameters import UnusedParameters
from composer_fsdp2.trainer.averages_loaded import check_trains_own_weights
from composer_fsdp2.trainer.override_attribute import override_attribute

__all__ = [
    "evaluate",
    "iterate",
    "train_loop",
    "train_microbatch",
    "train_microbatches",
]

_EVEN = "_fsdp2_even"
"""attribute of a Trainer while it trains"""
_UNKNOWN = 2**62
"""stands for the length of a dataloader that has none"""
_END = object()


class _Even:
    """A copy of a DataSpec that splits into equally many microbatches on every rank.

    Added ones come first: what a batch leaves behind is that of a real one, and evaluation takes a
    sampler's duplicates off the last.
    """

    def __init__(self, spec: DataSpec, state: State) -> None:
        self._given = spec
        self._device = _device_of(state)
        self._agreement = agreement_of(self._device)
        self._added: list[Any] = []
        self.left = 0
        """added ones that have not run"""
        self.only_added = False
        """whether this rank has none of its own"""
        self.adding = False
        """whether one of them runs"""
        self.spec = copy.copy(spec)
        self.spec.split_batch = self.split

    def split(self, batch: Any, size: int | float) -> Sequence[Any]:
        """Replaces `DataSpec.split_batch` of a whole batch. Collective: yes."""
        found = self.parts(batch, size)
        least, most = self._agree(len(found))
        self.left, self.only_added = most - len(found), not found and most > 0
        if least == most:
            self._added = []
            return found
        example = found[-1] if least else _from_another(found, self._agreement)
        self._added = [copy.deepcopy(example) for _ in range(self.left)]  # before one has run
        return [*self._added, *found]

    def _agree(self, number: int) -> tuple[int, int]:
        """The least and the largest number of microbatches of a rank. Collective: yes."""
        return self._agreement.min_max(number)

    def parts(self, batch: Any, size: int | float) -> Sequence[Any]:
        """The microbatches of this rank that count."""
        if not self._given.get_num_samples_in_batch(batch):
            return []
        return self._given.split_batch(batch, size)

    def counted(self, count: Callable[..., Any]) -> Callable[..., Any]:
        """Of added ones, none; a number of the same type."""

        @functools.wraps(count)
        def counted(batch: Any, *args: Any, **kwargs: Any) -> Any:
            added = self.adding or any(batch is one for one in self._added)
            return count(batch, *args, **kwargs) * (not added)

        return counted


class _EvenTraining(_Even):
    def __init__(self, spec: DataSpec, state: State, on_tokens: bool) -> None:
        super().__init__(spec, state)
        self._on_tokens = on_tokens
        run = run_of(state.model)
        self._unused = None if run is None else run.listener(UnusedParameters)
        self.spec.get_num_samples_in_batch = self.counted(spec.get_num_samples_in_batch)
        self.spec.get_num_tokens_in_batch = self.counted(spec.get_num_tokens_in_batch)

    def _agree(self, number: int) -> tuple[int, int]:
        unused = self._unused
        asks = int(unused is not None and unused.must_compare)
        least, most, compare = self._agreement.maximum([-number, number, asks])
        if unused is not None and compare:
            unused.compare()
        return -least, most

    def parts(self, batch: Any, size: int | float) -> Sequence[Any]:
        found = super().parts(batch, size)
        if not self._on_tokens:
            return found
        # Its loss may be 0 / 0, and NaN times a weight of 0 is NaN.
        tokens = functools.partial(
            self._given.get_num_tokens_in_batch, token_type="loss_generating"
        )
        return [microbatch for microbatch in found if tokens(microbatch)]

    def begin(self) -> None:
        """The microbatches are run, perhaps again: an optimizer may call its closure often."""
        self.left, self.adding = len(self._added), False

    @contextmanager
    def one_added(self, trainer: Any) -> Generator[None]:
        """Around one that was added."""
        kept = Snapshot(self._device)
        kept.keep_buffers(trainer.state.model)
        self.left, self.adding = self.left - 1, True
        try:
            with override_attribute(trainer._original_model, "update_metric", _nothing):
                yield
        finally:
            self.adding = False
            kept.restore()


class _EvenEvaluation(_Even):
    def __init__(self, spec: DataSpec, state: State) -> None:
        super().__init__(spec, state)
        self._running: Any = None
        self.spec.microbatch_transforms = self.transform

    def split(self, batch: Any, size: int | float) -> Sequence[Any]:
        if batch is self._running:  # to take a sampler's duplicates off
            return self._given.split_batch(batch, size)
        return super().split(batch, size)

    def transform(self, microbatch: Any) -> Any:
        """Replaces `DataSpec.microbatch_transforms`, which each one goes through."""
        self.adding, self.left = self.left > 0, max(0, self.left - 1)
        self._running = self._given.microbatch_transforms(microbatch)
        return self._running

    def updated(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """Replaces `update_metric` of the model."""

        @functools.wraps(update)
        def updated(*args: Any, **kwargs: Any) -> Any:
            return None if self.adding else update(*args, **kwargs)

        return updated


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


def _from_another(found: Sequence[Any], agreement: Agreement) -> Any:
    """One of this rank, or else of the last rank that has any. Collective: yes."""
    _, giver = agreement.min_max(dist.get_global_rank() if found else -1)
    box: list[Any] = [None]
    if dist.get_global_rank() == giver:
        # A pickled CUDA tensor would be put on the giver's device by every rank that receives it.
        box = [DeviceCPU().batch_to_device(found[-1])]
    dist.broadcast_object_list(box, src=giver)
    return found[-1] if found else box[0]


def _device_of(state: State) -> torch.device:
    return state.device.tensor_to_device(torch.empty(0)).device


# --- Replacements of methods of the Trainer. ---


def train_loop(original: Callable[..., None], trainer: Any) -> None:
    """Replaces `Trainer._train_loop`. Collective: yes.

    Raises:
        ConfigError: on every rank, when one has no data at all.
        CheckpointError: on every rank, when averages would be trained.
    """
    state: State = trainer.state
    if run_of(state.model) is None:
        original(trainer)
        return
    check_trains_own_weights(state)
    _agree_on_length(state)
    if state.auto_microbatching:  # each rank starts with the batch size of its own dataloader
        size: Any = state.device_train_microbatch_size
        _, state.device_train_microbatch_size = agreement_of(_device_of(state)).min_max(size)
    spec = trainer._train_data_spec
    even = _EvenTraining(spec, state, trainer.accumulate_train_batch_on_tokens)
    with (
        override_attribute(trainer, "_train_data_spec", even.spec),
        override_attribute(trainer, _EVEN, even),
    ):
        original(trainer)


def _agree_on_length(state: State) -> None:
    """Makes an epoch equally long for all: schedules and intervals count in its batches."""
    length = _UNKNOWN if state.dataloader_len is None else int(state.dataloader_len)
    least, most = agreement_of(_device_of(state)).min_max(length)
    if least == most and least != 0:
        return
    if least == 0:
        raise ConfigError(
            "A rank has no batch of training data. The others would wait for it, and no epoch "
            "would train anything. Deal the samples with composer.utils.dist.get_sampler, or "
            "give that rank data."
        )
    state.dataloader_len = least
    if dist.get_global_rank() == 0:
        rest = "an unknown number" if most == _UNKNOWN else str(most)
        warnings.warn(
            f"One rank has {least} batches of training data, and another {rest}. Every epoch "
            f"ends after {least} on all ranks, and what others have more is left out. Deal the "
            "samples with composer.utils.dist.get_sampler to train on all of them.",
            stacklevel=5,
        )


def iterate(original: Callable[..., Iterator[Any]], trainer: Any, mode: TrainerMode) -> Any:
    """Replaces `Trainer._iter_dataloader`. Collective: yes, for every batch.

    Raises:
        PlanError: on every rank, when ranks ran different units in the batch before, or when ranks
            that compute one batch together read different ones.
    """
    state: State = trainer.state
    run = run_of(state.model)
    if run is None:
        yield from original(trainer, mode)
        return
    group = run.batch_group
    assert state.dataloader is not None
    length = None if state.dataloader_len is None else int(state.dataloader_len)
    batches, training = itertools.islice(state.dataloader, length), mode == TrainerMode.TRAIN
    agreement, finished = agreement_of(_device_of(state)), 0
    while not finished:
        if training:
            trainer.engine.run_event(Event.BEFORE_DATALOADER)
        batch = next(batches, _END)
        term = 0 if group is None or batch is _END else group.difference_term(batch)
        order = run.listener(OrderCheck) if training else None
        finished, differs = _number_of_ranks(batch is _END, agreement, order, term)
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


def _number_of_ranks(
    flag: bool, agreement: Agreement, order: OrderCheck | None, term: int
) -> tuple[int, int]:
    """Returns how many ranks have the flag, and the sum of terms.

    They have run the same units since the last call.
    """
    total, squares = (0, 0) if order is None else order.terms()
    number, total, squares, terms = agreement.total([int(flag), total, squares, term])
    if order is not None:
        order.check(total, squares)
    return number, terms


def train_microbatches(
    original: Callable[..., torch.Tensor], trainer: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Replaces `Trainer._train_microbatches`."""
    even = getattr(trainer, _EVEN, None)
    if even is None:
        return original(trainer, *args, **kwargs)
    even.begin()
    loss = original(trainer, *args, **kwargs)
    # An optimizer that runs the batch itself, as SAM does, takes a loss of 0 for a failure, and
    # would go on on the other ranks alone.
    return torch.full_like(loss, math.nan) if even.only_added else loss


def train_microbatch(
    original: Callable[..., Mapping[str, torch.Tensor]], trainer: Any, *args: Any
) -> Mapping[str, torch.Tensor]:
    """Replaces `Trainer._train_microbatch`."""
    even = getattr(trainer, _EVEN, None)
    if even is None or not even.left:
        return original(trainer, *args)
    with even.one_added(trainer):
        losses = original(trainer, *args)
    return {name: torch.zeros_like(loss) for name, loss in losses.items()}


def evaluate(
    original: Callable[..., None], trainer: Any, evaluator: Any, *args: Any, **kwargs: Any
) -> None:
    """Replaces `Trainer._eval_loop`. Collective: yes."""
    model = trainer._original_model
    if run_of(trainer.state.model) is None:
        original(trainer, evaluator, *args, **kwargs)
        return
    even = _EvenEvaluation(evaluator.dataloader, trainer.state)
    with (
        override_attribute(evaluator, "dataloader", even.spec),
        override_attribute(model, "update_metric", even.updated(model.update_metric)),
    ):
        original(trainer, evaluator, *args, **kwargs)
