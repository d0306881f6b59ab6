"""Callbacks and what they ask, on sharded models: they log and decide as for the whole model.

The functions here replace Composer's and LLM Foundry's (see `patches`); other models keep theirs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from composer.core import State
from composer.devices import DeviceGPU
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_fsdp2.optim.norms import Groups, groups_of, whole_metrics
from composer_fsdp2.shard.units import is_sharded, reshard
from composer_fsdp2.step.agreement import agreement_of
from composer_fsdp2.step.run import run_of
from composer_fsdp2.text import plain_name
from composer_fsdp2.torch_private.tensors import local_part
from composer_fsdp2.trainer.override_attribute import override_attribute

__all__ = [
    "agreed_metric",
    "check_loss",
    "freeze_named_parameters",
    "keep_learning_rates",
    "log_optimizer",
    "logged_norms",
    "measure_activation",
    "name_modules",
    "record_memory",
]

_GRADIENT = "l2_norm/grad"
_NORM = "l2_norm/"
_HOMES = ("composer.optim.", "llmfoundry.optim.")
"""Optimizers from here report norms under names that begin with `l2_norm/`, and nothing else of
which a shard would have a part."""


def log_optimizer(original: Callable[..., None], monitor: Any, state: State, logger: Any) -> None:
    """Replaces `OptimizerMonitor.batch_end`. Collective: yes, in the batches it logs."""
    if not is_sharded(state.model):
        original(monitor, state, logger)
        return
    if state.timestamp.batch.value % monitor.batch_log_interval != 0:
        return
    # Gradients are at the shards; while a unit is gathered, its modules hold other parameters.
    reshard(state.model)
    metrics = logged_norms(state.model, state.optimizers[0], reported=monitor.log_optimizer_metrics)
    norms = [value for name, value in metrics.items() if name.startswith(_GRADIENT)]
    metrics[f"{_GRADIENT}/global"] = math.hypot(*norms)
    logger.log_metrics(metrics)


def logged_norms(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, reported: bool
) -> dict[str, Any]:
    """Returns norms of every parameter that has a gradient on some rank, under plain names.

    Collective: yes, one for each mesh. A rank without a gradient takes part with zeros: the others
    may have one, and wait for its part.

    Args:
        model: sharded.
        optimizer: the one that may report more than the norm of the gradient.
        reported: whether to ask the optimizer.
    """
    report: Any = getattr(optimizer, "report_per_parameter_metrics", None) if reported else None
    of_shards = type(optimizer).__module__.startswith(_HOMES)
    metrics, shards, names = dict[str, Any](), dict[str, Groups](), dict[str, list[str]]()
    for given_name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        name, grad = plain_name(given_name), param.grad
        gradient, seen = f"{_GRADIENT}/{name}", f"seen/{name}"
        param.grad = torch.zeros_like(param) if grad is None else grad
        try:
            norms, values = [seen], dict[str, Any]()
            if report is not None and of_shards:
                values = _report_of_shard(optimizer, name, param)
                norms += [metric for metric in values if metric.startswith(_NORM)]
            elif report is not None:
                values = dict(report(param, name, {}))
            local = local_part(param.grad)
            if gradient not in values:
                values[gradient] = torch.linalg.vector_norm(local)
                norms.append(gradient)
        finally:
            param.grad = grad
        names[name] = list(values)
        # A number that is 0 if no rank has a gradient.
        metrics |= {**values, seen: local.new_full((), float(grad is not None))}
        shards.update(dict.fromkeys(norms, groups_of(param)))
    numbers = whole_metrics(metrics, shards)
    for name, reported_names in names.items():
        if numbers.pop(f"seen/{name}") == 0:
            for metric in reported_names:
                del numbers[metric]
    return numbers


def _report_of_shard(optimizer: Any, name: str, param: torch.Tensor) -> dict[str, Any]:
    """Returns the optimizer's report of a parameter that is this rank's shard."""
    state = optimizer.state.get(param)
    if state is None or param.grad is None:
        return {}
    shard = local_part(param).detach()
    shard.grad = local_part(param.grad)
    optimizer.state[shard] = {
        key: local_part(value) if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }
    try:
        return dict(optimizer.report_per_parameter_metrics(shard, name, {}))
    finally:
        del optimizer.state[shard]


def check_loss(original: Callable[..., None], monitor: Any, state: State, logger: Any) -> None:
    """Replaces `NaNMonitor.after_loss`.

    Collective: yes. The ranks whose loss is good would wait in backward for the one that is not.

    Raises:
        RuntimeError: on every rank, when the loss of any is NaN.
    """
    run = run_of(state.model)
    if run is None:
        original(monitor, state, logger)
        return
    error = None
    try:
        original(monitor, state, logger)
    except (RuntimeError, TypeError) as caught:
        error = caught
    if agreement_of(run.device).any_rank(error is not None):
        raise error or RuntimeError("Train loss contains a NaN on another rank.")


def agreed_metric(original: Callable[..., Any], stopper: Any, state: State) -> Any:
    """Replaces `_get_monitored_metric` of the stoppers: rank 0's value decides for all.

    Collective: yes. A metric that is not reduced over the ranks would stop some of them.
    """
    value, run = original(stopper, state), run_of(state.model)
    if run is None:
        return value
    plain = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    return state.device.tensor_to_device(torch.as_tensor(agreement_of(run.device).of_rank0(plain)))


def name_modules(original: Callable[..., None], monitor: Any, model: nn.Module) -> None:
    """Replaces `ActivationMonitor.create_module_names`: the names of the unwrapped model."""
    original(monitor, model)
    if is_sharded(model):
        names: dict[nn.Module, str] = monitor.module_names
        monitor.module_names = {module: plain_name(name) for module, name in names.items()}


def measure_activation(
    original: Callable[..., None], monitor: Any, *args: Any, **kwargs: Any
) -> None:
    """Replaces `ActivationMonitor.add_metrics`: numbers to log need no gradient."""
    sharded = any(isinstance(module, FSDPModule) for module in monitor.module_names)
    with torch.no_grad() if sharded else contextlib.nullcontext():
        original(monitor, *args, **kwargs)


def record_memory(original: Callable[..., None], callback: Any, state: State, logger: Any) -> None:
    """Replaces `init` of the callbacks that record CUDA's memory.

    They look where the weights are and give up for good if that is the CPU, from where FSDP moves
    them later.
    """
    moves = state.fsdp_config_version == 2 and isinstance(state.device, DeviceGPU)
    # Composer goes on for a model on meta, which is moved later too.
    shown = nn.Linear(1, 1, device="meta") if moves else state.model
    with override_attribute(state, "model", shown):
        original(callback, state, logger)


# --- LLM Foundry's. ---


def freeze_named_parameters(
    original: Callable[..., None], callback: Any, state: State, logger: Any
) -> None:
    """Lets `LayerFreezing` find parameters by plain names under activation checkpointing."""
    if state.fsdp_config_version != 2:
        original(callback, state, logger)
        return
    names = {plain_name(name): name for name, _ in state.model.named_parameters()}
    layer_names = {names.get(name, name) for name in callback.layer_names}
    with override_attribute(callback, "layer_names", layer_names):
        original(callback, state, logger)


def keep_learning_rates(
    original: Callable[..., dict[str, Any]], optimizer: Any, optimizer_metrics: dict[str, Any]
) -> dict[str, Any]:
    """Replaces `DecoupledAdaLRLion.pre_reduce_metrics`: learning rates are no norms."""
    rates = {k: v for k, v in optimizer_metrics.items() if k.startswith("layerwise_lr")}
    reduced = original(optimizer, optimizer_metrics)  # changes what it is given
    params = (param for group in optimizer.param_groups for param in group["params"])
    return {**reduced, **rates} if any(isinstance(param, DTensor) for param in params) else reduced
