"""The dimension along which a parameter is sharded, and what is said where none is even."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.planner import plan_wrapping
from composer_fsdp2.plan.rules import root_rule
from composer_fsdp2.plan.shard_dims import shard_dim, uneven_shards
from composer_fsdp2.plan.wrap_plan import ShardUnit


def test_tensors_whose_rows_ranks_cannot_share_are_told():
    model = nn.Module()
    model.router = nn.Linear(4096, 8, device="meta")
    shape = (8, 2**13 + 1, 2**13 + 1)
    model.experts = nn.ParameterList(torch.empty(shape, device="meta") for _ in range(6))
    model.gate = nn.Linear(64, 1, device="meta")  # as a shared expert has
    model.wide = nn.Linear(2**13, 2**15, device="meta")
    model.forward = lambda: None
    tree = ModuleTree.read(model)
    units = plan_wrapping(tree, [root_rule]).units
    told = uneven_shards(tree, units, 32)
    assert told is not None
    assert told[0].startswith("The rows of 'experts.0', 'experts.1' and ")
    assert "the 32 ranks that shard them, and no other dimension is a multiple" in told[0]
    assert "keep 1.125 GiB of weights more than their share" in told[0]
    assert "ep: {degree: 8}" in told[1]
    assert uneven_shards(tree, units, 8) is None
    assert uneven_shards(tree, units, 10) is None  # a rank in ten more than its share is no matter
    told = uneven_shards(tree, units, 33)
    assert told is not None
    assert "(8, 8193, 8193)" in told[1]
    model.experts = nn.ParameterList(torch.empty(8, 2**13, 2**13, device="meta") for _ in range(6))
    tree = ModuleTree.read(model)
    assert uneven_shards(tree, units, 32) is None
    by_rows = [dataclasses.replace(unit, reshard_after_forward=8) for unit in units]
    told = uneven_shards(tree, by_rows, 32)
    assert told is not None
    assert "a number in reshard_after_forward" in told[0]


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [
        ((8, 4096, 1024), 32, 1),
        ((8, 4095, 1024), 32, 2),
        ((8, 4095, 1023), 32, 0),  # nothing divides evenly
        ((8, 4096, 1024), 8, 0),
        ((40, 4096, 1024), 32, 1),  # two rows for some, none for others
        ((8, 128, 64), 32, 0),  # not worth a copy
        ((32000, 4096), 48, 0),
    ],
)
def test_a_dimension_that_ranks_share_evenly(shape: tuple[int, ...], ranks: int, dim: int):
    unit = ShardUnit(
        module="", params=("w",), numel=1, reshard_after_forward=True, reason="the root"
    )
    weight = nn.Parameter(torch.empty(shape, device="meta"))
    assert shard_dim(weight, unit, ranks) == dim
    assert shard_dim(weight, dataclasses.replace(unit, reshard_after_forward=8), ranks) == 0
