"""Ranks that read one batch in Composer's Trainer: their mesh, their data, and counts.

[Note: same data] Ranks of a tensor group, or of a sequence group, compute one batch together.
Composer takes every rank for one with data of its own: its mesh has no place for them,
`dist.get_sampler` deals samples to all ranks, and samples and tokens are summed over all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from composer.core import Evaluator
from composer.core.state import State
from composer.utils import ParallelismType, dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler

from composer_fsdp2.config.group_size import ranks_of_a_batch, written_group_size
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.parallel.parallelism import BatchGroup
from composer_fsdp2.plan.mesh_shape import TENSOR_AXIS, MeshShape
from composer_fsdp2.prepare.settings import TrainerFSDP2Config
from composer_fsdp2.step.run import run_of
from composer_fsdp2.trainer.dist_views import counting_groups

__all__ = [
    "counted_once",
    "create_mesh",
    "refuse_auto",
    "set_dataloader",
    "show_batch",
]


def create_mesh(
    original: Callable[..., Any], device: Any, fsdp_config: Any, tp_config: Any
) -> DeviceMesh | None:
    """Replaces Composer's `_create_device_mesh`. Collective: yes."""
    if not isinstance(fsdp_config, TrainerFSDP2Config):
        return original(device, fsdp_config, tp_config)
    shape = MeshShape.resolve(fsdp_config.settings, dist.get_world_size())
    if shape.tensor == 1:
        return original(device, fsdp_config, tp_config)
    names = [ParallelismType.DATA_PARALLEL_SHARD.value, TENSOR_AXIS]
    if shape.replicate is not None:
        names.insert(0, ParallelismType.DATA_PARALLEL_REPLICATE.value)
    device_type = "cuda" if device.name == "gpu" else device.name
    return init_device_mesh(device_type, tuple(shape.axes.values()), mesh_dim_names=tuple(names))


# --- Data ---


def set_dataloader(
    original: Callable[..., None], state: State, dataloader: Any = None, *args: Any, **kwargs: Any
) -> None:
    """Replaces `State.set_dataloader`: a sampler that deals to single ranks deals to groups.

    Collective: no. Samplers of another kind stay; batches are compared when they are read.
    """
    # State's own `__init__` sets none, before it has a configuration.
    if isinstance(dataloader, DataLoader) and isinstance(state.fsdp_config, TrainerFSDP2Config):
        sampler, size = dataloader.sampler, ranks_of_a_batch(state.fsdp_config.settings)
        ranks, rank = dist.get_world_size(), dist.get_global_rank()
        if (
            size > 1
            and isinstance(sampler, DistributedSampler)
            and (sampler.num_replicas, sampler.rank) == (ranks, rank)
        ):
            other = DistributedSampler(
                sampler.dataset,
                num_replicas=ranks // size,
                rank=rank // size,
                drop_last=sampler.drop_last,
            )
            for name in ("num_replicas", "rank", "num_samples", "total_size"):
                setattr(sampler, name, getattr(other, name))
    original(state, dataloader, *args, **kwargs)


def refuse_auto(group: BatchGroup | None, evaluator: Evaluator) -> None:
    """Refuses an evaluation that looks for its microbatch size. Collective: no.

    Raises:
        ConfigError: the same on every rank.
    """
    if group is not None and evaluator.auto_microbatching:
        raise ConfigError(
            f"device_eval_microbatch_size of '{evaluator.label}' is auto, and ranks compute one "
            "batch together. One that runs out of memory in the middle of it would leave its "
            "group waiting. Write a number of samples."
        )


def show_batch(original: Callable[..., Any], cfg: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces LLM Foundry's `update_config_with_batch_size_info`, which has divided the batch.

    It divides by the number of ranks, so `foundry.transform` has multiplied the batch by the size
    of a group. The configuration that is logged has the batch of the run again.
    """
    block, batch = cfg.get("fsdp_config"), cfg["global_train_batch_size"]
    if isinstance(block, dict) and block.get("version") == 2 and isinstance(batch, int):
        cfg["global_train_batch_size"] = batch // written_group_size(block)
    return original(cfg, *args, **kwargs)


# --- Counts ---


def counted_once(
    original: Callable[..., tuple[Any, ...]], trainer: Any, *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    """Replaces `Trainer._accumulate_time_across_ranks`. Collective: yes."""
    run = run_of(trainer.state.model)
    with counting_groups(None if run is None else run.batch_group):
        return original(trainer, *args, **kwargs)
