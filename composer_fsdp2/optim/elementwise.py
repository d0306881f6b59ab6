"""Which optimizers step element by element, so that a shard alone gives the bits of the whole."""

from __future__ import annotations

import copy
import enum
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from composer_fsdp2.config.state import OptimizerState
from composer_fsdp2.errors import PlanError
from composer_fsdp2.optim.local_step import LocalStep
from composer_fsdp2.optim.packing import Packing
from composer_fsdp2.optim.state_kept import Policy
from composer_fsdp2.optim.state_step import KeptSteps
from composer_fsdp2.shard.torch_private.tensors import local_tensor

__all__ = [
    "check_local_step",
    "class_step",
    "is_known",
    "is_plain_data",
    "packing_for",
    "steps_alike",
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


def _always(_group: Mapping[str, Any], _param: torch.Tensor) -> bool:
    return True


def _loops_on_cpu(group: Mapping[str, Any], param: torch.Tensor) -> bool:
    """Whether torch's step loops in Python; elsewhere it takes many parameters at once itself."""
    asked = any(group.get(key) for key in ("foreach", "fused", "capturable", "differentiable"))
    return not asked and param.device.type == "cpu"


def is_plain_data(value: Any) -> bool:
    """Numbers, words, types of torch and collections of them: what can be copied without harm."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(is_plain_data, value))  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, dict):
        return is_plain_data(list(value)) and is_plain_data(list(value.values()))  # pyright: ignore
    simple = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)
    return value is None or isinstance(value, simple)


def steps_alike(optimizer: torch.optim.Optimizer, *, one_by_one: bool = False) -> bool:
    """Tries two steps of a small copy on DTensors and on local shards, and compares every bit.

    With `one_by_one`, the step on local shards is one for each parameter.

    Collective: yes, over the mesh of the parameters. Answers `False` for an optimizer that cannot
    be copied safely, because it holds more than plain data.
    """
    own = vars(torch.optim.Optimizer([nn.Parameter(torch.empty(0))], {}))
    attributes = {key: value for key, value in vars(optimizer).items() if key not in own}
    held = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    numbers = [{k: v for k, v in g.items() if not isinstance(v, torch.Tensor)} for g in held]
    like = next(
        (p for g in optimizer.param_groups for p in g["params"] if isinstance(p, DTensor)), None
    )
    if like is None or not is_plain_data(attributes) or not is_plain_data(numbers):
        return False
    with _random_states_kept(like.device_mesh.device_type):
        try:
            whole, local = (_small_copy(optimizer, attributes, held, like) for _ in range(2))
            local_step = LocalStep(local, kept=_one_by_one(local) if one_by_one else None)
            for step in range(2):
                for one in (whole, local):
                    _give_gradients(one, step)
                    one.step()
            local_step.remove()
        except Exception:  # whatever it is, the optimizer is stepped as torch does
            return False
    return _same_bits(whole, local)


def _one_by_one(optimizer: torch.optim.Optimizer) -> KeptSteps:
    """Keeps all state in the optimizer's own form, and steps one parameter at a time."""
    everything = Policy(OptimizerState(device="cpu"))
    return KeptSteps(optimizer, everything, class_step(optimizer), at_once=1)


def _random_states_kept(device_type: str) -> AbstractContextManager[None]:
    if device_type == "cpu":
        return torch.random.fork_rng(devices=[])
    current = torch.get_device_module(device_type).current_device()
    return torch.random.fork_rng(devices=[current], device_type=device_type)


def _small_copy(
    optimizer: torch.optim.Optimizer,
    attributes: Mapping[str, Any],
    groups: list[dict[str, Any]],
    like: DTensor,
) -> torch.optim.Optimizer:
    small = object.__new__(type(optimizer))
    made = [
        {**copy.deepcopy(group), "params": _small_params(like, i)} for i, group in enumerate(groups)
    ]
    for group in made:
        if not torch.as_tensor(group.get("lr", 1.0)).item():
            group["lr"] = 0.01  # a learning rate of zero would show nothing
    torch.optim.Optimizer.__init__(small, made, copy.deepcopy(optimizer.defaults))
    vars(small).update(copy.deepcopy(dict(attributes)))
    return small


def _small_params(like: DTensor, number: int) -> list[nn.Parameter]:
    """A vector, a matrix that is divided unevenly, and three dimensions; the same on every rank."""
    ranks = like.device_mesh.size()
    shapes = ((ranks,), (2 * ranks + 1, 3), (2 * ranks, 2, 3))
    generator = torch.Generator().manual_seed(number)
    made = [torch.randn(shape, generator=generator).to(like.dtype) for shape in shapes]
    return [nn.Parameter(_divided(one, like)) for one in made]


def _divided(full: torch.Tensor, like: DTensor) -> DTensor:
    mesh = like.device_mesh
    # Every rank has made the whole tensor itself, so nothing needs to be sent.
    return distribute_tensor(full.to(mesh.device_type), mesh, like.placements, src_data_rank=None)


def _give_gradients(optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for group in optimizer.param_groups:
        for param in group["params"]:
            full = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = _divided(full, param)


def _same_bits(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    """Of parameters and state; state that is whole in one and divided in the other is not."""
    for mine, yours in zip(one.param_groups, other.param_groups, strict=True):
        for p, q in zip(mine["params"], yours["params"], strict=True):
            states = one.state.get(p, {}), other.state.get(q, {})
            if list(states[0]) != list(states[1]):
                return False
            values = [*zip(states[0].values(), states[1].values(), strict=True), (p, q)]
            if not all(_equal(a, b) for a, b in values):
                return False
    return True


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, DTensor):
        alike = one.placements == other.placements
        return alike and _equal(local_tensor(one), local_tensor(other))
    if isinstance(one, torch.Tensor):
        # For `torch.equal` a NaN differs from itself.
        return torch.equal(one.nan_to_num(), other.nan_to_num()) and one.dtype is other.dtype
    return bool(one == other)
