"""Ranks that read one batch in Composer's Trainer: their mesh, their data, and what they count.

[Note: same data] Ranks of a tensor group, or of a sequence group, compute one batch together.
Composer takes every rank for one with data of its own: its mesh has no place for them,
`dist.get_sampler` deals samples to all ranks, and samples and tokens are summed over all of them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from composer.core import DataSpec, Evaluator
from composer.core.state import State
from composer.utils import ParallelismType, dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler

from composer_fsdp2.config.group_size import SEQUENCE_KEY, TENSOR_KEY, ranks_of_a_batch
from composer_fsdp2.config.schema import FSDP2Config
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.parallel.batch_group import batch_group_of
from composer_fsdp2.plan.mesh_shape import TENSOR_AXIS, MeshShape
from composer_fsdp2.plan.module_tree import attribute_of
from composer_fsdp2.trainer.config import TrainerFSDP2Config, parse_parallelism_config

__all__ = [
    "begin_fit",
    "check_evaluation",
    "count_flops_once",
    "counted_once",
    "create_mesh",
    "deal_later",
    "deal_to_groups",
    "degree_of",
    "root_mesh_of",
]

_ROOT = "_fsdp2_root_mesh"
"""attribute of a config, for `root_mesh_of`"""


_GROUP_KEYS = (TENSOR_KEY, SEQUENCE_KEY, "settings")
"""what says so; settings that are parsed are looked into later"""


def degree_of(config: Any) -> int:
    """Returns how many ranks divide a layer, 1 where none do."""
    settings = config.settings if isinstance(config, TrainerFSDP2Config) else config
    spec = settings.tensor_parallel if isinstance(settings, FSDP2Config) else None
    return 1 if spec is None else spec.degree


def root_mesh_of(config: Any) -> DeviceMesh | None:
    """Returns the mesh of a run with tensor parallelism, `None` for another run."""
    return getattr(config, _ROOT, None)


def create_mesh(
    original: Callable[..., Any], device: Any, fsdp_config: Any, tp_config: Any
) -> DeviceMesh | None:
    """Replaces Composer's `_create_device_mesh`. Collective: yes."""
    if degree_of(fsdp_config) == 1:
        return original(device, fsdp_config, tp_config)
    shape = MeshShape.resolve(fsdp_config.settings, dist.get_world_size())
    device_type = "cuda" if device.name == "gpu" else device.name
    names = [ParallelismType.DATA_PARALLEL_SHARD.value, TENSOR_AXIS]
    if shape.replicate is not None:
        names.insert(0, ParallelismType.DATA_PARALLEL_REPLICATE.value)
    sizes = tuple(shape.axes.values())
    root = init_device_mesh(device_type, sizes, mesh_dim_names=tuple(names))
    setattr(fsdp_config, _ROOT, root)
    return root


def count_flops_once(model: nn.Module) -> None:
    """Has a model count the operations of a batch once for each group. Collective: no.

    SpeedMonitor adds up what every rank counts for its batch, and divides by the ranks.
    """
    group, counted = batch_group_of(model), attribute_of(model, "flops_per_batch")
    if group is not None and callable(counted):
        setattr(model, "flops_per_batch", functools.partial(_share, counted, group.size))  # noqa: B010


def _share(counted: Callable[..., Any], size: int, batch: Any) -> float:
    return counted(batch) / size


# --- Data ---


def deal_to_groups(arguments: Mapping[str, Any]) -> None:
    """Has the samplers that Composer made for single ranks deal to groups instead.

    Collective: no. Samplers of another kind stay; what ranks read is compared in the first step.

    Args:
        arguments: of a Trainer, as they are given.
    """
    config = arguments.get("parallelism_config")
    if not _mentions_groups(config):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the Trainer parses it again, and warns then
        parsed = parse_parallelism_config(config)
    if parsed is None or not isinstance(parsed.fsdp2, TrainerFSDP2Config):
        return
    size = ranks_of_a_batch(parsed.fsdp2.settings)
    if size == 1:
        return
    for key in ("train_dataloader", "eval_dataloader"):
        given = arguments.get(key)
        for loader in given if isinstance(given, list | tuple) else (given,):
            _deal(loader, size)


def deal_later(model: nn.Module, loader: Any) -> None:
    """Has a sampler of data that a Trainer is given after its model deal to groups.

    Collective: no. Before the Trainer asks for the number of batches.
    """
    group = batch_group_of(model)
    if group is not None:
        _deal(loader, group.size)


def _mentions_groups(config: Any) -> bool:
    """Whether ranks of a run may read one batch."""
    if not isinstance(config, Mapping):
        config = {"fsdp2": config.fsdp2, "tp": config.tp}
    settings = config.get("fsdp2", config.get("fsdp"))
    inside = settings if isinstance(settings, Mapping) else getattr(settings, "__dict__", {})
    written = (config.get("tp"), config.get(SEQUENCE_KEY), *map(inside.get, _GROUP_KEYS))
    return any(map(bool, written))


def check_evaluation(model: nn.Module, evaluator: Evaluator) -> None:
    """Has a sampler for single ranks deal to groups instead, and refuses `auto`. Collective: no.

    The Trainer may be given its data when it evaluates.

    Raises:
        ConfigError: the same on every rank.
    """
    group = batch_group_of(model)
    if group is not None and evaluator.auto_microbatching:
        raise ConfigError(
            f"device_eval_microbatch_size of '{evaluator.label}' is auto, and ranks compute one "
            "batch together. One that runs out of memory in the middle of it would leave its "
            "group waiting. Write a number of samples."
        )
    deal_later(model, evaluator)


def _loader_of(loader: Any) -> DataLoader[Any] | None:
    while isinstance(loader, Evaluator | DataSpec):
        loader = loader.dataloader
    return loader if isinstance(loader, DataLoader) else None


def _sampler_of(given: Any) -> DistributedSampler[Any] | None:
    loader = _loader_of(given)
    sampler = None if loader is None else loader.sampler
    if not isinstance(sampler, DistributedSampler):
        return None
    dealt = (sampler.num_replicas, sampler.rank)
    return sampler if dealt == (dist.get_world_size(), dist.get_global_rank()) else None


def _deal(loader: Any, degree: int) -> None:
    sampler = _sampler_of(loader)
    if sampler is None:
        return
    other = DistributedSampler(
        sampler.dataset,
        num_replicas=dist.get_world_size() // degree,
        rank=dist.get_global_rank() // degree,
        drop_last=sampler.drop_last,
    )
    for name in ("num_replicas", "rank", "num_samples", "total_size"):
        setattr(sampler, name, getattr(other, name))


def begin_fit(state: State) -> None:
    """Has groups compare their batches and share their random states again. Collective: no."""
    group = batch_group_of(state.model)
    if group is not None:
        group.begin()


def counted_once(
    original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    """Replaces `Trainer._accumulate_time_across_ranks`. Collective: yes."""
    samples, tokens, *others = original(trainer, *args, **kwargs)
    group = batch_group_of(trainer.state.model)
    size = 1 if group is None else group.size
    return (samples // size, tokens // size, *others)
