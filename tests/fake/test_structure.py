"""Meshes, placements and shapes on 64 ranks, in one process: the `fake` backend sends nothing."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from composer_fsdp2 import ConfigError, prepare_fully_shard, uninstall
from composer_fsdp2.parallel.form import form_of
from composer_fsdp2.patches import install_for_foundry
from composer_fsdp2.plan import shard_dims
from composer_fsdp2.shard.device_mesh import with_cpu_backend
from composer_fsdp2.torch_private.fake import fake_ranks
from composer_fsdp2.torch_private.tensors import layouts_of
from tests.support.experts import FAMILIES, STACKED
from tests.support.models import TinyLM, batches, llama_config

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
    uninstall()  # preparing a model of transformers has installed the rows about it
    if dist.is_initialized():
        dist.destroy_process_group()


def sharded(model: nn.Module, config: dict[str, Any]) -> dict[str, FSDPModule]:
    return prepare_fully_shard(model, None, config, device="cpu")[1]


def test_groups_for_offloaded_shards_wait_for_no_rank(as_rank: Join):
    as_rank(0)
    mesh = init_device_mesh("cpu", (64,), mesh_dim_names=("dp_shard",))
    assert with_cpu_backend(mesh).size() == 64


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


def test_tensor_parallel_cuts_a_mesh_of_a_replica_once(as_rank: Join):
    as_rank(5)
    widths = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 32}
    config = llama_config(num_key_value_heads=2, **widths)
    model, by_hand = LlamaForCausalLM(config), LlamaForCausalLM(config)
    sharded(model, {"data_parallel_replicate_degree": 4, "tensor_parallel": 2})
    weight = model.model.layers[0].mlp.gate_proj.weight
    assert weight.device_mesh.mesh_dim_names[-2:] == ("dp_shard", "tp")
    assert weight.device_mesh.get_group("tp").size() == 2
    assert weight.device_mesh.get_group("dp_shard").size() == 8
    assert weight.device_mesh.mesh.reshape(-1, 8, 2)[0].flatten().tolist() == [*range(16)]

    mesh = init_device_mesh("cpu", (4, 8, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    plan = {"model.layers.*.mlp.gate_proj": ColwiseParallel()}
    parallelize_module(by_hand, mesh["tensor"], plan)
    fully_shard(by_hand, mesh=mesh["replicate", "shard"])
    ours, theirs = (
        {id(p.device_mesh) for name, p in m.named_parameters() if name.endswith("gate_proj.weight")}
        for m in (model, by_hand)
    )
    assert len(ours) == len(theirs)


@pytest.mark.skipif(STACKED, reason="transformers has no lists of experts")
def test_experts_of_other_ranks_cost_little(as_rank: Join):
    as_rank(5)
    model = FAMILIES["Mixtral"][0](64)
    names = [name for name, _ in model.named_parameters()]
    shapes = [param.shape for param in model.parameters()]
    sharded(model, {"expert_parallel": 64, "wrap_policy": {"classes": ["MixtralDecoderLayer"]}})
    assert [name for name, _ in model.named_parameters()] == names
    assert [param.shape for param in model.parameters()] == shapes
    remote = [param for param in model.parameters() if form_of(param).is_remote]
    assert len(remote) == model.config.num_hidden_layers * 63 * 3
    assert all(isinstance(param, nn.Parameter) and param.requires_grad for param in remote)
    assert all(param.is_leaf and param.to_local().numel() == 0 for param in remote)
    # A layout for each shape in a layer, and none for each parameter.
    assert len(set(map(id, layouts_of(remote)))) == model.config.num_hidden_layers * 2


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


# --- What is replaced while units are sharded. ---


class Odd(nn.Module):
    """Rows that ranks share evenly, with a rest, and with too few for all."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(rows, 3)) for rows in (128, 100, 65, 64, 63, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(weight.sum() for weight in self.weights)


