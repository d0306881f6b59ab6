"""The optimizer steps the shards the model computes with, whenever and however it was built."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from composer.optim import DecoupledAdamW, DecoupledSGDW
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from composer_fsdp2 import PlanError, prepare_fully_shard
from composer_fsdp2.parallel.form import FULLY_SHARDED
from tests.support.models import TinyLM, batches
from tests.support.parity import (
    OPTIMIZERS,
    Recipe,
    assert_same_state,
    assert_same_values,
    gathered,
    model_loss,
    train_together,
)

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]

MORE_OPTIMIZERS: dict[str, MakeOptimizer] = {
    **OPTIMIZERS,
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-5, amsgrad=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1),
    "decoupled adamw": lambda params: DecoupledAdamW(params, lr=1e-2, eps=1e-5, weight_decay=1e-5),
    "decoupled sgdw": lambda params: DecoupledSGDW(params, lr=0.1, momentum=0.9, weight_decay=1e-5),
}

every_optimizer = pytest.mark.parametrize("name", MORE_OPTIMIZERS)


def tied_lm() -> TinyLM:
    torch.manual_seed(0)
    return TinyLM("two modules")


@pytest.mark.table("amsgrad", "adagrad")
@pytest.mark.world_size(2)
@every_optimizer
def test_built_before_or_after(name: str):
    before, after = tied_lm(), tied_lm()
    early = MORE_OPTIMIZERS[name](before.parameters())
    prepare_fully_shard(before, early, {})
    prepare_fully_shard(after, None, {})
    late = MORE_OPTIMIZERS[name](after.parameters())
    for model, optimizer in ((before, early), (after, late)):
        _train(model, optimizer, batches(5, 4))
    expected, got = gathered(after), gathered(before)
    assert all(torch.equal(expected[key], got[key]) for key in expected)
    _assert_steps_shards(before, early)


@pytest.mark.table("adagrad-0")
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("name", "steps"), [("adagrad", 0), *((name, 3) for name in MORE_OPTIMIZERS)]
)
def test_state_goes_on(name: str, steps: int):
    """The same unsharded history, then 20 steps with and without shards."""
    pair = [tied_lm(), tied_lm()]
    optimizers = [MORE_OPTIMIZERS[name](model.parameters()) for model in pair]
    for model, optimizer in zip(pair, optimizers, strict=True):
        _train(model, optimizer, batches(steps, 8, seed=3))
    prepare_fully_shard(pair[1], optimizers[1], {})
    assert_same_state(*optimizers)
    train_together(pair[0], optimizers[0], pair[1], optimizers[1], Recipe())


@pytest.mark.table
@pytest.mark.world_size(4)
@pytest.mark.parametrize("config", [{}, {"data_parallel_replicate_degree": 2}])
def test_state_goes_on_on_four_ranks(config: dict[str, Any]):
    pair = [tied_lm(), tied_lm()]
    optimizers = [MORE_OPTIMIZERS["adamw"](model.parameters()) for model in pair]
    for model, optimizer in zip(pair, optimizers, strict=True):
        _train(model, optimizer, batches(3, 8, seed=3))
    prepare_fully_shard(pair[1], optimizers[1], config)
    train_together(pair[0], optimizers[0], pair[1], optimizers[1], Recipe())


@pytest.mark.world_size(2)
def test_rank_0s_state_is_the_one_kept():
    model = tied_lm()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    _train(model, optimizer, batches(2, 4, seed=dist.get_rank()))
    alone = tied_lm()
    expected = OPTIMIZERS["sgd"](alone.parameters())
    _train(alone, expected, batches(2, 4, seed=0))
    prepare_fully_shard(model, optimizer, {})
    assert_same_values(alone, model)
    assert_same_state(expected, optimizer)


@pytest.mark.world_size(2)
def test_groups_keep_order_and_keys():
    model = tied_lm()
    optimizer = torch.optim.AdamW(_two_groups(model), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    before = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    prepare_fully_shard(model, optimizer, {})
    after = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    assert after == before
    assert after[0]["initial_lr"] == 1e-2
    assert after[1]["label"] == "matrices"
    expected = [group["params"] for group in _two_groups(model)]
    for params, group in zip(expected, optimizer.param_groups, strict=True):
        assert [id(p) for p in params] == [id(p) for p in group["params"]]
    _train(model, optimizer, batches(1, 4))
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 5e-3


@pytest.mark.world_size(2)
def test_group_settings_reach_their_parameters():
    pair = [tied_lm(), tied_lm()]
    optimizers = [torch.optim.AdamW(_two_groups(m), lr=1e-2, eps=1e-5) for m in pair]
    prepare_fully_shard(pair[1], optimizers[1], {})
    train_together(pair[0], optimizers[0], pair[1], optimizers[1], Recipe())


@pytest.mark.table
@pytest.mark.world_size(2)
@pytest.mark.parametrize("wanted", ["blocks.1", "up.weight", "embed"])
def test_subset_of_parameters(wanted: str):
    pair = [tied_lm(), tied_lm()]
    optimizers = [OPTIMIZERS["adamw"](_named(model, wanted)) for model in pair]
    prepare_fully_shard(pair[1], optimizers[1], {})
    assert optimizers[1].param_groups[0]["params"] == _named(pair[1], wanted)
    train_together(pair[0], optimizers[0], pair[1], optimizers[1], Recipe())


@pytest.mark.table
@pytest.mark.world_size(2)
@pytest.mark.parametrize("given", ["all", "trainable"])
def test_frozen_parameters(given: str):
    pair = [_frozen_embedding(), _frozen_embedding()]
    optimizers = [OPTIMIZERS["adamw"](_given(model, given)) for model in pair]
    prepare_fully_shard(pair[1], optimizers[1], {})
    assert not pair[1].embed.weight.requires_grad
    train_together(pair[0], optimizers[0], pair[1], optimizers[1], Recipe())


@pytest.mark.world_size(2)
def test_attributes_stay_on_parameters():
    model = tied_lm()
    model.embed.weight.no_decay = True
    model.blocks[0].up.weight.owner = "someone"
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    prepare_fully_shard(model, optimizer, {})
    assert model.head.weight.no_decay
    assert model.blocks[0].up.weight.owner == "someone"
    assert optimizer.param_groups[0]["params"][0].no_decay


@pytest.mark.world_size(2)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_post_accumulate_hooks_stay_and_are_called_once(device: str):
    with torch.device(device):
        model = TinyLM("two modules")
    called: list[str] = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(functools.partial(_record, called, name))
    prepare_fully_shard(model, None, {})
    model_loss(model, batches(1, 2)[0]).backward()
    assert sorted(called) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.world_size(2)
def test_tensor_hooks_are_refused_by_name():
    model = tied_lm()
    model.blocks[1].down.bias.register_hook(lambda grad: grad)
    with pytest.raises(PlanError, match=r"'blocks\.1\.down\.bias' have tensor hooks"):
        prepare_fully_shard(model, None, {})
    _assert_untouched(model)


@pytest.mark.world_size(2)
def test_parameters_of_another_model_are_refused():
    model, other = tied_lm(), tied_lm()
    optimizer = OPTIMIZERS["sgd"]([*model.blocks.parameters(), *other.head.parameters()])
    held = [list(group["params"]) for group in optimizer.param_groups]
    with pytest.raises(PlanError) as caught:
        prepare_fully_shard(model, optimizer, {})
    assert "1 parameters that are not in the model: group 0 parameter" in str(caught.value)
    assert "does not hold: embed.weight, " in str(caught.value)
    _assert_untouched(model)
    now = [group["params"] for group in optimizer.param_groups]
    assert [[id(p) for p in params] for params in now] == [[id(p) for p in ps] for ps in held]


class Contrast(nn.Module):
    """A loss with a temperature of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.temperature.exp()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("config", [{}, {"optimizer_state": {"device": "cpu"}}], ids=str)
