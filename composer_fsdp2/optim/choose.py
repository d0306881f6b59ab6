"""Whether an optimizer steps local shards, decided for the optimizers of a model."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from composer_fsdp2.optim.elementwise import (
    check_local_step,
    is_known,
    methods_for,
    packing_for,
)
from composer_fsdp2.optim.local_step import LocalStep
from composer_fsdp2.optim.muon import Muon
from composer_fsdp2.optim.trial import try_local_step
from composer_fsdp2.ranks import raise_on_all_ranks
from composer_fsdp2.runtime.agreement import agreement_of

__all__ = ["apply_local_step"]

log = logging.getLogger(__name__)

LocalStepSetting = bool | Literal["auto"]


def apply_local_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    setting: LocalStepSetting,
    device: torch.device,
) -> None:
    """Has the optimizers of a sharded model step local shards, as the setting `local_step` says.

    Collective: yes, if `auto` has to try an optimizer that is not known. An optimizer that is built
    later is looked at in its first step, and tried there is none: what is not known steps DTensors.

    Raises:
        PlanError: `local_step: true` and an optimizer that looks across elements; or one that can
            step neither DTensors nor local shards, which a trial shows.
    """
    if setting is False:
        if optimizer is not None and not isinstance(optimizer, Muon) and not is_known(optimizer):
            _tried_on_all_ranks(optimizer, device)  # on DTensors it may fail, too
        return
    if optimizer is not None:
        _apply(optimizer, setting, lambda: _tried_on_all_ranks(optimizer, device))
    watched = _Later(model, setting, optimizer)
    handle = register_optimizer_step_pre_hook(watched)
    weakref.finalize(model, handle.remove)


def _tried_on_all_ranks(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether local shards will do. Collective: yes. Raises what no rank can step."""
    trial = try_local_step(optimizer)
    if not agreement_of(device).any_rank(not trial.alike):
        return True
    raise_on_all_ranks({}, trial.refusal)
    return False


def _apply(
    optimizer: torch.optim.Optimizer, setting: LocalStepSetting, is_alike: Callable[[], bool]
) -> LocalStep | None:
    if isinstance(optimizer, Muon):
        return None  # it works on local shards itself, with collectives of its own
    if setting is True:
        check_local_step(optimizer)
    elif not is_known(optimizer) and not is_alike():
        log.info(
            "%s steps DTensors: local shards would give other numbers, or it could not be tried.",
            type(optimizer).__name__,
        )
        return None
    return LocalStep(optimizer, packing_for(optimizer), methods_for(optimizer))


class _Later:
    """Checks each optimizer once, in its first step, for shards of the model."""

    def __init__(
        self,
        model: nn.Module,
        setting: LocalStepSetting,
        seen: torch.optim.Optimizer | None,
    ) -> None:
        # Not its parameters: torch does not convert a tensor that somebody refers to weakly.
        self._model = weakref.ref(model)
        self._setting: LocalStepSetting = setting
        self._seen = weakref.WeakSet(() if seen is None else (seen,))

    def __call__(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if optimizer in self._seen or args[:1] != (optimizer,):
            return None
        self._seen.add(optimizer)
        model = self._model()
        ours = () if model is None else [p for p in model.parameters() if isinstance(p, DTensor)]
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if any(id(param) in held for param in ours):
            # torch runs the hooks of all optimizers before its own: those registered now are next.
            _apply(optimizer, self._setting, lambda: False)
        return None
