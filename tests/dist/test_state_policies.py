"""State that is kept in another form between steps: what it takes, what it gives, what it costs."""

from __future__ import annotations

import contextlib
import copy
import functools
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
from composer_fsdp2.optim.codec import Stored
from composer_fsdp2.optim.state import KeptState
from tests.support.pairs import parametrize_by_turns

Make = Callable[[Iterable[Any]], optim.Optimizer]
POLICIES: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bf16"},
    "8 bits": {"bits": 8},
    "cpu": {"device": "cpu"},
    "bf16 cpu": {"dtype": "bf16", "device": "cpu"},
    "8 bits cpu": {"bits": 8, "device": "cpu"},
}


class Layers(nn.Module):
    """Rows that no number of ranks divides, also fewer than ranks; small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 301)
        self.mix = nn.Parameter(torch.randn(7, 43, 31) * 0.1)
        self.norm = nn.LayerNorm(31)
        self.down = nn.Linear(31, 24)
        self.wide = nn.Linear(24, 5003)
        self.pair = nn.Parameter(torch.randn(2, 2600))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.up(inputs).tanh().view(-1, 7, 43)
        found = self.norm(torch.einsum("brc,rcd->bd", found, self.mix))
        return self.wide(self.down(found).tanh()) + self.pair.mean()


class OwnSign(optim.Optimizer):
    """Element by element, and known to nobody."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    mean = self.state[param].get("mean", torch.zeros_like(param))
                    self.state[param]["mean"] = mean.lerp(param.grad, 0.1)
                    self.change(param, self.state[param]["mean"], group["lr"])

    def change(self, param: torch.Tensor, mean: torch.Tensor, rate: float) -> None:
        param.sub_(rate * mean.sign())


class OwnNorm(OwnSign):
    """Looks across the elements of a parameter, and its name does not tell."""

    def change(self, param: torch.Tensor, mean: torch.Tensor, rate: float) -> None:
        param.sub_(rate * mean / torch.linalg.vector_norm(mean))


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
    from composer_fsdp2.parallel.form import form_of

    return form_of(like).shard(full, like)


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


@pytest.mark.table("adamax", "sgd")
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


@pytest.mark.table("rmsprop-8 bits cpu")
@pytest.mark.world_size(2)
@parametrize_by_turns(name=[name for name in OPTIMIZERS if name != "asgd"], policy=POLICIES)
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


def bytes_of(state: KeptState) -> int:
    """Bytes of all moments on this rank."""
    moments = [one for one in state.data.values() if isinstance(one, Stored)]
    return sum(one.values.nbytes + one.exponents.nbytes for one in moments)


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
            assert bytes_of(state) == expected, name
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


@pytest.mark.table("cpu-decoupled adamw", "bf16 cpu-sgd")
@pytest.mark.parametrize("name", ["decoupled adamw", "sgd"])
@pytest.mark.parametrize("policy", POLICIES)
def test_one_two_and_three_ranks_have_the_same_bits(policy: str, name: str, ranks: Any):
    found = [ranks(world, run_of, policy, name)[0] for world in (1, 2, 3)]
    for other in found[1:]:
        assert_equal(found[0], other)


@pytest.mark.matrix
@pytest.mark.world_size(4)
@pytest.mark.parametrize("policy", ["bf16", "8 bits cpu"])
def test_copies_have_the_same_bits(policy: str):
    degrees = {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2}
    found = []
    for config in (degrees, {}):
        pair = prepared(OPTIMIZERS["adamw"], POLICIES[policy], **config)
        step(*pair, range(5))
        found.append(everything(*pair))
    assert_equal(*found)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found[0])
    assert_equal(gathered[0], gathered[2])


# --- What others do with it. ---


