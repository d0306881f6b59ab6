"""Meshes, placements and shapes on 64 ranks, in one process: the `fake` backend sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from composer_fsdp2 import ConfigError, prepare_fully_shard
from tests.models import TinyLM, batches

WIDTH = 96
Join = Callable[[int], None]


class Stack(nn.Module):
    """Wide enough for 64 ranks to hold something of every matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 10)

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return module is not self.head and isinstance(module, nn.Linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)[..., :WIDTH]
        return self.head(x)


@pytest.fixture
def as_rank() -> Iterator[Join]:
    """A function that makes this process one of 64 ranks, until the test ends."""

    def join(rank: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=64)

    yield join
    if dist.is_initialized():
        dist.destroy_process_group()


def sharded(model: nn.Module, config: dict[str, Any]) -> dict[str, FSDPModule]:
    return prepare_fully_shard(model, None, config, device="cpu")[1]


@pytest.mark.parametrize(("rank", "rows"), [(0, 3), (63, 3)])
def test_flat(as_rank: Join, rank: int, rows: int):
    as_rank(rank)
    model = Stack()
    units = sharded(model, {})
    assert list(units) == ["blocks.0", "blocks.1", "blocks.2", ""]
    weight = model.blocks[1].weight
    assert weight.placements == (Shard(0),)
    assert weight.device_mesh.shape == (64,)
    assert weight.device_mesh.mesh_dim_names == ("dp_shard",)
    assert weight.shape == (2 * WIDTH, WIDTH)
    assert weight.to_local().shape == (rows, WIDTH)


@pytest.mark.parametrize(("rank", "rows"), [(0, 1), (9, 1), (10, 0), (63, 0)])
def test_fewer_rows_than_ranks(as_rank: Join, rank: int, rows: int):
    as_rank(rank)
    model = Stack()
    sharded(model, {})
    assert model.head.weight.to_local().shape == (rows, WIDTH)


@pytest.mark.parametrize(("replicate", "rows"), [(1, 3), (2, 6), (8, 24), (64, 192)])
def test_hsdp(as_rank: Join, replicate: int, rows: int):
    as_rank(5)
    model = Stack()
    sharded(model, {"data_parallel_replicate_degree": replicate})
    assert model.blocks[0].weight.to_local().shape == (rows, WIDTH)
    mesh = model.blocks[0].weight.device_mesh
    assert mesh.size(mesh.ndim - 1) == 64 // replicate
    assert mesh.mesh_dim_names[-1] == "dp_shard"


def test_hsdp_puts_ranks_of_one_copy_next_to_each_other(as_rank: Join):
    as_rank(5)
    model = Stack()
    sharded(model, {"data_parallel_replicate_degree": 8})
    weight = model.blocks[0].weight
    ranks = weight.device_mesh.mesh.flatten().tolist()
    if weight.device_mesh.ndim == 2:
        assert weight.placements == (Replicate(), Shard(0))
        assert ranks == list(range(64))
    else:
        # A backend without torch's HSDP: sharded in a copy, averaged over copies by a hook.
        assert weight.placements == (Shard(0),)
        assert ranks == list(range(8))


@pytest.mark.parametrize("reshard", [8, 16])
def test_int_reshard(as_rank: Join, reshard: int):
    as_rank(0)
    model = Stack()
    sharded(model, {"reshard_after_forward": reshard})
    model(torch.randn(2, WIDTH))
    assert model.blocks[1].weight.to_local().shape == (2 * WIDTH // reshard, WIDTH)
    assert not isinstance(model.head.weight, DTensor)  # top-level units stay until backward


def test_int_reshard_that_does_not_divide(as_rank: Join):
    as_rank(0)
    with pytest.raises(ConfigError, match=r"does not divide the shard degree 64. .* 16, 32, 64"):
        sharded(Stack(), {"reshard_after_forward": 12})
    with pytest.raises(ConfigError, match=r"does not divide the shard degree 8. .* 1, 2, 4, 8"):
        sharded(Stack(), {"reshard_after_forward": 16, "data_parallel_replicate_degree": 8})


def test_degrees_that_do_not_multiply(as_rank: Join):
    as_rank(0)
    with pytest.raises(ConfigError, match="does not multiply to the world size 64"):
        sharded(Stack(), {"data_parallel_replicate_degree": 7})


def test_ties_stay_one_parameter(as_rank: Join):
    as_rank(0)
    model = TinyLM("two modules")
    policy = {"names": ["head", "re:blocks\\.\\d+"], "embeddings": True}
    units = sharded(model, {"wrap_policy": policy})
    assert list(units) == ["blocks.0", "blocks.1", "blocks.2", ""]
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.to_local().shape == (1, 10)
    model(batches(1, 2)[0][0])


def test_meta_model_shows_its_structure(as_rank: Join):
    as_rank(0)
    with torch.device("meta"):
        model = Stack()
    sharded(model, {})
    assert model.blocks[0].weight.is_meta
    assert model.blocks[0].weight.to_local().shape == (3, WIDTH)
