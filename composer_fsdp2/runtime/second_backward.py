"""Backward through a backward: gradient penalties, forces, and gradients taken inside forward.

[Note: second backward] Autograd's graph of a gradient reads the weights without asking the unit to
gather them, for no hook of the unit is in it. So after a backward that builds such a graph
(`create_graph=True`), and after one that runs inside the model's forward, units stay gathered and
reduce nothing. The backward that comes last reduces, and frees them at its end. Memory for that
time: whole parameters of the units the first backward went through. The hooks of a unit are on
what its forward takes and returns:
https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_state.py#L318
https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py#L564
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from composer_fsdp2.errors import PlanError
from composer_fsdp2.shard.torch_private.gathered import (
    free,
    gathered_param,
    is_gathered,
    is_idle,
    wrap_pre_backward,
)
from composer_fsdp2.shard.torch_private.units import (
    after_backward,
    backward_number,
    has_run,
    params_of,
    sharded_param,
    wrap_post_backward,
)

__all__ = ["SecondBackward"]


class SecondBackward:
    """Keeps units gathered between two backwards; see [Note: second backward].

    Args:
        model: its forward is one microbatch.
        groups: of all units.
    """

    def __init__(self, model: nn.Module, groups: Iterable[Any]) -> None:
        self._kept: dict[Any, list[int]] = {}
        """groups, with the versions of their shards when they were gathered"""
        self._forwards = 0
        """how many are running, one inside the other"""
        self._keeps = False
        self._backward = -1
        for group in groups:
            wrap_pre_backward(group, self._pre_backward)
            wrap_post_backward(group, partial(self._post_backward, group))
        model.register_forward_pre_hook(self._enter, prepend=True)
        model.register_forward_hook(self._leave, always_call=True)

    def _enter(self, _module: nn.Module, _args: object) -> None:
        self._forwards += 1

    def _leave(self, *_: object) -> None:
        self._forwards -= 1

    def _pre_backward(self) -> None:
        """Called before a unit's own work in backward, in which its grad mode tells the kind."""
        if backward_number() == self._backward:
            return
        self._backward = backward_number()
        # Autograd turns grad mode on in backward only under `create_graph=True`.
        self._keeps = torch.is_grad_enabled() or self._forwards > 0
        if not self._keeps and self._kept:
            # One that is put in later comes after those of all units, of several roots too.
            after_backward(lambda: after_backward(self._release))

    def _post_backward(self, group: Any, reduce: Any, *args: Any) -> Any:
        if not self._keeps:
            return reduce(*args)
        for param in params_of(group):
            grad = gathered_param(param).grad if has_run(param) else None
            if grad is not None and grad.requires_grad:
                raise PlanError(_GRAPH_OF_PARAMETERS)
        if is_gathered(group):
            self._kept.setdefault(group, _versions(group))
        return None

    def frees(self, group: Any) -> bool:
        """Whether the memory may be freed; if so, it is taken for freed."""
        if group in self._kept and not is_idle(group):
            return False
        self._kept.pop(group, None)
        return True

    def begin(self) -> None:
        """Frees what was kept and is old by now, because the optimizer has stepped."""
        for group, versions in list(self._kept.items()):
            if versions != _versions(group):
                free(group)

    def _release(self) -> None:
        for group in list(self._kept):
            free(group)


def _versions(group: Any) -> list[int]:
    return [sharded_param(param)._version for param in params_of(group)]


_GRAPH_OF_PARAMETERS = (
    "backward(create_graph=True) leaves a graph in the gradients of parameters. FSDP2 reduces "
    "those gradients over the ranks outside autograd, so nothing could be differentiated through "
    "them. Take the gradient of inputs or of activations: torch.autograd.grad(outputs, inputs, "
    "create_graph=True), and call backward without create_graph on the loss that is made of it."
)
