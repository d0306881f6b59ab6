"""Whether the optimizer of a model steps local shards, and in which form it keeps its state."""

from __future__ import annotations

import warnings
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from composer_fsdp2.config.state import OptimizerState
from composer_fsdp2.errors import PlanError
from composer_fsdp2.optim.elementwise import (
    check_local_step,
    dtensor_refusal,
    is_known,
    try_small_copy,
)
from composer_fsdp2.optim.local import LocalShards, hook_local_step
from composer_fsdp2.optim.muon.optimizer import Muon
from composer_fsdp2.optim.state.step import KeptSteps, check_optimizer_state
from composer_fsdp2.ranks import raise_on_all_ranks
from composer_fsdp2.step.agreement import agreement_of

__all__ = ["apply_local_step"]


def apply_local_step(
    optimizer: torch.optim.Optimizer | None,
    setting: bool | Literal["auto"],
    device: torch.device,
    state: OptimizerState | None = None,
) -> None:
    """Has the optimizer of a sharded model step local shards, as the setting `local_step` says.

    Collective: yes, for an optimizer that is not known. With `state`, it keeps its state in that
    form. An optimizer that is built later steps DTensors, as torch has it.

    Raises:
        PlanError: `local_step: true` and an optimizer that looks across elements; one that can
            step neither DTensors nor local shards, which a trial shows; `state` and one that is
            not known to step parameters one by one, or has no state.
    """
    state = state or OptimizerState()
    if optimizer is None:
        if dist.get_rank() == 0 and (setting is True or state != OptimizerState()):
            name = "local_step" if state == OptimizerState() else "optimizer_state"
            warnings.warn(
                f"'{name}' is set and prepare_fully_shard was given no optimizer. One that is "
                "built later steps DTensors and keeps its state as torch does, so the setting has "
                "no effect. Build the optimizer first and give it to prepare_fully_shard, or "
                f"leave {name} out.",
                stacklevel=2,
            )
        return
    check_optimizer_state(optimizer, state)
    if isinstance(optimizer, Muon):
        return  # it works on local shards itself, with collectives of its own
    if setting is True:
        check_local_step(optimizer)
    elif not is_known(optimizer):
        if state != OptimizerState():
            raise PlanError(
                f"'optimizer_state' is set and the optimizer {type(optimizer).__name__} is not "
                "known to step each element by itself. State in another form is stepped one "
                "parameter after the other, and a step that looks across parameters, or counts "
                "over all of them, would be another one. Use torch.optim.AdamW or Adam, Composer's "
                "DecoupledAdamW, or LLM Foundry's DecoupledLionW, or leave optimizer_state out. If "
                "it does step element by element, write local_step: true."
            )
        if not _is_alike(optimizer, device):
            return
    if setting is False:
        return
    if state in (OptimizerState(), OptimizerState(dtype="fp32")):
        hook_local_step(optimizer, LocalShards())
    else:
        kept = KeptSteps(optimizer, state)
        hook_local_step(optimizer, LocalShards(kept.takes), kept.step)


def _is_alike(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether shards give the bits of the whole on every rank. Collective: yes.

    Raises:
        PlanError: the optimizer can step neither shards nor DTensors.
    """
    alike = try_small_copy(optimizer)
    if not agreement_of(device).any_rank(not alike):
        return True
    params = [param for group in optimizer.param_groups for param in group["params"]]
    like = next((param for param in params if isinstance(param, DTensor)), None)
    refusal = None
    if alike is not None and like is not None:
        refusal = dtensor_refusal(optimizer, like)
    raise_on_all_ranks({}, refusal)
    return False
