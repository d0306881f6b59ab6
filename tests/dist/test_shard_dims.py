"""Tensors with fewer rows than ranks, as those with all experts of a layer, are sharded evenly."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from composer_fsdp2 import Muon, installed, prepare_fully_shard
from composer_fsdp2.parallel.form import form_of
from tests.support.models import WIDTH, TinyComposer, TinyLM
from tests.support.parity import OPTIMIZERS, Recipe, check_parity, full, train_together
from tests.support.training import built, largest_difference, samples_of, trainer_for, weights

RANKS = 4
BY_ROWS = {"reshard_after_forward": 2}
"""torch keeps parts of gathered parameters by rows alone"""

pytestmark = pytest.mark.world_size(RANKS)


class Mixture(nn.Module):
    """Two experts in one tensor, of which a rank would have one or none; 2 MiB each."""

    def __init__(self, outputs: int = 1024, inputs: int = 512, count: int = 2) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count)
        self.inner = nn.Linear(WIDTH, inputs)
        self.experts = nn.Parameter(torch.randn(count, outputs, inputs) / inputs**0.5)
        self.outer = nn.Linear(outputs, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        computed = torch.einsum("bti,eoi->bteo", self.inner(x), self.experts)
        mixed = torch.einsum("bte,bteo->bto", self.gate(x).softmax(-1), computed)
        return x + self.outer(mixed.tanh())


class MixtureLM(TinyLM):
    def __init__(self, count: int = 2) -> None:
        super().__init__(layers=2)
        self.blocks[1] = Mixture(count=count)

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return isinstance(module, Mixture)


class MixtureComposer(TinyComposer):
    def __init__(self) -> None:
        super().__init__()
        self.net = MixtureLM()


def experts_of(model: nn.Module) -> DTensor:
    (experts,) = (param for name, param in model.named_parameters() if name.endswith("experts"))
    assert isinstance(experts, DTensor)
    return experts


@pytest.mark.table("even")
@pytest.mark.parametrize("config", [{}, BY_ROWS], ids=["even", "rows"])
def test_it_trains_as_one_process_does(config: dict[str, Any]):
    recipe = Recipe(steps=5, microbatches=2)
    experts = experts_of(check_parity(MixtureLM, config, "adamw", recipe))
    if config == BY_ROWS:
        assert experts.placements == (Shard(0),)
    else:
        assert experts.placements == (Shard(1),)
        assert experts.to_local().shape == (2, 256, 512)


@pytest.mark.matrix
def test_with_replicas_the_shards_of_one_count():
    """Three experts on two ranks: two on one, one on the other."""
    config = {"data_parallel_replicate_degree": 2}
    model = check_parity(functools.partial(MixtureLM, 3), config, "adamw", Recipe(steps=5))
    assert experts_of(model).placements[-1] == Shard(1)
    assert experts_of(model).to_local().shape == (3, 512, 512)


@pytest.mark.table("even")
@pytest.mark.parametrize("config", [{}, BY_ROWS], ids=["even", "rows"])
def test_muon_steps_as_one_process_does(config: dict[str, Any]):
    oracle, model = (built(MixtureComposer) for _ in range(2))
    rates = {"lr": 3e-3, "adamw_eps": 1e-5, "iteration_dtype": "fp32"}
    pair = [Muon(given, **rates) for given in (oracle, model)]
    prepare_fully_shard(model, pair[1], config)
    train_together(oracle, pair[0], model, pair[1], Recipe(steps=3))


class Normalized(torch.optim.Optimizer):
    """Looks across the elements of a parameter, so it steps DTensors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(group["lr"] * param.grad / torch.linalg.vector_norm(param.grad))


def test_an_optimizer_that_steps_dtensors():
    model = Mixture()
    before = model.experts.detach().clone()
    optimizer = Normalized([model.experts])  # the trial with small tensors takes its placements
    for param in (*model.gate.parameters(), *model.inner.parameters(), *model.outer.parameters()):
        param.requires_grad_(False)
    prepare_fully_shard(model, optimizer, {})
    experts = experts_of(model)
    gradient = torch.randn(before.shape, generator=torch.Generator().manual_seed(0))
    experts.grad = cast(Any, form_of(experts).shard(gradient, experts))
    optimizer.step()
    expected = before - 0.1 * gradient / torch.linalg.vector_norm(gradient)
    torch.testing.assert_close(full(experts), expected)


@pytest.mark.table("bf16-last", "8 bits-inner")
@pytest.mark.parametrize(
    ("shape", "dim"), [((1024, 512), 1), ((1022, 1024), 2)], ids=["inner", "last"]
)
@pytest.mark.parametrize("policy", [{"dtype": "bf16"}, {"bits": 8}], ids=["bf16", "8 bits"])
def test_state_in_fewer_bits_has_the_same_bits(
    policy: dict[str, Any], shape: tuple[int, int], dim: int
):
    states: list[dict[str, torch.Tensor]] = []
    settings = {"wrap_policy": {"classes": ["Mixture"]}, "optimizer_state": policy}
    for config, expected in (({}, dim), (BY_ROWS, 0)):
        torch.manual_seed(0)
        model = nn.Sequential(Mixture(*shape))
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        prepare_fully_shard(model, optimizer, {**settings, **config})
        experts = experts_of(model)
        assert experts.placements == (Shard(expected),)
        for number in range(3):
            generator = torch.Generator().manual_seed(number)
            for param in model.parameters():
                gradient = torch.randn(param.shape, generator=generator)
                param.grad = cast(Any, form_of(param).shard(gradient, param))
            optimizer.step()
        state = optimizer.state[experts]
        states.append({key: full(value) for key, value in state.items()})
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key


def _run(
    fsdp2: dict[str, Any], folder: Path, load_path: Path | None = None
) -> dict[str, torch.Tensor]:
    """Trains two steps, or loads what was saved after them; returns weights and state."""
    model = built(MixtureComposer, seed=0 if load_path is None else 1)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with installed():
        trainer = trainer_for(
            model,
            optimizer,
            samples_of(4, 8),
            fsdp2,
            batch=2,
            max_duration="2ba",
            save_folder=str(folder),
            load_path=None if load_path is None else str(load_path),
        )
        if load_path is None:
            trainer.fit()
    trainer.close()
    values = weights(model)
    names = {id(param): name for name, param in model.named_parameters()}
    for param, state in optimizer.state.items():
        values |= {f"{names[id(param)]} {key}": full(value) for key, value in state.items()}
    return values


@pytest.mark.table("sharded-even", "full-rows")
@pytest.mark.parametrize(
    ("saved", "loaded"), [({}, BY_ROWS), (BY_ROWS, {}), ({}, {})], ids=["rows", "even", "same"]
)
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_checkpoint_loads_into_either_layout(
    kind: str, saved: dict[str, Any], loaded: dict[str, Any], tmp_path: Path
):
    of_kind = {"state_dict_type": kind}
    before = _run(of_kind | saved, tmp_path / "first")
    path = tmp_path / "first" / {"sharded": "ep0-ba2", "full": "ep0-ba2-rank0.pt"}[kind]
    after = _run(of_kind | loaded, tmp_path / "second", path)
    assert largest_difference(after, before) == 0.0
