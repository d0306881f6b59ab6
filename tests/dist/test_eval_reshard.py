"""Evaluations that gather once, or hold little; training goes on as it was told."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from composer.core import Callback
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2 import clip_grad_norm_, installed, prepare_fully_shard
from composer_fsdp2.step.run import run_of
from tests.support.models import TinyComposer, TinyLM, batches, lm_loss
from tests.support.parity import OPTIMIZERS, Recipe, assert_same_values, model_loss, train_together
from tests.support.traffic import Bytes
from tests.support.training import (
    built,
    largest_difference,
    loader_of,
    samples_of,
    train_alone,
    trainer_for,
)

IDS, TARGETS = batches(1, 2)[0]


def sent(model: nn.Module, config: dict[str, Any], eval_reshard: bool | None) -> list[int]:
    """Bytes gathered in an evaluation of three batches, by batch, and in a step after it."""
    prepare_fully_shard(model, None, {**config, "eval_reshard_after_forward": eval_reshard})
    run = run_of(model)
    assert run is not None
    counts: list[int] = []
    with run.evaluating(), torch.no_grad():
        for _ in range(3):
            with Bytes() as traffic:
                model(IDS)
            counts.append(traffic.gathered.total())
    assert all(isinstance(param, DTensor) for param in model.parameters())
    with Bytes() as traffic:
        lm_loss(model(IDS), TARGETS).backward()
    return [*counts, traffic.gathered.total()]


def nbytes(model: nn.Module) -> int:
    return sum(-(-p.shape[0] // 2) * 2 * p.shape[1:].numel() * 4 for p in model.parameters())


@pytest.mark.table("True-False", "False-False")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("reshard", ["auto", True, False])
@pytest.mark.parametrize("eval_reshard", [True, False, None])
def test_gathers_of_an_evaluation(reshard: Any, eval_reshard: bool | None):
    """Before the first step too, when torch has not yet looked at which unit is outermost."""
    model = TinyLM()
    whole, blocks = nbytes(model), nbytes(model.blocks)
    found = sent(model, {"reshard_after_forward": reshard}, eval_reshard)
    usual = {"auto": [whole, blocks, blocks], True: [whole] * 3, False: [whole, 0, 0]}[reshard]
    evaluation = {True: [whole] * 3, False: [whole, 0, 0], None: usual}[eval_reshard]
    training = {"auto": whole + blocks, True: 2 * whole, False: whole}[reshard]
    assert found == [*evaluation, training]


@pytest.mark.table
@pytest.mark.world_size(4)
@pytest.mark.parametrize("eval_reshard", [True, False])
def test_a_number_of_ranks_comes_back(eval_reshard: bool):
    config = {"reshard_after_forward": 2}
    plain, model = TinyLM(), TinyLM()
    assert sent(model, config, eval_reshard)[-1] == sent(plain, config, None)[-1]


class Evaluation(Callback):
    """Counts what an evaluation gathers, and how much of it is still there in its last batch."""

    def __init__(self) -> None:
        self.traffic = Bytes()
        self.whole = 0

    def eval_start(self, state: Any, logger: Any) -> None:
        del state, logger
        self.traffic.__enter__()

    def eval_batch_end(self, state: Any, logger: Any) -> None:
        del logger
        self.whole = sum(not isinstance(param, DTensor) for param in state.model.parameters())

    def eval_end(self, state: Any, logger: Any) -> None:
        del state, logger
        self.traffic.__exit__(None, None, None)


@pytest.mark.table("False")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("eval_reshard", [True, False])
def test_evaluations_of_the_trainer(eval_reshard: bool):
    samples, model, seen = samples_of(2, 8), built(TinyComposer), Evaluation()
    with installed():
        trainer = trainer_for(
            model,
            OPTIMIZERS["sgd"](model.parameters()),
            samples,
            {"eval_reshard_after_forward": eval_reshard},
            eval_dataloader=loader_of(samples_of(1, 24), 4),
            eval_interval="1ba",
            callbacks=[seen],
        )
        trainer.fit()
        trainer.predict(loader_of(samples_of(1, 8), 4))
        trainer.close()
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert seen.whole == (0 if eval_reshard else len(list(model.parameters())))
    times = 3 if eval_reshard else 1
    assert seen.traffic.gathered.total() == 2 * times * nbytes(model)
    expected = built(TinyComposer)
    train_alone(expected, OPTIMIZERS["sgd"](expected.parameters()), samples, 8)
    assert largest_difference(model, expected) <= 1e-6


def sometimes_evaluated_then_frozen(model: nn.Module, batch: Any) -> torch.Tensor:
    """In every third step evaluates, then freezes every second parameter, or unfreezes all."""
    model.step = getattr(model, "step", -1) + 1
    if model.step % 3 == 0:
        with torch.no_grad():
            model(batch[0])
        for number, param in enumerate(model.parameters()):
            param.requires_grad_(model.step % 2 == 1 or number % 2 == 0)
    return model_loss(model, batch)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("reshard", ["auto", False])
def test_what_is_frozen_after_an_evaluation_stays_frozen(reshard: Any):
    """The evaluation leaves units gathered, and whoever freezes then freezes gathered copies."""
    torch.manual_seed(0)
    oracle = TinyLM()
    model = copy.deepcopy(oracle)
    pair = [OPTIMIZERS["sgd"](each.parameters()) for each in (oracle, model)]
    prepare_fully_shard(model, pair[1], {"reshard_after_forward": reshard})
    train_together(
        oracle, pair[0], model, pair[1], Recipe(steps=8), sometimes_evaluated_then_frozen
    )


@pytest.mark.world_size(2)
@pytest.mark.parametrize("reshard", ["auto", False])
@pytest.mark.parametrize("clip", [nn.utils.clip_grad_value_, clip_grad_norm_])
def test_gradients_are_clipped_after_an_evaluation(clip: Any, reshard: Any):
    """Between backward and step: gathered parameters have no gradient, and who clips skips them."""
    torch.manual_seed(0)
    oracle = TinyLM()
    model = copy.deepcopy(oracle)
    pair = [OPTIMIZERS["sgd"](each.parameters()) for each in (oracle, model)]
    prepare_fully_shard(model, pair[1], {"reshard_after_forward": reshard})
    for batch in batches(3, 8):
        own = tuple(part.chunk(2)[dist.get_rank()] for part in batch)
        for each, optimizer, given in zip((oracle, model), pair, (batch, own), strict=True):
            model_loss(each, given).backward()
            with torch.no_grad():
                each(given[0])
            clip(each.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(oracle, model)


class Scores(TinyLM):
    def score(self, ids: torch.Tensor) -> torch.Tensor:
        return self(ids) if self.training else TinyLM.forward(self, ids)


@pytest.mark.world_size(2)
def test_gradients_are_clipped_after_another_method():
    """As `generate` of a model with adapters, which gathers the unit around it by a method."""
    torch.manual_seed(0)
    oracle = Scores()
    model = copy.deepcopy(oracle)
    pair = [OPTIMIZERS["sgd"](each.parameters()) for each in (oracle, model)]
    prepare_fully_shard(model, pair[1], {"forward_methods": ["score"]})
    for batch in batches(3, 8):
        own = tuple(part.chunk(2)[dist.get_rank()] for part in batch)
        for each, optimizer, given in zip((oracle, model), pair, (batch, own), strict=True):
            model_loss(each, given).backward()
            each.eval()
            with torch.no_grad():
                each.score(given[0])
            each.train()
            torch.nn.utils.clip_grad_value_(each.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(oracle, model)
