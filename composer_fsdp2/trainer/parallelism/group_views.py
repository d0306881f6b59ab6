"""Composer's `dist` as other modules see it where ranks that read one batch count as one."""

from __future__ import annotations

import sys
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import nn

from composer_fsdp2.config.group_size import written_group_size
from composer_fsdp2.parallel.batch_group import BatchGroup, batch_group_of

__all__ = ["CountsGroups", "DealsToGroups", "View"]


class View(ModuleType):
    """A module that answers as another one does, but for what a class below it changes."""

    def __init__(self, dist: ModuleType) -> None:
        super().__init__(dist.__name__, dist.__doc__)
        self.wrapped = dist

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)


class CountsGroups(View):
    """For LLM Foundry's configuration, which divides the batch by the number of ranks."""

    def get_world_size(self) -> int:
        """The number of groups where the caller is about to divide a run's batch.

        The run is a local variable of the caller's own caller.
        """
        caller, ranks = sys._getframe(1), self.wrapped.get_world_size()
        if caller.f_code.co_name != "calculate_batch_size_info" or caller.f_back is None:
            return ranks
        cfg = caller.f_back.f_locals.get("cfg")
        block = cfg.get("fsdp_config") if isinstance(cfg, dict) else None
        is_fsdp2 = isinstance(block, dict) and block.get("version") == 2
        return ranks // written_group_size(block) if is_fsdp2 else ranks


class DealsToGroups(View):
    """For the Trainer's evaluation, which takes samples off single ranks.

    A sampler repeats samples to deal equally many to all, and the Trainer takes them off the last
    of all ranks, in the batch with which it has as many as there are.
    """

    def get_global_rank(self) -> int:
        """The number of the group in an evaluation."""
        group, rank = _group_that_evaluates(sys._getframe(1)), self.wrapped.get_global_rank()
        return rank if group is None else rank // group.size

    def get_world_size(self) -> int:
        """The number of groups in an evaluation."""
        group, ranks = _group_that_evaluates(sys._getframe(1)), self.wrapped.get_world_size()
        return ranks if group is None else ranks // group.size

    def all_reduce(self, tensor: torch.Tensor, reduce_operation: str = "SUM") -> None:
        """Adds up samples once for each group in an evaluation. Collective: yes."""
        group = _group_that_evaluates(sys._getframe(1))
        self.wrapped.all_reduce(tensor, reduce_operation=reduce_operation)
        if group is not None and reduce_operation == "SUM":
            tensor.div_(group.size, rounding_mode="floor")


def _group_that_evaluates(caller: FrameType) -> BatchGroup | None:
    if caller.f_code.co_name != "_eval_loop":
        return None
    state = getattr(caller.f_locals.get("self"), "state", None)
    model = getattr(state, "model", None)
    return batch_group_of(model) if isinstance(model, nn.Module) else None
