"""Tries with small tensors whether an optimizer steps shards as it steps full parameters.

[Note: small copy] An optimizer that is on no list makes two steps on small tensors, once in full
and once cut in two, and every bit is compared. That needs no other rank, and asks for nothing but
numbers and words in the optimizer, which can be copied without harm. Where the bits differ, the
optimizer steps DTensors, whose operations are those of full tensors. Optimizers that mix DTensors
with tensors of their own fail there, so that is tried too, before the run starts.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from composer_fsdp2.errors import PlanError
from composer_fsdp2.optim.local import class_step
from composer_fsdp2.ranks import raise_on_all_ranks
from composer_fsdp2.step.agreement import agreement_of
from composer_fsdp2.torch_private.tensors import tree_leaves

__all__ = ["steps_alike"]

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), set, frozenset),
    *(enum.Enum, torch.dtype, torch.device, torch.Tensor),
)
"""types that can be copied without harm, in lists and dictionaries too"""


def steps_alike(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Says whether steps of shards give the bits of full steps on every rank. Collective: yes.

    Raises:
        PlanError: the optimizer can step neither shards nor DTensors.
    """
    alike = _try_small_copy(optimizer)
    if not agreement_of(device).any_rank(not alike):
        return True
    raise_on_all_ranks({}, None if alike is None else _dtensor_refusal(optimizer))
    return False


@torch.random.fork_rng(devices=[])
def _try_small_copy(optimizer: torch.optim.Optimizer) -> bool | None:
    """Says whether halves of small tensors are stepped as full ones; `None` if a trial fails.

    Collective: no.
    """
    try:
        full = _two_steps(optimizer, 1)
    except Exception:  # whatever it is, the optimizer is stepped as torch does
        return None
    try:
        halves = _two_steps(optimizer, 2)
    except Exception:
        return False
    return all(
        list(tensor) == list(first) == list(second)
        and all(_is_joined(tensor[key], [first[key], second[key]]) for key in tensor)
        for tensor, first, second in zip(full, halves[::2], halves[1::2], strict=True)
    )


def _two_steps(optimizer: torch.optim.Optimizer, parts: int) -> list[dict[Any, Any]]:
    """Returns small tensors, each cut into parts, with the state of a copy of the optimizer."""
    small = _small_copy(optimizer, parts)
    for seed in (100, 200):
        for number, group in enumerate(small.param_groups):
            for param, grad in zip(group["params"], _drawn(seed + number, parts), strict=True):
                param.grad = grad
        class_step(small)(small)
    params = [param for group in small.param_groups for param in group["params"]]
    return [{"the parameter": param, **small.state.get(param, {})} for param in params]


def _dtensor_refusal(optimizer: torch.optim.Optimizer) -> PlanError | None:
    """Returns why an optimizer, which can be copied, cannot step DTensors; `None` if it can.

    Collective: yes, over the mesh of its parameters, as operations on DTensors are.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    sharded = next((param for param in params if isinstance(param, DTensor)), None)
    if sharded is None:
        return None
    mesh, small = sharded.device_mesh, _small_copy(optimizer, 1)
    # Small tensors have fewer dimensions than the experts of a layer.
    placements = [Shard(0) if getattr(p, "dim", 0) else p for p in sharded.placements]
    for group in small.param_groups:
        # Every rank has made the full tensor itself, so nothing needs to be sent.
        group["params"] = [
            nn.Parameter(
                distribute_tensor(
                    param.detach().to(mesh.device_type),
                    mesh,
                    placements,
                    src_data_rank=None,
                )
            )
            for param in group["params"]
        ]
        for param in group["params"]:
            param.grad = param.detach() * 0.5
    try:
        with torch.random.fork_rng(devices=[]):
            class_step(small)(small)
    except Exception as error:
        name, text = type(optimizer).__name__, str(error).strip().split("\n")[0][:200]
        return PlanError(
            f"The optimizer {name} cannot step sharded parameters: on DTensors its step ends "
            f"in {type(error).__name__} ({text}), and on this rank's shards alone it computes "
            "something else than on whole parameters, so the first step of the run would fail or "
            "be wrong. Use an optimizer that steps element by element, such as AdamW, Adam, SGD, "
            "or Composer's DecoupledAdamW and DecoupledSGDW; or composer_fsdp2.Muon(model, ...) "
            "for whole matrices."
        )
    return None


def _small_copy(optimizer: torch.optim.Optimizer, parts: int) -> torch.optim.Optimizer:
    """Returns a copy whose groups hold small tensors in the CPU's memory, each cut into parts.

    Raises:
        TypeError: the optimizer holds more than plain data.
    """
    base_attributes = vars(torch.optim.Optimizer([nn.Parameter(torch.empty(0))], {}))
    attributes = {
        key: value for key, value in vars(optimizer).items() if key not in base_attributes
    }
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    leaves = tree_leaves([attributes, groups])
    leaves += [item for leaf in leaves if isinstance(leaf, set | frozenset) for item in leaf]
    if not all(isinstance(value, _PLAIN) for value in leaves):
        raise TypeError("It holds more than plain data.")
    for number, group in enumerate(groups):
        group["params"] = [nn.Parameter(part) for part in _drawn(number, parts)]
        if group.get("lr") is not None and not float(group["lr"]):
            group["lr"] = 0.01  # a learning rate of zero would show nothing
    small = object.__new__(type(optimizer))
    torch.optim.Optimizer.__init__(small, copy.deepcopy(groups), copy.deepcopy(optimizer.defaults))
    vars(small).update(copy.deepcopy(attributes))
    return small


def _drawn(seed: int, parts: int) -> list[torch.Tensor]:
    """Returns a vector, a matrix and three dimensions, each cut into parts.

    In float32 whatever the model is in: kernels round the last elements of a bfloat16 tensor in
    another way, those that fill no vector.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator) for shape in ((2,), (5, 3), (4, 2, 3))]
    return [part.clone() for tensor in tensors for part in tensor.chunk(parts)]


def _is_joined(value: Any, parts: Sequence[Any]) -> bool:
    """Says whether parts, end to end, are equal to a tensor, or each of them to another value."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return all(bool(part == value) for part in parts)
    if any(getattr(part, "ndim", 0) != value.ndim for part in parts):
        return False
    joined, value = torch.cat([part.detach() for part in parts]), value.detach()
    # For `torch.equal` a NaN differs from itself.
    return joined.dtype is value.dtype and torch.equal(joined.nan_to_num(), value.nan_to_num())
