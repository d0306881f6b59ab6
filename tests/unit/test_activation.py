"""Activation checkpointing on plain modules: names stay, gradients stay."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    ActivationWrapper,
    CheckpointWrapper,
    OffloadWrapper,
    checkpoint_wrapper,
)

from composer_fsdp2.core.activation import ActivationPlan, apply_activation, plan_activation
from composer_fsdp2.errors import PlanError
from tests.models import Block, TinyLM, batches, lm_loss

WAYS = {
    "recompute": {"recompute": True, "offload": False},
    "offload": {"recompute": False, "offload": True},
    "both": {"recompute": True, "offload": True},
}


def blocks(_name: str, module: nn.Module) -> bool:
    return isinstance(module, Block)


def checkpointed(model: nn.Module, **ways) -> ActivationPlan:
    plan = plan_activation(model, blocks, **ways)
    apply_activation(model, plan)
    return plan


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    ids, targets = batches(1, 4)[0]
    lm_loss(model(ids), targets).backward()
    found = ((name, param.grad) for name, param in model.named_parameters())
    part = "_checkpoint_wrapped_module."
    return {name.replace(part, ""): grad for name, grad in found if grad is not None}


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("tie", ["none", "all layers", "module registered twice"])
def test_gradients_are_exactly_those_without(tie, ways):
    plain = TinyLM(tie)
    model = copy.deepcopy(plain)
    checkpointed(model, **ways)
    expected, found = gradients(plain), gradients(model)
    # Offloading stores what it saves row by row, so a product with a transposed weight may take
    # another kernel; recomputing does exactly the same again.
    atol = 0.0 if ways["recompute"] else 1e-7
    torch.testing.assert_close(found, expected, rtol=atol * 10, atol=atol)


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_names_stay_and_state_goes_in_and_out(ways):
    plain, model = TinyLM("two modules"), TinyLM("two modules")
    plan = checkpointed(model, **ways)
    assert plan.modules == ("blocks.0", "blocks.1", "blocks.2")
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    assert all(torch.equal(model.state_dict()[k], v) for k, v in plain.state_dict().items())
    assert isinstance(model.get_submodule("blocks.0.up"), nn.Linear)


@pytest.mark.parametrize(
    ("way", "kinds"),
    [
        ("recompute", [CheckpointWrapper, Block]),
        ("offload", [OffloadWrapper, Block]),
        ("both", [OffloadWrapper, CheckpointWrapper, Block]),
    ],
)
def test_what_each_way_wraps_with(way, kinds):
    model = TinyLM(layers=1)
    checkpointed(model, **WAYS[way])
    assert [type(m) for m in model.blocks[0].modules()][: len(kinds)] == kinds


def test_a_module_registered_twice_is_wrapped_once():
    model = TinyLM("module registered twice")
    plan = checkpointed(model)
    assert plan.modules == ("blocks.0", "blocks.1", "blocks.2")
    assert isinstance(model.last, ActivationWrapper)
    assert model.last is model.blocks[0]
    assert sum(isinstance(m, ActivationWrapper) for m in model.modules()) == 3


@pytest.mark.parametrize(
    "choose", [blocks, lambda name, _: name in {f"blocks.{n}" for n in range(3)}]
)
def test_what_is_wrapped_already_is_left_alone(choose):
    model = TinyLM()
    model.blocks[0] = mine = checkpoint_wrapper(model.blocks[0])
    plan = plan_activation(model, choose)
    assert plan.modules == ("blocks.0", "blocks.1", "blocks.2")
    for _ in range(2):
        apply_activation(model, plan)
        assert model.blocks[0] is mine
        assert sum(isinstance(m, ActivationWrapper) for m in model.modules()) == 3


def test_modules_inside_each_other_are_wrapped_each():
    model = TinyLM(layers=1)
    plan = plan_activation(model, lambda name, _: name in ("blocks.0", "blocks.0.up"))
    names = list(model.state_dict())
    apply_activation(model, plan)
    assert isinstance(model.blocks[0], CheckpointWrapper)
    assert isinstance(
        model.get_submodule("blocks.0")._checkpoint_wrapped_module.up, CheckpointWrapper
    )
    assert list(model.state_dict()) == names


def test_the_root_is_never_wrapped():
    model = nn.Sequential(nn.Linear(2, 2))
    assert plan_activation(model, lambda *_: True).modules == ("0",)


def test_containers_are_refused():
    with pytest.raises(PlanError, match=r"'blocks' was chosen .* has no forward"):
        plan_activation(TinyLM(), lambda name, _: name == "blocks")


def test_nothing_chosen_is_an_error():
    with pytest.raises(PlanError, match="no module was chosen"):
        plan_activation(TinyLM(), lambda *_: False)


def test_the_plan_as_text():
    plan = ActivationPlan(modules=("a", "b"), recompute=True, offload=True)
    assert str(plan) == "activations (recompute + offload): a, b"


def test_planning_changes_nothing():
    model = TinyLM()
    plan_activation(model, blocks)
    assert not any(isinstance(m, ActivationWrapper) for m in model.modules())
