"""An optimizer steps local shards with the bits of DTensors, and nobody else sees a difference."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from composer.optim import DecoupledAdamW, DecoupledSGDW
from torch import nn, optim
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from composer_fsdp2 import Muon, PlanError, prepare_fully_shard
from composer_fsdp2.errors import ShardReadError
from composer_fsdp2.torch_private.tensors import local_tensor
from tests.support.pairs import parametrize_by_turns
from tests.support.parity import full

Make = Callable[[Iterable[Any]], optim.Optimizer]


class OwnSign(optim.Optimizer):
    """Element by element, and known to nobody."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["count"] = state.get("count", 0) + 1
                    state["mean"] = state.get("mean", torch.zeros_like(param)).lerp(param.grad, 0.1)
                    param.sub_(group["lr"] * state["mean"].sign())
        return loss


class OwnNorm(OwnSign):
    """Looks across the elements of a parameter, and its name does not tell."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * param.grad / torch.linalg.vector_norm(param.grad))
        return loss


class Lamb(OwnNorm):
    pass


class WithAPlace(OwnSign):
    """Holds more than plain data: a copy of it could reach what is not its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.elsewhere = nn.Linear(1, 1)


OPTIMIZERS: dict[str, Make] = {
    "adam": lambda p: optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "adamw": lambda p: optim.AdamW(p, lr=1e-2, amsgrad=True),
    "adamw foreach": lambda p: optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw fused": lambda p: optim.AdamW(p, lr=1e-2, fused=True),
    "adamw capturable rate": lambda p: optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    "adadelta": lambda p: optim.Adadelta(p, lr=1e-2),
    "adagrad": lambda p: optim.Adagrad(p, lr=1e-2, lr_decay=0.1),
    "adamax": lambda p: optim.Adamax(p, lr=1e-2),
    "asgd": lambda p: optim.ASGD(p, lr=1e-2),
    "nadam": lambda p: optim.NAdam(p, lr=1e-2, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": lambda p: optim.RAdam(p, lr=1e-2),
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    "sgd": lambda p: optim.SGD(p, lr=1e-2),
    "sgd momentum": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "decoupled adamw": lambda p: DecoupledAdamW(p, lr=1e-2, weight_decay=1e-4, amsgrad=True),
    "decoupled sgdw": lambda p: DecoupledSGDW(p, lr=1e-2, momentum=0.9, weight_decay=1e-4),
    "own": OwnSign,
}


def lion(params: Any) -> optim.Optimizer:
    from llmfoundry.optim import DecoupledLionW

    return DecoupledLionW(params, lr=1e-2, weight_decay=1e-4)


OPTIMIZERS["lion"] = lion


class Layers(nn.Module):
    """Many small parameters of uneven sizes, two large ones, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        small = [nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(3)]
        large = [nn.Linear(5, 6001), nn.Linear(6001, 5)]
        self.layers = nn.ModuleList([*small, nn.Sequential(*large), nn.LayerNorm(5)])
        small[2][0].bias.requires_grad_(False)

    def forward(self, inputs: torch.Tensor, left_out: int = -1) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != left_out:
                inputs = layer(inputs)
        return inputs


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Layers()


def prepared(make: Make, **config: Any) -> tuple[nn.Module, optim.Optimizer]:
    model = make_model()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    prepare_fully_shard(model, optimizer, {"wrap_policy": {"classes": ["Sequential"]}, **config})
    return model, optimizer


def built_later(make: Make, **config: Any) -> tuple[nn.Module, optim.Optimizer]:
    prepare_fully_shard(model := make_model(), None, config)
    return model, make(model.parameters())


def train(model: nn.Module, optimizer: optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        # One layer is left out in each step.
        (model(torch.randn(4, 5), step % 3).square().mean() * 100).backward()
        optimizer.step()


def same_bits(one: Any, other: Any) -> bool:
    if isinstance(one, DTensor):
        assert type(other) is type(one)
        assert one.placements == other.placements
        assert one.shape == other.shape
        return torch.equal(one.detach().to_local(), other.detach().to_local())
    assert type(one) is type(other)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def assert_same(one: tuple[nn.Module, optim.Optimizer], other: Any) -> None:
    for (name, p), q in zip(one[0].named_parameters(), other[0].parameters(), strict=True):
        assert same_bits(p, q), name
        mine, yours = one[1].state.get(p, {}), other[1].state.get(q, {})
        assert list(mine) == list(yours), name
        for key in mine:
            assert same_bits(mine[key], yours[key]), (name, key)


@pytest.mark.table("sgd")
@pytest.mark.world_size(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gives_the_bits_of_dtensors(name: str):
    local, dtensors = (prepared(OPTIMIZERS[name], local_step=how) for how in ("auto", False))
    for pair in (local, dtensors):
        train(*pair, range(5))
    assert_same(local, dtensors)
    with CommDebugMode() as traffic:
        local[1].step()
    assert traffic.get_total_counts() == 0


@pytest.mark.table
@pytest.mark.world_size(4)
@pytest.mark.parametrize("name", ["decoupled adamw", "adamw fused", "own"])
def test_gives_the_bits_of_dtensors_in_hsdp(name: str):
    degrees = {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2}
    pairs = [prepared(OPTIMIZERS[name], local_step=how, **degrees) for how in ("auto", False)]
    for pair in pairs:
        train(*pair, range(4))
    assert_same(*pairs)


def sees_plain_tensors(make: Make, **config: Any) -> bool:
    """Whether the step itself gets plain tensors."""
    model = make_model()
    optimizer = make(model.parameters())
    prepare_fully_shard(model, optimizer, config)
    return looked_at(model, optimizer)


def looked_at(model: nn.Module, optimizer: optim.Optimizer) -> bool:
    seen: list[Any] = []
    hook = optimizer.register_step_pre_hook(lambda _, args, __: seen.extend(args[0].param_groups))
    train(model, optimizer, [0])
    hook.remove()
    return not any(isinstance(param, DTensor) for group in seen for param in group["params"])


@pytest.mark.world_size(2)
def test_auto_tries_what_it_does_not_know():
    assert sees_plain_tensors(optim.SGD)
    assert sees_plain_tensors(OwnSign)
    assert not sees_plain_tensors(OwnNorm)
    assert not sees_plain_tensors(Lamb)
    assert not sees_plain_tensors(WithAPlace)
    assert sees_plain_tensors(WithAPlace, local_step=True)
    assert not sees_plain_tensors(optim.SGD, local_step=False)


@pytest.mark.world_size(2)
def test_trying_leaves_no_trace():
    states = []
    for how in ("auto", False):
        torch.manual_seed(3)
        _, optimizer = prepared(OwnSign, local_step=how)
        assert not optimizer.state
        states.append(torch.random.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.world_size(2)
def test_one_that_looks_across_elements_is_refused_if_asked_for():
    with pytest.raises(PlanError, match="local_step: auto"):
        prepared(Lamb, local_step=True)


class Mixes(OwnSign):
    """Element by element, with a plain tensor of its own, which torch refuses beside DTensors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.left_out = {"bias"}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.addcmul_(param.grad, torch.full([1], -group["lr"]))


class WhitensRows(OwnSign):
    """As Shampoo does: a product of the matrix with itself, in a plain tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    flat = param.grad.reshape(len(param), -1)
                    left = flat @ flat.T + torch.eye(len(flat))
                    param.sub_(torch.linalg.solve(left, flat).view_as(param), alpha=group["lr"])


def adafactor(params: Any) -> optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(params)  # without a rate, which it finds itself


REFUSED: dict[str, Make] = {
    "whitens": WhitensRows,
    "adafactor": adafactor,
    "adafactor with rate": lambda p: type(adafactor([nn.Parameter(torch.ones(1))]))(
        p, lr=0.1, relative_step=False, beta1=0.9
    ),
}


@pytest.mark.world_size(3)
@pytest.mark.parametrize("how", ["auto", False])
@pytest.mark.parametrize("name", REFUSED)
def test_one_that_can_step_neither_is_refused_on_every_rank(name: str, how: Any):
    with pytest.raises(PlanError, match=r"cannot step sharded parameters.* AdamW") as caught:
        prepared(REFUSED[name], local_step=how)
    said = [""] * 3
    torch.distributed.all_gather_object(said, str(caught.value))
    assert len(set(said)) == 1


class Replaces(OwnSign):
    """Gives parameters other memory, which FSDP2 does not gather."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                    param.data = param.data - group["lr"] * mean.lerp_(param.grad, 0.1).data


class InPlace(OwnSign):
    """Writes to `param.data`, the memory that is there."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.copy_(param.data - group["lr"] * param.grad.data)


class ReplacesWithAPlace(Replaces):
    """Cannot be copied, so that nothing is tried."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.place = object()


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "config", [{}, {"local_step": True, "optimizer_state": {"device": "cpu"}}], ids=str
)
def test_one_that_assigns_to_data_trains_on_local_shards(config: dict[str, Any]):
    whole = make_model()
    plain = whole, Replaces([p for p in whole.parameters() if p.requires_grad])
    sharded = prepared(Replaces, **config)
    for pair in (plain, sharded):
        train(*pair, range(3))
    for value, shards in zip(whole.parameters(), sharded[0].parameters(), strict=True):
        assert (value - full(shards)).abs().max() <= 1e-6


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("how", "make", "config"),
    [
        (prepared, Replaces, {"local_step": False}),
        (prepared, ReplacesWithAPlace, {}),
        (built_later, Replaces, {}),
    ],
)
def test_one_that_assigns_to_data_of_dtensors_is_refused(how: Any, make: Make, config: Any):
    with pytest.raises(ShardReadError, match=r"\(`tensor.data = value`\)"):
        train(*how(make, **config), range(1))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("how", ["auto", False])
