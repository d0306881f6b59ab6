"""Units that stay gathered: between two backwards, and between a backward and the step.

[Note: second backward] Autograd's graph of a gradient reads the weights without asking the unit to
gather them, for no hook of the unit is in it. So after a backward that builds such a graph
(`create_graph=True`), and after one that runs inside the model's forward, units stay gathered and
reduce nothing. The backward that comes last reduces, and frees them at its end. Memory for that
time: whole parameters of the units the first backward went through. The hooks of a unit are on
what its forward takes and returns:
https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_state.py#L318
https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py#L564
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from composer_fsdp2.errors import PlanError
from composer_fsdp2.parallel.parallelism import are_whole
from composer_fsdp2.step.run import Run, StepListener
from composer_fsdp2.text import unit_text
from composer_fsdp2.torch_private.units import (
    backward_number,
    gathered_param,
    has_gradient,
    has_run,
    is_gathered,
    is_idle,
    params_of,
    reduces,
    sharded_param,
)

__all__ = ["ParallelForwards", "SecondBackward", "StaleGathers", "UnannouncedMicrobatches"]


class SecondBackward(StepListener):
    """Keeps units gathered between two backwards; see [Note: second backward]."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._kept: dict[Any, list[int]] = {}
        """groups, with the versions of their shards when they were gathered"""
        self._keeps = False
        self._backward = -1

    def before_backward(self, unit: str, group: Any) -> None:
        """Learns from the grad mode which kind of backward runs. Collective: no."""
        if backward_number() == self._backward:
            return
        self._backward = backward_number()
        # Autograd turns grad mode on in backward only under `create_graph=True`.
        self._keeps = torch.is_grad_enabled() or self.run.depth > 0

    def may_reduce(self, unit: str, group: Any) -> bool:
        """Whether this is the last backward. Collective: no.

        Raises:
            PlanError: for a gradient of a parameter that autograd could differentiate.
        """
        if not self._keeps:
            return True
        for param in params_of(group):
            grad = gathered_param(param).grad if has_run(param) else None
            if grad is not None and grad.requires_grad:
                raise PlanError(
                    "backward(create_graph=True) leaves a graph in the gradients of parameters. "
                    "FSDP2 reduces those gradients over the ranks outside autograd, so nothing "
                    "could be differentiated through them. Take the gradient of inputs or of "
                    "activations: torch.autograd.grad(outputs, inputs, create_graph=True), and "
                    "call backward without create_graph on the loss that is made of it."
                )
        if is_gathered(group):
            self._kept.setdefault(group, _versions(group))
        return False

    def may_free(self, unit: str, group: Any) -> bool:
        """Whether no backward waits for the group, which then counts as freed."""
        if group in self._kept and not is_idle(group):
            return False
        self._kept.pop(group, None)
        return True

    def begin_forward(self) -> None:
        """Frees units that are old by now, because the optimizer has stepped. Collective: no."""
        for group, versions in list(self._kept.items()):
            if versions != _versions(group):
                group.reshard()

    def end_of_backward(self) -> None:
        """Frees all units after the last backward. Collective: no."""
        for group in [] if self._keeps else list(self._kept):
            group.reshard()


def _versions(group: Any) -> list[int]:
    return [sharded_param(param)._version for param in params_of(group)]


