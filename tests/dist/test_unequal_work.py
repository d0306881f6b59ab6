"""Ranks with unequal work: nobody waits for ever, and gradients are those of all samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from composer import Callback, DataSpec, Logger, Trainer
from composer.algorithms import GradientClipping
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
from tests.models import VOCAB, TinyComposer, batches
from tests.parity import OPTIMIZERS
from tests.training import built, largest_difference, samples_of, trainer_for

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
