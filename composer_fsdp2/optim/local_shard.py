"""One parameter's shard as a plain tensor, with its state."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2.errors import PlanError
from composer_fsdp2.optim.written_through import MISSING, Mutable
from composer_fsdp2.shard.sharded_tensor import sharded_like
from composer_fsdp2.shard.torch_private.tensors import local_tensor

__all__ = ["DataReplaced", "LocalShard", "local_gradient"]


class DataReplaced(PlanError):
    """An optimizer has given a parameter other memory."""

    @classmethod
    def by(cls, optimizer: torch.optim.Optimizer) -> DataReplaced:
        """Says which optimizer it is and what to write."""
        return cls(
            f"The step of {type(optimizer).__name__} assigns to `param.data`. FSDP2 gathers the "
            "memory that it has made for the shard, so the assignment would be lost and the model "
            "would not train. Change the parameter in place in the optimizer: "
            "`param.data.copy_(value)` or `param.add_(update)`."
        )


class LocalShard:
    """This rank's part of a parameter; a parameter that is not sharded is its own.

    `changed` says that something else than a step has exchanged a tensor since: FSDP2's first
    forward, or a checkpoint that has put other state in place.
    """

    __slots__ = ("_seen", "_source", "changed", "held", "local", "param", "state")

    def __init__(self, param: Any) -> None:
        self.param = param
        self._source: torch.Tensor | None = None
        self.local: Any = param
        self.held: dict[Any, Any] | None = None
        self.state = _LocalState(self)
        self._seen: dict[Any, Any] = {}
        self.changed = True

    @property
    def is_sharded(self) -> bool:
        """Whether the parameter is a DTensor."""
        return self.local is not self.param

    @property
    def local_state(self) -> Any:
        """The state as the step is to see it."""
        return self.state if self.is_sharded else self.held

    def read_param(self) -> None:
        """Takes the tensor that the parameter has at this moment."""
        param = self.param
        if not isinstance(param, DTensor):
            return
        source = local_tensor(param)
        if source is not self._source:
            if self._source is not None and type(source) is type(self._source):
                # FSDP2's first forward exchanges it, in the closure of a step.
                self.local.grad, self.local.data = None, source
            else:
                # It shares the shard's memory; a step on it leaves the DTensor's version as it is.
                self.local = nn.Parameter(source, requires_grad=param.requires_grad)
            self._source = source
            self.changed = True
        if self.local.requires_grad is not param.requires_grad:
            self.local.requires_grad_(param.requires_grad)
            self.changed = True

    def check_memory(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses an optimizer whose step has put other memory into the parameter.

        Raises:
            DataReplaced: with what to write.
        """
        source = self._source
        if source is not None and self.local.data_ptr() != source.data_ptr():
            raise DataReplaced.by(optimizer)

    def read_state(self, held: dict[Any, Any] | None) -> None:
        """Takes what has changed in the optimizer's state since the last step, if it has any."""
        self.held = held
        if not self.is_sharded or (held is None and not self._seen):
            return
        seen, held = self._seen, held or {}
        for key, value in held.items():
            if seen.get(key, MISSING) is not value:
                seen[key] = value
                self.changed = True
                dict.__setitem__(self.state, key, self._to_local(value))
        if len(seen) > len(held):
            self.changed = True
            for key in seen.keys() - held.keys():
                del seen[key]
                dict.__delitem__(self.state, key)

    def note(self, key: Any, value: Any) -> None:
        """A step has set a value of the state: the optimizer gets it in its own form."""
        if self.held is not None:
            self.held[key] = self._seen[key] = self._to_whole(value)

    def forget(self, key: Any) -> None:
        """A step has removed a value of the state."""
        self._seen.pop(key, None)
        if self.held is not None:
            self.held.pop(key, None)

    def _to_local(self, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        if value.placements != self.param.placements:
            value = value.redistribute(self.param.device_mesh, self.param.placements)
        return local_tensor(value)

    def _to_whole(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.ndim == 0:
            return value
        return sharded_like(value, self.param) if value.shape == self.local.shape else value


def local_gradient(param: Any) -> torch.Tensor | None:
    """Returns this rank's part of a gradient, divided as the parameter is."""
    grad = param.grad
    if not isinstance(grad, DTensor):
        return grad
    # FSDP2's have the parameter's own; a gradient set by hand may lie in another way.
    if grad.placements != param.placements or grad.device_mesh is not param.device_mesh:
        grad = grad.redistribute(param.device_mesh, param.placements)
    return local_tensor(grad)


class _LocalState(Mutable):
    """The state of one parameter in plain tensors; changes reach the optimizer's."""

    __slots__ = ("_shard",)

    def __init__(self, shard: LocalShard) -> None:
        super().__init__()
        self._shard = shard

    def __setitem__(self, key: Any, value: Any) -> None:
        # SGD sets its momentum anew in each step, which is the tensor that is there already.
        if dict.get(self, key, MISSING) is not value:
            dict.__setitem__(self, key, value)
            self._shard.note(key, value)

    def __delitem__(self, key: Any) -> None:
        dict.__delitem__(self, key)
        self._shard.forget(key)