def test_one_that_changes_data_in_place_trains(how: Any):
    """Built later, it steps DTensors; their first step is looked at, and found to be right."""
    whole = make_model()
    plain = whole, InPlace([p for p in whole.parameters() if p.requires_grad])
    sharded = built_later(InPlace, local_step=how)
    for pair in (plain, sharded):
        train(*pair, range(3))
    for value, shards in zip(whole.parameters(), sharded[0].parameters(), strict=True):
        assert (value - full(shards)).abs().max() <= 1e-6


@pytest.mark.world_size(2)
def test_one_that_fails_on_dtensors_steps_local_shards_if_it_may():
    sharded = prepared(Mixes)
    whole = make_model()
    plain = whole, Mixes([p for p in whole.parameters() if p.requires_grad])
    for pair in (sharded, plain):
        train(*pair, range(3))
    for p, q in zip(sharded[0].parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q)


@pytest.mark.world_size(2)
def test_one_that_takes_norms_has_them_of_the_whole():
    sharded = prepared(Lamb)
    whole = make_model()
    plain = whole, Lamb([p for p in whole.parameters() if p.requires_grad])
    for pair in (sharded, plain):
        train(*pair, range(3))
    for p, q in zip(sharded[0].parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q)


@pytest.mark.world_size(2)
def test_hooks_schedulers_and_state_see_dtensors():
    model = make_model()
    optimizer = DecoupledAdamW(model.parameters(), lr=1e-2)
    schedule = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    prepare_fully_shard(model, optimizer, {})
    seen: list[Any] = []

    def look(one: optim.Optimizer, *_: Any) -> None:
        assert one is optimizer
        seen.extend(one.param_groups[0]["params"])
        seen.extend(state["exp_avg"] for state in one.state.values())

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    for step in range(2):
        train(model, optimizer, [step])
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 1e-2 / 4
    assert len(seen) > 4 * len(list(model.parameters()))
    assert all(isinstance(one, DTensor) for one in seen)


