"""What happens in a step is in one tuple, and numbers do not depend on its guards."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import composer_fsdp2
from composer_fsdp2 import clip_grad_norm_, prepare_fully_shard
from composer_fsdp2.parallel.parallelism import whole_sequences
from composer_fsdp2.prepare import model as prepare
from composer_fsdp2.step.run import StepListener, run_of
from tests.support.models import TinyLM, batches, lm_loss
from tests.support.parity import OPTIMIZERS, assert_same_values

GUARDS = [kind for kind in prepare.STEP if ".guards." in kind.__module__]


def trained(model: TinyLM) -> list[float]:
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    settings = {"forward_prefetch": 1, "wrap_policy": {"names": ["blocks.0", "blocks.1"]}}
    prepare_fully_shard(model, optimizer, settings)
    losses = []
    for ids, targets in batches(3, 4):
        loss = lm_loss(model(ids), targets)
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        with torch.no_grad():
            losses.append(lm_loss(model(ids), targets).item())
    return losses


@pytest.mark.world_size(2)
@pytest.mark.parametrize("guard", GUARDS)
def test_numbers_stay_without_a_guard(guard: type[StepListener]):
    torch.manual_seed(0)
    whole = TinyLM()
    without = copy.deepcopy(whole)
    losses = trained(whole)
    others = tuple(kind for kind in prepare.STEP if kind is not guard)
    with pytest.MonkeyPatch.context() as patch:  # the ranks go on with other tests
        patch.setattr(prepare, "STEP", others)
        assert trained(without) == losses
    run = run_of(without)
    assert run is not None
    assert run.listener(guard) is None
    assert_same_values(whole, without)


@pytest.mark.world_size(2)
def test_a_batch_on_default_settings_passes_few_files():
    """`benchmarks/files_in_a_batch.py` lists them."""
    model, package = TinyLM(), Path(composer_fsdp2.__file__).parent
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    prepare_fully_shard(model, optimizer, {"wrap_policy": {"names": ["blocks.0", "blocks.1"]}})
    called: set[str] = set()
    for number, (ids, targets) in enumerate(batches(4, 4)):
        if number == 3:  # after what is done in the first steps alone
            sys.setprofile(lambda frame, *_: called.add(frame.f_code.co_filename))
        lm_loss(model(ids), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    sys.setprofile(None)
    assert len([file for file in called if Path(file).is_relative_to(package)]) <= 10


class Reductions(StepListener):
    """Notes the units whose gradients are reduced."""

    def before_reduce(self, unit: str, group: object) -> None:
        self.run.model.__dict__.setdefault("reduced", []).append(unit)


@pytest.mark.world_size(2)
def test_a_listener_of_ones_own():
    model = TinyLM()
    prepare_fully_shard(model, None, {"wrap_policy": {"names": ["blocks.0", "blocks.1"]}})
    run = run_of(model)
    assert run is not None
    heard = Reductions(run)
    run.listen(heard)
    before = StepListener(run)
    run.listen(before, first=True)
    assert (run.listeners[0], run.listeners[-1]) == (before, heard)
    ids, targets = batches(1, 4)[0]
    lm_loss(model(ids), targets).backward()
    assert vars(model)["reduced"] == ["blocks.1", "blocks.0", ""]
    run.stop_listening(heard)
    lm_loss(model(ids), targets).backward()
    assert len(vars(model)["reduced"]) == 3


@pytest.mark.world_size(2)
def test_an_event_that_no_listener_can_hear_is_an_error():
    model = TinyLM()
    prepare_fully_shard(model, None, {})
    run = run_of(model)
    assert run is not None
    assert run.tell("before_agreement", "a test")
    with pytest.raises(KeyError, match="before_agrement"):
        run.tell("before_agrement", "a test")


# --- After a forward without gradients. ---


def is_sharded(model: torch.nn.Module) -> bool:
    return all(isinstance(param, DTensor) for param in model.parameters())


@pytest.mark.world_size(2)
def test_gradients_are_cleared_after_an_evaluation():
    """By the model, which shows gathered parameters without a gradient while a unit is gathered."""
    model = TinyLM()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    prepare_fully_shard(model, optimizer, {})
    ids, targets = batches(1, 4)[0]
    lm_loss(model(ids), targets).backward()
    optimizer.step()
    with torch.no_grad():
        model(ids)
    model.zero_grad()
    assert all(param.grad is None for param in optimizer.param_groups[0]["params"])


@pytest.mark.world_size(2)
def test_evaluations_and_generation_gather_the_root_once():
    model = TinyLM()
    prepare_fully_shard(model, None, {})
    run = run_of(model)
    assert run is not None
    ids = batches(1, 4)[0][0]
    for inside in (run.evaluating, whole_sequences):
        with torch.no_grad(), inside():
            model(ids)
            assert not isinstance(model.head.weight, DTensor)
        assert is_sharded(model) is (inside == run.evaluating)  # `generate` frees them itself
        with torch.no_grad():
            model(ids)
        assert is_sharded(model)


class Scores(TinyLM):
    """Computes with a weight of the root after the model's forward."""

    def score(self, ids: torch.Tensor) -> torch.Tensor:
        return self(ids) @ self.head.weight


class Streams(TinyLM):
    """Returns a generator, which computes when it is read."""

    def forward(self, ids: torch.Tensor) -> Any:
        return (logits @ self.head.weight for logits in super().forward(ids))

    def score(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.stack(list(self(ids)))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("make", [Scores, Streams])
def test_a_root_that_computes_after_its_forward_stays_gathered(make: type[Any]):
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    prepare_fully_shard(model, None, {"forward_methods": ["score"]} if make is Scores else {})
    ids = batches(1, 4)[0][0]
    with torch.no_grad():
        for _ in range(2):
            assert torch.allclose(model.score(ids), plain.score(ids), atol=1e-6)
    assert is_sharded(model) is (make is Scores)
