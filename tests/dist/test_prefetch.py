"""Units are gathered ahead, as far as asked, in the order in which they run."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from composer_fsdp2 import PlanError, prepare_fully_shard
from tests.support.models import TinyLM
from tests.support.parity import Recipe, assert_same_gradients, check_parity

WIDTHS = (4, 6, 8, 10, 12, 14, 16)
BLOCKS = len(WIDTHS) - 1


class Layer(nn.Linear):
    """Says when it computes, in forward and in backward."""

    log: list[str]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append(f"forward {self.name}")
        y = super().forward(x) * 1
        if y.requires_grad:
            y.grad_fn.next_functions[0][0].register_prehook(self._note_backward)  # type: ignore
        return y

    def _note_backward(self, _grads: object) -> None:
        self.log.append(f"backward {self.name}")


class Tower(nn.Module):
    """Layers of different sizes, registered in another order than they run in."""

    def __init__(self) -> None:
        super().__init__()
        sizes = list(itertools.pairwise(WIDTHS))
        self.layers = nn.ModuleDict({str(i): Layer(*sizes[i]) for i in reversed(range(BLOCKS))})
        self.log: list[str] = []
        for name, layer in self.layers.items():
            layer.name, layer.log = name, self.log
        self.order = [str(i) for i in range(BLOCKS)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.order:
            x = self.layers[name](x)
        return x


class Gathers(TorchDispatchMode):
    """Adds to the log of a tower which layer is gathered, told by its size."""

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.log, self.total = tower.log, 0
        self.names = {
            sum(-(-p.shape[0] // 2) * 2 * p.shape[1:].numel() for p in layer.parameters()): name
            for name, layer in tower.layers.items()
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Newer torch sends objects that ranks exchange by the same operator, as integers.
        if "_allgather_base_" in str(func) and args[0].is_floating_point():
            self.total += args[0].nbytes
            self.log.append(f"gather {self.names[args[0].numel()]}")
        return func(*args, **(kwargs or {}))


def tower(**config: Any) -> Tower:
    torch.manual_seed(0)
    model = Tower()
    policy = {"classes": ["Layer"]}
    prepare_fully_shard(
        model, None, {"wrap_policy": policy, "reshard_after_forward": True, **config}
    )
    return model


def step(model: Tower, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    model(torch.randn(3, WIDTHS[0], generator=generator)).square().sum().backward()


def watched(model: Tower) -> tuple[list[str], int]:
    model.log.clear()
    with Gathers(model) as gathers:
        step(model)
    return list(model.log), gathers.total


def gathered_before(log: list[str], event: str) -> set[int]:
    """Layers whose gather in this pass has started when something computes."""
    kind = event.split()[0]
    start = next(i for i, entry in enumerate(log) if entry.startswith("backward"))
    first = 0 if kind == "forward" else max(i for i, e in enumerate(log) if e.startswith("forward"))
    assert first < start
    entries = log[first : log.index(event)]
    return {int(entry.split()[1]) for entry in entries if entry.startswith("gather")}


@pytest.mark.table("0-2", "0-0")
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("forward", "backward"), [(0, None), (1, 0), (2, None), (0, 2), (3, 3), (0, 0)]
)
def test_gathers_start_earlier_and_are_no_more(forward: int, backward: int | None):
    plain = tower()
    step(plain)
    _, usual = watched(plain)
    plain.zero_grad()
    model = tower(forward_prefetch=forward, backward_prefetch=backward)
    for seed in (1, 2):  # the first is recorded, the second begins to prefetch
        step(model, seed)
        step(plain, seed)
        assert_same_gradients(plain, model)
    log, total = watched(model)
    assert total == usual
    for i in range(BLOCKS):
        ahead = min(i + forward, BLOCKS - 1)
        assert gathered_before(log, f"forward {i}") == set(range(ahead + 1))
        back = max(i - (1 if backward is None else backward), 0)
        last = gathered_before(log, f"backward {i}")
        assert last == set(range(back, BLOCKS))


@pytest.mark.world_size(2)
def test_the_first_step_and_evaluation_are_torchs_own():
    model = tower(forward_prefetch=2, backward_prefetch=2)
    log, _ = watched(model)
    assert gathered_before(log, "forward 0") == {0}
    watched(model)
    model.log.clear()
    with torch.no_grad(), Gathers(model):
        model.eval()(torch.ones(1, WIDTHS[0]))
    assert model.log == [f"{what} {i}" for i in range(BLOCKS) for what in ("gather", "forward")]


@pytest.mark.world_size(2)
def test_a_changed_order_warns_once_and_stays_right():
    model, plain = tower(forward_prefetch=2, backward_prefetch=2), tower()
    for one in (model, plain):
        step(one)
        step(one)
        one.order = ["0", "1"]
    with pytest.warns(UserWarning, match="none in place 2 where 'layers.2' was"):
        step(model)
    step(plain)
    for one in (model, plain):
        one.zero_grad()
        # What was gathered for nothing must not be used with the new weights.
        for param in one.parameters():
            param.data.mul_(2)
        step(one)
        one.order = [str(i) for i in range(BLOCKS)]
        step(one)
    assert_same_gradients(plain, model)


@pytest.mark.world_size(2)
def test_ranks_that_run_in_another_order_hear_of_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = {"wrap_policy": {"classes": ["Linear"]}, "forward_prefetch": 1, "order_check": "never"}
    prepare_fully_shard(model, None, config)
    order = (0, 1) if dist.get_rank() == 0 else (1, 0)
    model.forward = lambda x: model[order[1]](model[order[0]](x))  # type: ignore[method-assign]
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(PlanError, match="Ranks 0 and 1 hold a different order of units in forward"):
        model(torch.ones(1, 4))


@pytest.mark.table("module registered twice")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("tie", ["two modules", "module registered twice"])
def test_the_numbers_stay(tie: str):
    config = {"activation_checkpointing": True, "forward_prefetch": 2, "backward_prefetch": 2}
    recipe = Recipe(steps=4, microbatches=2, evaluate=True)
    check_parity(lambda: TinyLM(tie), config, recipe=recipe)
