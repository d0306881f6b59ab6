"""Muon on shards is Muon on whole matrices: the same numbers on any number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import composer
import pytest
import torch
from composer import Trainer
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from composer_fsdp2 import (
    ConfigError,
    Muon,
    PlanError,
    installed,
    prepare_fully_shard,
)
from composer_fsdp2.parallel.form import form_of
from tests.support.models import TinyComposer, TinyLM, batches, lm_loss
from tests.support.parity import (
    STATE_TOLERANCE,
    TOLERANCE,
    Recipe,
    full,
    gathered,
    train_together,
)
from tests.support.training import built, samples_of, trainer_for

RATES = {"lr": 3e-3, "adamw_eps": 1e-5, "iteration_dtype": "fp32"}
"""an eps that does not blow up what is zero but for rounding, as in `tests.support.parity`"""
HSDP = {"data_parallel_replicate_degree": 2}
COPIES = {"data_parallel_replicate_degree": 4}
OTHERS = [("tied layers", 5), ("one module twice", 5)]


class Attention(nn.Module):
    """Query, key and value in one matrix, of other sizes; 18 outputs, which few ranks divide.

    Without a bias: AdamW would make steps of the key's gradient, which is 0 but for rounding.
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
def test_one_rank():
    check("fused", {})


@pytest.mark.table("tied layers-5")
@pytest.mark.world_size(2)
@pytest.mark.parametrize(("name", "steps"), [("plain", 20), ("tied", 20), ("fused", 20), *OTHERS])
def test_two_ranks(name: str, steps: int):
    check(name, {}, steps)


@pytest.mark.table("tied")
@pytest.mark.world_size(3)
@pytest.mark.parametrize("name", ["tied", "fused"])
def test_three_ranks(name: str):
    check(name, {})


@pytest.mark.table
@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("name", "config"), [("fused", {}), ("tied", HSDP), ("fused", HSDP), ("fused", COPIES)]
)
def test_four_ranks(name: str, config: dict[str, Any]):
    check(name, config)


# --- Of the same gradients, the same bits. ---


def with_gradients(model: nn.Module, seed: int) -> None:
    """Gives every trained parameter its part of the same gradient on any number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator)
        param.grad = form_of(param).shard(grad, param) if param.requires_grad else None


@pytest.mark.table("config1-134217728-bf16", "config3-134217728-bf16")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("config", "limit"), [({}, 1), ({}, 2**27), (HSDP, 1), (HSDP, 2**27)])
def test_same_bits_in_any_bucket(dtype: str, config: dict[str, Any], limit: int):
    settings: dict[str, Any] = {
        "iteration_dtype": dtype,
        "adjust_lr_fn": "original",
        "bucket_bytes": limit,
    }
    torch.manual_seed(0)
    alone, sharded = Fused(), Fused()
    sharded.load_state_dict(alone.state_dict())
    expected = Muon(alone, **settings)
    prepare_fully_shard(sharded, optimizer := Muon(sharded, **settings), config)
    for seed in range(3):
        for model, one in ((alone, expected), (sharded, optimizer)):
            with_gradients(model, seed)
            one.step()
    wanted, found = gathered(alone), gathered(sharded)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


# --- What it sends. ---


class Sent(TorchDispatchMode):
    """Elements in all-to-alls, without those that stay on their rank, and all collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []
        self.others: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "alltoall_base_" in name:
            own = dist.get_rank() % len(args[4])
            self.elements.append(sum(args[4]) - args[4][own])
        elif name.startswith("c10d"):
            self.others.append(name)
        return func(*args, **(kwargs or {}))


def one_step(model: nn.Module, optimizer: Muon) -> list[int]:
    """What all ranks sent in one step, by collective."""
    with_gradients(model, 0)
    with Sent() as sent:
        optimizer.step()
    assert sent.others == []
    everyone: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, sent.elements)
    return [sum(ranks) for ranks in zip(*everyone, strict=True)]


@pytest.mark.world_size(4)
def test_two_collectives_a_bucket_and_no_more_than_the_rows_of_others():
    model = TinyLM(width=12)
    hidden = sum(block.up.weight.numel() * 2 for block in model.blocks)
    prepare_fully_shard(model, optimizer := Muon(model), {})
    # Every matrix without the quarter that its owner has, there and back.
    assert one_step(model, optimizer) == [hidden * 3 // 4] * 2
    model = TinyLM(width=12)
    prepare_fully_shard(model, optimizer := Muon(model, bucket_bytes=1), {})
    found = one_step(model, optimizer)
    assert len(found) == 4  # six matrices, of which a bucket has one for every rank
    assert sum(found) == 2 * hidden * 3 // 4


@pytest.mark.world_size(4)
def test_copies_share_the_work():
    model = TinyLM(width=12)
    hidden = sum(block.up.weight.numel() * 2 for block in model.blocks)
    prepare_fully_shard(model, optimizer := Muon(model), HSDP)
    # There: half a matrix inside its copy. Back: that half, and the whole to the other copy.
    assert one_step(model, optimizer) == [hidden // 2, hidden * 3 // 2]


@pytest.mark.world_size(2)
def test_experts_in_lists_stay_where_they_are():
    model = nn.Sequential(Experts(10))
    prepare_fully_shard(model, optimizer := Muon(model), {})
    assert one_step(model, optimizer) == []


# --- Gradients that are not there. ---


class Sides(TinyLM):
    """Runs one of three layers beside the blocks; `chosen` says which on this rank."""

    def __init__(self, chosen: int) -> None:
        super().__init__()
        self.sides = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
        self.chosen = chosen

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + self.sides[self.chosen](x)))