@pytest.mark.table("adamw foreach")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["decoupled adamw", "adamw foreach", "sgd momentum", "own"])
def test_a_closure_runs_once_and_its_gradients_are_stepped(name: str):
    pairs = [prepared(OPTIMIZERS[name], local_step=how) for how in ("auto", False)]
    for model, optimizer in pairs:
        for step in range(3):
            runs = []

            def closure(model=model, optimizer=optimizer, step=step, runs=runs):
                optimizer.zero_grad()
                torch.manual_seed(step)
                loss = model(torch.randn(4, 5)).square().mean()
                loss.backward()
                runs.append(1)
                return loss.item()

            assert isinstance(optimizer.step(closure=closure), float)
            assert len(runs) == 1
    assert_same(*pairs)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["decoupled adamw", "adamw foreach", "sgd momentum", "own"])
def test_settings_that_change_while_a_closure_runs_are_stepped_with(name: str):
    """Composer's Trainer calls `before_train_batch` and its like inside of the closure."""
    pairs = [prepared(OPTIMIZERS[name], local_step=how) for how in ("auto", False)]
    for model, optimizer in pairs:
        for number, rate in enumerate((0.0, 0.01, 0.0)):
            before = [full(param).clone() for param in model.parameters()]

            def closure(model=model, optimizer=optimizer, rate=rate):
                optimizer.param_groups[0]["lr"] = rate
                optimizer.noted = rate
                loss = model(torch.full((4, 5), 0.5)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure=closure)
            optimizer.zero_grad()
            assert optimizer.param_groups[0]["lr"] == optimizer.noted == rate
            after = [full(param) for param in model.parameters()]
            is_same = all(map(torch.equal, before, after))
            assert is_same is (rate == 0.0), number
    assert_same(*pairs)


