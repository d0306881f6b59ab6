"""Knows the optimizers that step element by element: a shard alone gives the bits of the full step.

They step local shards of a sharded model, and may keep their state in another form.
"""

from __future__ import annotations

import re
import warnings
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from composer_fsdp2.config.placement import OptimizerState
from composer_fsdp2.errors import PlanError
from composer_fsdp2.optim.local import LocalStep, MatrixOptimizer
from composer_fsdp2.optim.small_copy import steps_alike
from composer_fsdp2.optim.state import KeptSteps
from composer_fsdp2.step.run import Run, StepListener
from composer_fsdp2.torch_private.tensors import local_tensor, sharded_like

__all__ = ["LaterOptimizers", "apply_local_step", "check_optimizer_state", "known_as"]

_WITHOUT_STATE = "llmfoundry.optim.no_op:NoOp"
_AVERAGES = "torch.optim.asgd:ASGD"
_MOMENTUM_OR_NONE = (
    "torch.optim.sgd:SGD",
    "composer.optim.decoupled_weight_decay:DecoupledSGDW",
)
_KNOWN = frozenset(
    {
        _WITHOUT_STATE,
        _AVERAGES,
        *_MOMENTUM_OR_NONE,
        "composer.optim.decoupled_weight_decay:DecoupledAdamW",
        "llmfoundry.optim.lion:DecoupledLionW",
        # These sum squared norms over all ranks themselves, and so expect local shards.
        "llmfoundry.optim.adaptive_lion:DecoupledAdaLRLion",
        "llmfoundry.optim.adaptive_lion:DecoupledClipLion",
        "torch.optim.adadelta:Adadelta",
        "torch.optim.adagrad:Adagrad",
        "torch.optim.adam:Adam",
        "torch.optim.adamax:Adamax",
        "torch.optim.adamw:AdamW",
        "torch.optim.nadam:NAdam",
        "torch.optim.radam:RAdam",
        "torch.optim.rmsprop:RMSprop",
    }
)
"""modules and classes, by name: looking for them imports nothing"""
_CHANGES_NO_STEP = {"__init__", "__repr__", "__setstate__", "__getstate__"}
_ACROSS = re.compile("adafactor|lamb|lars|muon|shampoo|soap|galore|kfac|lbfgs|came", re.IGNORECASE)
"""optimizers that look across the elements of a parameter, by name"""


