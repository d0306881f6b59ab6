"""Refuses by name, before a run starts, what does not go where ranks compute a batch together."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from composer_fsdp2.config.group_size import ranks_of_a_batch
from composer_fsdp2.config.schema import FSDP2Config
from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.optim.elementwise import is_known
from composer_fsdp2.optim.muon import Muon
from composer_fsdp2.trainer.parallelism.tensor_groups import degree_of

__all__ = ["check_items", "check_known", "check_scale", "refuse_later_optimizers", "tried"]

_COMPOSERS = ("composer.", "llmfoundry.")
_TRIED = frozenset(
    {
        "CheckpointSaver",
        "EMA",
        "EarlyStopper",
        "EnvironmentLoggingCallback",
        "FreeOutputs",
        "GradientClipping",
        "HuggingFaceCheckpointer",
        "LRMonitor",
        "MemoryMonitor",
        "MemorySnapshot",
        "NaNMonitor",
        "OOMObserver",
        "RunTimeoutCallback",
        "RuntimeEstimator",
        "SWA",
        "ScheduledGarbageCollector",
        "SpeedMonitor",
        "SystemMetricsMonitor",
        "ThresholdStopper",
    }
)
"""Callbacks and algorithms of Composer and LLM Foundry that read no weights but those of state
dicts, or only add up what `optim.norms` knows to be divided."""


_DRAWS = frozenset(
    {
        "AugMix",
        "ColOut",
        "CutMix",
        "CutOut",
        "GyroDropout",
        "MixUp",
        "ProgressiveResizing",
        "RandAugment",
        "SelectiveBackprop",
        "StochasticDepth",
    }
)
"""Algorithms that draw random numbers of their own, also outside of the model's forward."""


_LOST = {"tensor": "fused weights in another order", "expert": "the experts of one rank alone"}


def _kind_of(settings: FSDP2Config) -> str | None:
    """Returns what divides layers between ranks, `None` where FSDP2 alone shards them."""
    if degree_of(settings) > 1:
        return "tensor"
    experts = settings.expert_parallel
    return "expert" if experts is not None and experts.degree > 1 else None


def tried() -> list[str]:
    """Returns the names of callbacks and algorithms that go with tensor parallelism."""
    return sorted(_TRIED)


def check_items(settings: FSDP2Config, items: Iterable[Any], microbatch_size: Any) -> None:
    """Refuses callbacks, algorithms and microbatches. Collective: no.

    Raises:
        ConfigError: naming the first one that has not been tried.
    """
    divides = _kind_of(settings)
    if divides is not None and microbatch_size == "auto":
        raise ConfigError(
            f"device_train_microbatch_size is auto, and {divides} parallelism is asked for. One "
            "rank that runs out of memory in the middle of a layer would leave its group waiting. "
            "Write a number of samples."
        )
    for item in items:
        kind, name = type(item), type(item).__name__
        foreign = isinstance(item, torch.optim.Optimizer) or not kind.__module__.startswith(
            _COMPOSERS
        )
        if not foreign and name not in _TRIED:
            _refuse(name, settings)


def _refuse(name: str, settings: FSDP2Config) -> None:
    draws = name in _DRAWS and ranks_of_a_batch(settings) > 1
    why = (
        "It draws on each rank by itself, and the ranks of a group need the same batch."
        if draws
        else "It may read or change weights, of which a rank has a part in an order of its own."
    )
    if degree_of(settings) > 1:
        raise ConfigError(
            f"{name} and tensor parallelism are both asked for. {why} Leave it out, "
            f"or take 'tp' out of parallelism_config. These go with it: {', '.join(tried())}."
        )
    if _kind_of(settings) == "expert":
        raise ConfigError(
            f"{name} and expert parallelism are both asked for. It may read or change weights, and "
            "a rank has those of its own experts alone. Leave it out, or take 'ep' out of "
            "parallelism_config."
        )
    if draws:
        raise ConfigError(
            f"{name} and sequence parallelism are both asked for. {why} Leave it out, or take "
            "'sequence_parallel' out of parallelism_config."
        )


def check_known(settings: FSDP2Config, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuses optimizers that look across elements, but for Muon. Collective: no.

    Raises:
        PlanError: for such an optimizer.
    """
    kind = _kind_of(settings)
    if kind is None or optimizer is None or isinstance(optimizer, Muon):
        return
    if kind == "expert" and not is_known(optimizer):
        raise PlanError(
            f"{type(optimizer).__name__} and expert parallelism are both asked for. It is not "
            "known to compute each element by itself, and torch steps no experts together with "
            "other weights. Use AdamW, Lion, SGD or another optimizer that steps element by "
            "element."
        )
    if not is_known(optimizer):
        raise PlanError(
            f"{type(optimizer).__name__} and tensor parallelism are both asked for. It is not "
            "known to compute each element by itself, and a rank has a part of a matrix, in an "
            "order of its own. Use AdamW, Lion, SGD or another optimizer that steps element by "
            "element, or composer_fsdp2.Muon."
        )


def check_scale(settings: FSDP2Config, compute: torch.dtype) -> torch.dtype:
    """Refuses scaled gradients; returns the dtype of another run. Collective: no.

    Raises:
        ConfigError: for amp_fp16.
    """
    if (kind := _kind_of(settings)) is not None and compute == torch.float16:
        raise ConfigError(
            f"The precision is amp_fp16, and {kind} parallelism is asked for. Torch does not tell "
            "all ranks of both axes that one gradient is infinite: some of them would step, and "
            "have another scale of gradients from then on. Write amp_bf16."
        )
    return compute


def refuse_later_optimizers(
    model: nn.Module, settings: FSDP2Config, optimizer: torch.optim.Optimizer | None
) -> None:
    """Refuses the step of an optimizer that `prepare_fully_shard` was not given. Collective: no.

    Its checkpoints would hold fused projections in the order of the ranks.
    """
    if (kind := _kind_of(settings)) is None:
        return
    known = weakref.WeakSet(() if optimizer is None else (optimizer,))
    held = weakref.ref(model)

    def check(stepped: torch.optim.Optimizer, *_: Any) -> None:
        if stepped in known or (sharded := held()) is None:
            return
        ours = {id(param) for param in sharded.parameters()}
        if any(id(param) in ours for group in stepped.param_groups for param in group["params"]):
            raise PlanError(
                f"{type(stepped).__name__} was built after the model was prepared with {kind} "
                f"parallelism. Its checkpoints would hold {_LOST[kind]}. Give it to "
                "prepare_fully_shard, or to the Trainer."
            )
        known.add(stepped)

    # It is never removed: the model may be collected while torch goes through its hooks.
    register_optimizer_step_pre_hook(check)