class LooksFirst(optim.Adam):
    """Asks for its groups before it runs the closure, and keeps them."""

    def step(self, closure: Any = None) -> Any:
        groups, loss = self.param_groups, closure()
        for group in groups:
            for param in group["params"]:
                if param.grad is not None:
                    with torch.no_grad():
                        param.sub_(param.grad, alpha=0.1)
        return loss


@pytest.mark.world_size(2)
def test_groups_asked_for_before_the_closure_get_its_gradients():
    pairs = [prepared(LooksFirst, local_step=how) for how in (True, False)]
    for model, optimizer in pairs:
        for step in range(3):

            def closure(model=model, step=step):
                model.zero_grad()
                torch.manual_seed(step)
                model(torch.randn(4, 5)).square().mean().backward()
                return 1.0

            optimizer.step(closure)
    assert_same(*pairs)


@pytest.mark.table
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "name", ["adamw fused", "adamax", "asgd", "sgd", "decoupled adamw", "lion"]
)
def test_state_that_is_loaded_goes_on(name: str):
    local, dtensors = (prepared(OPTIMIZERS[name], local_step=how) for how in ("auto", False))
    for pair in (local, dtensors):
        train(*pair, range(2))
        saved = copy.deepcopy(pair[1].state_dict())
        train(*pair, range(2, 4))
        pair[1].load_state_dict(saved)
        train(*pair, range(4, 6))
        with torch.no_grad():  # in place, as a checkpoint is read
            for state in pair[1].state.values():
                for value in state.values():
                    if isinstance(value, DTensor):
                        value.to_local().mul_(0.5)
        train(*pair, range(6, 8))
        pair[1].state.clear()
        train(*pair, range(8, 10))
    assert_same(local, dtensors)


@pytest.mark.world_size(2)
def test_an_optimizer_that_is_built_later_steps_local_shards():
    local = prepared(lambda p: DecoupledAdamW(p, lr=1e-2))
    later = built_later(lambda p: DecoupledAdamW(p, lr=1e-2))
    asked = built_later(WithAPlace, local_step=True)
    train(*asked, [0])
    assert looked_at(*asked)
    for pair in (local, later):
        train(*pair, range(3))
    assert_same(local, later)
    assert [looked_at(*pair) for pair in (local, later)] == [True, True]
    assert not looked_at(*built_later(optim.SGD, local_step=False))
    assert not looked_at(*built_later(OwnSign))
    with pytest.raises(PlanError, match="local_step: auto"):
        train(*built_later(Lamb, local_step=True), [0])
    told = pytest.warns(UserWarning, match="'optimizer_state' is set .* given no optimizer")
    with told if dist.get_rank() == 0 else contextlib.nullcontext():
        built_later(optim.SGD, optimizer_state={"dtype": "bf16"})


