"""Composer's conventions for wrapping and checkpointing, in their order of precedence."""

from __future__ import annotations

import os

import pytest
import torch
from composer.models import ComposerModel
from torch import nn
from torchmetrics import MeanMetric, MetricCollection

from composer_fsdp2.blocks.activation import plan_activation
from composer_fsdp2.config.schema import parse_config
from composer_fsdp2.config.wrapping import Selector, UnitSettings, WrapPolicy
from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.planner import plan_wrapping
from composer_fsdp2.plan.wrap_plan import ShardUnit
from composer_fsdp2.prepare.conventions import activation_choice, trainer_rules
from composer_fsdp2.prepare.plan import _check_offload
from tests.support.models import AcrossChildren, Block, TinyComposer, TinyLM


def plan(model: nn.Module, **policy):
    return plan_wrapping(model, trainer_rules(ModuleTree.read(model), WrapPolicy(**policy)))


def reasons(model: nn.Module, **policy) -> dict[str, str]:
    return {unit.module: unit.reason for unit in plan(model, **policy).units}


def unit_of(model: nn.Module, name: str) -> ShardUnit:
    (unit,) = [unit for unit in plan(model).units if unit.module == name]
    return unit


class Plain(nn.Module):
    """Blocks and no hook."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Around(ComposerModel):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, batch):
        return batch

    def loss(self, outputs, batch, *_args):
        return outputs


def hooked(answer) -> Plain:
    """A model whose `fsdp_wrap_fn` gives `answer` for its blocks."""
    model = Plain()
    model.fsdp_wrap_fn = lambda module: answer if isinstance(module, Block) else False
    return model


BLOCKS = ("net.blocks.0", "net.blocks.1")


def test_the_direct_children_of_a_composer_model_are_units():
    assert reasons(Around(one=nn.Linear(2, 2), two=Plain())) == {
        "one": "direct child",
        "two": "direct child",
    }


def test_any_other_model_is_the_root():
    assert reasons(Plain()) == {"": "root"}
    assert reasons(TinyLM(layers=1)) == {"blocks.0": "fsdp_wrap_fn", "": "root"}


def test_containers_among_the_children_are_passed_over():
    model = Around(parts=nn.ModuleList([nn.Linear(2, 2)]), net=nn.Linear(2, 2))
    assert reasons(model) == {"net": "direct child", "": "root"}


def test_metrics_are_left_alone():
    metric = MeanMetric()
    metric.inner = nn.Linear(2, 2, bias=False)
    model = Around(net=Plain(), metric=metric, metrics=MetricCollection([MeanMetric()]))
    metric.inner._fsdp_wrap = True
    metric.inner.weight.requires_grad_(False)
    found = plan_wrapping(
        model, trainer_rules(ModuleTree.read(model), WrapPolicy()), ignored_params=["metric.*"]
    )
    assert [unit.module for unit in found.units] == ["net"]


def test_fsdp_wrap_comes_first():
    model = Around(net=hooked(True))
    model.net.blocks[0]._fsdp_wrap = False
    model.net.head._fsdp_wrap = True
    assert reasons(model) == {
        "net.blocks.1": "fsdp_wrap_fn",
        "net.head": "_fsdp_wrap",
        "net": "direct child",
    }
    assert reasons(model, classes=(Selector("Block"),)) == {
        "net.blocks.1": "class Block",
        "net.head": "_fsdp_wrap",
        "net": "direct child",
    }


def test_fsdp_wrap_false_on_a_direct_child_leaves_it_to_the_root():
    model = Around(net=hooked(True))
    model.net._fsdp_wrap = False
    assert reasons(model) == dict.fromkeys(BLOCKS, "fsdp_wrap_fn") | {"": "root"}


def test_fsdp_wrap_on_the_root_itself_is_not_asked():
    model = hooked(True)
    model._fsdp_wrap = False
    assert reasons(model)[""] == "root"


def test_a_policy_that_says_what_a_block_is_replaces_the_hook():
    model = Around(net=hooked(True))
    assert reasons(model, names=(Selector("net.head"),)) == {
        "net.head": "name net.head",
        "net": "direct child",
    }
    assert reasons(model, min_num_params=400) == {
        **dict.fromkeys(BLOCKS, "min_num_params"),
        "net": "direct child",
    }


def test_a_policy_that_only_adds_keeps_the_hook():
    model = Around(net=TinyLM(layers=2))
    assert reasons(model, embeddings=UnitSettings()) == {
        "net.embed": "embeddings",
        **dict.fromkeys(BLOCKS, "fsdp_wrap_fn"),
        "net": "direct child",
    }


def test_every_direct_child_has_its_own_hook():
    model = Around(one=hooked(True), two=hooked(False), three=Plain())
    assert [name for name, why in reasons(model).items() if why == "fsdp_wrap_fn"] == [
        "one.blocks.0",
        "one.blocks.1",
    ]


def test_the_hook_is_not_asked_about_its_own_module():
    model = Plain()
    asked: list[nn.Module] = []
    model.fsdp_wrap_fn = lambda module: bool(asked.append(module))
    plan(Around(net=model))
    assert asked
    assert model not in asked


def test_the_hook_comes_before_the_list_of_hugging_face():
    model = hooked(False)
    model._no_split_modules = ["Block"]
    assert reasons(Around(net=model)) == {"net": "direct child"}
    del model.fsdp_wrap_fn
    assert reasons(Around(net=model)) == {
        **dict.fromkeys(BLOCKS, "_no_split_modules"),
        "net": "direct child",
    }


# --- what fsdp_wrap_fn may return ---


@pytest.mark.parametrize("answer", [False, {}, None])
def test_no_is_no(answer):
    assert reasons(Around(net=hooked(answer))) == {"net": "direct child"}


@pytest.mark.parametrize(
    ("answer", "reshard", "precision"),
    [
        (True, True, None),
        ({"reshard_after_forward": False}, False, None),
        ({"reshard_after_forward": 2}, 2, None),
        ({"mixed_precision": "pure"}, True, "PURE"),
        ({"sharding_strategy": "FULL_SHARD"}, True, None),
        ({"sharding_strategy": "shard_grad_op"}, False, None),
        ({"sharding_strategy": "SHARD_GRAD_OP", "mixed_precision": "FULL"}, False, "FULL"),
    ],
)
def test_settings_of_single_units(answer, reshard, precision):
    unit = unit_of(Around(net=hooked(answer)), "net.blocks.0")
    assert (unit.reshard_after_forward, unit.mixed_precision) == (reshard, precision)


def test_strategies_of_torch_are_understood_too():
    from torch.distributed.fsdp import ShardingStrategy

    model = Around(net=hooked({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}))
    assert unit_of(model, "net.blocks.0").reshard_after_forward is False


def test_fsdp1_settings_that_are_no_longer_needed_are_named():
    with pytest.warns(UserWarning, match=r"'backward_prefetch' of 'net.blocks.\d' is no longer"):
        plan(Around(net=hooked({"backward_prefetch": "BACKWARD_PRE"})))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (1, "returned a int for 'net.blocks.0'"),
        ("yes", "returned a str for 'net.blocks.0'"),
        ([True], "returned a list"),
        ({"process_group": "node"}, "'net.blocks.0' its own 'process_group'"),
        ({"device_mesh": object()}, "'net.blocks.0' its own 'device_mesh'"),
        ({"sharding_strategy": "HYBRID_SHARD"}, "data_parallel_replicate_degree"),
        ({"sharding_strategy": "NO_SHARD"}, "'net.blocks.0' sharding_strategy NO_SHARD"),
        ({"reshard": True}, "'reshard' is not a key of fsdp_wrap_fn of 'net.blocks.0'"),
        ({"reshard_after_forward": 0}, "fsdp_wrap_fn of 'net.blocks.0'.reshard_after_forward"),
        ({"mixed_precision": "PURR"}, "Did you mean 'PURE'?"),
    ],
)
def test_answers_that_cannot_be_followed(answer, said):
    with pytest.raises(ConfigError) as caught:
        plan(Around(net=hooked(answer)))
    assert said in str(caught.value)


# --- policies that match nothing ---


def test_a_policy_that_matches_nothing_is_an_error():
    with pytest.raises(PlanError, match=r"wrap_policy\.classes names 'Blok'"):
        trainer_rules(ModuleTree.read(TinyComposer()), WrapPolicy(classes=(Selector("Blok"),)))


# --- activation checkpointing ---


def checkpointed(model: nn.Module, **policy) -> tuple[str, ...]:
    tree, units = ModuleTree.read(model), plan(model, **policy)
    return plan_activation(tree, choose=activation_choice(tree, units.blocks())).modules


def test_the_hook_decides():
    model = Around(net=hooked(True))
    model.net.activation_checkpointing_fn = lambda module: isinstance(module, nn.LayerNorm)
    assert checkpointed(model) == ("net.blocks.0.norm", "net.blocks.1.norm")


def test_the_attribute_comes_before_the_hook():
    model = Around(net=hooked(True))
    model.net.activation_checkpointing_fn = lambda module: isinstance(module, Block)
    model.net.blocks[0]._activation_checkpointing = False
    model.net.head._activation_checkpointing = True
    assert checkpointed(model) == ("net.blocks.1", "net.head")


def test_the_attribute_alone_decides():
    model = Around(net=hooked(True))
    model.net.blocks[1]._activation_checkpointing = True
    assert checkpointed(model) == ("net.blocks.1",)


def test_with_neither_it_is_the_blocks():
    assert checkpointed(Around(net=hooked(True))) == BLOCKS
    assert checkpointed(hooked(True)) == ("blocks.0", "blocks.1")


def test_embedding_and_head_are_no_blocks():
    found = checkpointed(TinyLM(layers=2), embeddings=UnitSettings())
    assert found == ("blocks.0", "blocks.1")


def test_units_that_contain_units_are_no_blocks():
    names = (Selector("blocks.0"), Selector("blocks.0.up"), Selector("blocks.1"))
    assert checkpointed(TinyLM(layers=2), names=names) == ("blocks.0.up", "blocks.1")


def test_a_hook_that_chooses_nothing_is_an_error():
    model = Around(net=hooked(True))
    model.net.activation_checkpointing_fn = lambda module: False
    with pytest.raises(PlanError, match="activation_checkpointing_fn"):
        checkpointed(model)


def test_neither_hook_nor_blocks_is_an_error():
    for model in (AcrossChildren(), Plain()):
        with pytest.raises(PlanError, match="no module was chosen"):
            checkpointed(model)


# --- Threads. ---


@pytest.mark.parametrize(("offload", "cores", "told"), [(True, 8, 1), (True, 2, 0), (False, 8, 0)])
def test_an_optimizer_on_the_cpu_with_one_thread_is_told(
    monkeypatch, caplog, offload: bool, cores: int, told: int
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(cores))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as torchrun starts ranks
    try:
        _check_offload(parse_config({"cpu_offload": offload}), "cuda")
    finally:
        torch.set_num_threads(threads)
    assert caplog.text.count("Set OMP_NUM_THREADS=4 before torchrun starts") == told
