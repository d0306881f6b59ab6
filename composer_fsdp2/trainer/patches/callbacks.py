"""Rows of Composer's callbacks; each belongs to the callback it is of."""

from __future__ import annotations

import functools

from composer_fsdp2.trainer.patches.engine import Feature, PatchPoint, asked_by_class

__all__ = ["CALLBACK_ROWS"]

_UPSTREAM = "https://github.com/mosaicml/composer/blob/v0.32.1/composer"
_PACKAGE = "composer.callbacks"
_row = functools.partial(PatchPoint, versions="mosaicml 0.32.1")


def _feature(module: str, name: str) -> Feature:
    return Feature(
        name,
        f"Leave {name} out of the Trainer's callbacks.",
        asked_by_class(f"{_PACKAGE}.{module}:{name}"),
    )


_ACTIVATIONS = _feature("activation_monitor", "ActivationMonitor")


CALLBACK_ROWS: tuple[PatchPoint, ...] = (
    _row(
        target=f"{_PACKAGE}.load_checkpoint:load_checkpoint",
        replacement="trainer.autoresume:load_any_checkpoint",
        feature=_feature("load_checkpoint", "LoadCheckpoint"),
        why="takes the kind of a checkpoint from a setting (a second name of the same function)",
        upstream=f"{_UPSTREAM}/utils/checkpoint.py#L406",
        fingerprints={"eb5a9a68a9cf7007"},
    ),
    _row(
        target=f"{_PACKAGE}.optimizer_monitor:OptimizerMonitor.batch_end",
        replacement="trainer.callbacks:log_optimizer",
        feature=_feature("optimizer_monitor", "OptimizerMonitor"),
        why="logs norms of the local shard",
        upstream=f"{_UPSTREAM}/callbacks/optimizer_monitor.py#L70",
        fingerprints={"ee826ea52bcf0ea1"},
    ),
    _row(
        target=f"{_PACKAGE}.nan_monitor:NaNMonitor.after_loss",
        replacement="trainer.callbacks:check_loss",
        feature=_feature("nan_monitor", "NaNMonitor"),
        why="stops one rank and leaves the others waiting",
        upstream=f"{_UPSTREAM}/callbacks/nan_monitor.py#L18",
        fingerprints={"aba49752a7d72e7f"},
    ),
    _row(
        target=f"{_PACKAGE}.early_stopper:EarlyStopper._get_monitored_metric",
        replacement="trainer.callbacks:agreed_metric",
        feature=_feature("early_stopper", "EarlyStopper"),
        why="stops some ranks when a metric is not the same on all",
        upstream=f"{_UPSTREAM}/callbacks/early_stopper.py#L106",
        fingerprints={"7b3797acd38e874e"},
    ),
    _row(
        target=f"{_PACKAGE}.threshold_stopper:ThresholdStopper._get_monitored_metric",
        replacement="trainer.callbacks:agreed_metric",
        feature=_feature("threshold_stopper", "ThresholdStopper"),
        why="stops some ranks when a metric is not the same on all",
        upstream=f"{_UPSTREAM}/callbacks/threshold_stopper.py#L86",
        fingerprints={"7b3797acd38e874e"},
    ),
    _row(
        target=f"{_PACKAGE}.activation_monitor:ActivationMonitor.create_module_names",
        replacement="trainer.callbacks:name_modules",
        feature=_ACTIVATIONS,
        why="logs names with the wrappers of activation checkpointing in them",
        upstream=f"{_UPSTREAM}/callbacks/activation_monitor.py#L225",
        fingerprints={"b98d17931ba704e0"},
    ),
    _row(
        target=f"{_PACKAGE}.activation_monitor:ActivationMonitor.add_metrics",
        replacement="trainer.callbacks:measure_activation",
        feature=_ACTIVATIONS,
        why="adds to what checkpointed blocks save, and recomputing them then fails",
        upstream=f"{_UPSTREAM}/callbacks/activation_monitor.py#L213",
        fingerprints={"e0e7c7ad59ccb7eb"},
    ),
    _row(
        target=f"{_PACKAGE}.memory_snapshot:MemorySnapshot.init",
        replacement="trainer.callbacks:record_memory",
        feature=_feature("memory_snapshot", "MemorySnapshot"),
        why="gives up when the weights are on the CPU, from where FSDP moves them",
        upstream=f"{_UPSTREAM}/callbacks/memory_snapshot.py#L98",
        fingerprints={"c3f3f6c5380e14ce"},
    ),
    _row(
        target=f"{_PACKAGE}.oom_observer:OOMObserver.init",
        replacement="trainer.callbacks:record_memory",
        feature=_feature("oom_observer", "OOMObserver"),
        why="gives up when the weights are on the CPU, from where FSDP moves them",
        upstream=f"{_UPSTREAM}/callbacks/oom_observer.py#L118",
        fingerprints={"be71331175525c25"},
    ),
)
