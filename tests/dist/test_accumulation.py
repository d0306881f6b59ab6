"""When gradients are reduced: the same numbers, fewer bytes, nothing left for the next batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from composer import Callback, DataSpec
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from composer_fsdp2 import ConfigError, PlanError, installed, prepare_fully_shard
from composer_fsdp2.step.accumulation import Accumulation
from composer_fsdp2.step.run import run_of
from tests.support.models import TinyComposer, TinyLM, batches, lm_loss
from tests.support.parity import (
    OPTIMIZERS,
    assert_close,
    assert_same_gradients,
    assert_same_values,
    copy_values,
    full,
)
from tests.support.traffic import Bytes
from tests.support.training import (
    Samples,
    built,
    largest_difference,
    loader_of,
    samples_of,
    train_alone,
    trainer_for,
)

SGD = OPTIMIZERS["sgd"]
STEPS, MICROBATCHES = 3, 4
BF16 = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
HSDP = {"data_parallel_replicate_degree": 2}


def numel(model: nn.Module) -> int:
    """Elements when every first dimension is padded to two ranks."""
    return sum(-(-p.shape[0] // 2) * 2 * p.shape[1:].numel() for p in model.parameters())


def trained(
    config: dict[str, Any],
    samples: Samples,
    make: Callable[[], TinyComposer] = TinyComposer,
    **kwargs: Any,
) -> tuple[TinyComposer, Bytes]:
    """Trains with the Trainer; counts what its last batch sends."""
    model, traffic = built(make), Bytes()

    class Count(Callback):
        def batch_start(self, state: Any, logger: Any) -> None:
            del logger
            if int(state.timestamp.batch) == STEPS - 1:
                traffic.__enter__()

        def batch_end(self, state: Any, logger: Any) -> None:
            del logger
            if int(state.timestamp.batch) == STEPS:
                traffic.__exit__(None, None, None)

    with installed():
        trainer = trainer_for(
            model,
            SGD(model.parameters()),
            samples,
            config,
            device_train_microbatch_size=4 // MICROBATCHES,
            callbacks=[Count()],
            **kwargs,
        )
        trainer.fit()
        trainer.close()
    return model, traffic


def alone(
    samples: Samples, size: int, make: Callable[[], TinyComposer] = TinyComposer
) -> nn.Module:
    model = built(make)
    train_alone(model, SGD(model.parameters()), samples, size)
    return model


# --- The Trainer. ---


@pytest.mark.table("False")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("reshard", ["auto", False])
def test_the_last_microbatch_reduces_for_all(reshard: Any):
    samples = samples_of(STEPS, 8)
    model, traffic = trained({"gradient_sync": "last", "reshard_after_forward": reshard}, samples)
    assert largest_difference(model, alone(samples, 8)) <= 1e-6
    whole, blocks = 4 * numel(model), 4 * numel(model.net.blocks)
    assert traffic.reduced.total() == whole
    again = 0 if reshard is False else 2 * MICROBATCHES * blocks - blocks
    assert traffic.gathered.total() == whole + again


@pytest.mark.world_size(4)
def test_copies_are_averaged_once():
    samples = samples_of(STEPS, 16)
    model, traffic = trained({**HSDP, "gradient_sync": "reduce_scatter_only"}, samples)
    assert largest_difference(model, alone(samples, 16)) <= 1e-6
    assert traffic.averaged.total() == 4 * numel(model) // 2
    assert traffic.reduced.total() == 4 * numel(model) * MICROBATCHES


class Weighted(TinyComposer):
    """Its loss is the mean over the tokens that have a target."""

    def loss(self, outputs: torch.Tensor, batch: Any, *_args: Any) -> torch.Tensor:
        return F.cross_entropy(outputs.flatten(0, -2), batch[1].flatten(), ignore_index=-100)


@pytest.mark.world_size(2)
def test_microbatches_weighted_by_tokens():
    """As LLM Foundry does: microbatches with few targets count less, on every rank."""
    samples = samples_of(STEPS, 8)
    dropped = torch.rand(samples.tensors[1].shape, generator=torch.Generator().manual_seed(5))
    samples.tensors[1][dropped < 0.6] = -100
    samples.tensors[1][:, 0] = 1

    def tokens(batch: Any) -> dict[str, int]:
        return {"total": batch[1].numel(), "loss_generating": int((batch[1] != -100).sum())}

    model, _ = trained(
        {"gradient_sync": "last"},
        samples,
        Weighted,
        train_dataloader=DataSpec(loader_of(samples, 4), get_num_tokens_in_batch=tokens),
        accumulate_train_batch_on_tokens=True,
    )
    assert largest_difference(model, alone(samples, 8, Weighted)) <= 1e-6


class FailsOnce(Callback):
    """Raises in the middle of the second batch, the first time it gets there."""

    def __init__(self) -> None:
        self.microbatches = 0

    def after_backward(self, state: Any, logger: Any) -> None:
        del state, logger
        self.microbatches += 1
        if self.microbatches == MICROBATCHES + 2:
            raise KeyboardInterrupt


@pytest.mark.world_size(2)
def test_the_trainer_goes_on_after_an_interrupted_batch():
    samples = samples_of(STEPS, 8)
    model = built(TinyComposer)
    with installed():
        trainer = trainer_for(
            model,
            SGD(model.parameters()),
            samples,
            {"gradient_sync": "last"},
            device_train_microbatch_size=1,
            callbacks=[FailsOnce()],
        )
        with pytest.raises(KeyboardInterrupt):
            trainer.fit()
        trainer.fit()
        trainer.close()
    expected = built(TinyComposer)
    optimizer = SGD(expected.parameters())
    for batch in (samples[start : start + 8] for start in (0, 8, 16)):
        optimizer.zero_grad()
        expected.loss(expected(batch), batch).backward()
        optimizer.step()
    assert largest_difference(model, expected) <= 1e-6


# --- Any loop. ---


def accumulation_of(model: nn.Module, config: dict[str, Any]) -> Accumulation:
    prepare_fully_shard(model, None, config)
    sharding = run_of(model)
    assert sharding is not None
    return sharding.accumulation


def accumulate(
    model: nn.Module,
    accumulation: Accumulation,
    data: Sequence[tuple[torch.Tensor, ...]],
    between: Callable[[int], object] = int,
) -> None:
    with accumulation.batch():
        for index, (ids, targets) in enumerate(data):
            with accumulation.microbatch(last=index + 1 == len(data)):
                lm_loss(model(ids), targets).backward()
                between(index)


def trained_by_hand(config: dict[str, Any], ranks: int) -> tuple[nn.Module, Bytes]:
    """Three steps in a loop, against the oracle; counts the last one."""
    torch.manual_seed(0)
    model = TinyLM()
    oracle = copy.deepcopy(model)
    accumulation = accumulation_of(model, config)
    optimizers = [SGD(one.parameters()) for one in (oracle, model)]
    for batch in batches(STEPS, ranks * MICROBATCHES):
        mine = [part.chunk(ranks)[dist.get_rank()].split(1) for part in batch]
        with Bytes() as traffic:
            accumulate(model, accumulation, list(zip(*mine, strict=True)))
        (lm_loss(oracle(batch[0]), batch[1]) * MICROBATCHES).backward()
        assert_close("norm", *(full(clip_grad_norm_(m.parameters(), 1.0)) for m in (oracle, model)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(oracle, model)
    return model, traffic


@pytest.mark.table("False-last")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("sync", ["every", "last"])
@pytest.mark.parametrize("reshard", ["auto", True, False])
def test_the_same_numbers_and_fewer_bytes(sync: str, reshard: Any):
    config = {"gradient_sync": sync, "reshard_after_forward": reshard}
    model, traffic = trained_by_hand(config, 2)
    whole, blocks = 4 * numel(model), 4 * numel(model.blocks)
    each_time = 1 if sync == "last" else MICROBATCHES
    assert traffic.reduced.total() == whole * each_time
    # The top-level unit keeps its parameters anyway: with `last`, for the next microbatch too.
    gathered = {
        True: MICROBATCHES * 2 * whole,
        "auto": MICROBATCHES * 2 * blocks + (whole - blocks) * each_time,
        False: whole * each_time,
    }
    assert traffic.gathered.total() == gathered[reshard]


@pytest.mark.table
@pytest.mark.world_size(4)
@pytest.mark.parametrize("sync", ["every", "last", "reduce_scatter_only"])
@pytest.mark.parametrize("reshard", ["auto", 1])
def test_the_same_numbers_with_copies(sync: str, reshard: Any):
    config = {**HSDP, "gradient_sync": sync, "reshard_after_forward": reshard}
    model, traffic = trained_by_hand(config, 4)
    whole = 4 * numel(model)
    assert traffic.reduced.total() == whole * (1 if sync == "last" else MICROBATCHES)
    assert traffic.averaged.total() == whole // 2 * (MICROBATCHES if sync == "every" else 1)


@pytest.mark.world_size(2)
def test_gradients_wait_in_the_dtype_of_the_reduction():
    grads: list[list[torch.Tensor]] = []
    for sync in ("every", "last"):
        torch.manual_seed(0)
        model = TinyLM()
        accumulation = accumulation_of(model, {"gradient_sync": sync, "mixed_precision": BF16})
        for _ in range(2):
            model.zero_grad()
            with Bytes() as traffic:
                accumulate(model, accumulation, batches(3, 2))
        grads.append([full(param.grad) for param in model.parameters()])
    for one, other in zip(*grads, strict=True):
        assert_close("gradient", one, other)
    assert traffic.reduced == {torch.float32: 4 * numel(model)}


class Breaks(nn.Module):
    """Raises once in its forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            raise ArithmeticError("in forward")
        if self.where == "backward" and x.requires_grad:
            x.register_hook(self._break)
        return x

    def _break(self, _grad: torch.Tensor) -> None:
        raise ArithmeticError("in backward")


