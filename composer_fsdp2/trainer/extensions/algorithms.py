"""Composer's algorithms that change or average weights, on shards.

Averages are taken element by element, so every rank averages its own shards. The functions here
replace Composer's (see `patches`); models that are not sharded keep Composer's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from composer.algorithms import EMA, SWA
from composer.algorithms.ema.ema import EMAParameters
from composer.core import State
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.optim.norms import (
    clip_by_unit_norm_,
    clip_grad_norm_,
    clip_grad_value_,
    gradient_norm,
)
from composer_fsdp2.parallel.form import FULLY_SHARDED, ParameterForm, form_of
from composer_fsdp2.shard.units import is_sharded, reshard
from composer_fsdp2.text import plain_name
from composer_fsdp2.torch_private.tensors import local_part, tree_leaves, tree_map_only

__all__ = [
    "apply_fsdp",
    "ascent_norm",
    "average_weights",
    "clip_adaptively",
    "clip_gradients",
    "freeze_layers",
    "load_ema",
    "save_ema",
    "spread_averages",
    "start_averages",
    "weights_of",
    "whole_averages",
]

_Tensors = dict[str, torch.Tensor]
_forms: WeakKeyDictionary[EMAParameters, Mapping[str, ParameterForm]] = WeakKeyDictionary()
"""form of each average, by FQN"""


def clip_gradients(
    original: Callable[..., None],
    model: nn.Module,
    clipping_type: str,
    clipping_threshold: float,
    fsdp_enabled: bool,
) -> None:
    """Replaces `apply_gradient_clipping`. Collective: yes, for a sharded model and a norm."""
    clip = {"norm": clip_grad_norm_, "value": clip_grad_value_}.get(clipping_type)
    if clip is not None and is_sharded(model):
        clip(model.parameters(), clipping_threshold)
    else:
        original(model, clipping_type, clipping_threshold, fsdp_enabled)


def ascent_norm(original: Callable[..., torch.Tensor], optimizer: Any) -> torch.Tensor:
    """Replaces `SAMOptimizer._grad_norm`. Collective: yes, for shards."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return gradient_norm(params) if _sharded(params) else original(optimizer)


def clip_adaptively(
    original: Callable[..., None], parameters: Iterable[torch.Tensor], clipping_threshold: float
) -> None:
    """Replaces `_apply_agc`. Collective: yes, for shards."""
    params = list(parameters)
    if _sharded(params):
        clip_by_unit_norm_(params, clipping_threshold)
    else:
        original(params, clipping_threshold)


def freeze_layers(
    original: Callable[..., tuple[int, float]], model: nn.Module, *args: Any, **kwargs: Any
) -> tuple[int, float]:
    """Replaces `freeze_layers`: the gathered parameters are frozen too.

    Collective: yes, for a sharded model. They are made once, with the `requires_grad` the shards
    had then.
    """
    if not is_sharded(model):
        return original(model, *args, **kwargs)
    reshard(model)
    frozen = original(model, *args, **kwargs)
    slots = {
        (module, name)
        for module in model.modules()
        for name, param in module._parameters.items()
        if param is not None and not param.requires_grad
    }
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            # Until it is resharded, the gathered parameters are the attributes of its modules.
            unit.unshard()
            for module, name in slots:
                getattr(module, name).requires_grad_(False)
            unit.reshard()
    return frozen


# --- Exponential moving average ---


def weights_of(original: Callable[..., Any], model: nn.Module) -> Any:
    """Replaces `get_model_context_manager`: in the block, the model has its shards."""
    if not is_sharded(model):
        return original(model)
    reshard(model)
    return contextlib.nullcontext()


def start_averages(
    original: Callable[..., None], averages: EMAParameters, model: nn.Module | None
) -> None:
    """Replaces `EMAParameters.__init__`: notes in which form ranks hold averages.

    Collective: no.
    """
    original(averages, model)
    named = () if model is None else model.named_parameters()
    _forms[averages] = {name: form_of(param) for name, param in named}


def save_ema(original: Callable[..., dict[str, Any]], ema: EMA) -> dict[str, Any]:
    """Replaces `EMA.state_dict`: names and form are those of the model without wrappers.

    Collective: yes, with tensor or expert parallelism.
    """
    values = original(ema)
    average, model = values.get("ema_model"), ema.ema_model
    if average is None or model is None or not _sharded(average["named_parameters_dict"].values()):
        return values
    forms = _forms.get(model, {})
    for part, tensors in average.items():
        average[part] = {
            plain_name(name): forms.get(name, FULLY_SHARDED).to_checkpoint(tensor)
            for name, tensor in tensors.items()
        }
    return values


