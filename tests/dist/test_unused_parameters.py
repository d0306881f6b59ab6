"""Experts without a token and towers without an image, on some ranks or on all."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from composer_fsdp2 import installed, prepare_fully_shard
from composer_fsdp2.errors import PlanError
from composer_fsdp2.step.run import run_of
from composer_fsdp2.step.unused_parameters import UnusedParameters
from composer_fsdp2.torch_private.tensors import default_store
from tests.support.experts import EXPERTS, FAMILIES, STACKED, Sparse, choose, force
from tests.support.models import WIDTH, Block, TinyComposer, TinyLM, batches
from tests.support.parity import (
    OPTIMIZERS,
    assert_close,
    assert_same_gradients,
    assert_same_state,
    assert_same_values,
    model_loss,
)
from tests.support.training import (
    built,
    largest_difference,
    samples_of,
    train_alone,
    trainer_for,
)

ROUTES = (
    (0, 0, 1, 1, 2, 2, 3, 3),  # each of two ranks uses two experts, and others
    (0, 0, 0, 0, 1, 2, 3, 1),  # one rank uses one, another rank three
    (0, 0, 0, 0, 1, 1, 1, 1),  # nobody uses the last two
)
"""expert of each sample of each step"""
MOVED = "ignore:.*were chosen as units, and some ranks may leave them out"

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    pytest.mark.filterwarnings(MOVED),
]


def train_routed(
    make: Callable[[], nn.Module],
    config: dict[str, Any],
    optimizer: str = "sgd",
    routes: Sequence[Sequence[int]] = ROUTES,
    microbatches: int = 1,
) -> nn.Module:
    """Trains with the routes and asserts that it is as in one process; returns the model."""
    models: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    optimizers = [OPTIMIZERS[optimizer](model.parameters()) for model in models]
    prepare_fully_shard(models[1], optimizers[1], config)
    for (ids, targets), route in zip(batches(len(routes), 8), routes, strict=True):
        choose(models[0], list(route))
        loss = model_loss(models[0], (ids, targets))
        if loss.requires_grad:
            loss.backward()
        backward_here(models[1], (ids, targets), route, microbatches)
        assert_same_gradients(*models)
        for stepped in optimizers:
            stepped.step()
            stepped.zero_grad()
    assert_same_values(*models)
    assert_same_state(*optimizers)
    evaluate(*models, batches(1, 8)[0], routes[1 % len(routes)])
    return models[1]


@torch.no_grad()
def evaluate(
    oracle: nn.Module, model: nn.Module, batch: tuple[torch.Tensor, ...], route: Sequence[int]
) -> None:
    """Asserts that the loss of all ranks together is that of one process."""
    choose(oracle, list(route))
    expected = model_loss(oracle, batch)
    mine = torch.arange(8).chunk(dist.get_world_size())[dist.get_rank()]
    choose(model, [route[row] for row in mine])
    loss = model_loss(model, tuple(part[mine] for part in batch))
    dist.all_reduce(loss)
    assert_close("loss without a backward", expected, loss / dist.get_world_size())


def backward_here(
    model: nn.Module, batch: tuple[torch.Tensor, ...], route: Sequence[int], microbatches: int
) -> None:
    """Forward and backward of this rank's samples, in microbatches."""
    sharding = run_of(model)
    assert sharding is not None
    mine = torch.arange(8).chunk(dist.get_world_size())[dist.get_rank()].chunk(microbatches)
    with sharding.accumulation.batch():
        for number, rows in enumerate(mine, 1):
            choose(model, [route[row] for row in rows])
            with sharding.accumulation.microbatch(last=number == microbatches):
                loss = model_loss(model, tuple(part[rows] for part in batch))
                (loss / microbatches).backward()