class Breaking(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.breaks = Breaks()
        self.blocks.insert(1, self.breaks)


@pytest.mark.table("last-between", "bf16-forward")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("where", ["forward", "backward", "between"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"gradient_sync": "last"},
        {"gradient_sync": "last", "mixed_precision": BF16},
        {"gradient_sync": "last", "reshard_after_forward": False},
    ],
    ids=["every", "last", "bf16", "kept"],
)
def test_an_error_in_the_middle_leaves_nothing(config: dict[str, Any], where: str):
    torch.manual_seed(0)
    model, twin = Breaking(), Breaking()
    twin.load_state_dict(model.state_dict())
    accumulation, undisturbed = accumulation_of(model, config), accumulation_of(twin, config)
    data = batches(3, 2)
    accumulate(model, accumulation, data)

    def disturb(index: int) -> None:
        if index == 1:
            if where == "between":
                raise ArithmeticError("between")
            model.breaks.where = where

    with pytest.raises(ArithmeticError, match=where):
        accumulate(model, accumulation, data, disturb)
    model.breaks.where = ""
    for one, its in ((model, accumulation), (twin, undisturbed)):
        one.zero_grad()
        accumulate(one, its, data)
    assert_same_gradients(twin, model)


@pytest.mark.world_size(4)
def test_an_error_in_the_middle_leaves_nothing_for_the_copies():
    torch.manual_seed(0)
    model = TinyLM()
    accumulation = accumulation_of(model, {**HSDP, "gradient_sync": "reduce_scatter_only"})
    oracle = TinyLM()
    copy_values(model, oracle)
    data = batches(2, 2)

    def fail(_index: int) -> None:
        raise ArithmeticError("between")

    with pytest.raises(ArithmeticError, match="between"):
        accumulate(model, accumulation, data, fail)
    model.zero_grad()
    accumulate(model, accumulation, data)
    for ids, targets in data:
        lm_loss(oracle(ids), targets).backward()
    assert_same_gradients(oracle, model)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("sync", ["every", "last"])
