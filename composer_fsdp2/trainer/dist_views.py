"""Composer's `dist` as single files of Composer and LLM Foundry are to see it."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import torch
from composer.trainer import trainer as composers
from torch.distributed.tensor import DTensor

from composer_fsdp2.parallel.parallelism import BatchGroup
from composer_fsdp2.trainer.override_attribute import override_attribute

__all__ = ["CountsGroups", "OwnPaths", "ReducedNorms", "SharesAlone", "View", "counting_groups"]


class View(ModuleType):
    """Wraps a module; subclasses override functions of the module."""

    def __init__(self, dist: ModuleType) -> None:
        super().__init__(dist.__name__, dist.__doc__)
        self.wrapped = dist

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)


class CountsGroups(View):
    """Composer's `dist` for the Trainer, which counts a group as one rank where it is told to."""

    size = 1
    """ranks of a same-batch group, which count as one"""

    def get_global_rank(self) -> int:
        """The number of the group."""
        return self.wrapped.get_global_rank() // self.size

    def get_world_size(self) -> int:
        """The number of groups."""
        return self.wrapped.get_world_size() // self.size

    def all_reduce(self, tensor: torch.Tensor, reduce_operation: str = "SUM") -> None:
        """Adds up once for each group. Collective: yes."""
        self.wrapped.all_reduce(tensor, reduce_operation=reduce_operation)
        if self.size > 1 and reduce_operation == "SUM":
            tensor.div_(self.size, rounding_mode="floor")


class SharesAlone(View):
    """For the training script, which drops the FSDP settings of a run on one rank."""

    keeps = False
    """whether the settings of the run that starts next are FSDP2's"""

    def get_world_size(self) -> int:
        """Returns at least 2, once for each run that keeps its settings."""
        ranks, keeps, self.keeps = self.wrapped.get_world_size(), self.keeps, False
        return max(2, ranks) if keeps else ranks


class ReducedNorms(View):
    """For the Lion optimizers, which add up what they take for the norms of local shards."""

    def all_reduce(self, tensor: torch.Tensor, reduce_operation: str = "SUM") -> None:
        """Leaves a norm of a DTensor alone: it is that of the whole parameter already."""
        if not isinstance(tensor, DTensor):
            self.wrapped.all_reduce(tensor, reduce_operation=reduce_operation)


def counting_groups(group: BatchGroup | None) -> contextlib.AbstractContextManager[Any]:
    """Has the Trainer's functions count groups, not ranks, while a block runs. Collective: no."""
    if group is None:
        return contextlib.nullcontext()
    return override_attribute(vars(composers)["dist"], "size", group.size)


class OwnPaths(View):
    """Composer's `dist` for tasks with categories, which every node writes where rank 0 does."""

    def all_gather_object(self, obj: str) -> list[str]:
        """Returns this rank's own path in the place of rank 0's. Collective: yes."""
        return [obj, *self.wrapped.all_gather_object(obj)[1:]]
