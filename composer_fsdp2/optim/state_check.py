"""Whether an optimizer's state can be kept in another form."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composer_fsdp2.config.state import OptimizerState
from composer_fsdp2.errors import PlanError
from composer_fsdp2.optim.elementwise import (
    class_step,
    is_known,
    sums_norms,
)
from composer_fsdp2.optim.muon import Muon
from composer_fsdp2.optim.state_kept import SMALL, WEIGHTS, Policy
from composer_fsdp2.optim.trial import is_plain_data

__all__ = ["check_optimizer_state", "refuse_unknown", "warn_if_idle"]

_INSTEAD = (
    "Use torch.optim.AdamW or Adam, Composer's DecoupledAdamW, or LLM Foundry's DecoupledLionW, or "
    "leave optimizer_state out."
)


def check_optimizer_state(optimizer: torch.optim.Optimizer, setting: OptimizerState) -> None:
    """Refuses `optimizer_state` for an optimizer of which nothing could be kept so.

    Collective: no.

    Raises:
        PlanError: with what to write.
    """
    if setting == OptimizerState():
        return
    name = type(optimizer).__name__
    if isinstance(optimizer, Muon):
        raise PlanError(
            "'optimizer_state' cannot be had with Muon. Its hidden matrices have one state tensor "
            "where AdamW has two, and it steps them together, by collectives, so no bucket could "
            "be stepped alone. Leave optimizer_state out, or use AdamW with it."
        )
    if has_no_state(optimizer, averages=setting.device == "cpu"):
        raise PlanError(
            f"'optimizer_state' is set and the optimizer {name} keeps no moments, so the setting "
            "would have no effect. Leave optimizer_state out, or use an optimizer with state, "
            "such as torch.optim.AdamW or SGD with momentum."
        )
    trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
    others = sorted({str(param.dtype) for param in trained} - {"torch.float32"})
    if setting.dtype == "fp32" and others:
        raise PlanError(
            f"optimizer_state has dtype: fp32, and parameters are in {', '.join(others)}. {name} "
            "makes their state in their own dtype and computes in it, so the setting would have "
            "no effect. Leave dtype out, or build the model in float32."
        )


def warn_if_idle(optimizer: torch.optim.Optimizer, policy: Policy) -> None:
    """Warns of a policy that finds nothing to keep. Collective: no."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(map(policy.takes, params)) or dist.get_rank():
        return
    largest = max((param.numel() for param in params), default=0)
    warnings.warn(
        f"optimizer_state has no effect: the largest sharded parameter has {largest} elements, and "
        f"parameters with less than {SMALL} keep their state as it is. Leave optimizer_state out.",
        stacklevel=2,
    )


def refuse_unknown(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that is not known to step one parameter after the other.

    Raises:
        PlanError: always.
    """
    raise PlanError(
        f"'optimizer_state' is set and the optimizer {type(optimizer).__name__} was not found to "
        "step each element by itself: two steps of a small copy, on local shards and parameter by "
        "parameter, gave other numbers, or could not be tried. State in another form is stepped "
        f"in parts, and the parts would differ. {_INSTEAD} If it does step element by element and "
        "counts nothing over all parameters, write local_step: true."
    )


def has_no_state(optimizer: torch.optim.Optimizer, *, averages: bool) -> bool:
    """Whether a step of a small copy makes nothing to keep; `False` where none can be tried.

    Averages of weights count with `averages` only.
    """
    if optimizer.state or sums_norms(optimizer):
        return False
    own = vars(torch.optim.Optimizer([nn.Parameter(torch.empty(0))], {}))
    attributes = {key: value for key, value in vars(optimizer).items() if key not in own}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    numbers = [{k: v for k, v in g.items() if not isinstance(v, torch.Tensor)} for g in groups]
    if not is_known(optimizer) and not (is_plain_data(attributes) and is_plain_data(numbers)):
        return False
    try:
        small: Any = object.__new__(type(optimizer))
        made = [{**copy.deepcopy(g), "params": [_small_param()]} for g in groups]
        torch.optim.Optimizer.__init__(small, made, copy.deepcopy(optimizer.defaults))
        vars(small).update(copy.deepcopy(attributes))
        with torch.random.fork_rng(devices=[]):
            class_step(optimizer)(small)
    except Exception:  # whatever it is, its own step will tell
        return False
    tensors = {k: v for state in small.state.values() for k, v in state.items()}
    return not any(
        isinstance(value, torch.Tensor) and value.ndim and (averages or key not in WEIGHTS)
        for key, value in tensors.items()
    )


def _small_param() -> nn.Parameter:
    param = nn.Parameter(torch.zeros(2, 2))
    param.grad = torch.ones(2, 2)
    return param