def units_of(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


RANKS = [
    pytest.param(2, marks=[pytest.mark.world_size(2), pytest.mark.smoke]),
    pytest.param(4, marks=pytest.mark.world_size(4)),
]


@pytest.mark.table("DeepSeek-V3-2")
@pytest.mark.fault("ranks use other experts, or none", "survived")
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of_each_rank_are_others(family: str, ranks: int):
    make, expert = FAMILIES[family]
    trained = train_routed(lambda: force(make()), {}, "sgd")
    assert len(units_of(trained)) == 3
    assert dist.get_world_size() == ranks
    if any(param.ndim == 3 for param in trained.parameters()):
        return  # transformers 5 has all experts of a block in one parameter
    one_by_one = {"wrap_policy": {"classes": [expert]}}
    units = units_of(train_routed(lambda: force(make()), one_by_one, "adamw"))
    assert not any(".experts" in name for name in units)
    assert any(name.endswith(("mlp", "block_sparse_moe")) for name in units)


@pytest.mark.skipif(STACKED, reason="transformers has no lists of experts")
@pytest.mark.table("Qwen3-MoE", "DeepSeek-V3")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_single_experts_are_units_where_every_rank_calls_all(family: str):
    make, expert = FAMILIES[family]
    block = "DecoderLayer"
    classes = [
        *{type(m).__name__ for m in make().modules() if type(m).__name__.endswith(block)},
        expert,
    ]
    config = {"wrap_policy": {"classes": classes}, "unused_parameters": False}
    if family == "DeepSeek-V3":
        with pytest.raises(PlanError, match="does not call an expert without a token"):
            train_routed(lambda: force(make()), config, "sgd")
        return
    units = units_of(train_routed(lambda: force(make()), config, "sgd"))
    assert sum(".experts." in name for name in units) == 2 * EXPERTS


CONFIGS: dict[str, dict[str, Any]] = {
    "blocks": {},
    "one by one": {"wrap_policy": {"names": [r"re:blocks\.\d", r"re:blocks\.\d\.experts\.\d"]}},
    "one unit": {"wrap_policy": {"names": ["head"]}},
    "kept": {"reshard_after_forward": False},
    "recomputed": {"activation_checkpointing": True},
    "prefetch": {"forward_prefetch": 1, "backward_prefetch": 1},
    "all units": {"unused_parameters": True},
}


@pytest.mark.table("kept", "recomputed")
@pytest.mark.smoke
@pytest.mark.world_size(2)
@pytest.mark.parametrize("config", CONFIGS)
def test_experts_with(config: str):
    train_routed(Sparse, CONFIGS[config], "adamw")


@pytest.mark.table("None-last")
@pytest.mark.fault("ranks use other experts, or none", "survived")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("sync", ["every", "last"])
@pytest.mark.parametrize("dtype", [None, "fp32"])
def test_experts_in_microbatches(sync: str, dtype: str | None):
    config = {"gradient_sync": sync, "mixed_precision": {"reduce_dtype": dtype}}
    routes = (*ROUTES, (0, 0, 1, 1, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0, 0, 0), (3, 2, 1, 0, 0, 1, 2, 3))
    train_routed(Sparse, config, "adamw", routes, microbatches=2)


@pytest.mark.table
@pytest.mark.fault("ranks use other experts, or none", "survived")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("sync", ["every", "last", "reduce_scatter_only"])
def test_experts_with_copies(sync: str):
    config = {"gradient_sync": sync, "data_parallel_replicate_degree": 2}
    routes = (*ROUTES, (0, 1, 0, 2, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0, 0, 0))
    train_routed(Sparse, config, "sgd", routes, microbatches=2)


@pytest.mark.world_size(2)
def test_without_it_gradients_are_mixed():
    """As torch does it: what one rank sends as one expert's is added to what is another's there."""
    torch.manual_seed(0)
    model = Sparse()
    prepare_fully_shard(model, None, {"unused_parameters": False})
    backward_here(model, batches(1, 8)[0], ROUTES[0], microbatches=1)
    experts = model.blocks[1].experts
    reduced = [n for n in range(len(experts)) if experts[n].up.weight.grad is not None]
    assert reduced == ([0, 1], [2, 3])[dist.get_rank()]


# --- What no structure shows. ---


class Forked(TinyLM):
    """Each sample goes left or right, and nothing goes to the spare."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Block(), Block()
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.chosen: list[int] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, chosen = self.embed(ids), torch.tensor(self.chosen)
        for number, side in enumerate((self.left, self.right)):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                x = x.index_add(0, rows, side(x[rows]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return any(module is block for block in self.blocks)


SIDES = ((0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 1, 0, 1, 1))


@pytest.mark.smoke
@pytest.mark.fault("ranks run other branches of a model", "survived")
@pytest.mark.world_size(2)
def test_found_in_the_first_step():
    train_routed(Forked, {"gradient_sync": "last"}, "adamw", SIDES, microbatches=2)


@pytest.mark.world_size(2)
def test_all_units_when_the_first_step_does_not_show_it():
    config = {"unused_parameters": True}
    train_routed(Forked, config, "adamw", (SIDES[1], *SIDES[:2]))


CHANGING = (
    (0, 1, 0, 1, 0, 1, 0, 1),  # every rank goes both ways
    (0, 0, 0, 0, 1, 1, 1, 1),
    (1, 1, 1, 1, 0, 0, 0, 0),
    (0, 0, 0, 0, 0, 0, 0, 0),  # nobody goes right
    (0, 1, 0, 1, 0, 1, 0, 1),
    (1, 1, 1, 1, 1, 1, 1, 1),
)


class NeverSpare(Forked):
    """Leaves nothing out in a step in which both ways are taken."""

    def __init__(self) -> None:
        super().__init__()
        del self.spare


class Twice(NeverSpare):
    """The first block runs again at the end."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(self.norm(self.side(x)))

    def side(self, x: torch.Tensor) -> torch.Tensor:
        chosen = torch.tensor(self.chosen)
        for number, side in enumerate((self.left, self.right)):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                x = x.index_add(0, rows, side(x[rows]))
        return x


class Fork(nn.Module):
    """Each sample goes left or right."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Block(), Block()

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        for number, side in enumerate((self.left, self.right)):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                x = x.index_add(0, rows, side(x[rows]))
        return x


class Crossed(TinyLM):
    """A unit runs twice, and each sample goes the other way the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.fork = Fork()
        self.chosen: list[int] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, chosen = self.embed(ids), torch.tensor(self.chosen)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.fork(self.fork(x, chosen), 1 - chosen)))


