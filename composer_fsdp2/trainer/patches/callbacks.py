"""Rows of Composer's callbacks; each belongs to the callback it is of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from composer_fsdp2.trainer.patches.checkpoint import load_checkpoint
from composer_fsdp2.trainer.patches.engine import Feature, PatchPoint, asked_by_class, imported

__all__ = ["CALLBACK_ROWS"]

_VERSIONS = "mosaicml 0.32.1"
_UPSTREAM = "https://github.com/mosaicml/composer/blob/v0.32.1/composer"
_PACKAGE = "composer.callbacks"
_OURS = "composer_fsdp2.trainer.callbacks"


def _feature(module: str, name: str) -> Feature:
    return Feature(
        name,
        f"Leave {name} out of the Trainer's callbacks.",
        asked_by_class(f"{_PACKAGE}.{module}:{name}"),
    )


_ACTIVATIONS = _feature("activation_monitor", "ActivationMonitor")


def _row(
    target: str,
    replacement: Callable[..., Any],
    fingerprint: str,
    why: str,
    lines: str,
    feature: Feature | None = None,
) -> PatchPoint:
    module, _, name = target.partition(":")
    return PatchPoint(
        target=f"{_PACKAGE}.{target}",
        replacement=replacement,
        feature=feature or _feature(module, name.partition(".")[0]),
        why=why,
        upstream=f"{_UPSTREAM}/{lines}",
        fingerprints=frozenset({fingerprint}),
        versions=_VERSIONS,
    )


CALLBACK_ROWS: tuple[PatchPoint, ...] = (
    _row(
        "load_checkpoint:load_checkpoint",
        load_checkpoint,
        "eb5a9a68a9cf7007",
        "takes the kind of a checkpoint from a setting (a second name of the same function)",
        "utils/checkpoint.py#L406",
        _feature("load_checkpoint", "LoadCheckpoint"),
    ),
    _row(
        "optimizer_monitor:OptimizerMonitor.batch_end",
        imported(_OURS, "log_optimizer"),
        "ee826ea52bcf0ea1",
        "logs norms of the local shard",
        "callbacks/optimizer_monitor.py#L70",
    ),
    _row(
        "nan_monitor:NaNMonitor.after_loss",
        imported(_OURS, "check_loss"),
        "aba49752a7d72e7f",
        "stops one rank and leaves the others waiting",
        "callbacks/nan_monitor.py#L18",
    ),
    _row(
        "early_stopper:EarlyStopper._get_monitored_metric",
        imported(_OURS, "agreed_metric"),
        "7b3797acd38e874e",
        "stops some ranks when a metric is not the same on all",
        "callbacks/early_stopper.py#L106",
    ),
    _row(
        "threshold_stopper:ThresholdStopper._get_monitored_metric",
        imported(_OURS, "agreed_metric"),
        "7b3797acd38e874e",
        "stops some ranks when a metric is not the same on all",
        "callbacks/threshold_stopper.py#L86",
    ),
    _row(
        "activation_monitor:ActivationMonitor.create_module_names",
        imported(_OURS, "name_modules"),
        "b98d17931ba704e0",
        "logs names with the wrappers of activation checkpointing in them",
        "callbacks/activation_monitor.py#L225",
        _ACTIVATIONS,
    ),
    _row(
        "activation_monitor:ActivationMonitor.add_metrics",
        imported(_OURS, "measure_activation"),
        "e0e7c7ad59ccb7eb",
        "adds to what checkpointed blocks save, and recomputing them then fails",
        "callbacks/activation_monitor.py#L213",
        _ACTIVATIONS,
    ),
    _row(
        "memory_snapshot:MemorySnapshot.init",
        imported(_OURS, "record_memory"),
        "c3f3f6c5380e14ce",
        "gives up when the weights are on the CPU, from where FSDP moves them",
        "callbacks/memory_snapshot.py#L98",
    ),
    _row(
        "oom_observer:OOMObserver.init",
        imported(_OURS, "record_memory"),
        "be71331175525c25",
        "gives up when the weights are on the CPU, from where FSDP moves them",
        "callbacks/oom_observer.py#L118",
    ),
)
