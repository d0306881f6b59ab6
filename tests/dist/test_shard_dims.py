"""Tensors with fewer rows than ranks, as those with all experts of a layer, are sharded evenly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from composer_fsdp2 import Muon, installed, prepare_fully_shard
from tests.support.models import WIDTH, TinyComposer, TinyLM
from tests.support.parity import OPTIMIZERS, Recipe, check_parity, full, train_together
from tests.support.training import built, largest_difference, samples_of, trainer_for, weights

RANKS = 4
BY_ROWS = {"reshard_after_forward": 2}
"""torch keeps parts of gathered parameters by rows alone"""

pytestmark = pytest.mark.world_size(RANKS)


class Mixture(nn.Module):
    """Two experts in one tensor, of which a rank would have one or none; 2 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.inner = nn.Linear(WIDTH, 512)
        self.experts = nn.Parameter(torch.randn(2, 1024, 512) / 512**0.5)
        self.outer = nn.Linear(1024, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        computed = torch.einsum("bti,eoi->bteo", self.inner(x), self.experts)
        mixed = torch.einsum("bte,bteo->bto", self.gate(x).softmax(-1), computed)
        return x + self.outer(mixed.tanh())


class MixtureLM(TinyLM):
    def __init__(self) -> None:
        super().__init__(layers=2)
        self.blocks[1] = Mixture()

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


@pytest.mark.table("even")
@pytest.mark.parametrize("config", [{}, BY_ROWS], ids=["even", "rows"])
def test_muon_steps_as_one_process_does(config: dict[str, Any]):
    oracle, model = (built(MixtureComposer) for _ in range(2))
    rates = {"lr": 3e-3, "adamw_eps": 1e-5, "iteration_dtype": "fp32"}
    pair = [Muon(given, **rates) for given in (oracle, model)]
    prepare_fully_shard(model, pair[1], config)
    train_together(oracle, pair[0], model, pair[1], Recipe(steps=3))


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