@pytest.mark.table("cpu-sgd")
@pytest.mark.world_size(2)
@parametrize_by_turns(policy=POLICIES, name=["decoupled adamw", "adamw fused", "sgd", "rmsprop"])
def test_state_that_is_loaded_goes_on(name: str, policy: str):
    pairs = [prepared(OPTIMIZERS[name], POLICIES[policy]) for _ in range(2)]
    for pair in pairs:
        step(*pair, range(3))
    model, optimizer = pairs[0]
    saved = optimizer.state_dict()
    moment = saved["state"][0][next(k for k, v in saved["state"][0].items() if v.ndim)]
    assert isinstance(moment, DTensor)
    assert moment.dtype is (torch.bfloat16 if policy == "bf16" else torch.float32)
    saved = copy.deepcopy(saved)
    step(model, optimizer, range(3, 5))
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        for param, other in zip(model.parameters(), pairs[1][0].parameters(), strict=True):
            param.copy_(other)
    assert_equal(everything(*pairs[0]), everything(*pairs[1]))
    assert isinstance(optimizer.state[next(model.parameters())], KeptState)
    for pair in pairs:
        step(*pair, range(5, 8))
    assert_equal(everything(*pairs[0]), everything(*pairs[1]))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_optimizer_that_has_stepped_keeps_its_state_so(policy: str):
    torch.manual_seed(0)
    model = Layers()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.zero_grad()
    before = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}
    prepare_fully_shard(model, optimizer, {"optimizer_state": POLICIES[policy]})
    for name, param in model.named_parameters():
        state = optimizer.state[param]
        assert isinstance(state, KeptState) == ("cpu" in policy or param.numel() >= 4096)
        found = full(state["exp_avg"])
        assert (found - before[name]).norm() <= 0.07 * before[name].norm()
    step(model, optimizer, [1])


@pytest.mark.world_size(2)
def test_state_reads_and_writes_as_a_dictionary_does():
    model, optimizer = prepared(OPTIMIZERS["adamw"], POLICIES["8 bits"])
    step(model, optimizer, range(2))
    param = model.wide.weight
    state = optimizer.state[param]
    assert list(state) == ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    plain = dict(state)
    for found in (plain, {**state}, copy.deepcopy(state)):
        assert not isinstance(found, KeptState)
        for key, value in state.items():
            assert torch.equal(full(found[key]), full(value))
    assert state.get("nothing", 3) == 3
    assert isinstance(state["exp_avg"], DTensor)
    assert state["exp_avg"].shape == param.shape
    state["exp_avg"] = state["exp_avg"] * 2
    assert torch.equal(full(state["exp_avg"]), 2 * full(plain["exp_avg"]))
    state.update(plain)
    assert torch.equal(full(state["exp_avg"]), full(plain["exp_avg"]))
    del state["max_exp_avg_sq"]
    assert "max_exp_avg_sq" not in state
    optimizer.state.clear()
    step(model, optimizer, [2])
    assert int(optimizer.state[param]["step"]) == 1


@pytest.mark.table("adamw foreach", "sgd")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["decoupled adamw", "adamw foreach", "sgd"])
def test_a_closure_runs_once_and_its_gradients_are_stepped(name: str):
    found = []
    for policy in ("cpu", None):
        model, optimizer = prepared(OPTIMIZERS[name], POLICIES[policy] if policy else None)
        for number in range(3):
            runs = []

            def closure(model=model, number=number, runs=runs) -> float:
                give_gradients(model, number)
                runs.append(1)
                return 1.0

            assert optimizer.step(closure=closure) == 1.0
            assert len(runs) == 1
        found.append(everything(model, optimizer))
    assert_equal(*found)


@pytest.mark.world_size(2)
def test_parameters_without_gradients_and_groups_of_later():
    found = []
    for policy in ("cpu", None):
        model, optimizer = prepared(
            lambda p: DecoupledAdamW(list(p)[:-2], lr=1e-3), POLICIES[policy] if policy else None
        )
        step(model, optimizer, [0])
        optimizer.add_param_group({"params": [model.wide.weight, model.wide.bias], "lr": 1e-4})
        step(model, optimizer, [1])
        give_gradients(model, 2)
        model.mix.grad = model.wide.weight.grad = None
        optimizer.step()
        step(model, optimizer, [3])
        found.append(everything(model, optimizer))
    assert_equal(*found)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_parameters_in_bf16_keep_their_own_dtype(policy: str):
    torch.manual_seed(0)
    model = Layers().to(torch.bfloat16)
    optimizer = OPTIMIZERS["adamw foreach"](model.parameters())
    prepare_fully_shard(model, optimizer, {"optimizer_state": POLICIES[policy]})
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        for param in model.parameters():
            whole = torch.randn(param.shape, generator=generator).to(torch.bfloat16)
            param.grad = shard(whole, param)
        optimizer.step()
    states = [optimizer.state[p] for p in model.parameters()]
    assert all(state["exp_avg"].dtype is torch.bfloat16 for state in states)


