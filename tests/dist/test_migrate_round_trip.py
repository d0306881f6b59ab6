"""A migrated configuration trains as the old one did: mesh, gathers and numbers, on four ranks.

What the old strategies define is written out in `CASES`, not taken from the migration's tables:
over which ranks parameters are gathered in forward and in backward, over which gradients are
reduced, and that training equals an unsharded copy on the same global batches.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import yaml
from composer import Callback, Trainer
from composer.algorithms import GradientClipping
from composer.core import Event
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from composer_fsdp2 import installed
from composer_fsdp2.tools.migrate.engine import migrate
from tests.support.models import TinyComposer
from tests.support.parity import OPTIMIZERS, TOLERANCE, full
from tests.support.training import built, largest_difference, samples_of, train_alone, trainer_for

STEPS = 6
MICROBATCHES = 2
NORM = 0.6
"""Some steps have a larger norm, some a smaller one."""
UNITS = 4
"""three blocks, and what is left of their parent, which is the top-level unit"""

FSDP1 = """
max_duration: 6ba
fsdp_config:
  sharding_strategy: {}
  mixed_precision: PURE
  activation_checkpointing: false
  activation_checkpointing_reentrant: false
  limit_all_gathers: true
"""
ACCELERATE = """
distributed_type: FSDP
mixed_precision: 'no'
fsdp_config:
  fsdp_sharding_strategy: {}
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Block
"""
ZERO = '{{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {}}}'

ALL = frozenset({frozenset({0, 1, 2, 3})})
NODES = frozenset({frozenset({0, 1}), frozenset({2, 3})})
ACROSS = frozenset({frozenset({0, 2}), frozenset({1, 3})})
Groups = frozenset[frozenset[int]]


@dataclass(frozen=True, kw_only=True)
class Old:
    """An old configuration and what it defines."""

    text: str
    mesh: dict[str, int]
    """size of each axis, outermost first"""
    forward: Groups | None = ALL
    """groups in which a microbatch gathers every unit; `None`: every rank holds whole parameters"""
    backward: Groups | None = None
    """groups in which it gathers every unit but the top-level one again; `None`: kept"""
    scattered: Groups | None = ALL
    """groups in which gradients are reduced to shards"""
    averaged: Groups | None = None
    """groups in which copies average their gradients"""


FLAT = {"data_parallel_shard": 4}
HYBRID = {"data_parallel_replicate": 2, "data_parallel_shard": 2}
NODE: dict[str, Any] = {"mesh": HYBRID, "forward": NODES, "scattered": NODES, "averaged": ACROSS}

CASES = {
    "FULL_SHARD": Old(text=FSDP1.format("FULL_SHARD"), mesh=FLAT, backward=ALL),
    "SHARD_GRAD_OP": Old(text=FSDP1.format("SHARD_GRAD_OP"), mesh=FLAT),
    "HYBRID_SHARD": Old(text=FSDP1.format("HYBRID_SHARD"), backward=NODES, **NODE),
    "_HYBRID_SHARD_ZERO2": Old(text=FSDP1.format("_HYBRID_SHARD_ZERO2"), **NODE),
    "NO_SHARD": Old(
        text=FSDP1.format("NO_SHARD"),
        mesh={"data_parallel_replicate": 4, "data_parallel_shard": 1},
        forward=None,
        scattered=None,
        averaged=ALL,
    ),
    "Accelerate, SHARD_GRAD_OP": Old(text=ACCELERATE.format("SHARD_GRAD_OP"), mesh=FLAT),
    "DeepSpeed, ZeRO-2": Old(text=ZERO.format('{"stage": 2}'), mesh=FLAT),
    "DeepSpeed, ZeRO-3 with hpZ": Old(
        text=ZERO.format('{"stage": 3, "zero_hpz_partition_size": 2}'), mesh=FLAT, backward=NODES
    ),
}


@dataclass
class Traffic(TorchDispatchMode):
    """Counts the collectives of this rank by phase of training, operation and ranks in the group.

    One over a single rank sends nothing and is not counted, nor are the integers in which ranks
    compare what comes next, in the first step.
    """

    phase: str = ""
    calls: Counter[tuple[str, str, frozenset[int]]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        place = {"_allgather_base_": 2, "_reduce_scatter_base_": 2, "allreduce_": 1}.get(name)
        if func.namespace == "c10d" and self.phase and place is not None:
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(args[place]))
            sent = args[0][0] if name == "allreduce_" else args[1]
            if len(ranks) > 1 and sent.is_floating_point():
                self.calls[self.phase, name, frozenset(ranks)] += 1
        return func(*args, **(kwargs or {}))


class Phases(Callback):
    """Tells the traffic in which part of a microbatch it is."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic

    def run_event(self, event: Event, _state: Any, _logger: Any) -> None:
        if event in (Event.BEFORE_FORWARD, Event.BEFORE_BACKWARD):
            self.traffic.phase = event.value.removeprefix("before_")
        elif event in (Event.AFTER_FORWARD, Event.AFTER_BACKWARD):
            self.traffic.phase = ""


