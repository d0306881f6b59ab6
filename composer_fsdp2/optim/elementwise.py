"""Which optimizers step element by element, so that a shard alone gives the bits of the whole.

[Note: small copy] An optimizer that is on no list makes two steps on small tensors, once whole and
once cut in two, and every bit is compared. That needs no other rank, and asks for nothing but
numbers and words in the optimizer, which can be copied without harm. Where the bits differ, the
optimizer steps DTensors, whose operations are those of the whole. Optimizers that mix DTensors with
tensors of their own fail there, so that is tried too, before the run starts.
"""

from __future__ import annotations

import copy
import enum
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from composer_fsdp2.errors import PlanError

__all__ = [
    "check_local_step",
    "class_step",
    "dtensor_refusal",
    "is_known",
    "makes_no_moments",
    "try_small_copy",
]

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
"""by module and class: to ask for them imports nothing"""
_CHANGES_NO_STEP = {"__init__", "__repr__", "__setstate__", "__getstate__"}
_ACROSS = re.compile("adafactor|lamb|lars|muon|shampoo|soap|galore|kfac|lbfgs|came", re.IGNORECASE)
"""optimizers that look across the elements of a parameter, by name"""


def _known_as(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns the known class whose step this is; a subclass may not change the step."""
    for kind in type(optimizer).__mro__:
        name = f"{kind.__module__}:{kind.__qualname__}"
        if name in _KNOWN:
            return name
        if {key for key, value in vars(kind).items() if callable(value)} - _CHANGES_NO_STEP:
            return None
    return None


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether local shards are known to give the bits of the whole."""
    return _known_as(optimizer) is not None


def makes_no_moments(optimizer: torch.optim.Optimizer, *, averages: bool) -> bool:
    """Whether a known optimizer keeps no state for each element, as its groups are set.

    Averages of weights count with `averages` only.
    """
    known = _known_as(optimizer)
    if known in _MOMENTUM_OR_NONE:
        return not (optimizer.state or any(group["momentum"] for group in optimizer.param_groups))
    return known == _WITHOUT_STATE or (known == _AVERAGES and not averages)


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


def class_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Returns the step of the optimizer's class, without the hooks around it."""
    step: Any = type(optimizer).step
    # torch wraps the step of a class once, and marks it as `hooked`.
    return step.__wrapped__ if hasattr(step, "hooked") else step


# --- See [Note: small copy]. ---


@torch.random.fork_rng(devices=[])
def try_small_copy(optimizer: torch.optim.Optimizer) -> bool | None:
    """Whether the halves of small tensors are stepped as the whole; `None` if it cannot be tried.

    Collective: no.
    """
    try:
        whole, halves = (_small_copy(optimizer, parts) for parts in (1, 2))
        for seed in (100, 200):
            _give_gradients(whole, seed, 1)
            class_step(whole)(whole)
    except Exception:  # whatever it is, the optimizer is stepped as torch does
        return None
    try:
        for seed in (100, 200):
            _give_gradients(halves, seed, 2)
            class_step(halves)(halves)
    except Exception:
        return False
    for one, two in zip(whole.param_groups, halves.param_groups, strict=True):
        pairs = zip(two["params"][::2], two["params"][1::2], strict=True)
        for param, pair in zip(one["params"], pairs, strict=True):
            state, states = whole.state.get(param, {}), [halves.state.get(p, {}) for p in pair]
            if any(list(half) != list(state) for half in states):
                return False
            values = [(param, pair), *((state[k], [half[k] for half in states]) for k in state)]
            if not all(_is_joined(value, parts) for value, parts in values):
                return False
    return True


def dtensor_refusal(optimizer: torch.optim.Optimizer, like: DTensor) -> PlanError | None:
    """Returns why an optimizer cannot step DTensors; `None` if it can or cannot be copied.

    Collective: yes, over the mesh of `like`, as operations on DTensors are.
    """
    mesh = like.device_mesh
    try:
        small = _small_copy(optimizer, 1)
    except Exception:
        return None
    for group in small.param_groups:
        # Every rank has made the whole tensor itself, so nothing needs to be sent.
        group["params"] = [
            nn.Parameter(
                distribute_tensor(
                    param.detach().to(mesh.device_type), mesh, like.placements, src_data_rank=None
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
    usual = vars(torch.optim.Optimizer([nn.Parameter(torch.empty(0))], {}))
    own = {key: value for key, value in vars(optimizer).items() if key not in usual}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    if not _is_plain_data([own, groups]):
        raise TypeError("It holds more than plain data.")
    for number, group in enumerate(groups):
        group["params"] = [nn.Parameter(part) for part in _drawn(number, parts)]
        if group.get("lr") is not None and not float(group["lr"]):
            group["lr"] = 0.01  # a learning rate of zero would show nothing
    small = object.__new__(type(optimizer))
    torch.optim.Optimizer.__init__(small, copy.deepcopy(groups), copy.deepcopy(optimizer.defaults))
    vars(small).update(copy.deepcopy(own))
    return small


def _is_plain_data(value: Any) -> bool:
    """Numbers, words, types of torch and collections of them: what can be copied without harm."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain_data, value))  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, dict):
        return _is_plain_data([*value, *value.values()])  # pyright: ignore
    simple = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)
    return value is None or isinstance(value, (*simple, torch.Tensor))


def _drawn(seed: int, parts: int) -> list[torch.Tensor]:
    """Returns a vector, a matrix and three dimensions, each cut into parts.

    In float32 whatever the model is in: kernels round the last elements of a bfloat16 tensor in
    another way, those that fill no vector.
    """
    generator = torch.Generator().manual_seed(seed)
    whole = [torch.randn(shape, generator=generator) for shape in ((2,), (5, 3), (4, 2, 3))]
    return [part.clone() for tensor in whole for part in tensor.chunk(parts)]


def _give_gradients(small: torch.optim.Optimizer, seed: int, parts: int) -> None:
    for number, group in enumerate(small.param_groups):
        for param, grad in zip(group["params"], _drawn(seed + number, parts), strict=True):
            param.grad = grad


def _is_joined(value: Any, parts: Sequence[Any]) -> bool:
    """Whether parts end to end are a tensor; of another value, whether each is equal to it."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return all(bool(part == value) for part in parts)
    if any(getattr(part, "ndim", 0) != value.ndim for part in parts):
        return False
    joined, value = torch.cat([part.detach() for part in parts]), value.detach()
    # For `torch.equal` a NaN differs from itself.
    return joined.dtype is value.dtype and torch.equal(joined.nan_to_num(), value.nan_to_num())
