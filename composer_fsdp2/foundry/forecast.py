"""Predicts the step of a run of LLM Foundry, once it has been rehearsed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from composer_fsdp2.estimate.forecast import Forecast, forecast
from composer_fsdp2.estimate.trace import Work
from composer_fsdp2.foundry.cluster import Cluster
from composer_fsdp2.foundry.rehearsal import Parts
from composer_fsdp2.plan.wrap_plan import WrapPlan
from composer_fsdp2.trainer.forecast import compute_loss, preparing, traced_settings

__all__ = ["forecast_run"]


def forecast_run(parts: Parts, units: WrapPlan, cluster: Cluster) -> Forecast:
    """Predicts one step of a rank. Collective: no. `torch.distributed` must not be initialised.

    Args:
        parts: of the rehearsal.
        units: likewise.
        cluster: where the run would take place.

    Raises:
        PlanError: the model cannot be prepared.
        ConfigError: likewise.
    """
    config = parts.config
    settings, notes = traced_settings(parts.settings)
    size, written = config.device_train_batch_size, config.device_train_microbatch_size
    rows = 1 if written == "auto" else min(written, size)
    if written == "auto":
        notes.append("device_train_microbatch_size is auto: a microbatch of 1 is shown")
    if rows < 1:  # a share of a sample: the Trainer divides each
        rows = 1
    precision = config.precision if cluster.on_gpus else "fp32"
    on_host: list[str] = []
    if parts.settings.cpu_offload:
        on_host += ["parameters", "gradients", "optimizer"]
    elif parts.settings.optimizer_state.device == "cpu":
        on_host.append("optimizer")
    return forecast(
        parts.model,
        parts.optimizer,
        units,
        Work(
            prepare=preparing(settings, precision),
            batch=_batch_of(int(rows), config.max_seq_len),
            compute=compute_loss(precision),
            microbatches=math.ceil(size / rows),
            ranks=cluster.ranks,
            ranks_per_node=cluster.ranks_per_node,
        ),
        treated=parts.treated,
        on_host=on_host,
        notes=notes,
    )


def _batch_of(rows: int, length: int) -> Callable[[], dict[str, Any]]:
    """Returns a function that makes a batch of full rows, as LLM Foundry's loaders of text do."""

    def batch() -> dict[str, Any]:
        ids = torch.zeros((rows, length), dtype=torch.int64)
        mask = torch.ones((rows, length), dtype=torch.bool)
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}

    return batch