def test_a_gradient_that_is_no_number_stays_in_its_batch(sync: str):
    torch.manual_seed(0)
    model = TinyLM()
    oracle = copy.deepcopy(model)
    accumulation = accumulation_of(model, {"gradient_sync": sync})
    data = batches(2, 2)

    def poison(index: int) -> None:
        if index == 0:
            (model(data[0][0]).sum() * float("nan")).backward()

    accumulate(model, accumulation, data, poison)
    assert all(full(param.grad).isnan().any() for param in model.parameters())
    model.zero_grad()
    accumulate(model, accumulation, data)
    for ids, targets in data:
        lm_loss(oracle(ids), targets).backward()
    assert_same_gradients(oracle, model)


class Sometimes(TinyLM):
    """Calls its second block when it is told to."""

    called = True

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embed(ids))
        x = self.blocks[1](x) if self.called else x
        return self.head(self.norm(self.blocks[2](x)))


@pytest.mark.table("calls1-True", "calls1-False")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(
    "calls", [(False, True, False), (True, False, False), (False, False, True)]
)
def test_a_unit_that_some_microbatches_do_not_call(calls: tuple[bool, ...], reshard: bool):
    """In the first batch of a run too, where torch would fail over a unit that has never run."""
    torch.manual_seed(0)
    model = Sometimes()
    oracle = copy.deepcopy(model)
    config = {"gradient_sync": "last", "mixed_precision": {"reduce_dtype": "fp32"}}
    accumulation = accumulation_of(model, {**config, "reshard_after_forward": reshard})
    data = batches(3, 2)
    for _ in range(2):
        for one in (model, oracle):
            one.zero_grad()
            one.called = calls[0]
        accumulate(
            model, accumulation, data, lambda i: setattr(model, "called", (*calls, 0)[i + 1])
        )
        for index, (ids, targets) in enumerate(data):
            oracle.called = calls[index]
            lm_loss(oracle(ids), targets).backward()
        assert_same_gradients(oracle, model)


