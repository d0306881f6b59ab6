"""Which ranks hold a parameter, of a layer whose parts ranks hold between them, such as experts.

[Note: remote experts] Every rank keeps a parameter for each part of the layer, under its name and
with its shape. One that other ranks hold is a DTensor on a mesh without this rank, with nothing in
it: torch's optimizers, checkpoints and counts of parameters see the same names on every rank.

[Note: stacks] A tensor that has all parts of a layer in its first dimension is cut along it: a rank
has the slice of its parts as a parameter of its own, which FSDP2 shards over the ranks with the
same parts. So it lies on one mesh, and never as a `_StridedShard`, which checkpoints of torch move
by hand and in which no rank has a whole matrix. FSDP2 shards the first dimension that its ranks
divide evenly, for past the first it can do no other; where that is the first, matrices stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from composer_fsdp2.parallel.fused_rows import part_of

__all__ = [
    "LAYER",
    "ExpertForm",
    "ExpertMesh",
    "HeldLayer",
    "expert_form_of",
    "is_remote",
    "layer_of",
    "shard_of",
]

_HELD = "_fsdp2_held"
"""attribute of a parameter, for `expert_form_of`"""
LAYER = "_fsdp2_held_layer"
"""attribute of a module that has a `HeldLayer` without being one, for `layer_of`"""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMesh:
    """The ranks of a run, as a layer sees them that ranks hold between them."""

    shards: DeviceMesh
    """the ranks that FSDP2 shards the same parts over, with the copies of HSDP around them"""
    group: dist.ProcessGroup
    """the ranks that hold all parts of a layer between them, next to each other"""
    data_parallel: DeviceMesh
    """the ranks that share one copy of the model, with the copies of HSDP around them"""
    tensor: DeviceMesh | None
    """the ranks that have the same tokens, because they divide the layers around this one"""
    remote: DeviceMesh
    """some rank that is not this one"""
    groups: tuple[dist.ProcessGroup, ...]
    """over which sums over all parts of a layer are taken"""

    @property
    def degree(self) -> int:
        """Ranks that hold the parts between them."""
        return self.group.size()

    @property
    def sources(self) -> int:
        """Ranks with tokens of their own among them."""
        return self.degree // (1 if self.tensor is None else self.tensor.size())

    @property
    def place(self) -> int:
        """Number of this rank among them."""
        return self.group.rank()


@dataclass(frozen=True, slots=True, eq=False)
class ExpertForm:
    """Which ranks hold a parameter."""

    mesh: ExpertMesh
    place: int
    """number of its holder in each group of ranks that hold all parts"""
    dim: int | None = None
    """dimension that FSDP2 shards, of a tensor with all parts; see [Note: stacks]"""

    def whole_shape(self, shape: torch.Size) -> torch.Size:
        """The shape that everybody else is shown, of a tensor that has this one here."""
        if self.dim is None:
            return shape
        return torch.Size((shape[0] * self.mesh.degree, *shape[1:]))

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's parts of a whole tensor, as a view. Collective: no."""
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

    @torch.no_grad()
    def whole(self, value: torch.Tensor | None) -> torch.Tensor | None:
        """Returns a whole tensor on every rank, in memory of its own.

        Collective: yes, over the ranks that share one copy of the model.

        Args:
            value: the parameter, its gradient or state; only its own ranks are asked for it.
        """
        if self.dim is None:
            return _sent(self.mesh, self.place, value)
        slices = [_sent(self.mesh, place, value) for place in range(self.mesh.degree)]
        found = [part for part in slices if part is not None]
        return torch.cat(found) if len(found) == len(slices) else None

    def to_checkpoint_form(self, value: torch.Tensor) -> DTensor:
        """Returns a tensor as FSDP2 alone would shard it.

        Collective: yes, over the ranks that share one copy of the model.

        Args:
            value: as a rank holds it, divided as the parameter is.
        """
        whole, data_parallel = self.whole(value), self.mesh.data_parallel
        assert whole is not None
        return part_of(whole, data_parallel, [*[Replicate()] * (data_parallel.ndim - 1), Shard(0)])

    def from_checkpoint_form(self, value: torch.Tensor, like: Any) -> torch.Tensor:
        """Returns a tensor as this rank holds it: the reverse of `to_checkpoint_form`.

        Collective: yes, over the ranks that share one copy of the model, for a DTensor.

        Args:
            value: sharded over all ranks, or whole.
            like: a DTensor that is divided as the parameter is.
        """
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if self.place != self.mesh.place:
            return like
        return part_of(self.own(whole), like.device_mesh, like.placements)


class HeldLayer:
    """A layer whose parts ranks hold between them, as other rooms ask it."""

    mesh: ExpertMesh
    """the ranks that hold them"""
    count: int
    """of all parts"""
    _load: torch.Tensor | int = 0
    """tokens that each part got since `take_load`"""

    def keep_own(self) -> set[nn.Parameter]:
        """Frees the parts of other ranks; see the notes above.

        Collective: no. Just before the unit is sharded, when every rank has the same weights.

        Returns:
            What FSDP2 is to leave alone.
        """
        raise NotImplementedError

    def take_load(self) -> torch.Tensor:
        """Returns how many tokens of this rank each part got in training, (parts,).

        Of all forwards since the last call, what is computed again left out. Collective: no.
        """
        empty = torch.zeros(
            self.count, dtype=torch.int64, device=self.mesh.data_parallel.device_type
        )
        load, self._load = empty + self._load, 0
        return load


def layer_of(module: object) -> HeldLayer | None:
    """Returns how a module shares its parts with other ranks. Collective: no."""
    return module if isinstance(module, HeldLayer) else getattr(module, LAYER, None)


def expert_form_of(param: object) -> ExpertForm | None:
    """Returns which ranks hold a parameter, `None` for one of which every rank has its share."""
    return getattr(param, _HELD, None)


def shard_of(param: nn.Parameter) -> Shard | None:
    """Which dimension FSDP2 is to shard; `None` leaves it to torch."""
    held = expert_form_of(param)
    return None if held is None or held.dim is None else Shard(held.dim)


def is_remote(param: object) -> bool:
    """Whether other ranks hold a parameter; see [Note: remote experts]."""
    held = expert_form_of(param)
    return held is not None and held.place != held.mesh.place


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
        whole = torch.empty(shape, dtype=dtype, device=mesh.data_parallel.device_type)
    whole = whole.clone(memory_format=torch.contiguous_format)
    dist.broadcast(whole, src=source, group=group)
    return whole
