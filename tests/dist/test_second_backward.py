"""Gradients of gradients: penalties, forces, and gradients inside forward, as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2 import PlanError, prepare_fully_shard
from composer_fsdp2.torch_private.units import is_gathered, param_groups
from tests.support.parity import full

WIDTH = 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 2)

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return isinstance(module, Layer)

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().sum(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.energy(x)


class Forces(Net):
    """Takes the gradient of its energy inside forward, and goes on computing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        energy = self.energy(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return self.head(force).square().sum(-1) + energy


class InnerStep(Net):
    """Moves its input by a gradient, without a graph of it, and goes on computing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            moved = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.energy(moved).sum(), moved)
        return self.energy(x - 0.1 * slope)


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean()


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    energy = model(x)
    (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return energy.mean() + slope.square().sum(-1).mean()


def only_the_slope(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.square().sum(-1).mean()


def between_two_forwards(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """As in adversarial training: real, mixed with a penalty, fake."""
    real = model(x).mean()
    return real + penalty(model, 0.5 * x) - 0.3 * model(0.1 * x).mean()


def third(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(0.1 * model(x).sum(), x, create_graph=True)
    (curve,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
    return 1e-3 * curve.square().sum(-1).mean()


WAYS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "penalty": (Net, penalty),
    "one unit": (lambda: Net(layers=0), penalty),
    "only the slope": (Net, only_the_slope),
    "between two forwards": (Net, between_two_forwards),
    "third derivative": (Net, third),
    "forces": (Forces, plain),
    "inner step": (InnerStep, plain),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "prefetch": {"forward_prefetch": 1, "backward_prefetch": 1},
    "every unit watched": {"unused_parameters": True},
    "hsdp": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1},
}


def _train(model: nn.Module, loss: Any, part: slice) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(3)
    for _ in range(4):
        x = 0.3 * torch.randn(8, WIDTH, generator=generator)
        loss(model, x[part]).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.table("prefetch-between two forwards", "every unit watched-one unit")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "setting",
    [pytest.param(s, marks=pytest.mark.smoke if s == "default" else ()) for s in SETTINGS],
)
def test_trains_as_in_one_process(way: str, setting: str):
    make, loss = WAYS[way]
    torch.manual_seed(0)
    alone = make()
    torch.manual_seed(0)
    model = make()
    prepare_fully_shard(model, None, SETTINGS[setting])
    _train(alone, loss, slice(None))
    rank = dist.get_rank()
    _train(model, loss, slice(4 * rank, 4 * rank + 4))
    for (name, a), b in zip(alone.named_parameters(), model.parameters(), strict=True):
        assert isinstance(b, DTensor)
        difference = (a - full(b)).abs().max()
        assert difference <= 1e-6, f"{name}: {difference}"


@pytest.mark.world_size(2)
def test_units_are_freed_when_the_last_backward_is_over():
    model = Net()
    prepare_fully_shard(model, None, {})
    penalty(model, torch.ones(2, WIDTH)).backward()
    groups = [group for layer in model.layers for group in param_groups(layer)]
    assert groups
    assert not any(map(is_gathered, groups))


@pytest.mark.world_size(2)
def test_weights_kept_for_a_backward_that_never_came_are_not_used_again():
    torch.manual_seed(0)
    model = Net()
    torch.manual_seed(0)
    alone = Net()
    prepare_fully_shard(model, None, {})
    shards = list(model.parameters())
    x = torch.ones(2, WIDTH)
    only_the_slope(model, x)  # dropped
    for params in (shards, list(alone.parameters())):
        for param in params:
            param.grad = torch.ones_like(param)
        torch.optim.SGD(params, lr=0.1).step()
    with torch.no_grad():
        assert torch.allclose(model(x), alone(x), atol=1e-6)


@pytest.mark.world_size(2)
def test_a_graph_in_gradients_of_parameters_is_refused():
    model = Net()
    prepare_fully_shard(model, None, {})
    with pytest.raises(PlanError, match=r"backward\(create_graph=True\) leaves a graph"):
        model(torch.ones(2, WIDTH)).sum().backward(create_graph=True)
