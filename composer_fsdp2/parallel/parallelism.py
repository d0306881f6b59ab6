"""The interface between the ways to divide a model between ranks and all other rooms.

[Note: dividing] Tensor, expert and sequence parallelism live in a folder each. Other rooms know of
them:

- the entry in `TRANSFORMATIONS`: a `Parallelism`, which refuses, plans and changes the model;
- the `AppliedParallelism` that its `apply_on` returns: it is told when the model is sharded, when
  the optimizer has the shards, and when a forward begins;
- `run_of(model).batch_group`: the ranks that read one batch, by which the Trainer deals data and
  counts samples. They are a `SameBatchGroup`, the kind of `AppliedParallelism` that says so;
- `form_of(param)`: its `ParameterForm`, asked by the optimizer, `summon`, checkpoints, norms and
  Muon for one parameter at a time; none of them asks which form it is;
- `experts_of(unit)`: its `DistributedExperts`, asked by `shard`, the monitor and unused parameters.
  Before anything is applied, `ShardUnit.holders` says it of units;
- `sequence_attention`, which users call; `draw_together` and `whole_sequences`, for `generate`.

So another way to divide a model is a folder beside these three, its setting, and one line in
`TRANSFORMATIONS`. No file outside of a folder imports anything else from it. A transformation
imports the rest of its folder on demand, so that runs without it do not load the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composer_fsdp2.blocks.transformation import Transformation
from composer_fsdp2.errors import PlanError
from composer_fsdp2.parallel.form import ExpertMesh
from composer_fsdp2.plan.mesh_shape import MeshShape
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.wrap_plan import WrapPlan
from composer_fsdp2.ranks import is_fake, raise_on_all_ranks
from composer_fsdp2.torch_private.tensors import tree_leaves

__all__ = [
    "DRAWN",
    "DRAWS",
    "TRIED",
    "AppliedParallelism",
    "BatchGroup",
    "DistributedExperts",
    "GroupSizes",
    "Parallelism",
    "SameBatchGroup",
    "are_whole",
    "experts_of",
    "set_experts",
    "untried_items",
    "whole_sequences",
]

Plan = TypeVar("Plan")

_EVERY = 50
"""batches of training from one comparison to the next: reading a batch waits for the device"""

DRAWS = {
    *("AugMix", "ColOut", "CutMix", "CutOut", "GyroDropout", "MixUp", "ProgressiveResizing"),
    *("RandAugment", "SelectiveBackprop", "StochasticDepth"),
}
"""Composer's algorithms that draw random numbers of their own, also outside of the forward."""
DRAWN = "It draws on each rank by itself, and the ranks of a group need the same batch."
"""why the ranks of a group cannot have them"""
TRIED = (
    *("CheckpointSaver", "EMA", "EarlyStopper", "EnvironmentLoggingCallback", "FreeOutputs"),
    *("GradientClipping", "HuggingFaceCheckpointer", "LRMonitor", "MemoryMonitor"),
    *("MemorySnapshot", "NaNMonitor", "OOMObserver", "RunTimeoutCallback", "RuntimeEstimator"),
    *("SWA", "ScheduledGarbageCollector", "SpeedMonitor", "SystemMetricsMonitor"),
    "ThresholdStopper",
)
"""Callbacks and algorithms of Composer and LLM Foundry that read no weights but those of state
dicts, or only add up what `optim.norms` knows to be divided."""


_WHOLE = ContextVar("whole sequences", default=False)


@contextlib.contextmanager
def whole_sequences() -> Generator[None]:
    """Has each rank compute its own sequences, undivided, as `generate` needs. Collective: no."""
    token = _WHOLE.set(True)
    try:
        yield
    finally:
        _WHOLE.reset(token)


def are_whole() -> bool:
    """Says whether the ranks of a group compute sequences of their own. Collective: no."""
    return _WHOLE.get()