class StaleGathers(StepListener):
    """Frees units that a forward without gradients, or one before a step, has gathered.

    Whoever clips or clears gradients, builds an optimizer or averages weights takes
    `model.parameters()`. Gradients are at the shards, and optimizers step shards; a unit that stays
    gathered shows whole parameters. After a step they would be those from before the step.
    Evaluations and `generate` free units at their end, and gather the root unit once until then,
    unless gradients wait.
    """

    _gradients_wait = False
    _computes_later = False
    """whether the result of the unit that ran last may compute with its parameters"""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._announced: set[Any] = set()
        """groups whose gradients may wait for a reduction"""
        self._calls: Counter[Any] = Counter()
        """how many calls of a group's unit are running, one inside the other"""

    def begin_forward(self) -> None:
        """Refuses gradients that nobody will reduce. Collective: no."""
        self._refuse_unannounced()

    def before_forward(self, unit: str, group: Any) -> None:
        """Learns that gradients may wait for a step. Collective: no."""
        self._gradients_wait = self._gradients_wait or torch.is_grad_enabled()
        self._calls[group] += backward_number() < 0
        self._computes_later = False

    def after_forward(self, unit: str, output: Any) -> None:
        """Learns that a unit returns a generator or a function. Collective: no."""
        self._computes_later = isinstance(output, Iterator) or callable(output)

    def after_group_forward(self, unit: str, group: Any) -> None:
        """Frees a unit after a forward without gradients. Collective: no."""
        self._calls[group] -= backward_number() < 0
        is_needed = self._calls[group] > 0 or self._computes_later
        if torch.is_grad_enabled() or is_needed or not is_gathered(group):
            return
        if self._gradients_wait or not (self.run.is_evaluating or are_whole()):
            group.reshard()

    def before_backward(self, unit: str, group: Any) -> None:
        """Learns that a unit will reduce. Collective: no."""
        self._announced.add(group)

    def before_reduce(self, unit: str, group: Any) -> None:
        """Learns that no gradient of a unit waits. Collective: no."""
        self._announced.discard(group)

    def new_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses an optimizer of gathered parameters. Collective: no.

        Raises:
            PlanError: naming the unit.
        """
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for name, groups in self.run.groups.items():
            params = [param for group in groups for param in params_of(group) if has_run(param)]
            if any(id(gathered_param(param)) in stepped for param in params):
                raise PlanError(
                    f"{type(optimizer).__name__} was built while {unit_text(name)} was gathered, "
                    "and has its gathered parameters. FSDP2 makes those anew of the shards for "
                    "every use, so what the optimizer does to them is lost and nothing is "
                    "trained. Build it before the first forward, or after the optimizer's step "
                    "and not between a forward and its backward; or give it to prepare_fully_shard."
                )

    def before_any_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses gradients that nobody will reduce. Collective: no."""
        self._refuse_unannounced()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Frees all units. Collective: no."""
        self._calls.clear()  # of forwards that ended with an error
        for name, groups in self.run.groups.items():
            if any(map(is_gathered, groups)):
                self.run.units[name].reshard()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Learns that no gradient waits. Collective: no."""
        self._gradients_wait = False

    def aborted(self) -> None:
        """Forgets gradients and forwards of the batch. Collective: no."""
        self._announced.clear()
        self._calls.clear()

    def _refuse_unannounced(self) -> None:
        for name, groups in self.run.groups.items():
            for group in groups:
                if not is_gathered(group) or group in self._announced or not reduces(group):
                    continue
                if any(has_run(param) and has_gradient(param) for param in params_of(group)):
                    raise PlanError(
                        f"{f'Unit {name!r}' if name else 'The root unit'} holds gradients of a "
                        "backward that came to none of its results: neither to what its forward "
                        "returned nor to what it put into a list, dict or dataclass that it was "
                        "given. They were not averaged over the ranks, and the optimizer would "
                        "step without them. Compute the loss inside the model's forward from "
                        "what its modules return, and use weights nowhere else."
                    )


# --- Tells the parallelisms of a model between ranks that a forward begins. ---


class ParallelForwards(StepListener):
    """Lets a same-batch group compare inputs and draw alike; see `parallel.parallelism`."""

    @classmethod
    def wanted(cls, run: Run) -> bool:
        """Where a model is divided."""
        return bool(run.parallelisms)

    def begin_forward(self) -> None:
        """Collective: as `AppliedParallelism.before_forward`."""
        for parallelism in self.run.parallelisms:
            parallelism.before_forward(self.run.model, self.run.inputs)


# --- Warns of a loop that does not say which microbatch is the last of its batch. ---


class UnannouncedMicrobatches(StepListener):
    """Warns once when a setting of `gradient_sync` cannot take effect."""

    @classmethod
    def wanted(cls, run: Run) -> bool:
        """Says whether gradients wait for the last microbatch."""
        return run.settings.gradient_sync != "every"

    _warned = False

    def before_forward(self, unit: str, group: Any) -> None:
        """Looks whether a forward of training belongs to a microbatch. Collective: no."""
        module = self.run.units[unit]
        assert isinstance(module, nn.Module)
        outside = torch.is_grad_enabled() and not self.run.accumulation.inside
        if self._warned or not (outside and module.training):
            return
        self._warned = True
        warnings.warn(
            f"gradient_sync is {self.run.settings.gradient_sync!r}, and the model runs outside of "
            "`microbatch()`. Gradients are reduced in every backward. Train through Composer's "
            "Trainer, or put each microbatch into "
            "`run_of(model).accumulation.microbatch(last=...)`.",
            stacklevel=2,
        )
