"""State that is kept in another form between steps: what it takes, what it gives, what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from composer.optim import DecoupledAdamW, DecoupledSGDW
from torch import nn, optim
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2.optim.state_kept import KeptState

Make = Callable[[Iterable[Any]], optim.Optimizer]
POLICIES: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bf16"},
    "8 bits": {"bits": 8},
    "cpu": {"device": "cpu"},
    "bf16 cpu": {"dtype": "bf16", "device": "cpu"},
    "8 bits cpu": {"bits": 8, "device": "cpu"},
}


class Layers(nn.Module):
    """Rows that no number of ranks divides, three dimensions, and small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 301)
        self.mix = nn.Parameter(torch.randn(7, 43, 31) * 0.1)
        self.norm = nn.LayerNorm(31)
        self.down = nn.Linear(31, 24)
        self.wide = nn.Linear(24, 5003)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.up(inputs).tanh().view(-1, 7, 43)
        found = self.norm(torch.einsum("brc,rcd->bd", found, self.mix))
        return self.wide(self.down(found).tanh())


OPTIMIZERS: dict[str, Make] = {
    "adam": lambda p: optim.Adam(p, lr=1e-3),
    "adamw": lambda p: optim.AdamW(p, lr=1e-3, amsgrad=True),
    "adamw foreach": lambda p: optim.AdamW(p, lr=1e-3, foreach=True),
    "adamw fused": lambda p: optim.AdamW(p, lr=1e-3, fused=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=1e-3),
    "adadelta": lambda p: optim.Adadelta(p, lr=1e-3),
    "adamax": lambda p: optim.Adamax(p, lr=1e-3),
    "asgd": lambda p: optim.ASGD(p, lr=1e-3),
    "nadam": lambda p: optim.NAdam(p, lr=1e-3),
    "radam": lambda p: optim.RAdam(p, lr=1e-3),
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "sgd": lambda p: optim.SGD(p, lr=1e-3, momentum=0.9),
    "decoupled adamw": lambda p: DecoupledAdamW(p, lr=1e-3, weight_decay=1e-5),
    "decoupled sgdw": lambda p: DecoupledSGDW(p, lr=1e-3, momentum=0.9),
}


def prepared(
    make: Make, policy: dict[str, Any] | None, **config: Any
) -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(0)
    model = Layers()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    if policy is not None:
        config = {**config, "optimizer_state": policy}
    prepare_fully_shard(model, optimizer, {"wrap_policy": {"classes": ["Linear"]}, **config})
    return model, optimizer


def give_gradients(model: nn.Module, step: int) -> None:
    """The same whole gradients on any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        full = torch.randn(param.shape, generator=generator) * 0.1
        param.grad = shard(full, param)


def shard(full: torch.Tensor, like: Any) -> Any:
    from composer_fsdp2.shard.optimizer import shard_like

    return shard_like(full, like)


def step(model: nn.Module, optimizer: optim.Optimizer, steps: Iterable[int]) -> None:
    for number in steps:
        give_gradients(model, number)
        optimizer.step()


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def everything(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, torch.Tensor]:
    """Whole weights and whole state. Collective: yes."""
    found: dict[str, Any] = {}
    for name, param in model.named_parameters():
        found[name] = full(param.detach())
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{name} {key}"] = full(value).clone()
    return found


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


# --- The step. ---


@pytest.mark.world_size(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_on_the_cpu_changes_no_bit(name: str):
    pairs = [prepared(OPTIMIZERS[name], policy) for policy in (POLICIES["cpu"], None)]
    for pair in pairs:
        step(*pair, range(4))
    assert_equal(*(everything(*pair) for pair in pairs))
    model, optimizer = pairs[0]
    assert all(isinstance(optimizer.state[p], KeptState) for p in model.parameters())
    give_gradients(model, 9)
    with CommDebugMode() as traffic:
        optimizer.step()
    assert traffic.get_total_counts() == 0


@pytest.mark.world_size(2)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "asgd"])
def test_every_optimizer_goes_where_it_goes_with_its_own_state(name: str, policy: str):
    kept, own = (prepared(OPTIMIZERS[name], p) for p in (POLICIES[policy], None))
    start = everything(*own)
    for pair in (kept, own):
        step(*pair, range(12))
    one, other = everything(*kept), everything(*own)
    for name, param in own[0].named_parameters():
        way, difference = other[name] - start[name], one[name] - other[name]
        limit = 0.02 if "bf16" in policy else 0.15
        assert difference.norm() <= limit * way.norm() + 1e-6, name
        assert (difference.norm() > 0) == (policy != "cpu" and param.numel() >= 4096), name


# --- What is held. ---


def theory(param: Any, key: str, policy: dict[str, Any]) -> int:
    """Bytes of one moment on this rank."""
    local = param.to_local()
    if param.numel() < 4096 or policy == POLICIES["cpu"]:
        return local.numel() * 4
    if "bits" not in policy:
        return local.numel() * 2
    row = local.numel() // max(1, local.shape[0])
    return local.numel() + local.shape[0] * -(-row // 256)


@pytest.mark.world_size(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_bytes_on_each_rank_are_those_of_theory(policy: str):
    model, optimizer = prepared(OPTIMIZERS["adamw"], POLICIES[policy])
    step(model, optimizer, range(2))
    moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    held = 0
    for name, param in model.named_parameters():
        state = optimizer.state[param]
        expected = sum(theory(param, key, POLICIES[policy]) for key in moments)
        if isinstance(state, KeptState):
            assert state.nbytes == expected, name
        else:
            assert param.numel() < 4096
            assert sum(state[key].to_local().nbytes for key in moments) == expected, name
        held += expected
    # Nothing else of its size stays between two steps.
    own = sum(p.to_local().numel() for p in model.parameters()) * 4 * len(moments)
    assert held < {"bf16": 0.54, "8 bits": 0.32, "cpu": 1.01}[policy.removesuffix(" cpu")] * own


@pytest.mark.world_size(2)
@pytest.mark.parametrize("policy", ["bf16", "8 bits"])
def test_what_a_step_reads_is_let_go(policy: str):
    import gc

    model, optimizer = prepared(OPTIMIZERS["decoupled adamw"], POLICIES[policy])
    step(model, optimizer, range(3))
    for param in model.parameters():
        param.grad = None
    gc.collect()
    shapes = {p.to_local().shape for p in model.parameters() if p.numel() >= 4096}
    held = [
        one
        for one in gc.get_objects()
        if type(one) is torch.Tensor and one.shape in shapes and one.dtype is torch.float32
    ]
    weights = {p.to_local().data_ptr() for p in model.parameters()}
    assert not [one for one in held if one.data_ptr() not in weights]


# --- Any number of ranks. ---


def run_of(policy: str, name: str = "decoupled adamw") -> dict[str, torch.Tensor]:
    pair = prepared(OPTIMIZERS[name], POLICIES[policy])
    step(*pair, range(6))
    return everything(*pair)


@pytest.mark.world_size(1)
@pytest.mark.parametrize("name", ["decoupled adamw", "sgd"])
@pytest.mark.parametrize("policy", POLICIES)
def test_one_two_and_three_ranks_have_the_same_bits(policy: str, name: str, ranks: Any):
    found = [ranks(world, run_of, policy, name) for world in (1, 2, 3)]
    for other in found[1:]:
        assert_equal(found[0], other)