# --- Which optimizers. ---


@pytest.mark.world_size(2)
def test_an_optimizer_of_ones_own_goes_if_it_is_asked_for():
    policies = (POLICIES["cpu"], None)
    kept, own = (prepared(OwnSign, policy, local_step=True) for policy in policies)
    for pair in (kept, own):
        step(*pair, range(3))
    assert_equal(everything(*kept), everything(*own))
    assert isinstance(kept[1].state[kept[0].mix], KeptState)
    # Nobody knows what its state means, so that it is not kept in 8 bits.
    pair = prepared(OwnSign, POLICIES["8 bits"], local_step=True)
    step(*pair, range(2))
    state = pair[1].state[pair[0].mix]
    assert bytes_of(state) == pair[0].mix.to_local().numel() * 2


@pytest.mark.world_size(2)
def test_lions():
    llmfoundry = pytest.importorskip("llmfoundry.optim", reason="needs the extra foundry")
    for make in (llmfoundry.DecoupledLionW, llmfoundry.DecoupledClipLion):
        found = []
        for policy in ("cpu", None, "8 bits"):
            pair = prepared(functools.partial(make, lr=1e-4), POLICIES[policy] if policy else None)
            step(*pair, range(3))
            found.append(everything(*pair))
            pair[1].state_dict()
        assert_equal(found[0], found[1])
        assert found[2].keys() == found[1].keys()


@pytest.mark.world_size(2)
def test_without_an_optimizer_the_setting_warns():
    told = pytest.warns(UserWarning, match="'optimizer_state' is set .* given no optimizer")
    with told if dist.get_rank() == 0 else contextlib.nullcontext():
        prepare_fully_shard(Layers(), None, {"optimizer_state": {"bits": 8}})


REFUSED: dict[str, tuple[Make, dict[str, Any], str]] = {
    "no state": (lambda p: optim.SGD(p, lr=0.1), {"bits": 8}, "keeps no moments"),
    "no moments": (lambda p: optim.ASGD(p, lr=0.1), {"dtype": "bf16"}, "keeps no moments"),
    "no state of Composer's": (
        lambda p: DecoupledSGDW(p, lr=0.1),
        {"device": "cpu"},
        "SGD with momentum",
    ),
    "Muon": (
        lambda p: Muon([{"params": [q], "algorithm": "adamw"} for q in p]),
        {"bits": 8},
        "had with Muon",
    ),
    "across elements": (lambda p: OwnNorm(p), {"bits": 8}, "write local_step: true"),
    "unknown": (lambda p: OwnSign(p), {"device": "cpu"}, "write local_step: true"),
}


@pytest.mark.table("no state", "Muon")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str):
    make, policy, said = REFUSED[name]
    with pytest.raises(PlanError, match=said):
        prepared(make, policy)


@pytest.mark.world_size(2)
def test_a_dtype_that_could_not_be_had_is_refused():
    model = Layers().to(torch.bfloat16)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with pytest.raises(PlanError, match=r"parameters are in torch\.bfloat16"):
        prepare_fully_shard(model, optimizer, {"optimizer_state": {"dtype": "fp32"}})
    pair = prepared(OPTIMIZERS["adamw"], {"dtype": "fp32"})
    step(*pair, range(2))
    assert not any(isinstance(state, KeptState) for state in pair[1].state.values())


@pytest.mark.world_size(2)
def test_one_rank_with_another_policy_is_found():
    policy = POLICIES["bf16"] if dist.get_rank() else POLICIES["8 bits"]
    with pytest.raises(PlanError, match="optimizer_state"):
        prepared(OPTIMIZERS["adamw"], policy)


@pytest.mark.world_size(2)
def test_a_policy_without_effect_says_so():
    model = nn.Linear(30, 30)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    told = pytest.warns(UserWarning, match="largest sharded parameter has 900 elements")
    with told if dist.get_rank() == 0 else contextlib.nullcontext():
        prepare_fully_shard(model, optimizer, {"optimizer_state": {"bits": 8}})
