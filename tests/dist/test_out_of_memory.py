"""A rank runs out of memory anywhere in a step: all try again with less, and lose nothing.

Memory of a CPU does not run out in a way that can be caught, so the error is raised where an
allocation could fail, as long as microbatches are larger than what is said to fit.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from composer import Callback, Logger, Trainer
from composer.core import Evaluator, State
from composer.metrics.nlp import LanguageCrossEntropy
from composer.profiler import Profiler, cyclic_schedule
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchmetrics import Metric

from composer_fsdp2 import installed, prepare_fully_shard
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.guards.leaving import out_of_memory as oom
from composer_fsdp2.guards.leaving.out_of_memory import OOMGuard, sync_oom
from composer_fsdp2.step.run import run_of
from composer_fsdp2.step.snapshot import Snapshot
from composer_fsdp2.torch_private.units import param_groups
from tests.support.faults_table import record
from tests.support.models import TinyComposer, TinyLM, batches, lm_loss
from tests.support.pairs import covering
from tests.support.parity import assert_same_values
from tests.support.training import built, loader_of, samples_of, trainer_for, weights

FITS = 2
"""samples of a microbatch; a rank's batch has 8"""
STABLE = 3
"""batches in a row that fit, after which ranks stop agreeing"""
ANYWHERE = ("forward", "backward", "gather", "reduction", "optimizer")
"""where memory may run out; with activation checkpointing, in the recomputation too"""
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie": "two modules", "fsdp2": {"unused_parameters": True}},
    "recomputed": {"fsdp2": {"activation_checkpointing": True}},
    "HSDP": {"fsdp2": {"data_parallel_replicate_degree": 2}},
}


class Dropped(TinyComposer):
    """Has dropout: an attempt that is thrown away must not move the random states."""

    def __init__(self, tie: str = "none") -> None:
        super().__init__(tie)
        for block in self.net.blocks:
            block.up = nn.Sequential(block.up, nn.Dropout(0.2))


class Measured(TinyComposer):
    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        return {} if is_train else {"entropy": LanguageCrossEntropy()}

    def eval_forward(self, batch: Any, outputs: Any = None) -> torch.Tensor:
        return self.net(batch[0])

    def update_metric(self, batch: Any, outputs: torch.Tensor, metric: Metric) -> None:
        metric.update(outputs.flatten(0, 1), batch[1].flatten())


class Memory:
    """Runs out on some ranks, at one point, while `asked()` samples are more than fit."""

    def __init__(
        self,
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
        asked: Callable[[], float],
        point: str,
        ranks: set[int],
    ) -> None:
        self.block, self.optimizer, self.asked = net.get_submodule("blocks.1"), optimizer, asked
        self.point, self.here = point, dist.get_rank() in ranks
        self.times = 0

    @classmethod
    def of(
        cls, trainer: Trainer, point: str, ranks: set[int], fits: float = FITS, start: int = 0
    ) -> Memory:
        """Counts a trainer's samples from batch `start` on."""
        state = trainer.state

        def asked() -> float:
            size = state.device_train_microbatch_size
            assert size is not None
            return size - fits + FITS if state.timestamp.batch >= start else 0

        return cls(state.model.net, state.optimizers[0], asked, point, ranks)

    def allocate(self, *_: Any) -> None:
        if self.here and self.asked() > FITS:
            self.times += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    @contextmanager
    def limited(self) -> Iterator[None]:
        inside = self.block.get_submodule("norm")
        with pytest.MonkeyPatch.context() as patch:
            if self.point in ("forward", "recompute", "backward"):
                inside.register_forward_hook(getattr(self, self.point))
            elif self.point == "optimizer":
                self.optimizer.register_step_post_hook(self.allocate)
            else:
                patch.setattr(oom, f"reserve_{self.point}", self.reserve)
            yield

    def forward(self, _module: nn.Module, _inputs: Any, _output: torch.Tensor) -> None:
        if torch._C._current_graph_task_id() == -1:
            self.allocate()

    def recompute(self, _module: nn.Module, _inputs: Any, _output: torch.Tensor) -> None:
        if torch._C._current_graph_task_id() != -1:
            self.allocate()

    def backward(self, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self.allocate)

    def reserve(self, group: Any) -> None:
        assert isinstance(self.block, FSDPModule)
        if group in param_groups(self.block):
            self.allocate()


