"""Runs steps of a prepared model on fake tensors, and reads memory and collectives off them."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2.estimate.collectives import CollectiveCounter, Key
from composer_fsdp2.optim.state.form import Stored
from composer_fsdp2.parallel.expert.held import is_elsewhere
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.wrap_plan import WrapPlan
from composer_fsdp2.ranks import is_fake
from composer_fsdp2.shard.apply import merge_aliases
from composer_fsdp2.shard.initial_weights import replace_parameter
from composer_fsdp2.step.run import Run, StepListener
from composer_fsdp2.torch_private.fake import Watch, fake_ranks, fake_tensors
from composer_fsdp2.torch_private.tensors import local_tensor

__all__ = ["STATE", "Trace", "Window", "Work", "observe_steps", "state_of", "trace_steps"]

STATE = ("parameters", "buffers", "gradients", "optimizer")
"""kinds of memory that stays; others are gathered, activations, logits, backward, step and other"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One training step of a rank, as it is written for real tensors."""

    prepare: Callable[[nn.Module, torch.optim.Optimizer], Run]
    batch: Callable[[], Any]
    """makes the inputs of one microbatch"""
    compute: Callable[[nn.Module, Any], tuple[Any, torch.Tensor]]
    """returns outputs and loss of a microbatch"""
    microbatches: int = 1
    ranks: int
    ranks_per_node: int
    rank: int = 0


@dataclass(slots=True)
class Window:
    """The most memory between two events of a step."""

    label: tuple[str, str]
    """the event, and the unit"""
    kinds: dict[str, int]
    """bytes at that moment"""


@dataclass(slots=True)
class Trace:
    """Memory, collectives and FLOPs of one step of a rank, once the optimizer has its state."""

    plan: WrapPlan
    held: Counter[str] = field(default_factory=Counter)
    """bytes of parameters, buffers, gradients and optimizer state"""
    kept: Counter[str] = field(default_factory=Counter)
    """bytes by kind that the forward of a microbatch leaves for its backward"""
    windows: list[Window] = field(default_factory=list)
    sent: Counter[Key] = field(default_factory=Counter)
    calls: Counter[Key] = field(default_factory=Counter)
    flops: int = 0
    balanced: bool = False
    """experts were taken to get the same number of tokens"""
    untraced: bool = False
    """there is the state alone"""

    def add(
        self,
        counter: CollectiveCounter,
        watch: Watch,
        before: tuple[Counter[Key], Counter[Key], int],
        times: int,
    ) -> None:
        """Adds what has been counted since `before`, so many times."""
        for into, now, then in (
            (self.sent, counter.bytes, before[0]),
            (self.calls, counter.calls, before[1]),
        ):
            into.update({key: size * times for key, size in (now - then).items()})
        self.flops += (watch.flops - before[2]) * times


class _Moments(StepListener):
    """Begins a window at each event of a unit."""

    def __init__(self, run: Run, watch: Watch, found: list[Window]) -> None:
        super().__init__(run)
        self._watch, self._found = watch, found
        blocks = [name for name in run.plan.blocks() if name in run.units]
        self._last = blocks[-1] if blocks else None
        self.label = ("start", "")

    def begin(self, event: str, unit: str = "") -> None:
        """Ends a window, and begins the next."""
        self._found.append(Window(self.label, dict(self._watch.peak_kinds)))
        self.label = event, unit
        self._watch.begin_peak()

    def before_forward(self, unit: str, group: Any) -> None:
        self.begin("forward" if self._watch.kind != "backward" else "recomputation", unit)

    def after_forward(self, unit: str, output: Any) -> None:
        if unit == self._last and self._watch.kind == "activations":
            self._watch.kind = "logits"
            self.begin("logits")

    def before_backward(self, unit: str, group: Any) -> None:
        self.begin("backward", unit)

    def end_of_backward(self) -> None:
        self.begin("end of backward")


def trace_steps(model: nn.Module, optimizer: torch.optim.Optimizer, work: Work) -> Trace:
    """Prepares a model and its optimizer, on meta or not, and runs steps of it.

    Collective: no. Both are changed. `torch.distributed` must not be initialised.

    Raises:
        UntraceableError: the model or the optimizer reads values that nobody has.
        PlanError: from preparing, or for a collective that is not known.
        ConfigError: from preparing.
    """
    with _prepared(model, optimizer, work) as (run, mode):
        return observe_steps(run, optimizer, work, mode)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, work: Work) -> Trace:
    """Prepares a model that cannot be traced, and steps the optimizer with gradients of zeros.

    Collective: no. Both are changed. Returns what stays in memory, and all units gathered at once
    that the plan keeps.
    """
    with _prepared(model, optimizer, work) as (run, mode):
        counter = CollectiveCounter(work.ranks_per_node)
        watch = Watch(counter.hear)
        watch.know(mode)
        found = Trace(run.plan, untraced=True)
        with watch:
            found.held = _State(run, optimizer, watch).make()
        found.windows.append(Window(("state", ""), dict(found.held)))
        return found


@contextlib.contextmanager
def _prepared(
    model: nn.Module, optimizer: torch.optim.Optimizer, work: Work
) -> Generator[tuple[Run, Any]]:
    mode = fake_tensors()
    with fake_ranks(work.ranks, work.rank), warnings.catch_warnings():
        # The preparation of the run warns; this one is not it.
        warnings.simplefilter("ignore")
        with mode:
            _drop_values(model, optimizer)
        # Outside of the mode, in which a mesh would have no numbers of ranks.
        run = work.prepare(model, optimizer)
        with mode:
            yield run, mode


