"""Same batch and same random numbers on all ranks of a tensor group.

[Note: one stream] Ranks of a group compute the same outside of divided layers, so dropout there
must draw the same numbers on all of them. Each of them takes the random state of the first one
before the first step. Composer gives every rank a seed of its own, and gives back the states of a
checkpoint by rank, so this happens again in each `fit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composer_fsdp2.parallel.same_batch import BatchCheck, check_same_batch
from composer_fsdp2.ranks import is_fake

__all__ = ["TensorGroup", "draw_together", "tensor_group_of"]

_GROUP = "_fsdp2_tensor_group"
"""attribute of a model, for `tensor_group_of`"""

_WHY = "in one group of tensor parallelism", "add up parts of different samples"


class TensorGroup:
    """Compares batches of a group, see `BatchCheck`, and shares random states; [Note: one stream].

    Collective: yes, over the default group, in the first forward after `begin`.
    """

    why = _WHY

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.group = group
        self._check = BatchCheck(group, _WHY)
        self._model = model
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        setattr(model, _GROUP, self)

    @property
    def size(self) -> int:
        """Ranks that read the same batch."""
        return self.group.size()

    def begin(self) -> None:
        """Looks again: data and random states may be others from here on. Collective: no."""
        self._check.begin()

    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if self._check.compare((args, kwargs), module.training) and module.training:
            _share_random_state(self._model, self.group)


def draw_together(model: nn.Module, group: dist.ProcessGroup, prompts: Any) -> None:
    """Prepares the ranks of a tensor group to draw words: one random state from here on.

    Collective: yes, over the default group.

    Raises:
        PlanError: the same on every rank, if prompts in any group differ.
    """
    if not is_fake():
        check_same_batch(group, prompts, _WHY)
        _share_random_state(model, group)


def _share_random_state(model: nn.Module, group: dist.ProcessGroup) -> None:
    device, first = next(model.parameters()).device, dist.get_global_rank(group, 0)
    state = torch.get_rng_state().to(device)
    dist.broadcast(state, src=first, group=group)
    torch.set_rng_state(state.cpu())
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        state = module.get_rng_state(device).to(device)
        dist.broadcast(state, src=first, group=group)
        module.set_rng_state(state.cpu(), device)


def tensor_group_of(model: nn.Module) -> TensorGroup | None:
    """Returns the tensor group of a model, `None` where its layers are not divided."""
    return getattr(model, _GROUP, None)
