"""Gathered parameters that a model writes to, exchanges, returns or keeps: one error everywhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from composer_fsdp2 import (
    PlanError,
    full_tensor,
    installed,
    prepare_fully_shard,
    summon_full_params,
)
from tests.support.models import Block, TinyComposer, TinyLM, batches, lm_loss
from tests.support.training import samples_of, trainer_for

WIDTH = 10
KEPT: list[torch.Tensor] = []


class Writes(Block):
    """Does something to `up.weight` in forward."""

    def __init__(self, deed: Callable[[Writes], object]) -> None:
        super().__init__()
        self.steps = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.deed = deed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.deed(self)
        return super().forward(x)


def clamp(block: Writes) -> None:
    with torch.no_grad():
        block.up.weight.clamp_(-0.01, 0.01)


def copy(block: Writes) -> None:
    with torch.no_grad():
        block.up.weight.copy_(torch.ones_like(block.up.weight))


def write_data(block: Writes) -> None:
    block.up.weight.data.mul_(0.5)


def flip_data(block: Writes) -> None:
    block.up.weight.data.copy_(block.up.weight.detach().flip(0))


def assign_data(block: Writes) -> None:
    block.up.weight.data = block.up.weight.data * 0.5


def count(block: Writes) -> None:
    block.steps += 1


def on_one_rank(block: Writes) -> None:
    if dist.get_rank() == 1:
        block.up.weight.data.mul_(0.5)


def assign_module(block: Writes) -> None:
    del block.up.weight
    block.up.weight = nn.Parameter(torch.ones(2 * WIDTH, WIDTH))


DEEDS: dict[str, tuple[Callable[[Writes], object], str]] = {
    "clamped": (clamp, r"'blocks\.1\.up\.weight' was changed in place"),
    "copied to": (copy, r"'blocks\.1\.up\.weight' was changed in place"),
    "through data": (write_data, r"'blocks\.1\.up\.weight' was changed in place"),
    "another order": (flip_data, r"'blocks\.1\.up\.weight' was changed in place"),
    "data assigned": (assign_data, r"'blocks\.1\.up\.weight' was changed in place"),
    "counted up": (count, r"'blocks\.1\.steps' was changed in place"),
    "on one rank": (on_one_rank, r"On rank 1: 'blocks\.1\.up\.weight' was changed in place"),
    "exchanged": (assign_module, r"in the place of 'blocks\.1\.up\.weight'"),
}


def model_with(block: nn.Module, **settings: Any) -> TinyLM:
    torch.manual_seed(0)
    model = TinyLM()
    model.blocks[1] = block
    names = ["blocks.0", "blocks.1", "blocks.2"]
    prepare_fully_shard(model, None, {"wrap_policy": {"names": names}, **settings})
    return model


def step(model: nn.Module) -> None:
    ids, targets = batches(1, 4)[0]
    lm_loss(model(ids), targets).backward()


@contextlib.contextmanager
def refused(match: str) -> Iterator[None]:
    """Every rank raises the same error, and stays in step."""
    with pytest.raises(PlanError, match=match) as caught:
        yield
    said: list[Any] = [None, None]
    dist.all_gather_object(said, str(caught.value))
    assert said[0] == said[1]


@pytest.mark.table("training-exchanged", "evaluation-through data")
@pytest.mark.smoke
@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", DEEDS)
@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
def test_a_write_in_forward_is_refused(name: str, trains: bool):
    deed, match = DEEDS[name]
    model = model_with(Writes(deed))
    with refused(match), torch.set_grad_enabled(trains):
        model(batches(1, 4)[0][0])


@pytest.mark.world_size(2)
@pytest.mark.parametrize("setting", [{"reshard_after_forward": False}, {"order_check": "never"}])
def test_a_write_is_refused_whatever_is_kept(setting: dict[str, Any]):
    model = model_with(Writes(write_data), **setting)
    with refused("was changed in place"):  # where memory is kept, it is freed after backward
        for _ in range(2):
            step(model)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("where", ["hook of a submodule", "hook of the unit", "child"])
def test_a_write_by_somebody_else_is_refused(where: str):
    block = Block()
    if where == "hook of a submodule":
        block.up.register_forward_pre_hook(lambda up, _: write_data_of(up))
    elif where == "hook of the unit":
        block.register_forward_hook(lambda block, *_: write_data_of(block.up))
    else:
        forward = block.up.forward
        block.up.forward = lambda x: (write_data_of(block.up), forward(x))[1]
    model = model_with(block)
    with refused(r"'blocks\.1\.up\.weight' was changed in place"):
        step(model)


def write_data_of(linear: Any) -> None:
    linear.weight.data.mul_(0.5)


@pytest.mark.world_size(2)
def test_a_write_in_a_later_step_is_refused_too():
    calls: list[int] = []

    def later(block: Writes) -> None:
        calls.append(1)
        if len(calls) > 2:
            clamp(block)

    model = model_with(Writes(later))
    step(model)
    step(model)
    with refused("was changed in place"):
        step(model)


@pytest.mark.world_size(2)
def test_the_trainer_says_so_before_it_steps():
    model = TinyComposer()
    model.net.blocks[1] = Writes(clamp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with installed():
        trainer = trainer_for(model, optimizer, samples_of(1, 8))
        with refused(r"'net\.blocks\.1\.up\.weight' was changed in place"):
            trainer.fit()
    trainer.close()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
def test_parameters_may_be_replaced_before_the_first_forward(trains: bool):
    """FSDP2 takes the new ones with the first forward, as with weights that are read late."""
    model = TinyLM()
    prepare_fully_shard(model, None, {"wrap_policy": {"classes": ["Block"]}})
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = nn.Parameter(param.detach().clone())
    with torch.set_grad_enabled(trains):
        for _ in range(2):
            model(batches(1, 4)[0][0])


@pytest.mark.world_size(2)
def test_buffers_and_weights_between_steps_may_be_written():
    def count_in_buffer(block: Writes) -> None:
        block.seen += 1

    block = Writes(count_in_buffer)
    block.register_buffer("seen", torch.zeros(()))
    model = model_with(block)
    for _ in range(3):
        step(model)
        with summon_full_params(model), torch.no_grad():
            model.blocks[1].up.weight.clamp_(-0.05, 0.05)
    assert model.blocks[1].seen == 3
    with summon_full_params(model, writeback=False):
        assert model.blocks[1].up.weight.abs().max() <= 0.05


# --- functional_call and transformations of torch.func. ---


class CallsBlocks(TinyLM):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(self.norm(x))

    call: Any


def with_its_own(block: nn.Module, x: torch.Tensor) -> Any:
    return functional_call(block, dict(block.named_parameters()), (x,))


def with_others(block: nn.Module, x: torch.Tensor) -> Any:
    others = {name: torch.ones(param.shape) for name, param in block.named_parameters()}
    return functional_call(block, others, (x,))


def with_made_of_its_own(block: nn.Module, x: torch.Tensor) -> Any:
    doubled = {name: param * 2 for name, param in block.named_parameters()}
    return functional_call(block, doubled, (x,))


def mapped(block: nn.Module, x: torch.Tensor) -> Any:
    return torch.vmap(block)(x)


def derived(block: nn.Module, x: torch.Tensor) -> Any:
    return torch.func.grad(lambda y: block(y).sum())(x)


def _calling(call: Any) -> TinyLM:
    torch.manual_seed(0)
    model = CallsBlocks()
    model.call = call
    return model


@pytest.mark.world_size(2)
@pytest.mark.parametrize("call", [with_others, with_made_of_its_own, mapped, derived])
def test_another_way_to_call_a_unit_is_refused(call: Any):
    model = _calling(call)
    names = ["blocks.0", "blocks.1", "blocks.2"]
    prepare_fully_shard(model, None, {"wrap_policy": {"names": names}})
    with refused("functional_call|torch.func"):
        step(model)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_functional_call_with_the_units_own_parameters_is_right(reshard: bool):
    plain, model = _calling(with_its_own), _calling(with_its_own)
    names = ["blocks.0", "blocks.1", "blocks.2"]
    settings = {"wrap_policy": {"names": names}, "reshard_after_forward": reshard}
    prepare_fully_shard(model, None, settings)
    step(plain)
    step(model)
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad.full_tensor(), atol=1e-6)


class Returns(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), {"weight": self.up.weight[:3]}


class TakesReturned(TinyLM):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
            if isinstance(x, tuple):
                x = x[0] + F.linear(x[0], x[1]["weight"]).mean()
        return self.head(self.norm(x))


@pytest.mark.world_size(2)
def test_a_unit_that_returns_its_parameter_is_refused():
    model = TakesReturned()
    model.blocks[1] = Returns()
    names = ["blocks.0", "blocks.1", "blocks.2"]
    prepare_fully_shard(model, None, {"wrap_policy": {"names": names}})
    with refused(r"unit 'blocks\.1' returns its parameter 'blocks\.1\.up\.weight'"):
        step(model)


class ContentsRead(TorchDispatchMode):
    """Counts the parameters whose bits are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.view.dtype
        return func(*args, **(kwargs or {}))