@pytest.mark.table("FULL_SHARD")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("name", CASES)
def test_trains_as_the_old_strategy_defines(name: str):
    old = CASES[name]
    block = _migrated(old.text)
    oracle, model, traffic = built(TinyComposer), built(TinyComposer), Traffic()
    norms = _train_oracle(oracle)
    with installed():
        trainer = _trainer(model, block, traffic)
        with traffic:
            trainer.fit()
    assert min(norms) < NORM < max(norms)
    assert trainer.state.timestamp.batch == STEPS
    assert _mesh(trainer) == old.mesh
    assert _calls(traffic) == _expected(old)
    assert largest_difference(model, oracle) <= TOLERANCE
    _check_shards(model, old)
    trainer.close()


def _migrated(text: str) -> dict[str, Any]:
    report = migrate(text, world_size=4, gpus_per_node=2)
    return yaml.safe_load(report.text)["parallelism_config"]


def _train_oracle(model: TinyComposer) -> list[float]:
    """Trains the unsharded copy; returns the norms before clipping."""
    norms: list[float] = []

    def clip(params: list[nn.Parameter]) -> None:
        norms.append(nn.utils.clip_grad_norm_(params, NORM).item())

    optimizer = OPTIMIZERS["sgd"](model.parameters())
    train_alone(model, optimizer, samples_of(STEPS, 8), 8, change_gradients=clip)
    return norms


def _trainer(model: TinyComposer, block: dict[str, Any], traffic: Traffic) -> Trainer:
    return trainer_for(
        model,
        OPTIMIZERS["sgd"](model.parameters()),
        samples_of(STEPS, 8),
        batch=2,
        parallelism_config=block,
        device_train_microbatch_size=2 // MICROBATCHES,
        algorithms=GradientClipping("norm", NORM),
        callbacks=Phases(traffic),
    )


def _mesh(trainer: Trainer) -> dict[str, int]:
    mesh = trainer.state.device_mesh
    assert mesh is not None
    assert mesh.mesh_dim_names is not None
    return dict(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True))


def _own(groups: Groups) -> frozenset[int]:
    """The group this rank is in."""
    (own,) = [ranks for ranks in groups if dist.get_rank() in ranks]
    return own


def _calls(traffic: Traffic) -> dict[tuple[str, str, frozenset[int]], int]:
    """Calls of one microbatch; every one of them has the same."""
    counts = {key: divmod(count, STEPS * MICROBATCHES) for key, count in traffic.calls.items()}
    assert not any(rest for _, rest in counts.values()), traffic.calls
    return {key: count for key, (count, _) in counts.items()}


def _expected(old: Old) -> dict[tuple[str, str, frozenset[int]], int]:
    kinds = [
        ("forward", "_allgather_base_", old.forward, UNITS),
        ("backward", "_allgather_base_", old.backward, UNITS - 1),
        ("backward", "_reduce_scatter_base_", old.scattered, UNITS),
        ("backward", "allreduce_", old.averaged, UNITS),
    ]
    return {
        (phase, kind, _own(groups)): count
        for phase, kind, groups, count in kinds
        if groups is not None
    }


def _check_shards(model: TinyComposer, old: Old) -> None:
    """The shards of each group make up the same whole parameters, to the last bit."""
    groups = old.forward or [{rank} for rank in range(dist.get_world_size())]
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        shards: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shards, param.to_local())
        for group in groups:
            whole = torch.cat([shards[rank] for rank in sorted(group)])
            assert torch.equal(whole, full(param)), name