def untried_items(items: Iterable[Any]) -> Iterator[str]:
    """Yields names of callbacks and algorithms of Composer and LLM Foundry not in `TRIED`."""
    for item in items:
        kind = type(item)
        theirs = kind.__module__.startswith(("composer.", "llmfoundry."))
        if theirs and kind.__name__ not in TRIED and not isinstance(item, torch.optim.Optimizer):
            yield kind.__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSizes:
    """Sizes of one rank's part of a model. A parameter counts once, however many names it has."""

    mesh: str
    layers: int
    """layers that are divided"""
    divided: int
    """elements of their parameters, over all ranks"""
    elements: int
    """elements of the model, over all ranks"""
    held: int
    """elements of the shards of a rank"""
    held_bytes: int
    """bytes of these shards; gradients take as much, and Adam's state twice as much"""
    gathered: int
    """elements of the largest unit as a rank gathers it"""
    largest: str
    """the unit"""

    def __str__(self) -> str:
        """Lines for `plan`."""
        return (
            f"mesh: {self.mesh}\n"
            f"tensor parallelism: {self.layers} layers are divided, {self.divided:,} of "
            f"{self.elements:,} elements\n"
            f"each rank: holds {self.held:,} elements ({self.held_bytes / 1e9:.1f} GB of weights), "
            f"gathers at most {self.gathered:,} ({self.largest})"
        )


class Parallelism(Transformation[Plan]):
    """A transformation that divides a model or its batches between ranks; see [Note: dividing]."""

    def apply(self, tree: ModuleTree, plan: Plan) -> None:
        """Is refused: a parallelism needs the mesh of the run."""
        raise NotImplementedError

    @abstractmethod
    def apply_on(self, tree: ModuleTree, plan: Plan, mesh: DeviceMesh) -> AppliedParallelism:
        """Changes the model before it is sharded. Collective: yes, over the default group.

        Returns:
            A `SameBatchGroup` where ranks read one batch from now on.
        """

    def sizes(
        self, tree: ModuleTree, plan: Plan, units: WrapPlan, shape: MeshShape
    ) -> GroupSizes | None:
        """Returns sizes of a rank's shards and largest unit, `None` where FSDP2 alone decides them.

        Collective: no.

        Args:
            tree: the model, before anything is changed.
            plan: what `plan` returned.
            units: the plan of FSDP2's units, after `adjust_units`.
            shape: sizes of the run's mesh axes.
        """
        return None


