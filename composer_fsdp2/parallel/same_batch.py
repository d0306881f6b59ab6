"""Whether the ranks of a group read the same batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from composer_fsdp2.errors import PlanError
from composer_fsdp2.ranks import is_fake, raise_on_all_ranks
from composer_fsdp2.shard.torch_private.tensors import tree_leaves

__all__ = ["BatchCheck", "check_same_batch", "difference_term"]

_EVERY = 50
"""batches of training from one comparison to the next: reading a batch waits for the device"""


class BatchCheck:
    """Compares what the ranks of a group compute: the start of training and of each evaluation.

    And every 50th batch of training. Collective: yes, over the default group, for such a batch.

    Args:
        group: ranks that compute one batch together.
        why: as of `check_same_batch`.
    """

    def __init__(self, group: dist.ProcessGroup, why: tuple[str, str]) -> None:
        self._group, self._why = group, why
        self._seen = {True: 0, False: 0}

    def begin(self) -> None:
        """Has the next batch compared: data may be others. Collective: no."""
        self._seen = {True: 0, False: 0}

    def compare(self, inputs: Any, training: bool) -> bool:
        """Compares a batch that is due; returns whether it begins training or an evaluation.

        Raises:
            PlanError: the same on every rank, if batches in any group differ.
        """
        if is_fake():
            return False
        seen = self._seen[training]
        if seen == 0 or (training and seen % _EVERY == 0):
            check_same_batch(self._group, inputs, self._why)
        self._seen[training] += 1
        if training:
            self._seen[False] = 0
        return seen == 0


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


def difference_term(inputs: Any, index: int, place: int, size: int) -> int:
    """Returns this rank's term of a sum that is zero where the ranks of every group agree.

    Collective: no. Add up the terms of all ranks of the run; their sum fits in 64 bits.

    Args:
        inputs: of the model, in any nesting.
        index: of the group among all.
        place: of this rank in its group.
        size: ranks of a group.
    """
    # The group's number is part of the digest: differences of two groups do not cancel.
    digest = int(hashlib.sha256(f"{index} {_digest(inputs)}".encode()).hexdigest()[:10], 16)
    return -digest if place else (size - 1) * digest


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