def trainer_of(size: int | str, run: str, steps: int = 2, **kwargs: Any) -> Trainer:
    chosen = RUNS[run]
    model = built(functools.partial(Dropped, chosen.get("tie", "none")))
    return trainer_for(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        samples_of(steps, 8 * dist.get_world_size()),
        chosen.get("fsdp2"),
        batch=8,
        device_train_microbatch_size=size,
        seed=3,
        **kwargs,
    )


def fit(trainer: Trainer) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="CUDA out of memory or excessive")
        trainer.fit()
    trainer.close()
    return weights(trainer.state.model)


@functools.cache
def expected(run: str) -> dict[str, torch.Tensor]:
    """Of a trainer that starts with what fits."""
    return fit(trainer_of(FITS, run))


@pytest.mark.table("backward-plain")
@pytest.mark.smoke
@pytest.mark.fault("out of memory in a step of the Trainer", "survived")
@pytest.mark.parametrize(
    ("point", "run"),
    [
        *(pytest.param(p, "plain", marks=pytest.mark.world_size(2)) for p in ANYWHERE),
        pytest.param("recompute", "recomputed", marks=pytest.mark.world_size(2)),
        pytest.param("reduction", "HSDP", marks=pytest.mark.world_size(4)),
    ],
)
def test_the_trainer_ends_with_the_weights_of_a_run_of_that_size(point: str, run: str):
    with installed():
        wanted = expected(run)
        trainer = trainer_of("auto", run)
        memory = Memory.of(trainer, point, {1})
        with memory.limited():
            found = fit(trainer)
    assert memory.times == (2 if memory.here else 0)
    assert trainer.state.device_train_microbatch_size == FITS
    assert_equal(found, wanted)


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


# --- The same without the trainer. ---