@pytest.mark.parametrize("rank", [0, 1, 49, 50, 63])
def test_shards_are_those_of_torch(as_rank: Join, rank: int):
    as_rank(rank)
    torch.manual_seed(0)
    model = Odd()
    by_hand = copy.deepcopy(model)
    sharded(model, {"reshard_after_forward": 8})
    fully_shard(by_hand, mesh=init_device_mesh("cpu", (64,)), reshard_after_forward=8)
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert ours.shape == theirs.shape
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours.to_local(), theirs.to_local())
    model(torch.ones(2))


def test_a_plan_finds_the_groups_of_many_ranks_quickly():
    with fake_ranks(16384, 5):
        flat = init_device_mesh("cpu", (16384,))
        mesh = init_device_mesh("cpu", (256, 64), mesh_dim_names=("replicate", "shard"))
        assert dist.get_process_group_ranks(mesh.get_group("shard")) == [*range(64)]
        assert dist.get_process_group_ranks(mesh.get_group("replicate")) == [*range(5, 16384, 64)]
        begun = time.process_time()
        for _ in range(5):  # 1.4 seconds each, where torch 2.7 compares rank by rank
            assert flat.get_group() is dist.group.WORLD
        assert time.process_time() - begun < 1


# --- In which order units gather ahead. ---


def t5() -> tuple[nn.Module, str]:
    sizes = {"vocab_size": 17, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)), "T5Block"


def llama() -> tuple[nn.Module, str]:
    return LlamaForCausalLM(llama_config()), "LlamaDecoderLayer"


def mpt() -> tuple[nn.Module, str]:
    modeling = pytest.importorskip(
        "llmfoundry.models.mpt.modeling_mpt", reason="needs the extra foundry"
    )
    install_for_foundry()
    sizes = {"d_model": 16, "n_heads": 2, "n_layers": 2, "expansion_ratio": 2, "vocab_size": 17}
    config = modeling.MPTConfig(max_seq_len=8, **sizes, attn_config={"attn_impl": "torch"})
    return modeling.MPTForCausalLM(config), "MPTBlock"


ORDERS = {
    llama: ["", "model.layers.0", "model.layers.1"],
    mpt: ["", "transformer.blocks.0", "transformer.blocks.1"],
    t5: ["", *(f"{half}.block.{i}" for half in ("encoder", "decoder") for i in (0, 1))],
}


def followers(units: dict[str, FSDPModule], states: str) -> dict[str, str]:
    """What each unit starts to gather in one of torch's lists."""
    names = {unit._get_fsdp_state(): name for name, unit in units.items()}
    lists = {name: getattr(unit._get_fsdp_state(), states) for name, unit in units.items()}
    return {name: names[ahead[0]] for name, ahead in lists.items() if ahead}


@pytest.mark.table("mpt", "t5")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize("make", ORDERS)
def test_order_of_models(as_rank: Join, make: Callable[[], tuple[nn.Module, str]]):
    as_rank(0)
    (model, block), order = make(), ORDERS[make]
    config = {"wrap_policy": {"classes": [block]}, "forward_prefetch": 1, "backward_prefetch": 1}
    units = sharded(model, config)
    forward: list[dict[str, str]] = []
    model.get_submodule(order[2]).register_forward_pre_hook(
        lambda *_: forward.append(followers(units, "_states_to_forward_prefetch"))
    )
    ids = torch.randint(1, 17, (2, 4))
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
    assert forward == [{}, dict(itertools.pairwise(order))]
    back = [*[""] * (order[0] == ""), *reversed(order[order[0] == "" :])]
    found = followers(units, "_states_to_backward_prefetch")
    assert found == dict(itertools.pairwise(back))


class StackedExperts(nn.Module):
    """Has all experts of a layer in one tensor, as transformers 5."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(experts, 97) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(("experts", "warns"), [(8, True), (128, False)])
def test_rows_that_ranks_cannot_share_are_told(
    as_rank: Join, monkeypatch: pytest.MonkeyPatch, experts: int, warns: bool
):
    monkeypatch.setattr(shard_dims, "_UNEVEN_BYTES", 1)
    as_rank(0)
    with pytest.warns(match="evenly to the 64 ranks") if warns else nullcontext():
        prepare_fully_shard(StackedExperts(experts), None, {})
