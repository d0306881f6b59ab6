"""Memory that runs out once at one place of a run, and what every run has to end with."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from composer import Algorithm, Callback, Logger, Trainer
from composer.algorithms import EMA, GradientClipping
from composer.core import DataSpec, Event, State
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from tests.support.models import Block, TinyComposer
from tests.support.parity import full
from tests.support.training import built, loader_of, samples_of, trainer_for

FITS = 2
"""samples of a microbatch; a rank's batch has 8"""
STABLE = 3
"""batches in a row that fit, after which nothing is kept for a second attempt at a step"""

KINDS: tuple[Callable[[], Exception], ...] = (
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    lambda: RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(h)"),
    lambda: RuntimeError("NCCL error: unhandled cuda error\nFailed to CUDA calloc 6291456 bytes"),
)
"""what torch raises"""


class Samples(Metric):
    """Adds up in a tensor, in a list and in a number."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("parts", [], dist_reduce_fx="cat")
        self.times = 0

    def update(self, outputs: torch.Tensor) -> None:
        self.total += outputs.float().square().sum()
        self.parts.append(outputs.float().mean((1, 2)))
        self.times += 1

    def compute(self) -> torch.Tensor:
        return self.total + dim_zero_cat(self.parts).sum()


class Noisy(nn.Module):
    """Draws from every random state, counts in place and anew, and normalises."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("anew", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.anew = self.anew + 1
        x = self.drop(self.norm(x.flatten(0, 1)).view_as(x))
        if self.training:
            x = x * (1 + 0.1 * np.random.random() + 0.1 * random.random())
        return x