class AppliedParallelism:
    """A parallelism in a run, after it was applied. Methods that it does not define do nothing."""

    def connect(self, model: nn.Module) -> None:
        """Changes the model once it is sharded. Collective: no."""

    def connect_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Changes the optimizer once it has the shards. Collective: no."""

    def before_forward(self, model: nn.Module, inputs: Any) -> None:
        """Is called when a forward of the model begins. Collective: as the parallelism says."""


class DistributedExperts:
    """The experts of one layer, of which each rank of a group has some, as other rooms ask them."""

    mesh: ExpertMesh
    """the ranks that have them"""
    count: int
    """experts of the layer"""
    _load: torch.Tensor | int = 0
    """tokens that each expert got since `take_load`"""

    def drop_remote(self) -> None:
        """Frees the experts of other ranks; see the notes in `form`.

        Collective: no. Just before the unit is sharded, when every rank has the same weights.
        """
        raise NotImplementedError

    def show_remote(self) -> None:
        """Ends what `drop_remote` has done for the time of sharding. Collective: no."""

    def take_load(self) -> torch.Tensor:
        """Returns how many tokens of this rank each expert got in training, (experts,).

        Counts all forwards since the last call, recomputation left out. Collective: no.
        """
        empty = torch.zeros(
            self.count, dtype=torch.int64, device=self.mesh.data_parallel.device_type
        )
        load, self._load = empty + self._load, 0
        return load


_EXPERTS = "_fsdp2_experts"
"""attribute of a module that has `DistributedExperts` without being one, for `experts_of`"""


def set_experts(module: nn.Module, experts: DistributedExperts) -> None:
    """Notes the experts on the module that has their parameters."""
    setattr(module, _EXPERTS, experts)


def experts_of(module: object) -> DistributedExperts | None:
    """Returns the experts that a module shares with other ranks. Collective: no."""
    # Not `getattr`: to find that a module has no such attribute takes 20 us, a tenth of a unit.
    return module if isinstance(module, DistributedExperts) else vars(module).get(_EXPERTS)


class SameBatchGroup(AppliedParallelism):
    """Ranks that compute one batch together, because a parallelism divides the model or the batch.

    Args:
        group: the process group that this rank is in.
    """

    why: ClassVar[tuple[str, str]]
    """kind of the group, and what its ranks would do with different batches; for errors"""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.begin()

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.group.size()

    def begin(self) -> None:
        """Has the next batch compared: data and random states may be others. Collective: no."""
        self._seen = {True: 0, False: 0}

    def compare(self, inputs: Any, training: bool) -> bool:
        """Compares a batch that begins training or an evaluation, and every 50th of training.

        Collective: yes, over the default group, for such a batch.

        Returns:
            Whether it begins training or an evaluation.

        Raises:
            PlanError: the same on every rank, if batches in any group differ.
        """
        if is_fake():
            return False  # its collectives bring nothing from other ranks
        # All ranks count the same batches, so they come to the collective in the same one.
        seen = self._seen[training]
        if seen == 0 or (training and seen % _EVERY == 0):
            self.check(inputs)
        self._seen[training] += 1
        if training:
            self._seen[False] = 0  # the next evaluation may read other data
        return seen == 0

    def check(self, inputs: Any) -> None:
        """Compares the inputs, in any nesting, that the ranks of every group are about to compute.

        Collective: yes, over the default group; waits for the device.

        Raises:
            PlanError: the same on every rank, if batches in any group differ.
        """
        # Facts with a tilde are told to all ranks, and need not be equal on them.
        facts = {"~group": dist.get_global_rank(self.group, 0), "~batch": _digest(inputs)}
        digests: dict[int, str] = {}
        for rank, fact in enumerate(raise_on_all_ranks(facts)):
            first, batch = fact["~group"], fact["~batch"]
            if digests.setdefault(first, batch) != batch:
                kind, wrong = self.why
                raise PlanError(
                    f"Ranks {first} and {rank} are {kind} and read different batches. They would "
                    f"{wrong}. Give all {self.size} ranks of a group the same data: "
                    "`dist.get_sampler(dataset, num_replicas=dist.get_world_size() // "
                    f"{self.size}, rank=dist.get_global_rank() // {self.size})`, or `replication: "
                    f"{self.size}` of a streaming dataset."
                )


@dataclass(frozen=True, slots=True)
class BatchGroup:
    """The ranks that read the same batch, next to each other, of all parallelisms of a run."""

    parts: tuple[SameBatchGroup, ...]

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return math.prod(part.size for part in self.parts)

    def begin(self) -> None:
        """Has the next batch compared: data and random states may be others. Collective: no."""
        for part in self.parts:
            part.begin()

    def difference_term(self, batch: Any) -> int:
        """Returns this rank's term of a sum that is zero where all groups read one batch each.

        Collective: no. Add up the terms of all ranks of the run; their sum fits in 64 bits.
        """
        group_number, group_rank = divmod(dist.get_rank(), self.size)
        # The group's number is part of the digest: differences of two groups do not cancel. Ten
        # digits are 40 bits, which leaves 23 for the number of ranks in a sum.
        digest = int(
            hashlib.sha256(f"{group_number} {_digest(batch)}".encode()).hexdigest()[:10], 16
        )
        return -digest if group_rank else (self.size - 1) * digest

    def raise_different(self, batch: Any) -> None:
        """Raises the error that names the ranks. Collective: yes, over the default group.

        Raises:
            PlanError: the same on every rank, if batches in any group differ.
        """
        for part in self.parts:
            part.check(batch)


def _digest(inputs: Any) -> str:
    digest = hashlib.sha256()
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor):
            data = leaf.detach().cpu().contiguous()
            digest.update(f"{tuple(data.shape)} {data.dtype}".encode())
            if data.numel():  # torch views no bytes of an empty tensor; NumPy has no bf16
                digest.update(data.flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, int | float | str | bool):
            digest.update(repr(leaf).encode())
        elif isinstance(leaf, Mapping) and leaf:
            # Batches of transformers are mappings that torch does not look into.
            digest.update(_digest(dict(leaf)).encode())
    return digest.hexdigest()
