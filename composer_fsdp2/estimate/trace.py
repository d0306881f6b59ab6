"""Runs steps of a prepared model on fake tensors, and reads memory and collectives off them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from composer_fsdp2.estimate.collectives import CollectiveCounter, Key
from composer_fsdp2.optim.state import kept_storages, storages_of
from composer_fsdp2.parallel.form import form_of
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.wrap_plan import WrapPlan
from composer_fsdp2.ranks import is_fake
from composer_fsdp2.shard.apply import merge_aliases
from composer_fsdp2.shard.layout import replace_parameter
from composer_fsdp2.step.run import Run, StepListener
from composer_fsdp2.torch_private.fake import Watch, fake_ranks, gpu_autocast

__all__ = ["STATE", "Trace", "Window", "Work", "observe_steps", "trace_steps"]

STATE = ("parameters", "buffers", "gradients", "optimizer")
"""kinds of memory that stays; the rest: gathered, activations, logits, backward, step and other"""
_OF_UNITS = {"forward", "backward", "recomputation"}
"""events of a unit"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Describes one training step of a rank, as it is written for real tensors."""

    prepare: Callable[[nn.Module, torch.optim.Optimizer], Run]
    batch: Callable[[], Any]
    """makes the inputs of one microbatch"""
    compute: Callable[[nn.Module, Any], tuple[Any, torch.Tensor]]
    """returns outputs and loss of a microbatch"""
    microbatches: int = 1
    on_gpus: bool = False
    """steps run under the autocast of GPUs, and memory that their kernels take counts"""
    ahead: int = 0
    """units that are prefetched"""
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

    def __str__(self) -> str:
        event, unit = self.label
        return f"{event} of {unit or 'the root'}" if event in _OF_UNITS else event


@dataclass(slots=True)
class Trace:
    """Holds memory, collectives and FLOPs of one step of a rank, after the first step."""

    plan: WrapPlan
    held: Counter[str] = field(default_factory=Counter)
    """bytes of parameters, buffers, gradients and optimizer state"""
    kept: Counter[str] | None = None
    """bytes by kind that a forward leaves for its backward; `None` if no step ran"""
    windows: list[Window] = field(default_factory=list)
    sent: Counter[Key] = field(default_factory=Counter)
    calls: Counter[Key] = field(default_factory=Counter)
    flops: int = 0
    balanced: bool = False
    """experts were taken to get the same number of tokens"""
    unused: tuple[str, ...] = ()
    """FQNs of trained parameters that got no gradient"""

    def add(self, counter: CollectiveCounter, watch: Watch, times: int = 1) -> None:
        """Adds so many times all that was counted, which then begins from nothing again."""
        for into, counted in ((self.sent, counter.bytes), (self.calls, counter.calls)):
            into.update({key: size * times for key, size in counted.items()})
            counted.clear()
        self.flops += watch.flops * times
        watch.flops = 0


class _Moments(StepListener):
    """Begins a window at each event of a unit."""

    def __init__(self, run: Run, watch: Watch) -> None:
        super().__init__(run)
        self._watch, self.windows = watch, list[Window]()
        blocks = [name for name in run.plan.blocks() if name in run.units]
        self._last = blocks[-1] if blocks else None
        self.label = ("start", "")

    def begin(self, event: str, unit: str = "") -> None:
        """Ends a window, and begins the next."""
        self.windows.append(Window(self.label, dict(self._watch.peak_kinds)))
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


def trace_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, work: Work, *, state_only: bool = False
) -> Trace:
    """Prepares a model and its optimizer, on meta or not, and runs steps of it.

    Collective: no. Both are changed. `torch.distributed` must not be initialised.

    Args:
        model: not prepared yet; its values are dropped.
        optimizer: over the model's parameters.
        work: how the model is prepared, and the batches of a step.
        state_only: for a model that cannot be traced, steps the optimizer with gradients of zeros.

    Raises:
        UntraceableError: the model or the optimizer reads values that nobody has.
        PlanError: from preparing, or for a collective that is not known.
        ConfigError: from preparing.
    """
    with fake_ranks(work.ranks, work.rank) as mode, warnings.catch_warnings():
        # The preparation of the run warns; this one is not it.
        warnings.simplefilter("ignore")
        with mode:
            _drop_values(model, optimizer)
        # Outside of the mode, in which a mesh would have no numbers of ranks.
        run = work.prepare(model, optimizer)
        with mode, gpu_autocast() if work.on_gpus else nullcontext():
            return observe_steps(run, optimizer, work, mode, state_only=state_only)