class Sometimes(Block):
    """Ranks differ in whether they use it, for microbatches of one size alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Not the tensor itself: newer torch warns of units that return a view.
        return x.clone() if len(x) == 2 * FITS and dist.get_rank() else super().forward(x)


class Changing(TinyComposer):
    """A model of which a batch changes everything that a batch can change."""

    def __init__(self, noisy: bool = True, sometimes: bool = False) -> None:
        super().__init__()
        self.here: Callable[[str], None] = _pass
        if noisy:
            self.net.extra = Noisy(10)
        if sometimes:
            self.net.last = Sometimes()

    def forward(self, batch: Any) -> torch.Tensor:
        self.here("before model")
        return self.net(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any, *args: Any) -> torch.Tensor:
        self.here("loss")
        return super().loss(outputs, batch, *args)

    def eval_forward(self, batch: Any, outputs: Any = None) -> torch.Tensor:
        self.here("before evaluation")
        return self.net(batch[0]) if outputs is None else outputs

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        return {"samples": Samples()}

    def update_metric(self, batch: Any, outputs: torch.Tensor, metric: Metric) -> None:
        self.here("metric")
        metric.update(outputs)
        self.here("after metric")


def _pass(_place: str) -> None:
    pass


class Adding(Algorithm):
    """Speaks to the other ranks in the middle of a batch, as clipping by a norm does."""

    def __init__(self) -> None:
        self.here: Callable[[str], None] = _pass

    def match(self, event: Event, state: State) -> bool:
        return event == Event.AFTER_TRAIN_BATCH

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self.here("before exchange")
        grads = [p.grad for p in state.model.parameters() if p.grad is not None]
        sums = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
        total = torch.stack([one.float().square().sum() for one in sums]).sum()
        dist.all_reduce(total)
        self.here("after exchange")


class Speaking(Callback):
    """Is at every event."""

    def __init__(self) -> None:
        self.here: Callable[[str], None] = _pass

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        self.here(event.value)


class Stepping(torch.optim.AdamW):
    """Says when its step begins, is in the middle and ends."""

    here: Callable[[str], None] = staticmethod(_pass)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.here("step begins")
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self.here("step")
        groups = self.param_groups
        halves = [dict(group) for group in groups]
        for part in (slice(0, 3), slice(3, None)):
            for group, half in zip(groups, halves, strict=True):
                group["params"] = half["params"][part]
            try:
                super().step()
            finally:
                for group, half in zip(groups, halves, strict=True):
                    group["params"] = half["params"]
            self.here("inside step" if part.stop else "step ends")
        return loss


@dataclass
class Case:
    """One injected error."""

    place: str
    ranks: tuple[int, ...]
    kind: int
    guarded: bool
    times: int = 2
    """how often it is tried at most: at size 8, at 4"""

    def __str__(self) -> str:
        when = "guarded" if self.guarded else "unguarded"
        return f"{self.place} on {self.ranks}, kind {self.kind}, {when}, {self.times}x"


@dataclass
class Memory:
    """Runs out at the place of a case, while more samples are asked for than fit."""

    case: Case
    trainer: Trainer
    evaluator: Any = None
    raised: int = 0
    start: int = 0
    _stack: ExitStack = field(default_factory=ExitStack)

    def here(self, place: str) -> None:
        if place != self.case.place or dist.get_rank() not in self.case.ranks:
            return
        state = self.trainer.state
        size = state.device_train_microbatch_size
        if self.evaluator is not None:
            size = self.evaluator.device_eval_microbatch_size
        assert isinstance(size, int)
        fits = FITS if self.case.times > 1 else 4
        if size > fits and state.timestamp.batch >= self.start:
            self.raised += 1
            raise KINDS[self.case.kind]()

    def hook(self, place: str) -> Callable[..., None]:
        def hook(*_args: Any) -> None:
            self.here(place)

        return hook

    @contextmanager
    def limited(self) -> Generator[None]:
        state = self.trainer.state
        net = state.model.net
        inside = net.blocks[1].get_submodule("norm")
        handles = [
            net.blocks[0].register_forward_pre_hook(self.hook("before first block")),
            net.blocks[2].register_forward_hook(self.hook("after last block")),
            inside.register_forward_hook(self.in_block),
            net.head.register_forward_pre_hook(self.hook("head")),
        ]
        for optimizer in state.optimizers:
            handles.append(optimizer.register_step_pre_hook(self.hook("step pre-hook")))
            handles.append(optimizer.register_step_post_hook(self.hook("step post-hook")))
        held = [state.model, *state.callbacks, *state.algorithms, *state.optimizers]
        with pytest.MonkeyPatch.context() as patch:
            for one in held:
                if hasattr(one, "here"):
                    patch.setattr(one, "here", self.here)
            spec = self.trainer._train_data_spec
            specs = [spec] if self.evaluator is None else [self.evaluator.dataloader]
            for spec in specs:
                self.before(patch, spec, "microbatch_transforms", "transforms")
                self.before(patch, spec, "split_batch", "split")
            self.before(patch, state.device, "batch_to_device", "to device")
            for name in ("all_gather_into_tensor", "all_gather_single"):
                self.before(patch, dist, name, "inside gather")
            for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
                self.before(patch, dist, name, "inside reduction")
            for scheduler in state.schedulers:
                self.before(patch, scheduler, "step", "scheduler")
            yield
        for handle in handles:
            handle.remove()

    def before(self, patch: pytest.MonkeyPatch, owner: Any, name: str, place: str) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def limited(*args: Any, **kwargs: Any) -> Any:
            self.here(place)
            return original(*args, **kwargs)

        patch.setattr(owner, name, limited)

    def in_block(self, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        again = torch._C._current_graph_task_id() != -1
        self.here("recomputation" if again else "forward")
        if output.requires_grad:
            output.register_hook(self.hook("backward"))


TRAINED = (
    *("split", "to device", "transforms", "before_train_batch", "before_forward", "before model"),
    *("before first block", "forward", "after last block", "head", "after_forward", "loss"),
    *("after_loss", "backward", "inside gather", "inside reduction", "after_backward", "metric"),
    *("after metric", "before exchange", "after exchange", "after_train_batch"),
)
"""places of a batch before the optimizer's step"""
STEPPED = ("step pre-hook", "step begins", "step", "inside step", "step ends", "step post-hook")
BESIDE = ("batch_start", "batch_end", "scheduler", "after_dataloader", "epoch_end", "fit_end")
"""places where nothing is tried again"""
EVALUATED = (
    *("to device", "transforms", "eval_before_forward", "before evaluation", "forward", "head"),
    *("before first block", "inside gather", "eval_after_forward", "metric", "after metric"),
    "split",
)
LATE = STEPPED[2:]
"""after these, weights may have changed: tried again while another step is expected to fail"""


@dataclass(frozen=True)
class Variant:
    """A kind of run."""

    fsdp2: dict[str, Any] = field(default_factory=dict)
    world: int = 2
    algorithms: Callable[[], Sequence[Algorithm]] = tuple
    extra: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    noisy: bool = True
    sometimes: bool = False