def known_as(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns the known class whose step the optimizer has; a subclass may not change the step.

    A known class steps local shards to the bits of the full parameters.
    """
    for kind in type(optimizer).__mro__:
        name = f"{kind.__module__}:{kind.__qualname__}"
        if name in _KNOWN:
            return name
        if {key for key, value in vars(kind).items() if callable(value)} - _CHANGES_NO_STEP:
            return None
    return None


def apply_local_step(
    optimizer: torch.optim.Optimizer,
    setting: bool | Literal["auto"],
    device: torch.device,
    state: OptimizerState,
) -> None:
    """Has the optimizer of a sharded model step local shards, as the setting `local_step` says.

    Collective: yes, for an optimizer that is not known.

    Args:
        optimizer: over sharded parameters.
        setting: `local_step` of the run.
        device: of the run; ranks agree there about an optimizer that is not known.
        state: `optimizer_state` of the run, which `check_optimizer_state` has let pass.

    Raises:
        PlanError: `local_step: true` and an optimizer that looks across elements; an optimizer that
            can step neither DTensors nor local shards, which a trial shows; `state` and an
            optimizer that is not known to step parameters one by one.
    """
    if isinstance(optimizer, MatrixOptimizer):
        return  # it works on local shards itself, with collectives of its own
    name, known_class = type(optimizer).__name__, known_as(optimizer)
    if setting is True and not known_class and _ACROSS.search(name):
        raise PlanError(
            f"local_step: true cannot be had with the optimizer {name}, which looks across the "
            "elements of a parameter: each rank would step its shard as if it were the whole. "
            "Write local_step: auto, which finds out what the optimizer does, or leave it out."
        )
    is_tried = setting is not True and not known_class
    if is_tried and state != OptimizerState():
        raise PlanError(
            f"'optimizer_state' is set and the optimizer {name} is not known to step each element "
            "by itself. State in another form is stepped one parameter after the other, and a "
            "step that looks across parameters, or counts over all of them, would be another one. "
            "Use torch.optim.AdamW or Adam, Composer's DecoupledAdamW, or LLM Foundry's "
            "DecoupledLionW, or leave optimizer_state out. If it does step element by element, "
            "write local_step: true."
        )
    if (is_tried and not steps_alike(optimizer, device)) or setting is False:
        optimizer.register_step_post_hook(_restore_layouts)
        return
    if state in (OptimizerState(), OptimizerState(dtype="fp32")):
        LocalStep(optimizer)
    else:
        KeptSteps(optimizer, state)


def _restore_layouts(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Gives state tensors the placements of their parameter, which operators on DTensors lose.

    Collective: no. `torch.maximum(..., out=state)` of AMSGrad leaves the shards of the state right,
    and `Shard` where the parameter has `_StridedShard`: a full tensor would have other rows.
    """
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if (
                not isinstance(param, DTensor)
                or not isinstance(value, DTensor)
                or value.shape != param.shape
                or local_tensor(value).shape != local_tensor(param).shape
            ):
                continue
            # `==` takes a strided shard for a plain one.
            pairs = zip(value.placements, param.placements, strict=True)
            if any(type(a) is not type(b) for a, b in pairs):
                state[key] = sharded_like(local_tensor(value), param)


class LaterOptimizers(StepListener):
    """Has optimizers that are built after the model was prepared step local shards.

    An optimizer that is not known steps DTensors, as torch has it: a trial takes a collective, and
    the ranks need not come here together.
    """

    @classmethod
    def wanted(cls, run: Run) -> bool:
        """Says whether local steps are on. Warns of an `optimizer_state` without an effect."""
        state = run.settings.optimizer_state
        if not run.optimizers and state != OptimizerState() and dist.get_rank() == 0:
            warnings.warn(
                "'optimizer_state' is set and prepare_fully_shard was given no optimizer. One that "
                "is built later keeps its state as torch does, so the setting has no effect. Build "
                "the optimizer first and give it to prepare_fully_shard, or leave optimizer_state "
                "out.",
                stacklevel=2,
            )
        return run.settings.local_step is not False

    def new_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Changes an optimizer that holds parameters of the model. Collective: no.

        Raises:
            PlanError: as `apply_local_step`.
        """
        params = (param for group in optimizer.param_groups for param in group["params"])
        # An optimizer of several models is changed by the model of its first parameter.
        first = next((param for param in params if isinstance(param, DTensor)), None)
        if first is None or not any(first is param for param in self.run.model.parameters()):
            return
        setting = self.run.settings.local_step
        if setting is True or known_as(optimizer):
            apply_local_step(optimizer, setting, self.run.device, OptimizerState())


def check_optimizer_state(optimizer: torch.optim.Optimizer, setting: OptimizerState) -> None:
    """Refuses `optimizer_state` for an optimizer without state that it could change.

    Collective: no.

    Args:
        optimizer: holds parameters that are not sharded yet.
        setting: `optimizer_state` of the run.

    Raises:
        PlanError: naming the optimizer.
    """
    if setting == OptimizerState():
        return
    name = type(optimizer).__name__
    if isinstance(optimizer, MatrixOptimizer):
        raise PlanError(
            "'optimizer_state' cannot be had with Muon. Its hidden matrices have one state tensor "
            "where AdamW has two, and it steps them together, by collectives, so none could be "
            "stepped alone. Leave optimizer_state out, or use AdamW with it."
        )
    known_class = known_as(optimizer)
    if known_class in _MOMENTUM_OR_NONE:
        has_none = not (optimizer.state or any(g["momentum"] for g in optimizer.param_groups))
    else:
        # Averages of weights, which are no moments, move to the CPU alone.
        has_none = known_class == _WITHOUT_STATE or (
            known_class == _AVERAGES and setting.device != "cpu"
        )
    if has_none:
        raise PlanError(
            f"'optimizer_state' is set and the optimizer {name} keeps no moments, so the setting "
            "would have no effect. Leave optimizer_state out, or use an optimizer with state, "
            "such as torch.optim.AdamW or SGD with momentum."
        )
    params = [param for group in optimizer.param_groups for param in group["params"]]
    others = sorted({str(p.dtype) for p in params if p.requires_grad} - {"torch.float32"})
    if setting.dtype == "fp32" and others:
        raise PlanError(
            f"optimizer_state has dtype: fp32, and parameters are in {', '.join(others)}. {name} "
            "makes their state in their own dtype and computes in it, so the setting would have "
            "no effect. Leave dtype out, or build the model in float32."
        )
