"""Tensor parallelism in LLM Foundry's runs: where it is written, and data of its groups.

[Note: groups in a run] LLM Foundry divides the global batch by the number of ranks, and its loaders
deal samples to ranks. Ranks of a tensor group compute one batch together. So the batch is divided
by the number of groups, and every loader is told how many ranks next to each other read the same
(`replication`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from composer_fsdp2.errors import ConfigError

if TYPE_CHECKING:
    from composer_fsdp2.config.schema import FSDP2Config

__all__ = ["check_groups", "move_tensor_parallel", "same_data"]

_LOADERS = ("train_loader", "eval_loader", "eval_loaders")
_KNOWN = ("text", "finetuning", "contrastive_pairs")
"""loaders of LLM Foundry, which take `replication`"""


def move_tensor_parallel(parsed: Mapping[str, Any]) -> dict[str, Any]:
    """Makes `tp_config` a setting of FSDP2, which LLM Foundry carries to the Trainer untouched.

    Its own handling takes strategies alone, and drops the block on one rank.

    Raises:
        ConfigError: a strategy, or two places for one thing.
    """
    from composer_fsdp2.config.group_size import TENSOR_KEY
    from composer_fsdp2.config.parallel import check_strategy

    others = {key: value for key, value in parsed.items() if key != "tp_config"}
    tp, block = parsed.get("tp_config"), parsed["fsdp_config"]
    check_strategy(tp)
    check_strategy(block.get(TENSOR_KEY))
    if not tp:
        return others
    if block.get(TENSOR_KEY) is not None:
        raise ConfigError(
            f"Tensor parallelism is set twice: as '{TENSOR_KEY}' of FSDP2, and as 'tp' of "
            "parallelism_config or 'tp_config'. One of them would have no effect. Take one out."
        )
    return {**others, "fsdp_config": {**block, TENSOR_KEY: tp}}


def check_groups(parsed: Mapping[str, Any], settings: FSDP2Config) -> None:
    """Checks degrees and batch against the number of ranks, as the launcher has set it.

    Collective: no.

    Raises:
        ConfigError: the degrees do not multiply to the ranks, or the groups cannot share a batch.
    """
    from composer_fsdp2.config.group_size import ranks_of_a_batch
    from composer_fsdp2.plan.mesh_shape import MeshShape

    ranks, size = int(os.environ.get("WORLD_SIZE", "1")), ranks_of_a_batch(settings)
    shape = MeshShape.resolve(settings, ranks)
    batch, groups = parsed.get("global_train_batch_size"), ranks // size
    if isinstance(batch, int) and batch % groups:
        raise ConfigError(
            f"global_train_batch_size is {batch}, which the {groups} groups of {shape.describe()} "
            f"cannot share: the {size} ranks of a group read the same samples. Use a "
            f"multiple of {groups}, for example {-(-batch // groups) * groups}."
        )
    if "device_train_batch_size" in parsed:
        raise ConfigError(
            "LLM Foundry has divided the batch by the number of ranks before this package could "
            "divide it by the number of groups. Every rank would read too little. Install "
            "composer_fsdp2 with pip, so that LLM Foundry finds it first."
        )


def same_data(parsed: Mapping[str, Any], degree: int) -> dict[str, Any]:
    """Has the loaders give the ranks of a group the same samples; see [Note: groups in a run].

    Loaders of other names stay as they are: ranks compare what they read in the first step.

    Raises:
        ConfigError: a loader has another `replication`.
    """
    changed = dict(parsed)
    for key in _LOADERS:
        given = parsed.get(key)
        if isinstance(given, list):
            changed[key] = [_replicated(f"{key}[{n}]", one, degree) for n, one in enumerate(given)]
        elif isinstance(given, Mapping):
            changed[key] = _replicated(key, given, degree)
    return changed


def _replicated(where: str, loader: Any, degree: int) -> Any:
    if not isinstance(loader, Mapping) or loader.get("name") not in _KNOWN:
        return loader
    dataset = loader.get("dataset")
    if not isinstance(dataset, Mapping):
        return loader  # LLM Foundry says it better
    for place, block in _blocks(f"{where}.dataset", dataset):
        given = block.get("replication")
        if given not in (None, degree):
            raise ConfigError(
                f"{place}.replication is {given!r}, and {degree} ranks read one batch. Ranks of "
                "a group would read different samples, or groups the same. Leave it out: it is set "
                "to the number of ranks that read one batch."
            )
    return {**loader, "dataset": {**dataset, "replication": degree}}


def _blocks(where: str, dataset: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield where, dataset
    streams = dataset.get("streams")
    for name, stream in streams.items() if isinstance(streams, Mapping) else ():
        if isinstance(stream, Mapping):
            yield f"{where}.streams.{name}", stream