@pytest.mark.world_size(2)
def test_an_optimizer_of_two_models_that_is_built_later():
    trained = []
    for how in ("auto", False):
        models = [make_model(), make_model()]
        for model in models:
            prepare_fully_shard(model, None, {"local_step": how})
        optimizer = optim.Adam([param for model in models for param in model.parameters()])
        for step in range(3):
            train(models[0], optimizer, [step])
            models[1](torch.ones(4, 5)).sum().backward()
        assert looked_at(models[0], optimizer) == (how == "auto")
        trained.append(models)
    for one, other in zip(*trained, strict=True):
        assert all(map(same_bits, one.parameters(), other.parameters()))


@pytest.mark.world_size(2)
def test_gradients_that_a_later_hook_replaces_are_refused():
    model, optimizer = prepared(optim.SGD)

    def halve(*_: Any) -> None:
        for param in model.parameters():
            if param.grad is not None:
                param.grad = param.grad * 0.5

    handle = optimizer.register_step_pre_hook(halve)
    with pytest.raises(PlanError, match=r"Change them in place"):
        train(model, optimizer, [0])
    handle.remove()
    train(model, optimizer, [1])


@pytest.mark.world_size(2)
def test_a_group_that_is_added_later_is_stepped():
    pairs = []
    for how in ("auto", False):
        model = make_model()
        first, *others = [p for p in model.parameters() if p.requires_grad]
        optimizer = DecoupledAdamW([first], lr=1e-2)
        prepare_fully_shard(model, optimizer, {"local_step": how})
        sharded = [p for p in model.parameters() if p.requires_grad]
        train(model, optimizer, range(2))
        optimizer.add_param_group({"params": sharded[1:], "lr": 0.1})
        train(model, optimizer, range(2, 5))
        pairs.append((model, optimizer))
        assert len(others) == len(sharded) - 1
    assert_same(*pairs)


def gradients(model: nn.Module) -> list[Any]:
    found = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
    return list(map(weakref.ref, found))


@pytest.mark.world_size(2)
def test_gradients_are_let_go_after_the_step():
    model, optimizer = prepared(OPTIMIZERS["adamw foreach"])
    train(model, optimizer, [0])
    held = gradients(model)
    optimizer.zero_grad()
    gc.collect()
    assert not any(one() is not None for one in held)


@pytest.mark.world_size(2)
def test_a_closure_computes_without_the_gradients_of_the_step_before():
    model, optimizer = prepared(OPTIMIZERS["decoupled adamw"])
    alive, held = [], []

    def closure():
        optimizer.zero_grad()
        gc.collect()
        alive.append(sum(one() is not None for one in held))
        loss = model(torch.randn(4, 5)).square().mean()
        loss.backward()
        held[:] = gradients(model)
        return loss.item()

    for _ in range(3):
        optimizer.step(closure=closure)
    assert alive == [0, 0, 0]
    assert len(held) > 1


@pytest.mark.world_size(2)
def test_a_step_that_raises_leaves_the_optimizer_as_it_was(monkeypatch):
    pairs = [prepared(OPTIMIZERS["decoupled adamw"], local_step=how) for how in ("auto", False)]
    for model, optimizer in pairs:
        train(model, optimizer, [0])
        held = optimizer.param_groups[0]["params"], list(optimizer.state)
        with monkeypatch.context() as patch:
            patch.setattr(DecoupledAdamW, "adamw", staticmethod(lambda *_, **__: 1 / 0))
            with pytest.raises(ZeroDivisionError):
                optimizer.step()
        assert optimizer.param_groups[0]["params"] is held[0]
        assert all(p is q for p, q in zip(optimizer.state, held[1], strict=True))
        for state in optimizer.state.values():
            state["step"].fill_(1)  # counted before it raised, for those that were come to
        train(model, optimizer, range(1, 3))
    assert_same(*pairs)


