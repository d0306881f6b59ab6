"""Muon with tensor parallelism is Muon on whole matrices, cut by rows, by columns or by both."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from composer_fsdp2 import Muon
from composer_fsdp2.parallel.form import part_of
from tests.dist.test_muon import Sent
from tests.dist.test_tensor_parallel import (
    FAMILIES,
    assert_same_state,
    global_batches,
    loss_of,
    mean,
    of_this_group,
    prepared,
)
from tests.dist.test_tensor_uneven import ODD_FAMILIES, odd_batches
from tests.support.parity import TOLERANCE, assert_close, assert_same_values, full

RATES: dict[str, Any] = {"lr": 3e-3, "adamw_eps": 1e-5, "iteration_dtype": "fp32"}
ODD = {f"{name}, uneven rows": make for name, make in ODD_FAMILIES.items()}
NAMES = ("Llama, tied", "Gemma 3", "Phi-3", "GPT-2", "MPT, grouped", *ODD)
"""projections one by one and fused, stored (out, in) and (in, out), with rows that none share"""
ROWS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in NAMES),
    ("Phi-3", {"data_parallel_replicate_degree": 2}),
    ("MPT", {"tensor_parallel": 4}),
]

# Newer torch warns of blocks that end in a view; nothing in these models changes it in place.
pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    pytest.mark.world_size(4),
]


def alike(family: str) -> tuple[nn.Module, Any]:
    """A model on one process, and the same one for all ranks."""
    torch.manual_seed(dist.get_rank())  # rank 0's weights count
    model = (FAMILIES | ODD)[family]().double()
    holder = [model.state_dict()]
    dist.broadcast_object_list(holder)
    oracle = copy.deepcopy(model)
    oracle.load_state_dict(holder[0])
    return oracle, model


@pytest.mark.table
@pytest.mark.parametrize(("family", "settings"), ROWS)
def test_steps_like_one_process(family: str, settings: dict[str, Any]):
    oracle, model = alike(family)
    expected, optimizer = Muon(oracle, **RATES), Muon(model.parameters(), **RATES)
    prepared(model, optimizer, mixed_precision="FULL", **settings)
    degree = settings.get("tensor_parallel", 2)
    for step, ids in enumerate(odd_batches(20) if family in ODD else global_batches()):
        wanted, found = loss_of(oracle, ids), loss_of(model, of_this_group(ids, degree))
        wanted.backward()
        found.backward()
        assert_close(f"loss of step {step}", wanted.detach(), mean(found))
        for one in (expected, optimizer):
            one.step()
            one.zero_grad()
    assert TOLERANCE == 1e-6
    assert_same_values(oracle, model)
    assert_same_state(expected, optimizer)


def test_two_collectives_and_no_more_than_what_others_hold():
    model = FAMILIES["Llama"]()
    hidden = sum(
        param.numel()
        for name, param in model.named_parameters()
        if param.ndim == 2 and "embed" not in name and "head" not in name
    )
    prepared(model, optimizer := Muon(model.parameters()), mixed_precision="FULL")
    loss_of(model, of_this_group(global_batches(1)[0])).backward()
    with Sent() as sent:
        optimizer.step()
    assert sent.others == []
    everyone: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, sent.elements)
    # Every matrix without the quarter that its owner has, there and back.
    assert [sum(ranks) for ranks in zip(*everyone, strict=True)] == [hidden * 3 // 4] * 2


@pytest.mark.parametrize("degrees", [(2, 1, 2), (1, 2, 2), (2, 2, 1)])
def test_copies_share_the_work_of_both_axes(degrees: tuple[int, int, int]):
    """On the mesh of NCCL, where the copies are an axis of it: the same bits as in one process."""
    mesh = init_device_mesh("cpu", degrees, mesh_dim_names=("copies", "shards", "tensor"))
    fused = _StridedShard(0, split_factor=degrees[2])
    placed = [(fused, Shard(0)), (Shard(0), Shard(1)), (Shard(0), Replicate())]
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(12, size, generator=generator) for size in (8, 6, 10)]
    group = {"algorithm": "muon", "params": [nn.Parameter(whole.clone()) for whole in wholes]}
    alone = Muon([group])
    parts = [
        part_of(whole, mesh, (Replicate(), *places))
        for whole, places in zip(wholes, placed, strict=True)
    ]
    divided = Muon([{"algorithm": "muon", "params": [nn.Parameter(part) for part in parts]}])
    sent = Sent()
    for _ in range(2):
        for own, part in zip(*(held(one) for one in (alone, divided)), strict=True):
            own.grad = torch.randn(own.shape, generator=generator)
            part.grad = part_of(own.grad, mesh, part.placements)
        alone.step()
        with sent:
            divided.step()
    # In a step one exchange for both axes and one for one axis, whose matrix may be there already.
    assert len(sent.elements) in (2 * 3, 2 * 4)
    for own, part in zip(*(held(one) for one in (alone, divided)), strict=True):
        assert torch.equal(own, full(part))


def held(optimizer: Muon) -> list[Any]:
    return optimizer.param_groups[0]["params"]