VARIANTS: dict[str, Variant] = {
    "plain": Variant(),
    "forward_prefetch": Variant({"forward_prefetch": 1, "backward_prefetch": 1}),
    "order_check": Variant({"order_check": "always"}),
    "gradient_sync": Variant({"gradient_sync": "last"}),
    "recomputed": Variant({"activation_checkpointing": True}, extra=("recomputation",) * 4),
    "kept": Variant({"reshard_after_forward": False}),
    "unused": Variant({"unused_parameters": True}),
    "EMA": Variant(algorithms=lambda: [EMA(half_life="2ba", update_interval="1ba")]),
    "clipped": Variant(
        algorithms=lambda: [GradientClipping(clipping_type="norm", clipping_threshold=0.1)]
    ),
    "compiled": Variant(
        # Hooks inside of a block would be compiled with it.
        {"compile": {"backend": "aot_eager"}},
        noisy=False,
        left_out=("forward", "backward"),
    ),
    "HSDP": Variant({"data_parallel_replicate_degree": 2}, world=4),
}


def cases_of(name: str) -> list[Case]:
    """Every place once, and half of those where nothing is tried again.

    All pairs of a place, a kind, ranks, guarded or not, how often, and a variant are somewhere,
    but for the other half of `BESIDE` with a variant.
    """
    variant, first = VARIANTS[name], list(VARIANTS).index(name)
    places = [p for p in (*TRAINED, *STEPPED, *variant.extra) if p not in variant.left_out]
    found = [_case(variant, place, first + number) for number, place in enumerate(places)]
    late = [case for case in found if case.place in LATE]
    for case in late:
        case.guarded = True
    found += [replace(case, guarded=False, times=1) for case in late[first : first + 1]]
    for number in range(first % 2, len(BESIDE), 2):
        found.append(replace(_case(variant, BESIDE[number], first // 2 + number), times=1))
    return found


def _case(variant: Variant, place: str, number: int) -> Case:
    ranks = ((0,), (variant.world - 1,), tuple(range(variant.world)))
    often = 1 if number % 5 in (1, 3) else 2
    return Case(place, ranks[number % 3], number % len(KINDS), number // 4 % 2 == 0, often)


class Smaller(Callback):
    """What is to happen by itself."""

    def __init__(self, size: int) -> None:
        self.size = size

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch == STABLE:
            state.device_train_microbatch_size = self.size


def trainer_of(variant: Variant, size: int | str, steps: int, *callbacks: Callback) -> Trainer:
    model = built(functools.partial(Changing, variant.noisy, variant.sometimes))
    optimizer = Stepping(model.parameters(), lr=1e-2)
    samples = samples_of(steps, 8 * dist.get_world_size())
    spec = DataSpec(loader_of(samples, 8))
    return trainer_for(
        model,
        optimizer,
        samples,
        {**variant.fsdp2},
        train_dataloader=spec,
        device_train_microbatch_size=size,
        seed=3,
        algorithms=[Adding(), *variant.algorithms()],
        callbacks=[Speaking(), *callbacks],
        schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    )


def fitted(trainer: Trainer) -> dict[str, Any]:
    """Everything that a run ends with."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="CUDA out of memory or excessive")
        trainer.fit()
    trainer.close()
    state = trainer.state
    found: dict[str, Any] = dict(state.model.state_dict())
    for number, entries in enumerate(state.optimizers[0].state.values()):
        found.update({f"{number}.{name}": value for name, value in entries.items()})
    for algorithm in state.algorithms:
        if isinstance(algorithm, EMA):
            found.update({f"EMA.{n}": v for n, v in _averages(algorithm).items()})
    found["loss"] = state.total_loss_dict["loss/train/total"]
    found["metric"] = state.train_metrics["samples"].total
    found["metric.times"] = state.train_metrics["samples"].times
    found["numpy"], found["python"] = np.random.random(), random.random()
    found["torch"] = torch.rand(())
    found["rate"] = state.optimizers[0].param_groups[0]["lr"]
    return {n: full(v).clone() if isinstance(v, torch.Tensor) else v for n, v in found.items()}


def _averages(ema: EMA) -> dict[str, torch.Tensor]:
    assert ema.ema_model is not None
    return dict(ema.ema_model.named_parameters_dict)


def different(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Names of what is not the same, to the last bit."""
    if found.keys() != wanted.keys():
        return sorted(found.keys() ^ wanted.keys())
    return [
        name
        for name, value in wanted.items()
        if not torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value))
    ]


Outcome = Literal["survived", "reported"]


def due(case: Case) -> Outcome:
    """What has to become of a case in training."""
    late = case.place in LATE and not case.guarded
    return "reported" if late or case.place in BESIDE else "survived"