@pytest.mark.world_size(2)
def test_contents_are_read_in_the_first_step_alone():
    """In a backward grad mode is off, as in an evaluation."""
    model = model_with(Block())
    read = []
    for _ in range(3):
        with ContentsRead() as seen:
            step(model)
        read.append(seen.count)
    assert read[0] > 0
    assert read[1:] == [0, 0]
    with ContentsRead() as seen, torch.no_grad():
        model(batches(1, 4)[0][0])
    assert seen.count > 0


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(2)
def test_torchs_debug_mode_may_stay_alive():
    """It notes the parameters of modules, and computes nothing with them."""
    modes = []
    model = TinyLM()
    prepare_fully_shard(model, None, {})
    ids, targets = batches(1, 4)[0]
    for _ in range(3):
        with CommDebugMode() as mode:
            lm_loss(model(ids), targets).backward()
        assert mode.get_total_counts() > 0
        modes.append(mode)
    lm_loss(model(ids), targets).backward()


@pytest.mark.world_size(2)
def test_full_tensor_of_units_that_stayed_gathered():
    """They show a copy in the compute dtype, inside the root unit and in it."""
    torch.manual_seed(0)
    model = TinyLM()
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    config = {"reshard_after_forward": False, "mixed_precision": {"param_dtype": "bf16"}}
    prepare_fully_shard(model, None, config, device="cpu")
    for name, value in expected.items():
        with torch.no_grad():
            model(batches(1, 4)[0][0])
        assert torch.equal(full_tensor(model, name), value), name
