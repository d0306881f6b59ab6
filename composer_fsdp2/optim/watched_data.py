"""Finds an optimizer that assigns to `param.data` of a DTensor, which changes nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from composer_fsdp2.optim.local_shard import DataReplaced
from composer_fsdp2.shard.torch_private.tensors import storage_id

__all__ = ["WatchedData"]


class WatchedData:
    """Looks at the parameters around the first step of an optimizer that steps DTensors.

    A DTensor is a tensor without contents around the shard. An assignment to `data` gives it
    another empty storage, which is how it is found, and leaves the shard as it was. Local shards
    have a check of their own (`LocalShard.check_memory`).

    Collective: no.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Adds hooks to an optimizer. They stay: torch goes through them while they run."""
        self._is_checked = False
        self._storages: list[tuple[DTensor, int, torch.UntypedStorage]] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_checked:
            # Held, so that no other storage gets its address.
            self._storages = [
                (param, storage_id(param), param.untyped_storage())
                for group in optimizer.param_groups
                for param in group["params"]
                if isinstance(param, DTensor)
            ]

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Raises `DataReplaced` with what to write."""
        held, self._storages, self._is_checked = self._storages, [], True
        for param, storage, _memory in held:
            if storage_id(param) != storage:
                raise DataReplaced.by(optimizer)
