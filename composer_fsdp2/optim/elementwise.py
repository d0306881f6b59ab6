"""Which optimizers step element by element, so that a shard alone gives the bits of the whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from composer_fsdp2.errors import PlanError
from composer_fsdp2.optim.packing import Packing
from composer_fsdp2.optim.recalled import recalling
from composer_fsdp2.shard.torch_private.tensors import list_makers

__all__ = [
    "check_local_step",
    "class_step",
    "is_known",
    "methods_for",
    "packing_for",
    "sums_norms",
]

_TORCH = "torch.optim"
_IN_LOOPS = {
    "composer.optim.decoupled_weight_decay:DecoupledAdamW",
    "composer.optim.decoupled_weight_decay:DecoupledSGDW",
    "llmfoundry.optim.lion:DecoupledLionW",
}
"""step one parameter after the other, whatever their groups say"""
_FOREACH = {
    f"{_TORCH}.{module}:{name}"
    for module, name in {
        "adadelta": "Adadelta",
        "adagrad": "Adagrad",
        "adam": "Adam",
        "adamax": "Adamax",
        "adamw": "AdamW",
        "asgd": "ASGD",
        "nadam": "NAdam",
        "radam": "RAdam",
        "rmsprop": "RMSprop",
        "sgd": "SGD",
    }.items()
}
"""those of torch, with a loop and forms for many parameters at once"""
_WITH_NORMS = {
    "llmfoundry.optim.adaptive_lion:DecoupledAdaLRLion",
    "llmfoundry.optim.adaptive_lion:DecoupledClipLion",
}
"""sum squared norms over all ranks themselves, and so expect local shards"""
_NOTHING = {"llmfoundry.optim.no_op:NoOp"}
_KNOWN = _IN_LOOPS | _FOREACH | _WITH_NORMS | _NOTHING

_ACROSS = re.compile("adafactor|lamb|lars|muon|shampoo|soap|galore|kfac|lbfgs|came", re.IGNORECASE)
"""optimizers that look across the elements of a parameter, by name"""


def _known_as(optimizer: torch.optim.Optimizer) -> str | None:
    """The known class whose step this is; a subclass that changes the step is another one."""
    for kind in type(optimizer).__mro__:
        name = f"{kind.__module__}:{kind.__qualname__}"
        if name in _KNOWN:
            return name
        own = {key for key, value in vars(kind).items() if callable(value)}
        if own - {"__init__", "__repr__", "__setstate__", "__getstate__"}:
            return None
    return None


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether local shards are known to give the bits of DTensors, or better ones."""
    return _known_as(optimizer) is not None


def sums_norms(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step sums norms over all ranks, so that all of them have to make it."""
    return _known_as(optimizer) in _WITH_NORMS


def check_local_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuses `local_step: true` for an optimizer that looks across elements.

    Raises:
        PlanError: with what to set.
    """
    name = type(optimizer).__name__
    if not is_known(optimizer) and _ACROSS.search(name):
        raise PlanError(
            f"local_step: true cannot be had with the optimizer {name}, which looks across the "
            "elements of a parameter: each rank would step its shard as if it were the whole. "
            "Write local_step: auto, which finds out what the optimizer does, or leave it out."
        )


def packing_for(optimizer: torch.optim.Optimizer) -> Packing | None:
    """How small parameters of this optimizer are stepped together, if they can be."""
    known = _known_as(optimizer)
    if known not in _IN_LOOPS | _FOREACH:
        return None
    return Packing(class_step(optimizer), _always if known in _IN_LOOPS else _loops_on_cpu)


def class_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The step of the optimizer's class, without the hooks that torch has wrapped around it."""
    step: Any = type(optimizer).step
    # Torch does so once for a class, and marks it as `hooked`.
    return step.__wrapped__ if hasattr(step, "hooked") else step


def methods_for(optimizer: torch.optim.Optimizer) -> dict[str, Callable[..., Any]]:
    """Methods that step local shards with less work than the optimizer's own."""
    if _known_as(optimizer) not in _FOREACH:
        return {}
    makers = list_makers(type(optimizer))
    return {name: recalling(method) for name, method in makers.items()}


def _always(_group: Mapping[str, Any], _param: torch.Tensor) -> bool:
    return True


def _loops_on_cpu(group: Mapping[str, Any], param: torch.Tensor) -> bool:
    """Whether torch's step loops in Python; elsewhere it takes many parameters at once itself."""
    asked = any(group.get(key) for key in ("foreach", "fused", "capturable", "differentiable"))
    return not asked and param.device.type == "cpu"