@pytest.mark.world_size(3)
def test_a_layer_that_only_some_ranks_use():
    """The third layer is used by nobody: it keeps its weights, and its momentum is nothing."""
    torch.manual_seed(0)
    model = Sides(chosen=min(dist.get_rank(), 1))
    before = gathered(model)
    prepare_fully_shard(model, optimizer := Muon(model.parameters(), **RATES), {})
    for ids, targets in batches(3, 3):
        lm_loss(model(ids[[dist.get_rank()]]), targets[[dist.get_rank()]]).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = gathered(model)
    moved = [
        not torch.equal(after[f"sides.{n}.weight"], before[f"sides.{n}.weight"]) for n in range(3)
    ]
    assert moved == [True, True, False]
    assert full(optimizer.state[model.sides[2].weight]["momentum_buffer"]).abs().max() == 0


# --- Checkpoints. ---


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """As LLM Foundry divides them: by name, and without names."""
    norms = [param for name, param in model.named_parameters() if "norm" in name]
    embedding = [param for name, param in model.named_parameters() if "embed" in name]
    taken = {id(param) for param in (*norms, *embedding)}
    rest = [param for param in model.parameters() if id(param) not in taken]
    return [{"params": rest}, {"params": norms, "weight_decay": 0.0}, {"params": embedding}]


def _trainer(folder: str, seed: int, until: str = "3ba", **kwargs: Any) -> Trainer:
    model = built(lambda: TinyComposer("two modules"), seed)
    optimizer = Muon(_groups(model), **RATES)
    if "parallelism_config" in kwargs:
        optimizer.decide(model)  # nobody prepares it
    return trainer_for(
        model,
        optimizer,
        samples_of(6, 12),
        batch=12 // dist.get_world_size(),
        max_duration=until,
        save_folder=folder,
        save_interval="3ba",
        schedulers=composer.optim.ConstantWithWarmupScheduler(t_warmup="5ba"),
        **kwargs,
    )


def _state(trainer: Trainer) -> dict[str, Any]:
    """Weights, and the optimizer's state by name, whole."""
    (optimizer,) = trainer.state.optimizers
    names = {id(param): name for name, param in trainer.state.model.named_parameters()}
    found: dict[str, Any] = dict(gathered(trainer.state.model))
    for param, state in optimizer.state.items():
        found |= {f"{names[id(param)]}/{key}": full(v).clone() for key, v in state.items()}
    for number, group in enumerate(optimizer.param_groups):
        if group["params"]:  # a checkpoint keeps nothing of an empty one
            found[f"group {number}"] = {k: v for k, v in group.items() if k != "params"}
    return found


def _save(folder: str, **kwargs: Any) -> dict[str, Any]:
    with installed():
        (trainer := _trainer(folder, 0, **kwargs)).fit()
        trainer.close()
    return _state(trainer)


def _train_on(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state that was loaded, and that of three batches later."""
    with installed(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*RNG state")
        warnings.filterwarnings("ignore", message=".*world size")
        again = f"{folder}/again on {dist.get_world_size()}"
        trainer = _trainer(again, 1, "6ba", load_path=f"{folder}/ep0-ba3")
        loaded = _state(trainer)
        trainer.fit()
        trainer.close()
    return loaded, _state(trainer)


def _train_whole(folder: str) -> dict[str, Any]:
    return _save(folder, until="6ba", parallelism_config=None)


@pytest.mark.matrix
def test_saved_on_four_ranks_and_trained_on_with_fewer(tmp_path: Path, ranks: Any):
    """Loading changes nothing; then it goes on as the unsharded run that was never stopped."""
    whole = ranks(1, _train_whole, str(tmp_path / "whole"))[0]
    saved = ranks(4, _save, str(tmp_path))[0]
    assert any("momentum_buffer" in name for name in saved)
    for count in (2, 3):
        loaded, trained = ranks(count, _train_on, str(tmp_path))[0]
        assert loaded.keys() == saved.keys()
        assert [name for name, value in saved.items() if not _same(value, loaded[name], 0.0)] == []
        assert trained.keys() == whole.keys()
        far = STATE_TOLERANCE
        assert [name for name, value in whole.items() if not _same(value, trained[name], far)] == []
        weights = [name for name in whole if "/" not in name and torch.is_tensor(whole[name])]
        assert max((whole[name] - trained[name]).abs().max() for name in weights) <= TOLERANCE
        assert max((whole[name] - saved[name]).abs().max() for name in weights) > 100 * TOLERANCE


def _same(one: Any, other: Any, tolerance: float) -> bool:
    if not torch.is_tensor(one):
        return bool(one == other)
    return bool((one - other).abs().max() <= tolerance * max(1.0, one.abs().max().item()))


# --- What is refused, on every rank. ---


@pytest.mark.world_size(2)
def test_what_is_refused():
    model = TinyLM()
    wrong = Muon(model.parameters(), muon="block.*" if dist.get_rank() else ())
    with pytest.raises(PlanError, match=r"On rank 1: muon holds 'block\.\*', which matches no"):
        prepare_fully_shard(model, wrong, {})
    with pytest.raises(ConfigError, match="2 optimizers were given, and one is Muon"):
        prepare_fully_shard(model, [Muon(model), Muon(model)], {})
    vector = Muon(model.parameters(), muon="norm.*")
    with pytest.raises(PlanError, match=r"'norm.weight' matches a glob of muon, but its shape"):
        prepare_fully_shard(model, vector, {})


@pytest.mark.world_size(2)
def test_ranks_with_other_globs_are_found():
    model = TinyLM()
    other = Muon(model.parameters(), adamw="blocks.0.*" if dist.get_rank() else ())
    with pytest.raises(PlanError, match="different groups of the optimizer"):
        prepare_fully_shard(model, other, {})
