"""Refuses by name, before a run starts, what does not go where ranks compute a batch together."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from composer_fsdp2.config.group_size import ranks_of_a_batch
from composer_fsdp2.config.schema import FSDP2Config
from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.optim.elementwise import is_known
from composer_fsdp2.optim.muon import Muon
from composer_fsdp2.step.run import Run, StepListener
from composer_fsdp2.trainer.parallelism.tensor_groups import degree_of

__all__ = ["LaterOptimizers", "check_items", "check_known", "check_scale", "tried"]

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


def tried() -> list[str]:
    """Returns the names of callbacks and algorithms that go with tensor parallelism."""
    return sorted(_TRIED)


def check_items(settings: FSDP2Config, items: Iterable[Any], microbatch_size: Any) -> None:
    """Refuses callbacks, algorithms and microbatches. Collective: no.

    Raises:
        ConfigError: naming the first one that has not been tried.
    """
    if degree_of(settings) > 1 and microbatch_size == "auto":
        raise ConfigError(
            "device_train_microbatch_size is auto, and tensor parallelism is asked for. One rank "
            "that runs out of memory in the middle of a layer would leave its group waiting. Write "
            "a number of samples."
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
    if degree_of(settings) == 1 or optimizer is None or isinstance(optimizer, Muon):
        return
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
    if degree_of(settings) > 1 and compute == torch.float16:
        raise ConfigError(
            "The precision is amp_fp16, and tensor parallelism is asked for. Torch does not tell "
            "all ranks of both axes that one gradient is infinite: some of them would step, and "
            "have another scale of gradients from then on. Write amp_bf16."
        )
    return compute


class LaterOptimizers(StepListener):
    """Refuses the step of an optimizer that `prepare_fully_shard` was not given.

    Its checkpoints would hold fused projections in the order of the ranks.
    """

    @classmethod
    def wanted(cls, run: Run) -> bool:
        """Where tensor parallelism divides layers."""
        return degree_of(run.settings) > 1

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._known = weakref.WeakSet(() if run.optimizer is None else (run.optimizer,))

    def before_any_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Looks once whether an optimizer steps parameters of the model. Collective: no.

        Raises:
            PlanError: naming the optimizer.
        """
        if optimizer in self._known:
            return
        ours = {id(param) for param in self.run.model.parameters()}
        if any(id(param) in ours for group in optimizer.param_groups for param in group["params"]):
            raise PlanError(
                f"{type(optimizer).__name__} was built after the model was prepared with tensor "
                "parallelism. Its checkpoints would hold fused weights in another order. Give it "
                "to prepare_fully_shard, or to the Trainer."
            )
        self._known.add(optimizer)
