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

from composer_fsdp2.blocks.activation import (
    ActivationPlan,
    ActivationSpec,
    apply_activation,
    plan_activation,
)
from composer_fsdp2.errors import PlanError
from composer_fsdp2.plan.patterns import block_ids
from tests.support.alive import Alive
from tests.support.models import Block, TinyLM, TwoNames, batches, lm_loss

WAYS = {
    "recompute": {"settings": True},
    "offload": {"settings": False, "offload": True},
    "both": {"settings": True, "offload": True},
    "selective": {"settings": ActivationSpec(mode="selective")},
}


def blocks(_name: str, module: nn.Module) -> bool:
    return isinstance(module, Block)


def checkpointed(model: nn.Module, **ways) -> ActivationPlan:
    plan = plan_activation(model, **ways, choose=blocks)
    apply_activation(model, plan)
    return plan


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    ids, targets = batches(1, 4)[0]
    lm_loss(model(ids), targets).backward()
    found = ((name, param.grad) for name, param in model.named_parameters())
    part = "_checkpoint_wrapped_module."
    return {name.replace(part, ""): grad for name, grad in found if grad is not None}


@pytest.mark.table("all layers-both")
@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("tie", ["none", "all layers", "module registered twice"])
def test_gradients_are_exactly_those_without(tie, ways):
    plain = TinyLM(tie)
    model = copy.deepcopy(plain)
    checkpointed(model, **ways)
    expected, found = gradients(plain), gradients(model)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


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
    found = list(model.blocks[0].modules())[: len(kinds)]
    assert [isinstance(m, kind) for m, kind in zip(found, kinds, strict=True)] == [True] * len(
        kinds
    )
    assert isinstance(found[-1], Block)


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
    plan = plan_activation(model, choose=choose)
    assert plan.modules == ("blocks.0", "blocks.1", "blocks.2")
    for _ in range(2):
        apply_activation(model, plan)
        assert model.blocks[0] is mine
        assert sum(isinstance(m, ActivationWrapper) for m in model.modules()) == 3


def test_modules_inside_each_other_are_wrapped_each():
    model = TinyLM(layers=1)
    plan = plan_activation(model, choose=lambda name, _: name in ("blocks.0", "blocks.0.up"))
    names = list(model.state_dict())
    apply_activation(model, plan)
    assert isinstance(model.blocks[0], CheckpointWrapper)
    assert isinstance(
        model.get_submodule("blocks.0")._checkpoint_wrapped_module.up, CheckpointWrapper
    )
    assert list(model.state_dict()) == names


def test_the_root_is_never_wrapped():
    model = nn.Sequential(nn.Linear(2, 2))
    assert plan_activation(model, choose=lambda *_: True).modules == ("0",)


def test_containers_are_refused():
    with pytest.raises(PlanError, match=r"'blocks' was chosen .* has no forward"):
        plan_activation(TinyLM(), choose=lambda name, _: name == "blocks")


def test_nothing_chosen_is_an_error():
    with pytest.raises(PlanError, match="no module was chosen"):
        plan_activation(TinyLM(), choose=lambda *_: False)


def test_the_plan_as_text():
    plan = ActivationPlan(modules=("a", "b"), recompute=True, offload=True)
    assert str(plan) == "activations (recompute + offload): a, b"


def test_planning_changes_nothing():
    model = TinyLM()
    plan_activation(model, choose=blocks)
    assert not any(isinstance(m, ActivationWrapper) for m in model.modules())


# --- What each way does. ---


def measured(model: nn.Module) -> tuple[int, Alive, Alive]:
    """Bytes held between forward and backward, and what ran in each of them."""
    ids, targets = batches(1, 8, length=16)[0]
    with Alive() as forward:
        loss = lm_loss(model(ids), targets)
        held = forward.bytes()
        with Alive() as backward:
            loss.backward()
    return held, forward, backward


@pytest.mark.table("offload-0-0")
@pytest.mark.parametrize(
    ("way", "products", "gelus"),
    [("recompute", 3, 3), ("both", 3, 3), ("selective", 0, 3), ("offload", 0, 0)],
)
def test_what_runs_again(way, products, gelus):
    model = TinyLM()
    checkpointed(model, **WAYS[way])
    _, _, backward = measured(model)
    # `down` is the last operator of a block: nobody needs its result again.
    assert (backward.ran["addmm"], backward.ran["gelu"]) == (products, gelus)


@pytest.mark.matrix
def test_what_is_held_until_backward():
    held = {}
    for way in ("kept", "recompute", "selective"):
        model = TinyLM()
        if way != "kept":
            checkpointed(model, **WAYS[way])
        held[way], _, _ = measured(model)
    # Of a block: its input alone, or the results of its two products as well.
    tokens, width = 8 * 16, 10
    assert held["selective"] - held["recompute"] == 3 * tokens * 3 * width * 4
    assert held["kept"] > held["selective"]