def test_a_parameter_of_another_module_is_stepped_as_it_is(config: dict[str, Any]):
    """The loop averages its gradient, as it does without us."""
    pair, steps = [tied_lm(), tied_lm()], []
    for sharded, model in enumerate(pair):
        contrast = Contrast()
        groups = [{"params": model.parameters()}, {"params": contrast.parameters(), "lr": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=3e-3)
        optimizer.state[contrast.temperature] = {  # it has stepped before
            "step": torch.tensor(1.0),
            "exp_avg": torch.tensor(0.5),
            "exp_avg_sq": torch.tensor(0.25),
        }
        if sharded:
            told = pytest.warns(UserWarning, match=r"of the shapes \(\)\. Nobody averages")
            with told if dist.get_rank() == 0 else contextlib.nullcontext():
                prepare_fully_shard(model, optimizer, config)
        for inputs, targets in batches(3, 4):
            part = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2) if sharded else slice(None)
            contrast(model_loss(model, (inputs[part], targets[part]))).backward()
            if sharded:
                dist.all_reduce(contrast.temperature.grad)
                contrast.temperature.grad /= 2
            optimizer.step()
            optimizer.zero_grad()
        steps.append(contrast.temperature.detach())
    assert steps[0] != 2.0
    torch.testing.assert_close(*steps, atol=1e-6, rtol=0)
    _assert_close(*pair)


