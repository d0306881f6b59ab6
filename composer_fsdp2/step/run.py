"""Holds a prepared model, and tells listeners what happens in its steps."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_pre_hook

from composer_fsdp2.config.schema import FSDP2Config
from composer_fsdp2.parallel.parallelism import AppliedParallelism, BatchGroup
from composer_fsdp2.plan.mesh_shape import MeshShape
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.wrap_plan import WrapPlan
from composer_fsdp2.shard.units import resharding
from composer_fsdp2.step.accumulation import Accumulation, reset
from composer_fsdp2.torch_private.units import (
    after_backward,
    attach,
    backward_number,
    param_groups,
)

__all__ = ["Run", "StepListener", "run_of"]

_RUN = "_fsdp2_run"
"""attribute of a prepared model and of its units, for `run_of`"""


class StepListener:
    """Hears the events of a step of a prepared model.

    `Run.start` makes one listener of each class in `STEP` and calls those methods that the class
    defines; a method that no listener defines costs nothing. Every rank calls them, in the order of
    its own forward and backward. A unit is given by its name, '' for the root, and with torch's
    group of parameters, of which a unit has one; with newer torch it may have several.

    Source: where torch does each of these things,
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py#L252
    """

    @classmethod
    def wanted(cls, run: Run) -> bool:
        """Whether a run needs this listener. Collective: no, unless the class says so."""
        return True

    def __init__(self, run: Run) -> None:
        self.run = run

    def begin_forward(self) -> None:
        """A forward of the whole model begins; grad mode tells training from evaluation."""

    def end_forward(self) -> None:
        """A forward of the whole model has ended without an error."""

    def forward_failed(self, error: Exception) -> None:
        """A forward of the whole model raises `error`, or what this method raises."""

    def failed(self, error: str) -> None:
        """A forward of the whole model is about to raise an error of ours on this rank."""

    def before_forward(self, unit: str, group: Any) -> None:
        """Forward comes to a unit. A unit that is not gathered yet is gathered next."""

    def before_gather(self, unit: str, group: Any) -> None:
        """The all-gather of a unit begins: in forward, in backward or as a prefetch."""

    def before_agreement(self, subject: str) -> None:
        """The ranks are about to agree on something in a small collective of ours."""

    def before_unsharded(self, unit: str, group: Any) -> None:
        """Whole parameters are about to take the places of the shards in the modules."""

    def after_unsharded(self, unit: str, group: Any) -> None:
        """Whole parameters are in the modules."""

    def may_free(self, unit: str, group: Any) -> bool:
        """Whether the memory of whole parameters may be freed now."""
        return True

    def after_forward(self, unit: str, output: Any) -> None:
        """The forward of a unit has ended, and torch has not freed its parameters yet."""

    def after_group_forward(self, unit: str, group: Any) -> None:
        """The forward of a unit, or a method in `forward_methods`, is over for torch."""

    def before_backward(self, unit: str, group: Any) -> None:
        """Backward comes to a unit. Called again for each output that gets a gradient."""

    def may_reduce(self, unit: str, group: Any) -> bool:
        """Whether a unit may reduce its gradients in this backward."""
        return True

    def after_backward(self, unit: str, group: Any) -> None:
        """Backward has left a unit, or ends without having come to it; gradients may be added."""

    def before_reduce(self, unit: str, group: Any) -> None:
        """The reduce-scatter of a unit's gradients begins."""

    def end_of_backward(self) -> None:
        """Backward of all units, of several models too, is over."""

    def new_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer that is not the run's is about to step for the first time."""

    def before_any_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of this process, not only that of the run, is about to step."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of the run is about to step."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of the run has stepped."""

    def aborted(self) -> None:
        """The batch is thrown away on every rank: forget its events."""


Listener = TypeVar("Listener", bound=StepListener)


@dataclass(eq=False, kw_only=True)
class Run:
    """Holds a model that `prepare_fully_shard` has sharded, and the listeners of its steps."""

    model: nn.Module
    tree: ModuleTree
    """of the model, without parameters"""
    plan: WrapPlan
    shape: MeshShape
    settings: FSDP2Config
    device: torch.device
    """where units gather"""
    optimizers: Sequence[torch.optim.Optimizer] = ()
    """of `prepare_fully_shard`; optimizers built later are no part of the run"""
    units: Mapping[str, FSDPModule]
    """by name, children before parents"""
    conditional: Sequence[str] = ()
    """names of units with experts or a tower, in which ranks often use different parameters"""
    parallelisms: Sequence[AppliedParallelism] = ()
    batch_group: BatchGroup | None = None
    """the same-batch group; `None` where each rank reads its own batch"""
    inputs: tuple[Any, ...] = ()
    """arguments of the model's forward that runs: positional ones, then those by name"""
    listeners: tuple[StepListener, ...] = ()
    depth: int = 0
    """how many forwards of the model are running, one inside the other"""
    is_evaluating: bool = False
    """whether a block of `evaluating` runs"""
    averages_from: str | None = None
    """the checkpoint whose averages the model holds, beside optimizer state of other weights"""
    entered: str = ""
    """name of the unit whose forward began last"""
    _calls: dict[str, list[Callable[..., Any]]] = field(default_factory=dict[str, Any])
    _backward: int = -1
    _stepped: weakref.WeakSet[torch.optim.Optimizer] = field(default_factory=weakref.WeakSet)
    """optimizers of the process that are not the run's"""

    @functools.cached_property
    def groups(self) -> dict[str, list[Any]]:
        """Torch's groups of parameters, by the names of the units that have parameters."""
        names = [unit.module for unit in self.plan.units if unit.params]
        return {name: param_groups(self.units[name]) for name in names}

    @functools.cached_property
    def first_copy(self) -> torch.distributed.ProcessGroup | None:
        """The ranks that hold the first copy of the model. Collective: yes, the first time."""
        # Copies are the outermost axis of the mesh.
        return torch.distributed.new_group(list(range(self.shape.shard * self.shape.tensor)))

    @functools.cached_property
    def accumulation(self) -> Accumulation:
        """Tells the units which microbatch is the last of its batch."""
        sync = self.settings.gradient_sync
        # Units that keep their parameters until backward keep them for the microbatches to come.
        unsharded = [u.module for u in self.plan.units if u.reshard_after_forward is False]
        return Accumulation(self.units, sync, unsharded if sync == "last" else (), self.abort)

    def listener(self, kind: type[Listener]) -> Listener | None:
        """Returns the listener of a class; `None` where this run needs none."""
        return next((listener for listener in self.listeners if isinstance(listener, kind)), None)

    def start(self, step: Iterable[type[StepListener]]) -> None:
        """Makes the listeners, in their order, and begins to call them.

        Collective: as `wanted` of each class is.
        """
        self._call(())
        for kind in step:
            if kind.wanted(self):
                self.listen(kind(self))
        for name, groups in self.groups.items():
            for group in groups:
                attach(group, partial(self._hear_group, name, group))
        # Torch drops what a forward hook raises after an error: no hook could exchange the error.
        # https://github.com/pytorch/pytorch/blob/v2.7.0/torch/nn/modules/module.py#L1857
        self.model.forward = _Forward(self, self.model.forward)
        run_ref = weakref.ref(self)

        def hear_any_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if (run := run_ref()) is not None:
                run._hear_any_step(optimizer)

        # Never removed: the model may be collected while torch goes through these hooks.
        register_optimizer_step_pre_hook(hear_any_step)
        # Before torch's own, which may gather, and after it, when the unit is freed again.
        # https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_state.py#L214
        self.model.register_forward_pre_hook(self._begin_forward, prepend=True, with_kwargs=True)
        self.model.register_forward_hook(partial(self._hear, "end_forward"))
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(partial(self._hear_step, "before_step"))
            optimizer.register_step_post_hook(partial(self._hear_step, "after_step"))
        for name, unit in self.units.items():
            # Before torch's own, which frees the parameters.
            assert isinstance(unit, nn.Module)
            unit.register_forward_hook(partial(self._after_forward, name), prepend=True)
        # Where `run_of` looks for it.
        for module in (self.model, *self.units.values()):
            setattr(module, _RUN, self)

    def listen(self, listener: StepListener, first: bool = False) -> None:
        """Adds a listener, after the others or before them. Collective: no."""
        self._call((listener, *self.listeners) if first else (*self.listeners, listener))

    def stop_listening(self, listener: StepListener) -> None:
        """Removes a listener, if it is there. Collective: no."""
        self._call([other for other in self.listeners if other is not listener])

    def _call(self, listeners: Iterable[StepListener]) -> None:
        self.listeners = tuple(listeners)
        self._calls = {
            name: [
                getattr(listener, name)
                for listener in self.listeners
                if getattr(type(listener), name) is not method
            ]
            for name, method in vars(StepListener).items()
            if inspect.isfunction(method) and name != "__init__"
        }

    def abort(self) -> None:
        """Leaves a batch in the middle, so that the next forward starts afresh.

        Collective: no. All parameters are shards again; the gradients of the batch are lost.
        """
        self.tell("aborted")
        reset(self.units.values())

    @contextlib.contextmanager
    def evaluating(self) -> Generator[None]:
        """Has units free or keep their parameters by `eval_reshard_after_forward`.

        Collective: no. Afterwards all parameters are shards again.
        """
        before, self.is_evaluating = self.is_evaluating, True
        try:
            with resharding(self.units, self.settings.eval_reshard_after_forward):
                yield
        finally:
            self.is_evaluating = before

    def tell(self, event: str, *args: Any) -> bool:
        """Calls a method of all listeners that define it, until a listener answers with False.

        Raises:
            KeyError: no listener has such a method.
        """
        return all(call(*args) is not False for call in self._calls[event])

    def _hear_group(self, unit: str, group: Any, event: str) -> bool:
        if event == "before_forward":
            self.entered = unit
        # Torch also comes to units that backward did not reach, at its end: "may_reduce" alone.
        elif event in ("before_backward", "may_reduce") and backward_number() != self._backward:
            self._backward = backward_number()
            # A callback that is queued later comes after those of all units, of several models too.
            end = partial(self._hear, "end_of_backward")
            after_backward(lambda: after_backward(end))
        return self.tell(event, unit, group)

    def _begin_forward(self, _: nn.Module, *inputs: Any) -> None:
        self.inputs = inputs
        self.tell("begin_forward")

    def _hear(self, event: str, *_: object) -> None:
        self.tell(event)

    def _hear_any_step(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._stepped and optimizer not in self.optimizers:
            self._stepped.add(optimizer)
            self.tell("new_optimizer", optimizer)
        self.tell("before_any_step", optimizer)

    def _hear_step(self, event: str, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.tell(event, optimizer)

    def _after_forward(self, unit: str, *call: Any) -> None:
        self.tell("after_forward", unit, call[-1])


class _Forward:
    """Counts the forwards that run, and tells of their errors, for which torch has no hook.

    Copied with its module, as a bound method is.
    """

    def __init__(self, run: Run, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self._run, self._forward = run, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._run.depth += 1
        try:
            return self._forward(*args, **kwargs)
        except Exception as error:  # torch asserts too, where DTensors are concerned
            self._run.tell("forward_failed", error)
            raise
        finally:
            self._run.depth, self._run.inputs = self._run.depth - 1, ()


def run_of(module: nn.Module) -> Run | None:
    """Returns the run of a prepared model or of its units, `None` for another module."""
    return getattr(module, _RUN, None)