@pytest.mark.fault("ranks use other parameters of a unit that runs twice", "survived")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("copies", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_another_use_is_the_last_on_each_rank(copies: bool):
    config: dict[str, Any] = {"wrap_policy": {"names": ["fork"]}}
    if copies:
        config |= {"data_parallel_replicate_degree": 2}
    train_routed(Crossed, config, "adamw", CHANGING)
    train_routed(Crossed, config, "sgd", CHANGING, microbatches=2)


@pytest.mark.table
@pytest.mark.fault("ranks run other branches of a model after the first step", "survived")
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("make", [NeverSpare, Forked, Twice])
def test_branches_that_differ_after_the_first_step(make: Callable[[], nn.Module], ranks: int):
    copies = {"gradient_sync": "reduce_scatter_only", "data_parallel_replicate_degree": 2}
    last = copies if ranks > 2 else {"reshard_after_forward": False}
    train_routed(make, {}, "adamw", CHANGING, microbatches=1)
    train_routed(make, {"gradient_sync": "last"}, "sgd", CHANGING, microbatches=2)
    train_routed(make, {"activation_checkpointing": True}, "sgd", CHANGING, microbatches=2)
    train_routed(make, last, "adamw", CHANGING, microbatches=2)
    train_routed(make, last, "sgd", CHANGING, microbatches=1)


class ForkedComposer(TinyComposer):
    """Samples go left or right by their first token."""

    def __init__(self) -> None:
        super().__init__()
        self.net = NeverSpare()

    def forward(self, batch: Any) -> torch.Tensor:
        self.net.chosen = (batch[0][:, 0] % 2).tolist()
        return self.net(batch[0])


@pytest.mark.table("last")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("sync", ["every", "last"])
def test_the_trainer_compares_from_the_next_batch_on(sync: str):
    samples = samples_of(len(CHANGING), 8)
    # Composer deals every other sample to a rank.
    ways = [[route[n // 2 + n % 2 * 4] for n in range(8)] for route in CHANGING]
    samples.tensors[0][:, 0] = torch.tensor(ways).flatten()
    oracle, model = built(ForkedComposer), built(ForkedComposer)
    optimizers = [OPTIMIZERS["adamw"](one.parameters()) for one in (oracle, model)]
    train_alone(oracle, optimizers[0], samples, 8)
    with installed():
        trainer = trainer_for(
            model,
            optimizers[1],
            samples,
            {"gradient_sync": sync},
            device_train_microbatch_size=2,
        )
        trainer.fit()
    assert largest_difference(model, oracle) <= 1e-6
    assert_same_state(*optimizers)
    run = run_of(trainer.state.model)
    assert run is not None
    unused = run.listener(UnusedParameters)
    assert unused is not None
    root = max(unused._groups, key=lambda group: len(group.fsdp_params))
    assert unused._always == {root}
    assert not unused.must_compare
    trainer.close()


@pytest.mark.matrix
@pytest.mark.world_size(2)
def test_nothing_is_left_in_the_store():
    """Ranks tell each other through it that they left something out."""
    counts: list[int] = []
    for _ in range(2):  # the first makes process groups too
        train_routed(NeverSpare, {}, "adamw", CHANGING)
        dist.barrier()
        counts.append(default_store().num_keys())
    assert counts[0] == counts[1]


@pytest.mark.world_size(2)
def test_a_dense_model_agrees_once():
    """On what the first step used; then nothing more is sent than without."""
    counts: list[int] = []
    for unused in (False, "auto"):
        model = TinyLM()
        prepare_fully_shard(model, None, {"unused_parameters": unused})
        for ids, targets in batches(2, 4):
            with Collectives() as sent:
                model_loss(model, (ids, targets)).backward()
            counts.append(sent.count)
    assert counts[2] == counts[0] + 2  # in the first step its order is compared too
    assert counts[3] == counts[1]


class Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func).startswith("c10d")
        return func(*args, **(kwargs or {}))


# --- Towers. ---


class Looking(TinyLM):
    """A tower that is called where there are images."""

    def __init__(self, trained: str) -> None:
        super().__init__()
        self.tower = nn.Sequential(*(Block() for _ in range(3)))
        self.bridge = nn.Linear(WIDTH, WIDTH)
        for name, param in self.named_parameters():
            param.requires_grad_(re.match(trained, name) is not None)
        self.chosen: list[int] = []
        """samples with an image have a one"""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        rows = torch.tensor(self.chosen).nonzero().flatten()
        if len(rows):
            seen = self.bridge(self.tower(x[rows].detach().cos()))
            x = x.index_add(0, rows, seen)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


IMAGES = (
    (0, 0, 0, 0, 1, 0, 0, 1),
    (0, 0, 0, 0, 0, 0, 0, 0),
    (0, 1, 1, 0, 0, 0, 0, 0),
    (1, 0, 0, 0, 0, 1, 0, 0),
)


TRAINED = {
    "everything": "",
    "all but the tower": "(?!tower)",
    "all but the embedding": "(?!embed)",
    "bridge and last blocks": "bridge|blocks.[12]",
    "bridge and adapters": "bridge|blocks.*bias",
    "bridge": "bridge",
}


@pytest.mark.table("bridge")
@pytest.mark.fault("ranks leave out a tower", "survived")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("trained", TRAINED)
def test_a_tower_that_some_ranks_leave_out(trained: str):
    for changes in ({}, {"activation_checkpointing": True, "gradient_sync": "last"}):
        config = {"unused_parameters": ["tower"], **changes}
        make = functools.partial(Looking, TRAINED[trained])
        model = train_routed(make, config, "adamw", IMAGES, microbatches=2)
        assert not any("tower" in name for name in units_of(model))