@pytest.mark.world_size(2)
def test_parameters_of_another_sharded_model_are_refused():
    first, second = tied_lm(), tied_lm()
    prepare_fully_shard(first, None, {})
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    with pytest.raises(PlanError, match="another sharded model: group 0 parameter 0"):
        prepare_fully_shard(second, optimizer, {})
    _assert_untouched(second)


@pytest.mark.world_size(2)
def test_two_optimizers_step_two_parts_by_turns():
    pair = [tied_lm(), tied_lm()]
    for sharded, model in enumerate(pair):
        parts = [[], []]
        for param in model.parameters():
            parts[param.ndim == 2].append(param)
        optimizers = [torch.optim.SGD(parts[0], lr=0.02), torch.optim.AdamW(parts[1], lr=3e-3)]
        if sharded:
            prepare_fully_shard(model, optimizers, {})
        for step, (inputs, targets) in enumerate(batches(4, 4)):
            part = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2) if sharded else slice(None)
            model_loss(model, (inputs[part], targets[part])).backward()
            optimizers[step % 2].step()
            model.zero_grad()
    _assert_close(*pair)


def _assert_close(oracle: nn.Module, model: nn.Module) -> None:
    expected, got = gathered(oracle), gathered(model)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=1e-6, rtol=0, msg=name)


@pytest.mark.world_size(2)
def test_named_parameters_of_another_model_are_refused_by_name():
    model, other = tied_lm(), tied_lm()
    optimizer = torch.optim.SGD(other.named_parameters(), lr=0.1)
    with pytest.raises(PlanError, match=r"not in the model: 'embed\.weight' \(17, 10\)"):
        prepare_fully_shard(model, optimizer, {})


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Rprop", "SparseAdam"])
def test_an_optimizer_that_needs_whole_parameters_is_refused_by_name(name: str):
    model = tied_lm()

    class Mine(getattr(torch.optim, name)):
        pass

    for kind in (getattr(torch.optim, name), Mine):
        optimizer = kind(model.parameters())
        with pytest.raises(PlanError, match=rf"{kind.__name__} .* AdamW"):
            prepare_fully_shard(model, optimizer, {})
    _assert_untouched(model)


class ByRows(torch.optim.SGD):
    """Keeps a number for each row."""

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            self.state[param]["row_var"] = torch.zeros(len(param), 1)
        return super().step(closure)


@pytest.mark.world_size(2)
def test_state_that_cannot_be_divided_is_refused():
    model = tied_lm()
    optimizer = ByRows(model.parameters(), lr=0.1)
    _train(model, optimizer, batches(1, 4))
    with pytest.raises(PlanError, match=r"state 'row_var' of 'embed\.weight' has shape"):
        prepare_fully_shard(model, optimizer, {})
    _assert_untouched(model)


@pytest.mark.world_size(2)
def test_constructor_state_on_meta_is_refused():
    with torch.device("meta"):
        model = TinyLM()
    optimizer = MORE_OPTIMIZERS["adagrad"](model.parameters())
    with pytest.raises(PlanError, match=r"state 'sum' of 'embed\.weight' is on the meta device"):
        prepare_fully_shard(model, optimizer, {})


@pytest.mark.world_size(2)
def test_constructor_state_comes_from_rank_0_when_others_are_on_meta():
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        torch.manual_seed(0)
        model = TinyLM()
    torch.manual_seed(0)
    oracle = TinyLM()
    pair = [MORE_OPTIMIZERS["adagrad"](m.parameters()) for m in (oracle, model)]
    prepare_fully_shard(model, pair[1], {})
    train_together(oracle, pair[0], model, pair[1], Recipe())


@pytest.mark.world_size(2)
def test_parameters_over_one_memory_become_one_entry():
    model = _storage_tied()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    count = len(optimizer.param_groups[0]["params"])
    with pytest.warns(UserWarning, match="shared memory and are one parameter now"):
        prepare_fully_shard(model, optimizer, {})
    assert len(optimizer.param_groups[0]["params"]) == count - 1
    _assert_steps_shards(model, optimizer)


@pytest.mark.world_size(2)
def test_parameters_over_one_memory_in_two_groups_are_refused():
    model = _storage_tied()
    rest = [p for name, p in model.named_parameters() if name != "head.weight"]
    optimizer = torch.optim.SGD([{"params": rest}, {"params": [model.head.weight]}], lr=0.1)
    with pytest.raises(PlanError, match=r"hold 'embed\.weight' and 'head\.weight', which share"):
        prepare_fully_shard(model, optimizer, {})
    _assert_untouched(model)