@pytest.mark.world_size(2)
def test_a_frozen_parameter_that_is_thawed_is_stepped():
    pairs = []
    for how in ("auto", False):
        model = make_model()
        optimizer = DecoupledAdamW(model.parameters(), lr=1e-2)
        prepare_fully_shard(model, optimizer, {"local_step": how})
        train(model, optimizer, range(2))
        for param in model.parameters():
            param.requires_grad_(True)
        train(model, optimizer, range(2, 5))
        pairs.append((model, optimizer))
    assert_same(*pairs)


CHANGED: dict[str, Make] = {
    **OPTIMIZERS,
    "sgd without": lambda p: optim.SGD(p, lr=1e-2, momentum=0.0, foreach=False),
    "decoupled adamw plain": lambda p: DecoupledAdamW(p, lr=1e-2),
}


def _turn_on(optimizer: optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group.update({"momentum": 0.9} if "momentum" in group else {"amsgrad": True})
        for param in group["params"] if "amsgrad" in group else ():
            if param in optimizer.state:
                optimizer.state[param]["max_exp_avg_sq"] = torch.ones_like(param)


def _exchange_state(optimizer: optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, DTensor):
                state[key] = value.detach().clone() * 2


def _freeze(optimizer: optim.Optimizer) -> None:
    param = optimizer.param_groups[0]["params"][4]
    param.requires_grad_(False)
    param.grad = None


@pytest.mark.table("sgd without-_exchange_state")
@pytest.mark.world_size(2)
@parametrize_by_turns(
    name=["sgd without", "adamw fused", "adamw foreach", "decoupled adamw plain"],
    change=[_exchange_state, _turn_on, _freeze],
)
def test_changes_between_steps_are_seen(name: str, change: Callable[[Any], None]):
    """Of settings, state and what is trained, after steps in which nothing had changed."""
    pairs = [prepared(CHANGED[name], local_step=how) for how in ("auto", False)]
    for model, optimizer in pairs:
        train(model, optimizer, [3, 6, 9, 12])
        change(optimizer)
        train(model, optimizer, [15, 18, 21])
    assert_same(*pairs)


def _kept(state: dict[Any, Any]) -> dict[Any, Any]:
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


def _stop(*_: Any) -> None:
    raise MemoryError


TAKEN_BACK = itertools.cycle(itertools.product(([0, 3], []), (False, True)))
"""steps before, which give some parameters a state or none; whether the step raises"""


@pytest.mark.table("adagrad")
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("name", "before", "raises"),
    [pytest.param(name, *how, id=name) for name, how in zip(CHANGED, TAKEN_BACK, strict=False)],
)
def test_a_step_that_is_taken_back_leaves_nothing(name: str, before: list[int], raises: bool):
    """As another attempt at a batch does: the state is that of before, also where it was none."""
    pairs = [prepared(CHANGED[name], local_step=how) for how in ("auto", False)]
    for model, optimizer in pairs:
        train(model, optimizer, before)
        state = {param: _kept(held) for param, held in optimizer.state.items()}
        weights = [param.detach().clone() for param in model.parameters()]
        hooks = [optimizer.register_step_post_hook(_stop)] if raises else []
        with contextlib.suppress(MemoryError):
            train(model, optimizer, [4])
        for hook in hooks:
            hook.remove()
        optimizer.state.clear()
        optimizer.state.update(state)
        with torch.no_grad():
            for param, weight in zip(model.parameters(), weights, strict=True):
                param.copy_(weight)
        train(model, optimizer, [4, 5])
    assert_same(*pairs)


def muon(params: Any) -> optim.Optimizer:
    return Muon(params, adamw="*")


@pytest.mark.world_size(2)
@pytest.mark.parametrize("make", [optim.SGD, muon])
def test_parameters_count_that_they_were_changed(make: Make):
    model, optimizer = prepared(make)
    train(model, optimizer, [1])
    before = [param._version for param in model.parameters()]
    optimizer.step()
    stepped = [param.grad is not None for param in model.parameters()]
    after = [param._version for param in model.parameters()]
    assert [now > then for now, then in zip(after, before, strict=True)] == stepped
