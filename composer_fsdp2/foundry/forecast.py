"""Predicts the step of a run of LLM Foundry, once it has been rehearsed."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from composer_fsdp2.config.group_size import ranks_of_a_batch
from composer_fsdp2.config.placement import OptimizerState
from composer_fsdp2.config.schema import parse_config
from composer_fsdp2.errors import PlanError
from composer_fsdp2.estimate.clock import Gpu
from composer_fsdp2.estimate.forecast import Forecast, forecast
from composer_fsdp2.estimate.report import Batch
from composer_fsdp2.estimate.search import OFFLOAD, Choice, SearchResult, search, written
from composer_fsdp2.estimate.trace import Work
from composer_fsdp2.foundry.cluster import Cluster, environment
from composer_fsdp2.foundry.rehearsal import Parts
from composer_fsdp2.optim.elementwise import check_optimizer_state
from composer_fsdp2.prepare.model import TRANSFORMATIONS
from composer_fsdp2.prepare.plan import PreparePlan
from composer_fsdp2.prepare.trace import compute_loss, preparing, traced_settings

__all__ = ["batch_of", "forecast_run", "search_run"]


def forecast_run(
    parts: Parts,
    cluster: Cluster,
    *,
    changes: Mapping[str, Any] | None = None,
    rows: int | None = None,
) -> Forecast:
    """Predicts one step of a rank. Collective: no. `torch.distributed` must not be initialised.

    Args:
        parts: model, optimizer and loaders that `rehearse` built.
        cluster: ranks, ranks per node and their devices.
        changes: settings that replace those of the run.
        rows: samples of a microbatch, in place of the run's.

    Raises:
        PlanError: the model cannot be prepared.
        ConfigError: likewise.
    """
    config, requested = parts.config, parts.settings
    if changes is not None:
        parsed = parse_config(changes)
        requested = dataclasses.replace(requested, **{key: getattr(parsed, key) for key in changes})
    settings, notes = traced_settings(requested)
    size, batch = config.device_train_batch_size, batch_of(parts, rows)
    notes = [*parts.notes, *notes, *_differences(config, cluster, batch, rows)]
    precision = config.precision if cluster.on_gpus else "fp32"
    on_host = ["parameters", "gradients", "optimizer"] if requested.cpu_offload else list[str]()
    if requested.optimizer_state.device == "cpu" and not on_host:
        on_host.append("optimizer")
    plan = parts.plan
    if changes is not None:
        with environment(cluster.first_rank()):
            plan = PreparePlan(
                parts.model,
                parts.optimizer,
                settings,
                "fp32",
                "cpu",
                mesh=None,
                transformations=TRANSFORMATIONS,
            )
    named = (getattr(planned.plan, "modules", ()) for planned in plan.transformations)
    return forecast(
        parts.model,
        parts.optimizer,
        plan.units,
        Work(
            prepare=preparing(
                settings, precision, steps_together=cluster.on_gpus and "optimizer" not in on_host
            ),
            on_gpus=cluster.on_gpus,
            batch=functools.partial(_full_batch, batch.microbatch, batch.length),
            compute=compute_loss(precision),
            microbatches=math.ceil(size / batch.microbatch),
            ahead=settings.units_ahead,
            ranks=cluster.ranks,
            ranks_per_node=cluster.ranks_per_node,
        ),
        treated={name for names in named for name in names},
        on_host=on_host,
        notes=notes,
    )


def _differences(config: Any, cluster: Cluster, batch: Batch, rows: int | None) -> Iterator[str]:
    """Yields a note for each difference between the run and the step that is traced."""
    if rows is None and config.device_train_microbatch_size == "auto":
        yield "device_train_microbatch_size is auto: a microbatch of 1 is shown"
    if batch.length != config.max_seq_len:
        yield (
            f"a row has the {batch.length:,} tokens of train_loader.dataset.max_seq_len, and not "
            f"the {config.max_seq_len:,} of max_seq_len"
        )
    if not cluster.on_gpus and config.precision != "fp32":
        yield (
            f"precision is {config.precision}, and these are the numbers of fp32 on CPUs: --gpus N "
            "plans for N GPUs"
        )


def batch_of(parts: Parts, rows: int | None = None) -> Batch:
    """Returns the rows of a step; `rows` is a microbatch in place of the run's."""
    config = parts.config
    written = rows or config.device_train_microbatch_size
    written = 1 if written == "auto" else written
    dataset = config.train_loader.get("dataset")
    length = dataset.get("max_seq_len") if isinstance(dataset, Mapping) else None
    return Batch(
        # LLM Foundry divides it by the number of ranks: `transform` has multiplied it.
        rows=int(config.global_train_batch_size) // ranks_of_a_batch(parts.settings),
        # A share of a sample: Trainers divide each.
        microbatch=max(1, int(min(written, config.device_train_batch_size))),
        length=length if type(length) is int else config.max_seq_len,
    )


def search_run(
    parts: Parts, cluster: Cluster, gpu: Gpu, memory_gib: float
) -> tuple[list[SearchResult], list[tuple[Choice, str]]]:
    """Searches settings of a run; see `estimate.search`. Collective: no.

    Args:
        parts: model, optimizer and loaders that `rehearse` built.
        cluster: ranks, ranks per node and their devices.
        gpu: speed of every rank's GPU.
        memory_gib: of one GPU.

    Raises:
        PlanError: the model cannot be prepared.
        ConfigError: likewise.
    """
    state = dataclasses.asdict(parts.settings.optimizer_state)

    def measure(choice: Choice) -> Forecast:
        return forecast_run(parts, cluster, changes=written(choice, state), rows=choice.rows)

    tensor = parts.settings.tensor_parallel
    degree = 1 if tensor is None else tensor.degree
    experts = parts.settings.expert_parallel
    has_experts = experts is not None and experts.degree > 1
    trains = {param.requires_grad for param in parts.model.parameters()}
    is_alone = degree == 1 and not has_experts and not parts.settings.cpu_offload
    may_replicate = len(trains) == 2 and is_alone
    offloads = OFFLOAD
    try:
        check_optimizer_state(parts.optimizer, OptimizerState(device="cpu"))
    except PlanError:
        offloads = ("none", "all")
    return search(
        measure,
        ranks=cluster.ranks // degree,
        per_node=max(1, cluster.ranks_per_node // degree),
        most_rows=max(1, int(parts.config.device_train_batch_size)),
        gpu=gpu,
        memory_gib=memory_gib,
        offloads=("none",) if has_experts else offloads,
        frozen=("shard", "replicate") if may_replicate else ("shard",),
    )


def _full_batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    """Makes full rows, as LLM Foundry's loaders of text do."""
    ids = torch.zeros((rows, length), dtype=torch.int64)
    mask = torch.ones((rows, length), dtype=torch.bool)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}
