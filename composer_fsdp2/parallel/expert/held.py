"""Parameters of experts: those that this rank has a shard of, and those that other ranks hold.

[Note: experts elsewhere] Every rank keeps a parameter for each expert of the model, under its name
and with its shape. One that other ranks hold is a DTensor on a mesh without this rank, with nothing
in it: torch's optimizers, checkpoints and counts of parameters see the same names on every rank.

[Note: stacked experts] A tensor that has all experts of a layer in its first dimension is cut along
it: a rank has the slice of its experts as a parameter of its own, which FSDP2 shards over the ranks
with the same experts. So it lies on one mesh, and never as a `_StridedShard`, which checkpoints of
torch move by hand and in which no rank has a whole matrix. FSDP2 shards the first dimension that
its ranks divide evenly, for past the first it can do no other; where that is the first, matrices
stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from composer_fsdp2.parallel.expert.mesh import ExpertMesh

__all__ = ["Held", "held_by", "is_elsewhere", "put_elsewhere", "shard_of", "whole_expert"]

_HELD = "_fsdp2_expert"
"""attribute of a parameter of an expert, for `held_by`"""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Which ranks hold an expert."""

    mesh: ExpertMesh
    place: int
    """number of its holder in each group of ranks that hold all experts"""
    dim: int | None = None
    """dimension that FSDP2 shards, of a tensor with all experts; see [Note: stacked experts]"""

    def whole_shape(self, shape: torch.Size) -> torch.Size:
        """The shape that everybody else is shown, of a tensor that has this one here."""
        if self.dim is None:
            return shape
        return torch.Size((shape[0] * self.mesh.degree, *shape[1:]))

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's experts of a whole tensor, as a view. Collective: no."""
        if self.dim is None:
            return whole
        share = whole.shape[0] // self.mesh.degree
        return whole.narrow(0, self.place * share, share)

    def begin(self, shape: Sequence[int]) -> int:
        """Where this rank's slice of such a shape begins in the whole tensor."""
        return 0 if self.dim is None else self.place * shape[0]

    def note(self, param: nn.Parameter) -> None:
        """Remembers it on a parameter; sharding carries attributes over."""
        setattr(param, _HELD, self)


def held_by(param: object) -> Held | None:
    """Returns which ranks hold the expert of a parameter, `None` for one that is no expert's."""
    return getattr(param, _HELD, None)


def shard_of(param: nn.Parameter) -> Shard | None:
    """Which dimension FSDP2 is to shard; `None` leaves it to torch."""
    held = held_by(param)
    return None if held is None or held.dim is None else Shard(held.dim)


def is_elsewhere(param: object) -> bool:
    """Whether other ranks hold an expert's parameter; see [Note: experts elsewhere]."""
    held = held_by(param)
    return held is not None and held.place != held.mesh.place


def put_elsewhere(module: nn.Module, mesh: ExpertMesh) -> None:
    """Frees the parameters of an expert that other ranks hold. Collective: no."""
    for part in module.modules():
        for name, param in part._parameters.items():
            if param is None:
                continue
            empty = DTensor.from_local(
                torch.empty(0, dtype=param.dtype, device=mesh.elsewhere.device_type),
                mesh.elsewhere,
                [Shard(0)],
                run_check=False,
                shape=param.shape,
                stride=param.stride(),
            )
            part._parameters[name] = nn.Parameter(empty, requires_grad=param.requires_grad)


@torch.no_grad()
def whole_expert(held: Held, value: torch.Tensor | None) -> torch.Tensor | None:
    """Returns a whole tensor of an expert on every rank, in memory of its own.

    Collective: yes, over the ranks that share one copy of the model.

    Args:
        held: of its parameter.
        value: the parameter, its gradient or state; only the expert's own ranks are asked for it.
    """
    if held.dim is None:
        return _sent(held.mesh, held.place, value)
    slices = [_sent(held.mesh, place, value) for place in range(held.mesh.degree)]
    found = [part for part in slices if part is not None]
    return torch.cat(found) if len(found) == len(slices) else None


def _sent(mesh: ExpertMesh, place: int, value: torch.Tensor | None) -> torch.Tensor | None:
    """Returns on every rank the whole of what those of one place have. Collective: yes."""
    group = mesh.group
    sharded: Any = value if place == mesh.place else None
    whole: torch.Tensor | None = None if sharded is None else sharded.detach().full_tensor()
    source = dist.get_global_rank(group, place)
    facts: list[Any] = [None if whole is None else (whole.shape, whole.dtype)]
    dist.broadcast_object_list(facts, src=source, group=group)
    if facts[0] is None:
        return None
    if whole is None:
        shape, dtype = facts[0]
        whole = torch.empty(shape, dtype=dtype, device=mesh.usual.device_type)
    whole = whole.clone(memory_format=torch.contiguous_format)
    dist.broadcast(whole, src=source, group=group)
    return whole