class Loop:
    """Tries each batch with half the microbatch until it fits."""

    def __init__(self, run: str, size: int) -> None:
        chosen = RUNS[run]
        torch.manual_seed(0)
        self.model = Dropped(chosen.get("tie", "none"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        config = chosen.get("fsdp2", {})
        _, self.units = prepare_fully_shard(self.model, self.optimizer, config)
        run = run_of(self.model)
        assert run is not None
        self.run = run
        self.size = size

    def train(self) -> dict[str, torch.Tensor]:
        OOMGuard(self.run)
        torch.manual_seed(dist.get_rank())
        for batch in batches(2, 8, seed=dist.get_rank()):
            while not self.fits(batch):
                self.size //= 2
        return weights(self.model)

    def fits(self, batch: tuple[torch.Tensor, ...]) -> bool:
        kept = Snapshot(torch.device("cpu"))
        try:
            with sync_oom(torch.device("cpu")):
                for microbatch in zip(*(part.split(self.size) for part in batch), strict=True):
                    loss = self.model.loss(self.model(microbatch), microbatch)
                    (loss * self.size / 8).backward()
                kept.keep_optimizer(self.optimizer)
                self.optimizer.step()
        except torch.OutOfMemoryError:
            self.run.abort()
            assert gathered_bytes(self.units) == 0
            kept.restore()
            return False
        finally:
            self.optimizer.zero_grad()
        return True


@functools.cache
def expected_of_loop(run: str) -> dict[str, torch.Tensor]:
    return Loop(run, FITS).train()


OUT_OF_MEMORY = pytest.mark.fault("out of memory in a step", "survived")

RANKS: dict[str, Callable[[int], set[int]]] = {
    "first": lambda _size: {0},
    "last": lambda size: {size - 1},
    "all": lambda size: set(range(size)),
}
"""those without memory, by the size of the world"""


def matrix() -> list[Any]:
    cases = covering(
        {"point": (*ANYWHERE, "recompute"), "ranks": RANKS, "run": RUNS},
        lambda case: case["point"] != "recompute" or case["run"] == "recomputed",
    )
    return [
        pytest.param(*case.values(), marks=pytest.mark.world_size(size))
        for case in cases
        for size in [4 if case["run"] == "HSDP" else 2]
    ]


@pytest.mark.table("forward-first-plain", "forward-all-recomputed")
@OUT_OF_MEMORY
@pytest.mark.parametrize(("point", "ranks", "run"), matrix())
def test_ends_with_the_weights_of_a_run_of_that_size(point: str, ranks: str, run: str):
    wanted = expected_of_loop(run)
    loop = Loop(run, 8)
    own = RANKS[ranks](dist.get_world_size())
    memory = Memory(loop.model.net, loop.optimizer, lambda: loop.size, point, own)
    with memory.limited():
        found = loop.train()
    assert memory.times == (2 if memory.here else 0)
    assert loop.size == FITS
    assert_equal(found, wanted)


@OUT_OF_MEMORY
@pytest.mark.world_size(2)
@pytest.mark.parametrize("number", [3, pytest.param(0, marks=pytest.mark.matrix)])
def test_memory_runs_out_before_a_forward(number: int):
    """Ranks compare at its beginning what they do, and one of them does not come there."""
    loop, forwards = Loop("plain", 4), itertools.count()
    memory = Memory(loop.model.net, loop.optimizer, lambda: 4 * (next(forwards) == number), "", {1})
    loop.model.register_forward_pre_hook(memory.allocate, prepend=True)
    loop.train()
    assert memory.times == int(memory.here)
    assert loop.size == FITS


# --- When ranks agree, and when they do not. ---


@pytest.mark.world_size(2)
def test_guards_go_when_the_size_is_stable_and_come_back_after_evaluation():
    standing: list[int] = []

    class Watch(Callback):
        def after_train_batch(self, state: State, logger: Logger) -> None:
            standing.append(len(guarded_groups(state.model)))

        def eval_end(self, state: State, logger: Logger) -> None:
            standing.append(-1)

    with installed():
        samples = samples_of(9, 2 * dist.get_world_size())
        trainer = trainer_for(
            model := built(TinyComposer),
            torch.optim.SGD(model.parameters(), lr=0.1),
            samples,
            batch=2,
            device_train_microbatch_size="auto",
            eval_dataloader=loader_of(samples, 2),
            eval_interval="5ba",
            callbacks=[Watch()],
        )
        fit(trainer)
    units = sum(isinstance(module, FSDPModule) for module in trainer.state.model.modules())
    # As Composer, it asks for three batches that fit.
    assert standing == [units, units, units, 0, 0, -1, units, units, units, 0, -1]


def guarded_groups(model: nn.Module) -> list[Any]:
    """Groups that a guard waits for."""
    run = run_of(model)
    assert run is not None
    guard = run.listener(OOMGuard)
    return [group for groups in run.groups.values() for group in groups if guard is not None]


def guards_of(model: nn.Module) -> list[OOMGuard]:
    run = run_of(model)
    assert run is not None
    guard = run.listener(OOMGuard)
    return [] if guard is None else [guard]


class Smaller(Callback):
    """What is to happen by itself."""

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch == STABLE:
            state.device_train_microbatch_size = FITS


@pytest.mark.matrix
@pytest.mark.fault("out of memory where ranks do not agree any more", "survived")
@pytest.mark.world_size(2)
def test_without_guards_a_forward_is_tried_again():
    """When memory runs out on all ranks at once, as it does for a longer batch."""
    with installed():
        wanted = fit(trainer_of(8, "plain", STABLE + 2, callbacks=[Smaller()]))
        trainer = trainer_of("auto", "plain", STABLE + 2)
        memory = Memory.of(trainer, "forward", {0, 1}, start=STABLE)
        with memory.limited():
            found = fit(trainer)
    # A rank that is slower may be brought out by the other before its own memory runs out.
    times = torch.tensor(memory.times)
    dist.all_reduce(times)
    assert 2 <= times <= 4
    assert_equal(found, wanted)


class Instead:
    """A module with other values for some of its names."""

    def __init__(self, module: Any, **values: Any) -> None:
        self.module = module
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


class Retries(Callback):
    """The CUDA allocator of rank 1 frees its cache and tries again in some batches."""

    def __init__(self, batches: set[int]) -> None:
        self.batches, self.stats = batches, {"num_alloc_retries": 0}
        self.sizes: list[int | None] = []

    def batch_start(self, state: State, logger: Logger) -> None:
        self.sizes.append(state.device_train_microbatch_size)
        if dist.get_rank() == 1 and state.timestamp.batch.value in self.batches:
            self.stats["num_alloc_retries"] += 1


@pytest.mark.table("{4, 5, 6}-[8, 8, 8, 8, 8, 8, 4, 4]")
@pytest.mark.fault("the CUDA allocator retries, which costs time", "survived")
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("batches", "sizes"),
    [({0, 1}, [8, 8, *[4] * 6]), ({4, 5, 6}, [*[8] * 6, 4, 4]), ({3, 5, 7}, [8] * 8)],
    ids=str,
)
def test_retried_allocations_lower_the_size_of_the_next_batch(batches: set[int], sizes: list[int]):
    """Each batch is trained on once."""

    class Sizes(Callback):
        def batch_start(self, state: State, logger: Logger) -> None:
            state.device_train_microbatch_size = sizes[state.timestamp.batch.value]

    retries = Retries(batches)
    with installed():
        wanted = fit(trainer_of(8, "plain", 8, callbacks=[Sizes()]))
        trainer = trainer_of("auto", "plain", 8, callbacks=[retries])
        with pytest.MonkeyPatch.context() as patch:
            # For the Trainer's loop alone, which asks a GPU's allocator.
            cuda = Instead(
                torch.cuda, is_available=lambda: True, memory_stats=lambda: retries.stats
            )
            for module in ("composer.trainer.trainer", "composer_fsdp2.trainer.loop.step"):
                patch.setattr(f"{module}.torch", Instead(torch, cuda=cuda))
            found = fit(trainer)
    assert retries.sizes == sizes
    assert_equal(found, wanted)


@pytest.mark.fault("out of memory where nothing can be tried again", "reported")
@pytest.mark.world_size(2)
def test_without_guards_a_step_is_not_tried_again():
    with installed():
        trainer = trainer_of("auto", "plain", STABLE + 2)
        message = "Memory ran out in the optimizer's step"
        with (
            Memory.of(trainer, "optimizer", {1}, start=STABLE).limited(),
            pytest.raises(RuntimeError, match=message),
        ):
            fit(trainer)


@pytest.mark.fault("out of memory where nothing can be tried again", "reported")
@pytest.mark.world_size(2)
def test_one_sample_does_not_fit():
    with installed():
        trainer = trainer_of("auto", "plain")
        with (
            Memory.of(trainer, "backward", {1}, fits=0).limited(),
            pytest.raises(RuntimeError, match="internal microbatch of size 1"),
        ):
            fit(trainer)


@pytest.mark.table("ranks1", "ranks2")
@pytest.mark.fault("out of memory in evaluation", "survived")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("ranks", [{0}, {1}, {0, 1}])
@pytest.mark.filterwarnings("ignore:CUDA out of memory detected")
def test_evaluation(ranks: set[int]):
    def evaluated(size: int | str) -> tuple[float, Any]:
        samples = samples_of(2, 8 * dist.get_world_size())
        evaluator = Evaluator(
            label="eval", dataloader=loader_of(samples, 8), device_eval_microbatch_size=FITS
        )
        model = built(Measured)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = trainer_for(model, optimizer, samples, eval_dataloader=evaluator)
        (evaluator,) = trainer.state.evaluators
        if size == "auto":  # which Composer takes on a GPU alone
            evaluator.auto_microbatching, evaluator.device_eval_microbatch_size = True, 8
        failing = size == "auto" and dist.get_rank() in ranks

        def allocate(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if failing and len(inputs[0]) > FITS:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

        trainer.state.model.net.blocks[1].register_forward_pre_hook(allocate)
        trainer.eval()
        assert guarded_groups(trainer.state.model) == []
        return trainer.state.eval_metric_values, evaluator.device_eval_microbatch_size

    with installed():
        assert evaluated("auto") == evaluated(FITS)


@pytest.mark.world_size(2)
def test_auto_and_a_profiler():
    with installed(), pytest.raises(ConfigError, match="attempts that are thrown away"):
        trainer_of("auto", "plain", profiler=Profiler(cyclic_schedule(), []))


class Owner(Measured):
    """Has a parameter of its own: it is a unit itself, and so is what `eval_forward` gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0]) * self.scale.sum()

    def eval_forward(self, batch: Any, outputs: Any = None) -> torch.Tensor:
        return self.forward(batch)


@pytest.mark.world_size(2)
def test_evaluating_leaves_the_model_as_it_was():
    samples = samples_of(1, 8 * dist.get_world_size())
    model = built(Owner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with installed():
        trainer = trainer_for(model, optimizer, samples, eval_dataloader=loader_of(samples, 8))
        trainer.state.evaluators[0].auto_microbatching = True
        before, found = vars(model)["eval_forward"], []
        for _ in range(2):
            trainer.eval()
            found.append(dict(trainer.state.eval_metric_values))
    assert vars(model)["eval_forward"] is before
    assert found[0] == found[1]


class Items(dict[str, torch.Tensor]):
    """A batch of a kind that nobody knows: it is asked for attributes that it has not."""

    __getattr__ = dict[str, torch.Tensor].__getitem__


class OfItems(Measured):
    def forward(self, batch: Any) -> torch.Tensor:
        return self.net(batch["ids"])

    def eval_forward(self, batch: Any, outputs: Any = None) -> torch.Tensor:
        return self.forward(batch)

    def update_metric(self, batch: Any, outputs: torch.Tensor, metric: Metric) -> None:
        super().update_metric((batch["ids"], batch["targets"]), outputs, metric)


@pytest.mark.world_size(2)
def test_an_evaluation_keeps_no_batch_that_only_looks_like_a_dict():
    samples = samples_of(1, 8 * dist.get_world_size())
    data = loader_of(samples, 8)
    collate = data.collate_fn
    data.collate_fn = lambda found: Items(zip(("ids", "targets"), collate(found), strict=True))
    model = built(OfItems)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with installed():
        trainer = trainer_for(model, optimizer, samples, eval_dataloader=data)
        trainer.state.evaluators[0].auto_microbatching = True
        trainer.eval()
        assert trainer.state.eval_metric_values["entropy"] > 0


@pytest.mark.world_size(2)
def test_a_second_fit_begins_with_a_guard():
    """Its data may be longer than that of the first."""
    standing: list[int] = []

    class Watch(Callback):
        def after_train_batch(self, state: State, logger: Logger) -> None:
            standing.append(len(guards_of(state.model)))

    with installed():
        trainer = trainer_of("auto", "plain", 6, callbacks=[Watch()])
        trainer.fit(duration="4ba")
        trainer.fit(duration="2ba")
        trainer.close()
    assert standing == [1, 1, 1, 0, 1, 0]


@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore:.*may potentially fail")
def test_auto_without_fsdp2_is_composers():
    with installed(), pytest.raises(ValueError, match="on GPU"):
        trainer_of("auto", "plain", parallelism_config=None)


@pytest.mark.matrix
@pytest.mark.fault
@pytest.mark.world_size(2)
def test_50_times_in_a_row():
    """Anywhere, on any rank: nothing hangs, nothing stays gathered, nothing is lost."""
    choose = random.Random(0)
    torch.manual_seed(0)
    oracle = TinyLM()
    model = copy.deepcopy(oracle)
    pair = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (oracle, model)]
    (guard,), units = prepare_fully_shard(model, pair[1], {}, auto_microbatching=True)
    run = run_of(model)
    assert run is not None
    failing = Failing(units, choose)
    survived = 0
    for batch in batches(50, 4):
        lm_loss(oracle(batch[0]), batch[1]).backward()
        failing.choose()
        while True:
            try:
                with sync_oom(torch.device("cpu")):
                    lm_loss(model(batch[0]), batch[1]).backward()
                break
            except torch.OutOfMemoryError:
                survived += 1
                run.abort()
                pair[1].zero_grad()
                assert gathered_bytes(units) == 0
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
    assert survived == 50
    guard.remove()
    assert guarded_groups(model) == []
    assert_same_values(oracle, model)
    record("out of memory anywhere, one after the other", "survived", times=survived)


class Failing:
    """One allocation fails on one rank, at the n-th place where one could."""

    def __init__(self, units: dict[str, FSDPModule], choose: random.Random) -> None:
        self.random, self.left = choose, -1
        for unit in units.values():
            unit.register_forward_pre_hook(self.allocate)
            unit.register_forward_hook(self.allocate_in_backward)

    def choose(self) -> None:
        rank, self.left = self.random.randrange(2), self.random.randrange(8)
        if rank != dist.get_rank():
            self.left = -1

    def allocate(self, *_: Any) -> None:
        self.left -= 1
        if self.left == -1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    def allocate_in_backward(self, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(self.allocate)


def gathered_bytes(units: dict[str, FSDPModule]) -> int:
    groups = [group for unit in units.values() for group in param_groups(unit)]
    params = [param for group in groups for param in group.fsdp_params]
    return sum(tensor.untyped_storage().size() for p in params for tensor in p.all_gather_outputs)
