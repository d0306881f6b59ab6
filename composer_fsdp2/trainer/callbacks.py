"""Composer's callbacks on sharded models: what they log and decide is that of the whole model.

The functions here replace Composer's (see `patches`); other models keep Composer's own.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from composer.core import State
from composer.devices import DeviceGPU
from torch import nn
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2.shard.apply import is_sharded, reshard
from composer_fsdp2.step.agreement import agreement_of
from composer_fsdp2.trainer.load_steps import plain_name
from composer_fsdp2.trainer.logged_norms import GRADIENT, logged_norms

__all__ = [
    "agreed_metric",
    "check_loss",
    "log_optimizer",
    "measure_activation",
    "name_modules",
    "record_memory",
    "start_memory_records",
]

_START = "_fsdp2_start"


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
    norms = [value for name, value in metrics.items() if name.startswith(GRADIENT)]
    metrics[f"{GRADIENT}/global"] = math.hypot(*norms)
    logger.log_metrics(metrics)


def check_loss(original: Callable[..., None], monitor: Any, state: State, logger: Any) -> None:
    """Replaces `NaNMonitor.after_loss`.

    Collective: yes. The ranks whose loss is good would wait in backward for the one that is not.

    Raises:
        RuntimeError: on every rank, when the loss of any is NaN.
    """
    if not is_sharded(state.model):
        original(monitor, state, logger)
        return
    error = None
    try:
        original(monitor, state, logger)
    except (RuntimeError, TypeError) as found:
        error = found
    device = state.device.tensor_to_device(torch.empty(0)).device
    if agreement_of(device).any_rank(error is not None):
        raise error or RuntimeError("Train loss contains a NaN on another rank.")


def agreed_metric(original: Callable[..., Any], stopper: Any, state: State) -> Any:
    """Replaces `_get_monitored_metric` of the stoppers: rank 0's value decides for all.

    Collective: yes. A metric that is not reduced over the ranks would stop some of them.
    """
    value = original(stopper, state)
    if not is_sharded(state.model):
        return value
    device = state.device.tensor_to_device(torch.empty(0)).device
    plain = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    return state.device.tensor_to_device(torch.as_tensor(agreement_of(device).of_rank0(plain)))


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
    start = functools.partial(original, callback, state, logger)
    if state.fsdp_config_version == 2 and isinstance(state.device, DeviceGPU):
        setattr(callback, _START, start)
    else:
        start()


def start_memory_records(state: State) -> None:
    """Starts what `record_memory` put off until the model was sharded."""
    for callback in state.callbacks:
        start = vars(callback).pop(_START, None)
        if start is not None:
            start()
