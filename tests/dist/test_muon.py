"""Muon on shards is Muon on whole matrices: the same numbers on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F

from composer_fsdp2 import Muon, PlanError, prepare_fully_shard
from tests.support.models import VOCAB, TinyLM, batches
from tests.support.parity import Recipe, gathered, train_together

RATES = {"lr": 3e-3, "adamw_eps": 1e-5, "iteration_dtype": "fp32"}
"""an eps that does not blow up what is zero but for rounding, as in `tests.support.parity`"""
HSDP = {"data_parallel_replicate_degree": 2}


class Attention(nn.Module):
    """Query, key and value in one matrix, of other sizes; 18 outputs, which few ranks divide.

    Without a bias: that of the key has a gradient of 0 but for rounding, of which AdamW makes steps.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.Wqkv = nn.Linear(width, width + 8, bias=False)
        self.out_proj = nn.Linear(width, width)
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.Wqkv(x).split((self.width, 4, 4), dim=-1)
        mixed = torch.softmax(q[..., :4] @ k.transpose(-1, -2), -1) @ v
        return self.out_proj(F.pad(mixed, (0, self.width - 4)) + q)


class Experts(nn.Module):
    """Five experts as lists of matrices, all of which see everything."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(5, 12, width) / 4)
        self.down_proj = nn.Parameter(torch.randn(5, width, 6) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("bsw,eow->ebso", x, self.gate_up_proj).chunk(2, dim=-1)
        return torch.einsum("ebso,ewo->bsw", F.silu(gate) * up, self.down_proj) / 5


class Fused(TinyLM):
    """A language model with joined projections, experts, and parts that are frozen or unused."""

    def __init__(self) -> None:
        super().__init__("none", layers=1)
        self.attention = Attention(10)
        self.experts = Experts(10)
        self.never = nn.Linear(10, 10)
        self.frozen = nn.Linear(10, 10).requires_grad_(False)

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return isinstance(module, (Attention, Experts)) or super().fsdp_wrap_fn(module)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.attention(x)
        x = x + self.experts(self.frozen(x))
        return self.head(self.norm(self.blocks[0](x)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": TinyLM,
    "tied": lambda: TinyLM("two modules"),
    "tied layers": lambda: TinyLM("all layers"),
    "one module twice": lambda: TinyLM("module registered twice"),
    "fused": Fused,
}


def check(name: str, config: dict[str, Any], steps: int = 20, **settings: Any) -> Muon:
    pair: list[tuple[nn.Module, Muon]] = []
    for bare in (False, True):
        torch.manual_seed(0)
        model = MODELS[name]()
        given = model.parameters() if bare else model
        pair.append((model, Muon(given, **{**RATES, **settings})))
    (oracle, expected), (model, optimizer) = pair
    prepare_fully_shard(model, optimizer, config)
    # Ranks get equal parts of a batch.
    size = {3: 9}.get(dist.get_world_size(), 8)
    train_together(oracle, expected, model, optimizer, Recipe(steps=steps, batch_size=size))
    return optimizer


@pytest.mark.world_size(1)
@pytest.mark.parametrize("name", ["plain", "fused"])
def test_one_rank(name: str):
    check(name, {})


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks(name: str):
    check(name, {})


@pytest.mark.world_size(3)
@pytest.mark.parametrize("name", ["tied", "fused"])
def test_three_ranks(name: str):
    check(name, {})


@pytest.mark.world_size(4)
@pytest.mark.parametrize("name", ["tied", "fused"])
@pytest.mark.parametrize("config", [{}, HSDP, {"data_parallel_replicate_degree": 4}])
def test_four_ranks(name: str, config: dict[str, Any]):
    check(name, config)