def observe_steps(
    run: Run,
    optimizer: torch.optim.Optimizer,
    work: Work,
    mode: Any = None,
    *,
    state_only: bool = False,
) -> Trace:
    """Runs steps of a prepared model, and returns memory and collectives of the last step.

    Collective: as the steps are.

    Args:
        run: the prepared model.
        optimizer: over the run's sharded parameters.
        work: the batches of a step.
        mode: that of the fake tensors, if tensors are fake.
        state_only: steps the optimizer with gradients of zeros, and runs no forward.
    """
    axes = list(run.shape.axes)
    counter = CollectiveCounter(work.ranks_per_node, *axes if len(axes) == 1 else ())
    with Watch(counter.hear, mode, on_gpus=work.on_gpus) as watch:
        state = _State(run, optimizer, watch)
        state_bytes = state.make()
        if state_only:
            return Trace(run.plan, state_bytes, windows=[Window(("state", ""), dict(state_bytes))])
        Trace(run.plan).add(counter, watch)  # of the step that made the state
        return _steps(run, optimizer, work, watch, counter, state, Trace(run.plan))


def _drop_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Exchanges weights and buffers for fake tensors on the CPU."""
    merge_aliases(ModuleTree.read(model))
    slots: dict[int, list[tuple[nn.Module, str]]] = {}
    params: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                slots.setdefault(id(param), []).append((module, name))
                params[id(param)] = param
        for name, value in [*module._buffers.items(), *vars(module).items()]:
            if isinstance(value, torch.Tensor) and value.is_meta:
                attributes = module._buffers if name in module._buffers else vars(module)
                attributes[name] = torch.empty_like(value, device="cpu")
    new = {
        key: replace_parameter(slots[key], old, torch.empty_like(old, device="cpu"))
        for key, old in params.items()
    }
    for group in optimizer.param_groups:
        group["params"] = [new[id(p)] for p in group["params"] if id(p) in new]


class _State:
    """Knows the storages of parameters, buffers, gradients and optimizer state.

    Args:
        run: the prepared model, whose parameters are shards now; a forward exchanges them in the
            modules.
        optimizer: over those shards.
        watch: tells which storages live, and is told their kind.
    """

    def __init__(self, run: Run, optimizer: torch.optim.Optimizer, watch: Watch) -> None:
        self._params = [param for param in run.model.parameters() if not form_of(param).is_remote]
        self._optimizer, self._watch = optimizer, watch
        for storage in storages_of(run.model.buffers()):
            watch.note(storage, "buffers")

    def bytes(self) -> Counter[str]:
        """Names the storages, and returns the bytes of lasting storages by kind."""
        for kind, storage in kept_storages(self._params, self._optimizer):
            self._watch.note(storage, kind)  # newer torch pads shards in the first forward
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
    state: _State,
    trace: Trace,
) -> Trace:
    settings = run.settings
    warm = 0 if is_fake() else 1  # real ranks compare their batches in the first step
    if settings.units_ahead:
        warm = 2  # prefetching begins in the second step
    elif settings.gradient_sync == "last" or settings.tensor_parallel is not None:
        # Units that have never run reduce in each microbatch, and DTensor computes its layouts.
        warm = 1
    # With `every`, the second is as all that follow.
    count = min(work.microbatches, 2 if settings.gradient_sync == "every" else 3)
    moments = _Moments(run, watch)
    run.listen(moments)
    for total in (*[1] * warm, count):
        optimizer.zero_grad()
        moments.begin("start")
        moments.windows = list[Window]()
        trace = Trace(run.plan, windows=moments.windows)
        outputs: list[Any] = []  # as the Trainer has them: they live until the next are there
        with run.accumulation.batch():
            for number in range(total):
                moments.begin("microbatch", str(number))
                with run.accumulation.microbatch(last=number + 1 == total):
                    watch.kind, batch, start = "activations", work.batch(), watch.now.copy()
                    made, loss = work.compute(run.model, batch)
                    if not outputs:  # else they are freed as well
                        trace.kept = watch.now - start
                    outputs[:] = [made]
                    watch.kind = "backward"
                    (loss / total).backward()
                    del batch, made, loss
                state.bytes()  # gradients that the next microbatch adds to
                # The second stands for those that are not traced.
                trace.add(counter, watch, work.microbatches - count + 1 if number == 1 else 1)
        trace.unused = tuple(
            name
            for name, param in run.model.named_parameters()
            if param.requires_grad and param.grad is None and not form_of(param).is_remote
        )
        moments.begin("step")
        trace.held = state.step()
        moments.begin("end")
        trace.add(counter, watch)
    run.stop_listening(moments)
    trace.balanced = watch.balanced
    return trace