@pytest.mark.world_size(2)
def test_two_states_of_one_memory_are_refused():
    model = _storage_tied()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    _train(model, optimizer, batches(1, 4))
    with pytest.raises(PlanError, match=r"has stepped 'embed\.weight' and 'head\.weight'"):
        prepare_fully_shard(model, optimizer, {})
    _assert_untouched(model)


def _storage_tied() -> TinyLM:
    torch.manual_seed(0)
    return TinyLM("storage")


def _frozen_embedding() -> TinyLM:
    torch.manual_seed(0)
    model = TinyLM()
    model.embed.weight.requires_grad_(False)
    return model


def _given(model: nn.Module, which: str) -> list[nn.Parameter]:
    return [p for p in model.parameters() if which == "all" or p.requires_grad]


def _named(model: nn.Module, part: str) -> list[nn.Parameter]:
    return [param for name, param in model.named_parameters() if part in name]


def _two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Vectors without weight decay before matrices with it, against the model's order."""
    vectors = [p for p in model.parameters() if p.ndim == 1]
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return [
        {"params": vectors, "weight_decay": 0.0, "label": "vectors"},
        {"params": matrices, "weight_decay": 0.1, "lr": 3e-3, "label": "matrices"},
    ]


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Any]) -> None:
    for batch in data:
        model_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def _record(called: list[str], name: str, param: torch.Tensor) -> None:
    assert isinstance(param, DTensor)
    assert param.grad is not None
    called.append(name)


def _assert_steps_shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer holds exactly the model's parameters, and its state is theirs."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(param) for param in model.parameters()}
    assert {id(param) for param in optimizer.state} <= held


def _assert_untouched(model: nn.Module) -> None:
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    value = torch.ones(())
    dist.all_reduce(value)
    assert value == dist.get_world_size()


@pytest.mark.world_size(2)
def test_a_forward_between_backward_and_step_keeps_no_old_weights():
    """As the Trainer does when it computes metrics of training."""
    torch.manual_seed(0)
    oracle, model = TinyLM(), TinyLM()
    model.load_state_dict(oracle.state_dict())
    pair = [OPTIMIZERS["sgd"](m.parameters()) for m in (oracle, model)]
    prepare_fully_shard(model, pair[1], {})
    for batch in batches(3, 8):
        for trained, optimizer in zip((oracle, model), pair, strict=True):
            model_loss(trained, batch).backward()
            with torch.no_grad():
                trained(batch[0])
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(oracle, model)


# --- Whole tensors, divided as a parameter is ---


@pytest.mark.table("axes0-shape4", "axes1-shape3", "axes2-shape1", "axes2-shape4")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("shape", [(8, 3), (7, 3), (5,), (3, 5), (1, 4), (0, 3)])
@pytest.mark.parametrize("axes", [(4,), (2, 2), (1, 4)])
def test_each_rank_takes_its_part_and_sends_nothing(shape: tuple[int, ...], axes: tuple[int, ...]):
    """With HSDP, ranks without rows, and placements that divide nothing."""
    mesh = init_device_mesh("cpu", axes)
    full = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    whole = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    for placement in (Shard(0), Replicate()):
        like = whole.redistribute(placements=[*[Replicate()] * (mesh.ndim - 1), placement])
        with CommDebugMode() as communication:
            part = FULLY_SHARDED.shard(full, like)
        assert isinstance(part, DTensor)
        assert communication.get_total_counts() == 0
        assert (part.placements, part.shape, part.stride()) == (
            like.placements,
            like.shape,
            like.stride(),
        )
        assert torch.equal(part.to_local(), like.to_local())
        # A view would keep the whole tensor in memory, and change with it.
        assert part.to_local().untyped_storage().nbytes() == part.to_local().nbytes
        assert not part.numel() or part.to_local().data_ptr() != full.data_ptr()


@pytest.mark.world_size(2)
def test_a_part_has_the_layout_of_the_parameter():
    mesh = init_device_mesh("cpu", (2,))
    like = distribute_tensor(torch.zeros(5, 7), mesh, [Shard(0)])
    full = torch.randn(7, 5, generator=torch.Generator().manual_seed(1)).t()
    part = FULLY_SHARDED.shard(full, like)
    assert part.stride() == like.stride()
    assert torch.equal(part.full_tensor(), full)  # pyright: ignore[reportAttributeAccessIssue]
    plain = torch.zeros(5, 7)
    assert torch.equal(FULLY_SHARDED.shard(full, plain), full)
