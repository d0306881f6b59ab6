"""One object per transformation: a new one brings its class and its setting, and nothing else."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_fsdp2 import ConfigError, PlanError, apply_plan, plan_wrapping, prepare_fully_shard
from composer_fsdp2.blocks.transformation import ModelFacts
from composer_fsdp2.parallel.parallelism import AppliedParallelism, Parallelism
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.rules import by_class, root_rule
from composer_fsdp2.prepare import model as prepare
from composer_fsdp2.step.run import run_of
from tests.support.models import TinyLM, batches
from tests.support.parity import check_parity
from tests.support.toy_setting import OUTPUT_FACTOR, declaring
from tests.support.toy_transformation import Toy, multiply_output


@contextlib.contextmanager
def toy() -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch, declaring(OUTPUT_FACTOR):
        patch.setattr(prepare, "TRANSFORMATIONS", (Toy(), *prepare.TRANSFORMATIONS))
        yield


def doubled() -> nn.Module:
    model = TinyLM()
    for block in model.blocks:
        multiply_output(block, 2)
    return model


@pytest.mark.table("ac")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("beside", [{}, {"activation_checkpointing": True}], ids=["alone", "ac"])
def test_a_transformation_from_elsewhere_trains(beside: dict[str, Any]):
    shown = io.StringIO()
    with toy(), contextlib.redirect_stderr(shown):
        config = {"toy_output_factor": 2, "verbose": True, **beside}
        check_parity(TinyLM, config, make_oracle=doubled)
    line = "output times 2: blocks.0, blocks.1, blocks.2"
    assert (line in shown.getvalue()) == (dist.get_rank() == 0)


@pytest.mark.world_size(2)
def test_its_setting_is_one_of_ours():
    with toy(), pytest.raises(ConfigError, match="Did you mean 'toy_output_factor'"):
        prepare_fully_shard(TinyLM(), None, {"toy_output_facto": 2})
    with pytest.raises(ConfigError, match="'toy_output_factor' is not a key"):
        prepare_fully_shard(TinyLM(), None, {"toy_output_factor": 2})


@pytest.mark.world_size(2)
def test_its_check_stops_every_rank_before_the_model_is_changed():
    model = nn.Sequential(nn.Linear(2, 2))
    with toy(), pytest.raises(PlanError, match="finds no block"):
        prepare_fully_shard(model, None, {"toy_output_factor": 2})
    assert type(model) is nn.Sequential


@pytest.mark.world_size(2)
def test_ranks_with_other_plans_find_out():
    class Other(Toy):
        def describe(self, plan: Any) -> str:
            return f"of rank {dist.get_rank()}"

    with toy(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "TRANSFORMATIONS", (Other(),))
        with pytest.raises(
            PlanError, match=r"(?s)a different plan of transformations.*\+of rank 1"
        ):
            prepare_fully_shard(TinyLM(), None, {"toy_output_factor": 2})


EVERYTHING = {
    "activation_checkpointing": {"names": ["blocks.*"]},
    "compile": {"backend": "eager"},
    "chunked_loss": {"chunks": 2, "names": ["head"]},
    "keep_fp32": ["norm"],
    "wrap_policy": {"classes": ["Block"], "min_unit_bytes": 1},
}


@contextlib.contextmanager
def counted_walks() -> Generator[list[nn.Module]]:
    """Roots of the models that are walked meanwhile."""
    walked: list[nn.Module] = []
    read = ModuleTree.read.__func__

    def counting(cls: type[ModuleTree], model: Any) -> ModuleTree:
        if not isinstance(model, ModuleTree):
            walked.append(model)
        return read(cls, model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleTree, "read", classmethod(counting))
        yield walked


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("config", "walks"), [({}, 1), (EVERYTHING, 2)], ids=["plain", "everything"]
)
def test_the_model_is_walked_once(config: dict[str, Any], walks: int):
    """And once more where modules were exchanged for wrappers."""
    model = TinyLM()
    with counted_walks() as walked:
        prepare_fully_shard(model, None, config)
    assert walked == [model] * walks


@pytest.mark.world_size(2)
@pytest.mark.parametrize("tie", ["none", "storage"])
def test_a_tree_that_is_handed_in_keeps_no_full_parameter(tie: str):
    """Two parameters over one memory are merged first, and the tree is read again."""
    model = TinyLM(tie)
    tree = ModuleTree.read(model)
    plan = plan_wrapping(tree, [by_class("Block"), root_rule])
    apply_plan(model, plan, init_device_mesh("cpu", (2,)), tree=tree)
    assert tree.params == []


class Twice(AppliedParallelism):
    """Doubles the output of each block, and notes its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def connect(self, model: nn.Module) -> None:
        self.calls.append(f"sharded {isinstance(model, FSDPModule)}")

    def connect_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        shards = all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])
        self.calls.append(f"shards {shards}")

    def before_forward(self, model: nn.Module, inputs: Any) -> None:
        self.calls.append(f"forward {len(inputs[0])} {[*inputs[1]]}")


class Divides(Parallelism[str]):
    """A division that needs nothing but its class and its place in the tuple."""

    def __init__(self) -> None:
        self.applied = Twice()

    def plan(self, facts: ModelFacts) -> Any:
        return "toy"

    def apply_on(self, tree: ModuleTree, plan: Any, mesh: DeviceMesh) -> AppliedParallelism:
        for number in range(3):
            multiply_output(tree.root.get_submodule(f"blocks.{number}"), 2)
        assert mesh.size() == 2
        return self.applied


@pytest.mark.world_size(2)
def test_a_division_from_elsewhere():
    model, division = TinyLM(), Divides()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "TRANSFORMATIONS", (division, *prepare.TRANSFORMATIONS))
        prepare_fully_shard(model, optimizer, {})
    ids, _ = batches(1, 4)[0]
    model(ids)
    assert division.applied.calls == ["sharded True", "shards True", "forward 1 []"]
    run = run_of(model)
    assert run is not None
    assert run.batch_group is None  # each rank goes on to read a batch of its own
