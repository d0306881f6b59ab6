"""Ranks with unequal work: nobody waits for ever, and gradients are those of all samples."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from composer import Callback, DataSpec, Logger, Trainer
from composer.algorithms import SAM, GradientClipping
from composer.algorithms.sam.sam import SAMOptimizer
from composer.callbacks import NaNMonitor
from composer.core import Evaluator, Precision, State
from composer.loggers import InMemoryLogger
from composer.metrics.nlp import LanguageCrossEntropy
from composer.optim import LinearScheduler
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torchmetrics import Metric

from composer_fsdp2 import ConfigError, installed
from tests.support.models import TinyComposer, batches, lm_loss
from tests.support.parity import OPTIMIZERS
from tests.support.training import (
    built,
    largest_difference,
    loader_of,
    samples_of,
    trainer_for,
    weights,
)

pytestmark = pytest.mark.filterwarnings("ignore:Cannot split tensor of length")
Batch = tuple[torch.Tensor, ...]
SGD = OPTIMIZERS["sgd"]
TWO = ((5, 2), (1, 6), (0, 3), (4, 4), (3, 0), (0, 0), (6, 5))
FOUR = ((5, 2, 0, 4), (1, 0, 6, 0), (2, 2, 2, 2), (0, 0, 0, 3))
"""samples of each rank, batch by batch; a microbatch takes two"""
IGNORED = -100


def dealt(sizes: Sequence[Sequence[int]]) -> tuple[list[Batch], list[Batch]]:
    """The batches of all ranks together, and those of this one."""
    whole, own = [], []
    for number, counts in enumerate(sizes):
        (batch,) = batches(1, max(1, sum(counts)), seed=number)
        batch = tuple(part[: sum(counts)] for part in batch)
        whole.append(batch)
        own.append(tuple(part.split(list(counts))[dist.get_rank()] for part in batch))
    return whole, own


def trained_alone(whole: list[Batch], clip: float = 1e9) -> tuple[TinyComposer, list[float]]:
    model, losses = built(TinyComposer), []
    optimizer = SGD(model.parameters())
    for batch in whole:
        optimizer.zero_grad()
        losses.append(0.0)
        if len(batch[0]):
            loss = model.loss(model(batch), batch)
            loss.backward()
            losses[-1] = loss.item()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model, losses


def trainer_on(model: Any, own: Any, fsdp2: Any = None, size: Any = 2, **kwargs: Any) -> Trainer:
    settings: dict[str, Any] = {"train_dataloader": own, "device_train_microbatch_size": size}
    optimizer = SGD(model.parameters())
    return trainer_for(model, optimizer, samples_of(1, 4), fsdp2, **(settings | kwargs))


def fit(trainer: Trainer) -> None:
    trainer.fit()
    trainer.close()


KEPT = {"gradient_sync": "last", "reshard_after_forward": False}
HSDP = {"data_parallel_replicate_degree": 2}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (2, {}),
    "last": (2, {"gradient_sync": "last"}),
    "kept": (2, KEPT),
    "recomputed": (2, {"activation_checkpointing": True}),
    "four": (4, {"gradient_sync": "last"}),
    "HSDP": (4, HSDP),
    "HSDP, kept": (4, KEPT | HSDP),
    "HSDP, reduce_scatter_only": (4, HSDP | {"gradient_sync": "reduce_scatter_only"}),
}


@pytest.mark.table("kept", "four")
@pytest.mark.fault("ranks with other numbers of microbatches, or none", "survived")
@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=pytest.mark.world_size(RUNS[run][0])) for run in RUNS]
)
def test_trains_like_one_process(run: str):
    size, fsdp2 = RUNS[run]
    whole, own = dealt({2: TWO, 4: FOUR}[size])
    oracle, losses = trained_alone(whole, clip=0.05)
    model, logger = built(TinyComposer), InMemoryLogger()
    kwargs = {"algorithms": GradientClipping("norm", 0.05), "callbacks": [NaNMonitor()]}
    with installed():
        fit(trainer_on(model, own, fsdp2, loggers=logger, **kwargs))
    logged = [float(value) for _, value in logger.data["loss/train/total"]]
    assert logged == pytest.approx(losses, abs=1e-6)
    assert largest_difference(model, oracle) <= 1e-6


# --- Weights of tokens. ---


class Masked(TinyComposer):
    """The mean over the tokens that count: 0 / 0 when there is none, in backward too."""

    def loss(self, outputs: torch.Tensor, batch: Any, *_args: Any) -> torch.Tensor:
        mask = (batch[1] != IGNORED).flatten()
        losses = F.cross_entropy(
            outputs.flatten(0, -2), batch[1].flatten().clamp(min=0), reduction="none"
        )
        return (losses * mask).sum() / mask.sum()


def count_tokens(batch: Batch) -> dict[str, int]:
    return {"total": batch[1].numel(), "loss_generating": int((batch[1] != IGNORED).sum())}


def without_some_tokens() -> tuple[list[Batch], list[Batch]]:
    """In the first batch rank 1 learns nothing; then a microbatch; then nobody anything."""
    sizes = ((3, 4), (6, 4), (2, 2), (1, 5))
    whole, _ = dealt(sizes)
    own = []
    for number, (batch, (first, _)) in enumerate(zip(whole, sizes, strict=True)):
        targets = batch[1]
        targets[:, :2][torch.arange(len(targets)) % 3 == 0] = IGNORED
        start, end = [(first, None), (2, 4), (0, None), (0, 0)][number]
        targets[start:end] = IGNORED
        own.append(tuple(part.split([first, len(part) - first])[dist.get_rank()] for part in batch))
    return whole, own


@pytest.mark.fault("no token to learn on a rank or in a microbatch", "survived")
@pytest.mark.world_size(2)
def test_weights_of_tokens():
    whole, own = without_some_tokens()
    oracle, model, logger = built(Masked), built(Masked), InMemoryLogger()
    optimizer, losses = SGD(oracle.parameters()), []
    for batch in whole:
        losses.append(0.0)
        if count_tokens(batch)["loss_generating"]:
            loss = oracle.loss(oracle(batch), batch)
            loss.backward()
            losses[-1] = loss.item()
        optimizer.step()
        optimizer.zero_grad()
    data = DataSpec(own, get_num_tokens_in_batch=count_tokens)  # type: ignore
    with installed():
        fit(trainer_on(model, data, loggers=logger, accumulate_train_batch_on_tokens=True))
    logged = [float(value) for _, value in logger.data["loss/train/total"]]
    assert logged == pytest.approx(losses, abs=1e-6)
    assert largest_difference(model, oracle) <= 1e-6


# --- What microbatches that were added leave alone. ---


class Counted(TinyComposer):
    """Counts what it sees, and has dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net.embed = nn.Sequential(self.net.embed, nn.Dropout(0.5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, batch: Any) -> torch.Tensor:
        self.seen += len(batch[0])
        np.random.random(), random.random()
        return super().forward(batch)

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        return {"entropy": LanguageCrossEntropy()}

    def eval_forward(self, batch: Any, outputs: Any = None) -> torch.Tensor:
        return self.net(batch[0]) if outputs is None else outputs

    def update_metric(self, batch: Any, outputs: torch.Tensor, metric: Metric) -> None:
        metric.update(outputs.flatten(0, 1), batch[1].flatten())


class Watch(Callback):
    def __init__(self) -> None:
        self.states: list[tuple[bytes, str]] = []
        self.sizes: list[int] = []

    def before_forward(self, state: State, logger: Logger) -> None:
        numpys, pythons = np.random.get_state()[1:3], random.getstate()
        self.states.append((torch.get_rng_state().numpy().tobytes(), repr((numpys, pythons))))
        self.sizes.append(len(state.batch[0]))


@pytest.mark.world_size(2)
def test_buffers_metrics_and_random_states_stay():
    _, own = dealt([(1, 6)])
    model, watch = built(Counted), Watch()
    with installed():
        trainer = trainer_on(model, own, callbacks=[watch])
        fit(trainer)
    first, *others = watch.states
    assert model.seen == len(own[0][0])
    metrics = trainer.state.train_metrics
    assert metrics is not None
    assert metrics["entropy"].total_items == 5 * len(own[0][0])
    if dist.get_rank() == 0:
        assert watch.sizes == [1, 1, 1]
        assert [first, first] == others
    else:
        assert watch.sizes == [2, 2, 2]
        assert len(set(watch.states)) == 3


@pytest.mark.world_size(2)
@pytest.mark.parametrize("fsdp2", [{}, {"gradient_sync": "last"}], ids=str)
def test_equal_numbers_give_the_same_bits(fsdp2: dict[str, Any]):
    """As Composer's loop without a word between the ranks."""
    _, own = dealt([(5, 5), (3, 4)])
    found = []
    for even in (True, False):
        model = built(Counted)
        with installed():
            trainer = trainer_on(model, own, fsdp2, seed=3)
            if not even:
                trainer._train_loop = type(trainer)._train_loop.__wrapped__.__get__(trainer)
            fit(trainer)
        found.append(weights(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[1])


class Limited:
    """On one rank, memory runs out for microbatches of more than a sample."""

    def __init__(self, model: Any, rank: int) -> None:
        self.rank, self.times = rank, 0
        model.net.blocks[1].register_forward_pre_hook(self.allocate)

    def allocate(self, _module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if len(inputs[0]) > 2 and dist.get_rank() == self.rank:
            self.times += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


@pytest.mark.fault("ranks with other numbers of microbatches, or none", "survived")
@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore:SAM has known issues")
def test_an_optimizer_that_runs_a_batch_twice():
    whole, own = dealt(TWO[:4])
    oracle = built(TinyComposer)
    optimizer = SAMOptimizer(SGD(oracle.parameters()))
    for batch in whole:

        def closure(batch: Any = batch, **_: Any) -> torch.Tensor:
            oracle.zero_grad()
            loss = lm_loss(oracle(batch), batch[1])
            loss.backward()
            return loss

        optimizer.step(closure)
    model = built(TinyComposer)
    with installed():
        fit(trainer_on(model, own, algorithms=SAM()))
    assert largest_difference(model, oracle) <= 1e-6


class Sized(list[Batch]):
    def __init__(self, batches: list[Batch]) -> None:
        super().__init__(batches)
        self.batch_size = 8 - 7 * dist.get_rank()
        """what `auto` starts with, on each rank with its own"""


@pytest.mark.fault("out of memory in an added microbatch", "survived")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.filterwarnings("ignore:CUDA out of memory or excessive")
def test_out_of_memory_in_one_that_was_added(rank: int):
    """Rank 0's first batch is empty: what it runs out in is a copy of rank 1's."""
    whole, own = dealt([(0, 8), (5, 8), (8, 3)])
    oracle, _ = trained_alone(whole)
    model = built(TinyComposer)
    limited = Limited(model, rank)
    with installed():
        trainer = trainer_on(model, Sized(own), size="auto")
        fit(trainer)
    assert limited.times == (2 if dist.get_rank() == rank else 0)
    assert trainer.state.device_train_microbatch_size == 2
    assert largest_difference(model, oracle) <= 1e-6


@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
def test_scaled_gradients():
    whole, own = dealt([(0, 3), (4, 1)])
    oracle, _ = trained_alone(whole)
    model = built(TinyComposer)
    with installed():
        trainer = trainer_on(model, own)
        trainer.state.precision = Precision.AMP_FP16  # which Composer takes on a GPU alone
        trainer.state.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # type: ignore
        fit(trainer)
    assert largest_difference(model, oracle) <= 1e-6


# --- The end of the data. ---


class Unsized:
    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


@pytest.mark.fault("data that ends early on a rank", "survived")
@pytest.mark.world_size(2)
def test_epochs_are_as_long_as_the_shortest():
    """Schedules count in the batches of an epoch, and are the same on both ranks."""
    whole, own = dealt([(2, 2)] * 5)
    oracle = built(TinyComposer)
    optimizer = SGD(oracle.parameters())
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - max(0, step - 1) / 6)
    for batch in whole[:3] * 2:
        oracle.loss(oracle(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
    model = built(TinyComposer)
    settings = {"schedulers": LinearScheduler(alpha_f=0.0), "max_duration": "2ep"}
    with installed():
        trainer = trainer_on(model, own[: 3 + 2 * dist.get_rank()], **settings)
        expected = "One rank has 3 batches of training data, and another 5."
        with warned(expected):
            fit(trainer)
    assert trainer.state.timestamp.batch == 6
    assert largest_difference(model, oracle) <= 1e-6


@contextmanager
def warned(text: str) -> Iterator[None]:
    """Rank 0 says it once, the others nothing."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        yield
    told = [str(one.message) for one in found]
    ours = [one for one in told if not one.startswith(("Cannot split", "CUDA out of memory"))]
    assert len(ours) == (dist.get_rank() == 0), ours
    assert all(text in one for one in ours)


@pytest.mark.fault("data that ends early on a rank", "survived")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("short", [0, 1])
def test_data_of_unknown_length(short: int):
    whole, own = dealt([(2, 2)] * 4)
    oracle, _ = trained_alone([*whole[:2], *whole[:2], whole[0]])
    model = built(TinyComposer)
    mine = own[:2] if dist.get_rank() == short else own
    with installed(), warned("The data of 1 of 2 ranks ended before that of the others ('train')"):
        fit(trainer_on(model, Unsized(mine), max_duration="5ba"))
    assert largest_difference(model, oracle) <= 1e-6


@pytest.mark.fault("a rank without any data", "reported")
@pytest.mark.world_size(2)
def test_no_data_on_one_rank():
    _, own = dealt([(2, 2)])
    model = built(TinyComposer)
    with installed(), pytest.raises(ConfigError, match="A rank has no batch of training data"):
        fit(trainer_on(model, own[: dist.get_rank()]))


# --- Evaluation. ---


@pytest.mark.fault("other evaluation data on every rank", "survived")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.filterwarnings("ignore:CUDA out of memory detected")
def test_evaluation(auto: bool):
    """The last batch of rank 1 has no counterpart."""
    whole, own = dealt([(5, 2), (0, 3), (1, 6), (0, 1)])
    oracle, model = built(Counted).eval(), built(Counted)
    metric = LanguageCrossEntropy()
    for batch in whole[:3]:
        oracle.update_metric(batch, oracle.eval_forward(batch), metric)
    mine = own[: 3 + dist.get_rank()]
    evaluator = Evaluator(label="eval", dataloader=mine, device_eval_microbatch_size=2)
    with installed():
        trainer = trainer_on(model, own, eval_dataloader=evaluator)
        (evaluator,) = trainer.state.evaluators
        if auto:  # which Composer takes on a GPU alone
            evaluator.auto_microbatching, evaluator.device_eval_microbatch_size = True, 8
            Limited(model, 0)
        given = dict(vars(evaluator.dataloader))
        with warned("The data of 1 of 2 ranks ended before that of the others ('eval')"):
            trainer.eval()
    assert evaluator.device_eval_microbatch_size == 2
    assert float(trainer.state.eval_metric_values["entropy"]) == pytest.approx(
        float(metric.compute()), abs=1e-6
    )
    assert dict(vars(evaluator.dataloader)) == given
    assert "update_metric" not in vars(model)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("samples", [5, 7])
def test_evaluation_takes_a_samplers_duplicates_off(samples: int):
    ids, targets = samples_of(1, samples).tensors
    oracle, model = built(Counted).eval(), built(Counted)
    metric = LanguageCrossEntropy()
    oracle.update_metric((ids, targets), oracle.eval_forward((ids, targets)), metric)
    loader = loader_of(samples_of(1, samples), 4)
    evaluator = Evaluator(label="eval", dataloader=loader, device_eval_microbatch_size=1)
    with installed():
        trainer = trainer_on(model, dealt([(2, 2)])[1], eval_dataloader=evaluator)
        trainer.eval()
    assert float(trainer.state.eval_metric_values["entropy"]) == pytest.approx(
        float(metric.compute()), abs=1e-6
    )
