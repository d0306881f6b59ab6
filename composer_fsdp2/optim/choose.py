"""Whether an optimizer steps local shards, decided for the optimizers of a model."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from composer_fsdp2.config.state import OptimizerState
from composer_fsdp2.optim.elementwise import (
    check_local_step,
    class_step,
    is_known,
    methods_for,
    packing_for,
)
from composer_fsdp2.optim.local_step import LocalStep
from composer_fsdp2.optim.muon import Muon
from composer_fsdp2.optim.state_check import check_optimizer_state, refuse_unknown, warn_if_idle
from composer_fsdp2.optim.state_kept import Policy
from composer_fsdp2.optim.state_step import KeptSteps
from composer_fsdp2.optim.trial import try_local_step
from composer_fsdp2.ranks import raise_on_all_ranks
from composer_fsdp2.step.agreement import agreement_of

__all__ = ["apply_local_step"]

log = logging.getLogger(__name__)

LocalStepSetting = bool | Literal["auto"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The settings of a run about its optimizer."""

    local_step: LocalStepSetting
    state: OptimizerState

    @property
    def keeps(self) -> bool:
        """Whether anything about the state is set."""
        return self.state != OptimizerState()


def apply_local_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    setting: LocalStepSetting,
    device: torch.device,
    state: OptimizerState | None = None,
) -> None:
    """Has the optimizers of a sharded model step local shards, as the setting `local_step` says.

    Collective: yes, if `auto` has to try an optimizer that is not known. An optimizer that is built
    later is looked at in its first step, and tried there is none: what is not known steps DTensors.
    Their first step shows whether it changes them (`WatchedData`).

    With `state`, it keeps its state in that form.

    Raises:
        PlanError: `local_step: true` and an optimizer that looks across elements; one that can
            step neither DTensors nor local shards, which a trial shows; `state` and one that is
            not known to step parameters one by one, or has no state.
    """
    wanted = Wanted(setting, state or OptimizerState())
    if optimizer is not None:
        _apply(
            optimizer,
            wanted,
            lambda parts: _tried_on_all_ranks(optimizer, device, one_by_one=parts),
        )
    watched = _Later(model, wanted, optimizer)
    # It is never removed: the model may be collected while torch goes through its hooks.
    register_optimizer_step_pre_hook(watched)


def _tried_on_all_ranks(
    optimizer: torch.optim.Optimizer, device: torch.device, *, one_by_one: bool = False
) -> bool:
    """Whether local shards will do. Collective: yes. Raises what no rank can step."""
    trial = try_local_step(optimizer, one_by_one=one_by_one)
    if not agreement_of(device).any_rank(not trial.alike):
        return True
    raise_on_all_ranks({}, trial.refusal)
    return False


def _apply(
    optimizer: torch.optim.Optimizer, wanted: Wanted, is_alike: Callable[[bool], bool]
) -> LocalStep | None:
    if wanted.local_step is False:
        if not isinstance(optimizer, Muon) and not is_known(optimizer):
            is_alike(False)  # on DTensors it may fail, too
        return None
    check_optimizer_state(optimizer, wanted.state)
    if isinstance(optimizer, Muon):
        return None  # it works on local shards itself, with collectives of its own
    if wanted.local_step is True:
        check_local_step(optimizer)
    elif not is_known(optimizer) and not is_alike(wanted.keeps):
        if wanted.keeps:
            refuse_unknown(optimizer)
        log.info(
            "%s steps DTensors: local shards would give other numbers, or it could not be tried.",
            type(optimizer).__name__,
        )
        return None
    policy = Policy(wanted.state)
    kept = None
    if policy.changes:
        warn_if_idle(optimizer, policy)
        kept = KeptSteps(optimizer, policy, class_step(optimizer))
    return LocalStep(optimizer, packing_for(optimizer), methods_for(optimizer), kept)


class _Later:
    """Checks each optimizer once, in its first step, for shards of the model."""

    def __init__(
        self,
        model: nn.Module,
        wanted: Wanted,
        seen: torch.optim.Optimizer | None,
    ) -> None:
        # Not its parameters: torch does not convert a tensor that somebody refers to weakly.
        self._model = weakref.ref(model)
        self._wanted = wanted
        self._seen = weakref.WeakSet(() if seen is None else (seen,))

    def __call__(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        model = self._model()
        if model is None or optimizer in self._seen or args[:1] != (optimizer,):
            return None
        around = any(value is seen for value in vars(optimizer).values() for seen in self._seen)
        self._seen.add(optimizer)
        if around:
            return None  # SAM's, which has the other one step
        ours = [param for param in model.parameters() if isinstance(param, DTensor)]
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if any(id(param) in held for param in ours):
            # torch runs the hooks of all optimizers before its own: those registered now are next.
            _apply(optimizer, self._wanted, lambda _: False)
        return None