def observe_steps(
    run: Run, optimizer: torch.optim.Optimizer, work: Work, mode: Any = None
) -> Trace:
    """Runs steps of a prepared model, and reads off what the last of them took.

    Collective: as the steps are.

    Args:
        run: of the model.
        optimizer: of the model.
        work: a step.
        mode: that of the fake tensors, if tensors are fake.
    """
    axes = list(run.shape.axes)
    counter = CollectiveCounter(work.ranks_per_node, *axes if len(axes) == 1 else ())
    watch = Watch(counter.hear)
    found = Trace(run.plan)
    if mode is not None:
        watch.know(mode)
    with watch:
        _steps(run, optimizer, work, watch, counter, found)
    return found


def _drop_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Exchanges weights and buffers for fake tensors on the CPU."""
    merge_aliases(ModuleTree.read(model))
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    params: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                places.setdefault(id(param), []).append((module, name))
                params[id(param)] = param
        for name, value in [*module._buffers.items(), *vars(module).items()]:
            if isinstance(value, torch.Tensor) and value.is_meta:
                held = module._buffers if name in module._buffers else vars(module)
                held[name] = torch.empty_like(value, device="cpu")
    new = {
        key: replace_parameter(places[key], old, torch.empty_like(old, device="cpu"))
        for key, old in params.items()
    }
    for group in optimizer.param_groups:
        group["params"] = [new[id(p)] for p in group["params"] if id(p) in new]


class _State:
    """Knows the storages of parameters, buffers, gradients and optimizer state.

    Args:
        run: of the model, whose parameters are shards now; a forward exchanges them in the modules.
        optimizer: of the model.
        watch: sees the storages.
    """

    def __init__(self, run: Run, optimizer: torch.optim.Optimizer, watch: Watch) -> None:
        self._params = [param for param in run.model.parameters() if not is_elsewhere(param)]
        self._optimizer, self._watch = optimizer, watch
        for buffer in run.model.buffers():
            self._note("buffers", buffer)

    def _note(self, kind: str, tensor: torch.Tensor) -> None:
        local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        if local.device.type != "meta":
            self._watch.note(local.untyped_storage(), kind)

    def bytes(self) -> Counter[str]:
        """Names the storages, and returns the bytes of those that stay."""
        for param in self._params:
            self._note("parameters", param)  # newer torch pads shards in the first forward
            if param.grad is not None:
                self._note("gradients", param.grad)
        for of_param in self._optimizer.state.values():
            for value in getattr(of_param, "data", of_param).values():
                parts = [value.values, value.exponents] if isinstance(value, Stored) else [value]
                for part in parts:
                    if isinstance(part, torch.Tensor):
                        self._note("optimizer", part)
        return Counter({name: self._watch.now[name] for name in STATE})

    def step(self) -> Counter[str]:
        """Steps the optimizer, and returns the bytes that stay."""
        self.bytes()
        self._watch.kind = "step"
        self._optimizer.step()
        return self.bytes()

    def make(self) -> Counter[str]:
        """Has the optimizer make its state from gradients of zeros."""
        for param in self._params:
            if param.requires_grad:
                param.grad = torch.zeros_like(param)
        return self.step()


def _steps(
    run: Run,
    optimizer: torch.optim.Optimizer,
    work: Work,
    watch: Watch,
    counter: CollectiveCounter,
    found: Trace,
) -> None:
    settings, state = run.settings, _State(run, optimizer, watch)
    warm = 0 if is_fake() else 1  # real ranks compare their batches in the first step
    if settings.forward_prefetch or settings.backward_prefetch:
        warm = 2  # prefetching begins in the second step
    elif settings.gradient_sync == "last" or settings.tensor_parallel is not None:
        # Units that have never run reduce in each microbatch, and DTensor computes its layouts.
        warm = 1
    # With `every`, the second is as all that follow.
    count = min(work.microbatches, 2 if settings.gradient_sync == "every" else 3)
    moments = _Moments(run, watch, found.windows)
    run.listen(moments)
    state.make()
    for step in range(warm + 1):
        optimizer.zero_grad()
        found.windows.clear()
        found.sent.clear()
        found.calls.clear()
        found.flops = 0
        total = count if step == warm else 1
        outputs: list[Any] = []  # as the Trainer has them: they live until the next are there
        with run.accumulation.batch():
            for number in range(total):
                before = counter.bytes.copy(), counter.calls.copy(), watch.flops
                moments.begin("microbatch", str(number))
                with run.accumulation.microbatch(last=number + 1 == total):
                    _microbatch(run, work, watch, found, outputs, total)
                state.bytes()  # gradients that the next microbatch adds to
                # The second stands for those that are not traced.
                times = work.microbatches - count + 1 if number == 1 else 1
                found.add(counter, watch, before, times)
        before = counter.bytes.copy(), counter.calls.copy(), watch.flops
        moments.begin("step")
        found.held = state.step()
        moments.begin("end")
        found.add(counter, watch, before, 1)
    found.balanced = watch.balanced
    run.stop_listening(moments)


def _microbatch(
    run: Run, work: Work, watch: Watch, found: Trace, outputs: list[Any], count: int
) -> None:
    """Runs forward and backward; the new outputs take the place of those before."""
    watch.kind, batch, start = "activations", work.batch(), watch.now.copy()
    made, loss = work.compute(run.model, batch)
    if not outputs:  # else they are freed as well
        found.kept = watch.now - start
    outputs[:] = [made]
    watch.kind = "backward"
    (loss / count).backward()
