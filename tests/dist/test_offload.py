"""Shards in CPU memory: what can be shown without a GPU. The rest is in tests/gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_fsdp2 import Muon, prepare_fully_shard
from composer_fsdp2.config.placement import CPUOffload
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.planner import plan_wrapping
from composer_fsdp2.plan.rules import by_class, root_rule
from composer_fsdp2.shard.apply import apply_plan
from composer_fsdp2.shard.device_mesh import with_cpu_backend
from composer_fsdp2.shard.optimizer import detach_optimizer, reattach_optimizer
from tests.dist.test_muon import RATES
from tests.support.models import Block, TinyLM
from tests.support.parity import OPTIMIZERS, Recipe, train_together


@pytest.mark.world_size(2)
@pytest.mark.parametrize("written", [True, {"pin_memory": False}])
def test_a_run_on_the_cpu_has_nothing_to_offload(written: Any):
    with pytest.raises(ConfigError, match=r"'cpu_offload' is set in a run on the CPU.*Take it out"):
        prepare_fully_shard(TinyLM(), None, {"cpu_offload": written})


@pytest.mark.world_size(4)
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_groups_that_reduce_on_the_cpu_keep_their_ranks(shape: tuple[int, ...]):
    names = ("dp_replicate", "dp_shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    made = with_cpu_backend(mesh)
    assert torch.equal(made.mesh, mesh.mesh)
    assert made.mesh_dim_names == names
    assert made.get_coordinate() == mesh.get_coordinate()
    for axis in range(mesh.ndim):
        group = made.get_group(axis)
        assert group is not mesh.get_group(axis)
        value = torch.full((1,), float(dist.get_rank()))
        expected = value.clone()
        dist.all_reduce(value, group=group)
        dist.all_reduce(expected, group=mesh.get_group(axis))
        assert torch.equal(value, expected)


def _sharded(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As the trainer does it, with the policy that a run on the CPU may not ask for."""
    tree = ModuleTree.read(model)
    detached = detach_optimizer(optimizer, tree)
    apply_plan(
        model,
        plan_wrapping(model, [by_class(Block), root_rule]),
        with_cpu_backend(init_device_mesh("cpu", (2,))),
        offload=CPUOffload(pin_memory=False),
    )
    reattach_optimizer(detached)


@pytest.mark.table("muon-two modules")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("tie", ["none", "two modules"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_policy_reaches_every_unit_and_training_is_that_of_one_process(name: str, tie: str):
    """Clipping, norms and the optimizer's state go through the groups that were made for it."""
    torch.manual_seed(0)
    oracle = TinyLM(tie)
    torch.manual_seed(0)
    model = TinyLM(tie)
    pair = [
        Muon(m, **RATES) if name == "muon" else OPTIMIZERS[name](m.parameters())
        for m in (oracle, model)
    ]
    _sharded(model, pair[1])
    states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
    params = [param for state in states for param in state._fsdp_param_group.fsdp_params]
    assert len(params) == len(list(model.parameters()))
    assert all(param.offload_to_cpu and not param.pin_memory for param in params)
    train_together(oracle, pair[0], model, pair[1], Recipe(steps=3, clip_norm=0.5))
    assert all(isinstance(p, DTensor) and p.device.type == "cpu" for p in model.parameters())