@pytest.mark.world_size(4)
def test_a_unit_whose_gradients_the_copies_would_not_share():
    model = Sometimes()
    accumulation = accumulation_of(model, {**HSDP, "gradient_sync": "reduce_scatter_only"})
    with pytest.raises(PlanError, match=r"'blocks.1' got gradients in an earlier microbatch"):
        accumulate(model, accumulation, batches(2, 2), lambda _: setattr(model, "called", False))
    model.called = True
    accumulate(model, accumulation, batches(2, 2))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("copies", [None, 1, -1])
def test_without_copies_there_is_nothing_to_average_later(copies: int | None):
    config = {"gradient_sync": "reduce_scatter_only", "data_parallel_replicate_degree": copies}
    if copies == -1:
        config["data_parallel_shard_degree"] = 2
    with pytest.raises(ConfigError, match="2 ranks hold one replica of the model"):
        prepare_fully_shard(TinyLM(), None, config)


@pytest.mark.world_size(2)
def test_a_misspelt_choice():
    with pytest.raises(ConfigError, match=r"gradient_sync: 'lasts' is invalid.*mean 'last'"):
        prepare_fully_shard(TinyLM(), None, {"gradient_sync": "lasts"})


@pytest.mark.world_size(2)
def test_a_loop_that_knows_nothing_of_it_is_told_once():
    model = TinyLM()
    prepare_fully_shard(model, None, {"gradient_sync": "last"})
    ids, targets = batches(1, 4)[0]
    with torch.no_grad():
        model(ids)
    with pytest.warns(UserWarning, match="runs outside of `microbatch") as told:
        lm_loss(model(ids), targets).backward()
    assert len(told) == 1
    lm_loss(model(ids), targets).backward()