def test_activations_are_copied_and_weights_are_not():
    model = TinyLM(layers=1)
    saved = []
    ids, _ = batches(1, 8, length=16)[0]
    inputs = model.embed(ids)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model.blocks[0](inputs)
    weights = {id(p) for p in model.parameters()}
    activations = [t for t in saved if not {id(t), id(t._base)} & weights]
    assert 0 < len(activations) < len(saved)
    checkpointed(model, **WAYS["offload"])
    _, forward, _ = measured(model)
    assert forward.ran["clone"] == len(activations)


class Projections(nn.Module):
    """Three layers, whose input autograd saves for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2.0
        together = self.parts[0](x) + self.parts[1](x)
        return together + self.parts[2](x.add_(1.0))


def test_an_input_of_several_layers_is_copied_once_until_it_changes():
    model = nn.Sequential(Projections())
    plan = plan_activation(model, False, offload=True, choose=lambda name, _: name == "0")
    apply_activation(model, plan)
    with Alive() as forward:
        model(torch.ones(2, 8))
    assert forward.ran["clone"] == 2


@pytest.mark.parametrize("preserve", [True, False])
def test_randomness_is_the_same_again_if_asked(preserve):
    gradients = []
    for spec in (None, ActivationSpec(names=("0",), preserve_rng_state=preserve)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.Dropout()))
        bias = model[0][0].bias
        if spec is not None:
            apply_activation(model, plan_activation(model, spec))
        model(torch.ones(64, 64)).sum().backward()
        gradients.append(bias.grad)
    assert torch.equal(*gradients) is preserve


# --- Choosing without a function. ---

SIX = [f"blocks.{n}" for n in range(6)]


@pytest.mark.table("spec3-expected3", "spec5-expected5", "spec8-expected8", "spec12-expected12")
@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, SIX),
        ({"every": 2}, SIX[::2]),
        ({"every": 4}, [SIX[0], SIX[4]]),
        ({"target": 2}, SIX[:2]),
        ({"target": "first-1, last-2"}, [SIX[0], *SIX[4:]]),
        ({"target": "middle-2"}, SIX[1:3]),
        ({"target": "range-1-3"}, SIX[1:3]),
        ({"target": "2-5"}, SIX[2:5]),
        ({"target": (0, "last-1", "1-3")}, [*SIX[:3], SIX[5]]),
        ({"target": "first-99"}, SIX),
        ({"classes": ("Block",)}, SIX),
        ({"classes": ("Block", "TwoNames")}, [*SIX, "extra"]),
        ({"names": ("blocks.[13]",)}, [SIX[1], SIX[3]]),
        ({"names": (r"re:blocks\.\d\.up",), "target": "last-1"}, ["blocks.5.up"]),
        ({"classes": ("LayerNorm",), "every": 3}, ["blocks.0.norm", "blocks.3.norm"]),
    ],
)
def test_ways_to_choose(spec, expected):
    model = TinyLM("inside one module", layers=6)
    assert plan_activation(model, ActivationSpec(**spec)).modules == tuple(expected)


def test_settings_that_choose_come_before_the_function():
    spec = ActivationSpec(names=("blocks.1",))
    assert plan_activation(TinyLM(), spec, choose=blocks).modules == ("blocks.1",)
    selective = plan_activation(TinyLM(), ActivationSpec(mode="selective"), choose=blocks)
    assert (selective.modules, selective.selective) == (("blocks.0", "blocks.1", "blocks.2"), True)


class Stacks(nn.Module):
    """Lists of blocks, one of which holds lists itself, and lists of other things."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(3))
        self.decoder = nn.Sequential(Block(), Block())
        self.projections = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.mixed = nn.Sequential(Block(), TwoNames())


def test_each_list_is_counted_and_lists_in_blocks_are_not():
    spec = ActivationSpec(target="last-1")
    assert plan_activation(Stacks(), spec).modules == ("encoder.2", "decoder.1")
    model = Stacks()
    apply_activation(model, plan_activation(model))
    assert plan_activation(model, spec).modules == ("encoder.2", "decoder.1")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"classes": ("Blok",)}, r"classes names 'Blok'.*Did you mean 'Block'\?.*TinyLM"),
        ({"names": ("layers.*",)}, r"names holds 'layers\.\*'.*Names in this model: embed, blocks"),
        ({"target": (1, 3)}, r"names block 3, but the list has 3 blocks, from 0 to 2"),
        ({"target": "3-4"}, "no module was chosen"),
        ({"names": ("head",), "every": 2}, "no module was chosen"),
        ({"names": ("blocks",)}, "'blocks' was chosen .* has no forward"),
    ],
)
def test_choices_that_cannot_be_followed(spec, said):
    with pytest.raises(PlanError, match=said):
        plan_activation(TinyLM(), ActivationSpec(**spec))


@pytest.mark.parametrize("spec", [{"target": "first-1"}, {"every": 2}])
def test_counting_needs_a_list_of_blocks(spec):
    with pytest.raises(PlanError, match=f"{next(iter(spec))} counts blocks, but the model has no"):
        plan_activation(nn.Sequential(nn.Linear(2, 2)), ActivationSpec(**spec))


def test_a_target_may_be_written_with_or_without_spaces():
    assert block_ids("first-1,last-1", 4) == block_ids(" first-1 , last-1", 4) == {0, 3}
