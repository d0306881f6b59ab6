"""Recording loss and gradient norm: the numbers are right, and the run stays as it is."""

from __future__ import annotations

import copy
import json
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from composer import Trainer
from composer.algorithms import GradientClipping
from composer.core import DataSpec
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from composer_fsdp2 import installed, prepare_fully_shard
from composer_fsdp2.trainer.extensions.step_record import Recorder, recorded_norm
from tests.support.models import TinyComposer, TinyLM, batches, lm_loss
from tests.support.parity import OPTIMIZERS
from tests.support.training import (
    built,
    largest_difference,
    loader_of,
    samples_of,
    train_alone,
    trainer_for,
    weights,
)

STEPS, SIZE = 4, 8
HSDP = {"data_parallel_replicate_degree": 2}
REPLICATION = {"data_parallel_replicate_degree": 4, "data_parallel_shard_degree": 1}


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def run(
    sharding: Any, *algorithms: Any, microbatch: int = 4, **kwargs: Any
) -> tuple[TinyComposer, Trainer]:
    model = built(TinyComposer)
    with installed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trainer_for(
            model,
            OPTIMIZERS["sgd"](model.parameters()),
            samples_of(STEPS, SIZE),
            parallelism_config=sharding,
            algorithms=list(algorithms),
            device_train_microbatch_size=microbatch,
            **kwargs,
        )
        trainer.fit()
        trainer.close()
    return model, trainer


SHARDINGS = {"DDP": None, "FSDP2": {"fsdp2": {}}}


@pytest.mark.table("FSDP2")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", SHARDINGS)
def test_a_recorded_run_equals_one_that_is_not(kind: str, tmp_path: Path):
    clipping = GradientClipping("norm", clipping_threshold=0.1)
    plain, _ = run(SHARDINGS[kind], clipping)
    recorded, _ = run(SHARDINGS[kind], clipping, Recorder(str(tmp_path / "steps"), STEPS))
    assert largest_difference(plain, weights(recorded)) == 0


@pytest.mark.table("4-FSDP2", "2-FSDP2")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", SHARDINGS)
@pytest.mark.parametrize("microbatch", [4, 2])
def test_loss_and_norm_are_those_of_the_unsharded_run(kind: str, microbatch: int, tmp_path: Path):
    """The norm is that before clipping, although clipping is at the same event."""
    norms: list[float] = []

    def clip(params: list[nn.Parameter]) -> None:
        norms.append(clip_grad_norm_(params, 0.1).item())

    alone = built(TinyComposer)
    optimizer = OPTIMIZERS["sgd"](alone.parameters())
    losses = train_alone(alone, optimizer, samples_of(STEPS, SIZE), SIZE, change_gradients=clip)
    clipping = GradientClipping("norm", clipping_threshold=0.1)
    file = tmp_path / "steps"
    run(SHARDINGS[kind], clipping, Recorder(str(file), STEPS), microbatch=microbatch)
    dist.barrier()
    found = rows(file)
    assert [row["number"] for row in found] == [1, 2, 3, 4]
    assert [row["loss"] for row in found] == pytest.approx(losses, rel=1e-5)
    assert [row["gradient_norm"] for row in found] == pytest.approx(norms, rel=1e-5)
    assert min(norms) > 0.1


@pytest.mark.world_size(2)
def test_training_ends_after_the_steps_asked_for(tmp_path: Path):
    _, trainer = run({"fsdp2": {}}, Recorder(str(tmp_path / "steps"), 2))
    dist.barrier()
    assert [row["number"] for row in rows(tmp_path / "steps")] == [1, 2]
    assert trainer.state.timestamp.batch == 2


@pytest.mark.world_size(2)
def test_time_tokens_and_the_peak_memory_of_each_rank(tmp_path: Path):
    samples = samples_of(STEPS, SIZE)
    loader = DataSpec(loader_of(samples, SIZE // 2), get_num_tokens_in_batch=lambda b: b[0].numel())
    before = resident_set()
    begun = time.monotonic()
    run({"fsdp2": {}}, Recorder(str(tmp_path / "steps"), STEPS), train_dataloader=loader)
    took = time.monotonic() - begun
    dist.barrier()
    after = resident_set()
    found = rows(tmp_path / "steps")
    assert [row["tokens"] for row in found] == [samples.tensors[0][:SIZE].numel()] * STEPS
    assert min(row["seconds"] for row in found) > 0
    assert sum(row["seconds"] for row in found) < took + 1  # by rank 0's clock
    peaks = json.loads((tmp_path / "memory.json").read_text())
    mine = peaks[dist.get_rank()]
    assert len(peaks) == 2
    # Linux adds up the pages of each CPU in batches, and reads may miss some of them.
    batches = 2**20
    assert before - batches <= mine <= after + batches


def resident_set() -> int:
    """The most that this process has held, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024


def backward(model: nn.Module) -> None:
    ids, targets = batches(1, SIZE)[0]
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    lm_loss(model(ids[mine]), targets[mine]).backward()


def expected_norm() -> float:
    torch.manual_seed(0)
    model = TinyLM()
    ids, targets = batches(1, SIZE)[0]
    lm_loss(model(ids), targets).backward()
    return clip_grad_norm_(model.parameters(), float("inf")).item()


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    "config",
    [{}, HSDP, REPLICATION],
)
def test_the_norm_over_every_mesh(config: dict[str, int]):
    torch.manual_seed(0)
    model = TinyLM()
    prepare_fully_shard(model, None, config)
    backward(model)
    before = local_gradients(model)
    assert recorded_norm(model) == pytest.approx(expected_norm(), rel=1e-6)
    assert all(map(torch.equal, before, local_gradients(model)))


def local_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Copies of what this rank holds."""
    grads = [param.grad for param in model.parameters()]
    return [grad.to_local().clone() for grad in grads if isinstance(grad, DTensor)]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_the_norm_under_fsdp1(strategy: str, use_orig_params: bool):
    """Two roots, as Composer wraps the children of a model, and parameters that are in neither."""
    torch.manual_seed(0)
    model = TinyLM()
    model.blocks[0], model.head = (
        FullyShardedDataParallel(
            module,
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
        )
        for module in (model.blocks[0], model.head)
    )
    backward(model)
    for name, param in model.named_parameters():
        if "_fsdp_wrapped_module" not in name and param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
    before = copy.deepcopy([param.grad for param in model.parameters()])
    assert recorded_norm(model) == pytest.approx(expected_norm(), rel=1e-6)
    for grad, param in zip(before, model.parameters(), strict=True):
        assert (grad is None) == (param.grad is None)
        assert grad is None or torch.equal(grad, param.grad)  # pyright: ignore


@pytest.mark.world_size(2)
def test_a_parameter_without_gradient_on_one_rank_holds_up_nobody():
    torch.manual_seed(0)
    model = TinyLM()
    prepare_fully_shard(model, None, {})
    backward(model)
    left = torch.zeros(())
    for param in model.parameters():
        if dist.get_rank() == 0:
            param.grad = None
        elif isinstance(param.grad, DTensor):
            left += param.grad.to_local().square().sum()
    dist.all_reduce(left)
    assert left > 0
    assert recorded_norm(model) == pytest.approx(left.sqrt().item(), rel=1e-6)
