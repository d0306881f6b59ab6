"""Muon with what a run may bring: odd shapes, joined heads, parameters that come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import AutoModelForCausalLM, FalconConfig, GPTNeoXConfig

from composer_fsdp2 import Muon, prepare_fully_shard
from tests.dist.test_muon import HSDP, RATES, with_gradients
from tests.support.models import TinyLM
from tests.support.parity import gathered

Pair = list[tuple[nn.Module, Muon]]


def pair_of(
    make: Callable[[], nn.Module],
    config: dict[str, Any] | None = None,
    build: Callable[[nn.Module], Muon] = lambda model: Muon(model, **RATES),
) -> Pair:
    """The same model twice, whole and sharded."""
    found: Pair = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = make()
        optimizer = build(model)
        if sharded:
            prepare_fully_shard(model, optimizer, config or {})
        else:
            optimizer.decide(model)
        found.append((model, optimizer))
    return found


def assert_same(pair: Pair, tolerance: float = 0.0) -> None:
    (whole, _), (sharded, _) = pair
    found = gathered(sharded)
    for name, value in gathered(whole).items():
        difference = (value.double() - found[name].double()).abs().max().item()
        assert difference <= tolerance, f"{name} differs by {difference:.2e}"


class Odd(nn.Module):
    """Vectors in the shape of matrices, fewer rows than ranks, lists of them."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"row": (1, 9), "column": (9, 1), "low": (2, 9), "tall": (33, 3), "one": (1, 1)}
        shapes |= {"listed": (2, 5, 3), "many": (7, 1, 3)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.conv = nn.Conv2d(3, 4, 3)
        self.names = list(shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


@pytest.mark.table("fp32-spectral_unclamped-config1", "bf16-original-config0")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("config", [{}, HSDP])
@pytest.mark.parametrize("adjust", ["original", "spectral_unclamped"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_odd_shapes(dtype: str, adjust: str, config: dict[str, Any]):
    settings: dict[str, Any] = {"iteration_dtype": dtype, "adjust_lr_fn": adjust}
    pair = pair_of(Odd, config, lambda model: Muon(model, muon=model.names, **settings))
    for seed in range(3):
        for model, optimizer in pair:
            with_gradients(model, seed)
            optimizer.step()
    assert_same(pair)


# --- Query, key and value head by head. ---

SIZES = {"hidden_size": 24, "num_attention_heads": 6, "num_hidden_layers": 1, "vocab_size": 17}
ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
JOINED: dict[str, tuple[Any, int, tuple[int, ...]]] = {
    "neox": (GPTNeoXConfig(**SIZES, intermediate_size=24, **ENDS), 6, (4, 4, 4)),
    "falcon": (
        FalconConfig(**SIZES, new_decoder_architecture=True, num_kv_heads=2, **ENDS),
        2,
        (12, 4, 4),
    ),
}


def by_hand(weight: torch.Tensor, turns: int, outputs: tuple[int, ...]) -> list[torch.Tensor]:
    heads = weight.view(turns, -1, weight.shape[1]).split(outputs, dim=1)
    return [head.reshape(-1, weight.shape[1]) for head in heads]


@pytest.mark.table("neox-config1")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("config", [{}, HSDP])
@pytest.mark.parametrize("name", JOINED)
def test_heads_that_take_turns_are_matrices_of_their_own(name: str, config: dict[str, Any]):
    """The oracle is an unsharded Muon of three matrices, which were taken apart by hand."""
    kind, turns, outputs = JOINED[name]
    settings = {**RATES, "adjust_lr_fn": "spectral_unclamped"}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind)
    (glob,) = (n for n, _ in model.named_parameters() if n.endswith("query_key_value.weight"))
    weight = model.get_parameter(glob).detach().clone()
    parts = [nn.Parameter(part) for part in by_hand(weight, turns, outputs)]
    alone = Muon([{"params": parts, "algorithm": "muon"}], **settings)
    told = {glob: {"turns": turns, "outputs": list(outputs)}}
    prepare_fully_shard(model, optimizer := Muon(model.parameters(), **settings), config)
    another = AutoModelForCausalLM.from_config(kind)
    another.load_state_dict({**another.state_dict(), glob: weight})
    prepare_fully_shard(another, written := Muon(another, blocks=told, **settings), config)
    for seed in range(10):
        for one, steps in ((model, optimizer), (another, written)):
            with_gradients(one, seed)
            steps.step()
        grad = model.get_parameter(glob).grad.full_tensor()
        for part, own in zip(parts, by_hand(grad, turns, outputs), strict=True):
            part.grad = own
        alone.step()
    found = model.get_parameter(glob).detach().full_tensor()
    for part, own in zip(parts, by_hand(found, turns, outputs), strict=True):
        assert (part - own).abs().max() <= 1e-6
    assert (found - weight).abs().max() > 1e-2
    assert torch.equal(another.get_parameter(glob).detach().full_tensor(), found)


# --- Parameters that come and go. ---


@pytest.mark.world_size(3)
def test_frozen_and_without_a_gradient_for_a_while():
    pair = pair_of(TinyLM)
    for seed in range(8):
        for model, optimizer in pair:
            model.blocks[0].up.weight.requires_grad_(seed not in (0, 3, 4))
            with_gradients(model, seed)
            if seed == 5:
                model.blocks[1].down.weight.grad = None
            if seed == 6:
                for param in model.parameters():
                    param.grad = None
            optimizer.step()
    assert_same(pair)


@pytest.mark.world_size(2)
def test_parameters_leave_their_groups():
    """As `LayerFreezing` has it; the blocks of those that are left stay theirs."""
    joined = {"blocks.*.up.weight": 2}
    pair = pair_of(TinyLM, None, lambda model: Muon(model, blocks=joined, **RATES))
    for seed in range(4):
        for model, optimizer in pair:
            with_gradients(model, seed)
            if seed == 2:
                gone = {id(model.blocks[0].down.weight), id(model.embed.weight)}
                for group in optimizer.param_groups:
                    group["params"] = [p for p in group["params"] if id(p) not in gone]
            optimizer.step()
    assert_same(pair)


@pytest.mark.world_size(2)
def test_groups_with_rates_of_their_own_and_a_schedule():
    def build(model: nn.Module) -> Muon:
        groups = [
            {"params": list(model.blocks.parameters()), "weight_decay": 0.3, "momentum": 0.8},
            {"params": [*model.norm.parameters(), *model.head.parameters()], "weight_decay": 0.0},
            {"params": list(model.embed.parameters()), "lr": torch.tensor(0.01)},
        ]
        optimizer = Muon(groups, **RATES)
        schedules.append(
            torch.optim.lr_scheduler.OneCycleLR(
                optimizer, [0.1] * len(optimizer.param_groups), total_steps=9
            )
        )
        return optimizer

    schedules: list[torch.optim.lr_scheduler.OneCycleLR] = []
    pair = pair_of(TinyLM, None, build)
    for seed in range(8):
        for (model, optimizer), schedule in zip(pair, schedules, strict=True):
            with_gradients(model, seed)
            optimizer.step()
            schedule.step()
    assert_same(pair, 1e-6)
    one, other = (
        [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for _, o in pair
    )
    assert one == other


@pytest.mark.world_size(2)
def test_a_gradient_that_is_not_divided_and_a_closure():
    pair = pair_of(TinyLM)
    for model, optimizer in pair:

        def closure(model: nn.Module = model) -> float:
            with_gradients(model, 1)
            for param in (model.blocks[0].up.weight, model.embed.weight):
                if isinstance(param, DTensor):
                    param.grad = param.grad.redistribute(param.device_mesh, [Replicate()])
            return 3.0

        assert optimizer.step(closure) == 3.0
    assert_same(pair)


@pytest.mark.world_size(2)
def test_a_step_that_a_scaler_leaves_out():
    pair = pair_of(TinyLM)
    for model, optimizer in pair:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        for seed in range(5):
            scaler.scale(torch.ones(()))
            with_gradients(model, seed)
            for param in model.parameters():
                param.grad.mul_(scaler.get_scale())
            if seed == 2:
                grad = model.blocks[0].up.weight.grad
                own = grad.to_local() if isinstance(grad, DTensor) else grad
                if dist.get_rank() == 0 or own is grad:
                    own.view(-1)[0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 8.0  # twice as much, half of that, and twice again
    assert_same(pair)
