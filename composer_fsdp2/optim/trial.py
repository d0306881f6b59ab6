"""Tries an optimizer that nobody knows, on a small copy: does it step local shards alike?

[Note: trial] Two steps are made on DTensors and on local shards, and every bit is compared. Some
optimizers cannot step DTensors at all, because they mix them with tensors of their own. Then whole
plain tensors show what is right. One that fails on DTensors and needs more than its shard could
not make a single step, so it is refused while the model is prepared.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from composer_fsdp2.config.state import OptimizerState
from composer_fsdp2.errors import PlanError
from composer_fsdp2.optim.elementwise import class_step
from composer_fsdp2.optim.local_shard import DataReplaced
from composer_fsdp2.optim.local_step import LocalStep
from composer_fsdp2.optim.state_kept import Policy
from composer_fsdp2.optim.state_step import KeptSteps
from composer_fsdp2.shard.torch_private.tensors import local_tensor

__all__ = ["Trial", "is_plain_data", "try_local_step"]


class Trial(NamedTuple):
    """How two steps of a small copy went."""

    alike: bool
    """local shards get the bits that the whole would have"""
    refusal: PlanError | None = None
    """why neither local shards nor DTensors will do"""


def try_local_step(optimizer: torch.optim.Optimizer, *, one_by_one: bool = False) -> Trial:
    """Makes two steps of a small copy. See [Note: trial].

    Collective: yes, over the mesh of the parameters. An optimizer that cannot be copied safely,
    because it holds more than plain data, is not alike. With `one_by_one`, the step on local shards
    is one for each parameter.
    """
    own = vars(torch.optim.Optimizer([nn.Parameter(torch.empty(0))], {}))
    attributes = {key: value for key, value in vars(optimizer).items() if key not in own}
    held = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    numbers = [{k: v for k, v in g.items() if not isinstance(v, torch.Tensor)} for g in held]
    like = next(
        (p for g in optimizer.param_groups for p in g["params"] if isinstance(p, DTensor)), None
    )
    if like is None or not is_plain_data(attributes) or not is_plain_data(numbers):
        return Trial(alike=False)
    with _random_states_kept(like.device_mesh.device_type):
        try:
            sharded, local, whole = (
                _small_copy(optimizer, attributes, held, like, divided=divided)
                for divided in (True, True, False)
            )
        except Exception:  # whatever it is, the optimizer is stepped as torch does
            return Trial(alike=False)
        local_step = LocalStep(local, kept=_one_by_one(local) if one_by_one else None)
        failed, local_failed = _failure(sharded), _failure(local)
        local_step.remove()
        if isinstance(local_failed, DataReplaced):  # on DTensors it does nothing at all
            return Trial(alike=False, refusal=local_failed)
        if failed is None:
            return Trial(alike=local_failed is None and _same_bits(sharded, local))
        if _failure(whole) is not None:
            return Trial(alike=False)  # the trial is at fault
    if local_failed is None and _same_bits(whole, local, like):
        return Trial(alike=True)
    return Trial(alike=False, refusal=_refusal(optimizer, failed))


def _one_by_one(optimizer: torch.optim.Optimizer) -> KeptSteps:
    """Keeps all state in the optimizer's own form, and steps one parameter at a time."""
    everything = Policy(OptimizerState(device="cpu"))
    return KeptSteps(optimizer, everything, class_step(optimizer), at_once=1)


def _failure(optimizer: torch.optim.Optimizer) -> Exception | None:
    try:
        for step in range(2):
            _give_gradients(optimizer, step)
            optimizer.step()
    except Exception as error:
        return error
    return None


def _refusal(optimizer: torch.optim.Optimizer, error: Exception) -> PlanError:
    name, text = type(optimizer).__name__, str(error).strip().split("\n")[0][:200]
    return PlanError(
        f"The optimizer {name} cannot step sharded parameters: on DTensors its step ends in "
        f"{type(error).__name__} ({text}), and on this rank's shards alone it computes something "
        "else than on whole parameters, so the first step of the run would fail or be wrong. Use "
        "an optimizer that steps element by element, such as AdamW, Adam, SGD, or Composer's "
        "DecoupledAdamW and DecoupledSGDW; or composer_fsdp2.Muon(model, ...) for whole matrices."
    )


def is_plain_data(value: Any) -> bool:
    """Numbers, words, types of torch and collections of them: what can be copied without harm."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(is_plain_data, value))  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, dict):
        return is_plain_data(list(value)) and is_plain_data(list(value.values()))  # pyright: ignore
    simple = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)
    return value is None or isinstance(value, simple)


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
    *,
    divided: bool,
) -> torch.optim.Optimizer:
    small = object.__new__(type(optimizer))
    made = [
        {**copy.deepcopy(group), "params": _small_params(like, i, divided=divided)}
        for i, group in enumerate(groups)
    ]
    for group in made:
        rate = group.get("lr")
        if isinstance(rate, (int, float, torch.Tensor)) and not torch.as_tensor(rate).item():
            group["lr"] = 0.01  # a learning rate of zero would show nothing
    torch.optim.Optimizer.__init__(small, made, copy.deepcopy(optimizer.defaults))
    vars(small).update(copy.deepcopy(dict(attributes)))
    return small


def _small_params(like: DTensor, number: int, *, divided: bool) -> list[nn.Parameter]:
    """A vector, a matrix that is divided unevenly, and three dimensions; the same on every rank."""
    ranks = like.device_mesh.size()
    shapes = ((ranks,), (2 * ranks + 1, 3), (2 * ranks, 2, 3))
    generator = torch.Generator().manual_seed(number)
    made = [torch.randn(shape, generator=generator).to(like.dtype) for shape in shapes]
    device = like.device_mesh.device_type
    return [nn.Parameter(_divided(one, like) if divided else one.to(device)) for one in made]


def _divided(full: torch.Tensor, like: DTensor) -> DTensor:
    mesh = like.device_mesh
    # Every rank has made the whole tensor itself, so nothing needs to be sent.
    return distribute_tensor(full.to(mesh.device_type), mesh, like.placements, src_data_rank=None)


def _give_gradients(optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for group in optimizer.param_groups:
        for param in group["params"]:
            full = torch.randn(param.shape, generator=generator).to(param.dtype)
            is_whole = not isinstance(param, DTensor)
            param.grad = full.to(param.device) if is_whole else _divided(full, param)


def _same_bits(
    one: torch.optim.Optimizer, other: torch.optim.Optimizer, like: DTensor | None = None
) -> bool:
    """Of parameters and state; state that is whole in one and divided in the other is not.

    With `like`, those of the first are whole, and compared with the other's when divided.
    """
    for mine, yours in zip(one.param_groups, other.param_groups, strict=True):
        for p, q in zip(mine["params"], yours["params"], strict=True):
            states = one.state.get(p, {}), other.state.get(q, {})
            if list(states[0]) != list(states[1]):
                return False
            values = [*zip(states[0].values(), states[1].values(), strict=True), (p, q)]
            if not all(_equal(_as_shard(a, p, like), b) for a, b in values):
                return False
    return True


def _as_shard(value: Any, param: torch.Tensor, like: DTensor | None) -> Any:
    if like is None or not isinstance(value, torch.Tensor) or value.shape != param.shape:
        return value
    divided = _divided(value.detach(), like)
    return nn.Parameter(divided) if value is param else divided


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