def load_ema(
    original: Callable[..., None], ema: EMA, state: dict[str, Any], strict: bool = False
) -> None:
    """Replaces `EMA.load_state_dict`: whole tensors, or shards, go into the run's shards.

    Collective: yes, with tensor or expert parallelism.

    Raises:
        CheckpointError: a parameter has no average.
    """
    model = ema.ema_model
    if not isinstance(model, EMAParameters) or not _sharded(model.named_parameters_dict.values()):
        original(ema, state, strict)
        return
    values = dict(ema.ensure_compatible_state_dict(state))
    average = values.pop("ema_model")
    _fill(model.named_parameters_dict, average["named_parameters_dict"], _forms.get(model, {}))
    _fill(model.named_buffers_dict, average["named_buffers_dict"])
    original(ema, values, strict)


# --- Stochastic weight averaging ---


class ShardedAverage:
    """Averages the weights of a model for Composer's `SWA`, without a copy of the modules."""

    def __init__(self, model: nn.Module) -> None:
        self.n_averaged = torch.tensor(0)
        self.weights: _Tensors = {n: v.detach().clone() for n, v in model.state_dict().items()}
        # SWA ends with `model.load_state_dict(average.module.state_dict())`.
        self.module = SimpleNamespace(state_dict=lambda: self.weights)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Averages the current weights in. Buffers are copied."""
        learned = {plain_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
        share = 1 / (int(self.n_averaged) + 1)
        for name, value in model.state_dict().items():
            mean, now = local_part(self.weights[name]), local_part(value)
            averages = plain_name(name) in learned and share < 1
            mean.lerp_(now, share) if averages else mean.copy_(now)
        self.n_averaged += 1

    def state_dict(self) -> _Tensors:
        """Returns the averages under the names of torch's class."""
        named = {f"module.{plain_name(name)}": value for name, value in self.weights.items()}
        return {"n_averaged": self.n_averaged, **named}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes whole tensors or shards.

        Raises:
            CheckpointError: a weight has no average.
        """
        self.n_averaged = state["n_averaged"].clone().cpu()
        _fill(self.weights, {name: value for name, value in state.items() if name != "n_averaged"})


def average_weights(
    original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """Replaces `AveragedModel`, which copies the modules; those of FSDP2 cannot be copied."""
    return ShardedAverage(model) if is_sharded(model) else original(model, *args, **kwargs)


# --- Averages from one run to another ---


def apply_fsdp(original: Callable[[State], None], state: State) -> None:
    """Replaces `State._apply_fsdp`: averages of the whole model start again from its shards.

    Collective: yes.
    """
    original(state)
    for algorithm in state.algorithms if state.fsdp_config_version == 2 else ():
        if isinstance(algorithm, EMA) and algorithm.ema_model is not None:
            algorithm.ema_model = EMAParameters(state.model)
        elif isinstance(algorithm, SWA) and algorithm.swa_model is not None:
            average: Any = ShardedAverage(state.model)
            algorithm.swa_model = average


def whole_averages(algorithms: Any, keep: bool) -> Any:
    """Returns the state of algorithms with whole tensors in the place of shards.

    Collective: yes, if there are any shards in it.

    Args:
        algorithms: as in Composer's state dict.
        keep: whether this rank wants them.
    """

    def gathered(shards: DTensor) -> torch.Tensor | None:
        full = shards.full_tensor()
        return full.cpu() if keep else None

    return tree_map_only(DTensor, gathered, algorithms)


def spread_averages(algorithms: list[tuple[str, Any]]) -> Any:
    """Returns the state of algorithms as a mapping, if it holds shards.

    Collective: no. In Composer's list it would be saved as one object, by one rank alone.
    """
    return dict(algorithms) if _sharded(tree_leaves(algorithms)) else algorithms


def _sharded(tensors: Iterable[Any]) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in tensors)


@torch.no_grad()
def _fill(
    target: _Tensors,
    saved: Mapping[str, torch.Tensor],
    forms: Mapping[str, ParameterForm] | None = None,
) -> None:
    named: _Tensors = {}
    for name, tensor in saved.items():
        named[plain_name(name)] = tensor
        while name.startswith("module."):  # a prefix of DDP, or of `AveragedModel`
            name = name.removeprefix("module.")
            named[plain_name(name)] = tensor
    for name, tensor in target.items():
        value, form = named.get(plain_name(name)), (forms or {}).get(name, FULLY_SHARDED)
        shape = form.model_shape(tensor.shape)
        if value is None or value.shape != shape:
            raise CheckpointError(
                f"The checkpoint has no average of '{plain_name(name)}' in the shape "
                f"{tuple(shape)}. The average would go on from another model's. Leave the "
                "algorithms out with load_ignore_keys: [state/algorithms]."
            )
        tensor.copy_(form.from_checkpoint(value, tensor))
