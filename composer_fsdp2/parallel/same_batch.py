"""Whether the ranks of a group read the same batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from composer_fsdp2.errors import PlanError
from composer_fsdp2.ranks import raise_on_all_ranks
from composer_fsdp2.shard.torch_private.tensors import tree_leaves

__all__ = ["check_same_batch"]


def check_same_batch(group: dist.ProcessGroup, inputs: Any, why: tuple[str, str]) -> None:
    """Compares what the ranks of every group are about to compute.

    Collective: yes, over the default group; waits for the device.

    Args:
        group: ranks that compute one batch together.
        inputs: of the model, in any nesting.
        why: what the ranks are, and what they would do with different batches.

    Raises:
        PlanError: the same on every rank, if batches in any group differ.
    """
    facts = {"~group": dist.get_global_rank(group, 0), "~batch": _digest(inputs)}
    of_group: dict[int, str] = {}
    for rank, fact in enumerate(raise_on_all_ranks(facts)):
        known = of_group.setdefault(fact["~group"], fact["~batch"])
        if known != fact["~batch"]:
            raise PlanError(_different(fact["~group"], rank, group.size(), why))


def _different(first: int, rank: int, size: int, why: tuple[str, str]) -> str:
    return (
        f"Ranks {first} and {rank} are {why[0]} and read different "
        f"batches. They would {why[1]}. Give all "
        f"{size} ranks of a group the same data: "
        f"`dist.get_sampler(dataset, num_replicas=dist.get_world_size() // {size}, "
        f"rank=dist.get_global_rank() // {size})`, or `replication: {size}` of a streaming dataset."
    )


def _digest(inputs: Any) -> str:
    found = hashlib.sha256()
    for leaf in _leaves(inputs):
        if isinstance(leaf, torch.Tensor):
            data = leaf.detach().cpu().contiguous()
            found.update(f"{tuple(data.shape)} {data.dtype}".encode())
            if data.numel():
                found.update(data.flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, int | float | str | bool):
            found.update(repr(leaf).encode())
    return found.hexdigest()


def _leaves(inputs: Any) -> Iterator[Any]:
    for leaf in tree_leaves(inputs):
        # Batches of transformers are mappings that torch does not look into.
        if isinstance(leaf, Mapping) and leaf:
            yield from _leaves(dict(leaf))
        else:
            yield leaf
