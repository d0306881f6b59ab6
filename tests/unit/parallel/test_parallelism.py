"""What other rooms know of a way to divide a model is stated in one file."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

from torch import nn

import composer_fsdp2
from composer_fsdp2.config.schema import parse_config
from composer_fsdp2.parallel.sequence.transformation import SequenceParallel
from composer_fsdp2.parallel.tensor.layers import LayerPlan
from composer_fsdp2.parallel.tensor.transformation import TensorParallel
from composer_fsdp2.plan.mesh_shape import MeshShape
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.wrap_plan import ShardUnit, WrapPlan

PACKAGE = Path(composer_fsdp2.__file__).parent
IMPORTS = re.compile(
    r"^\s*from composer_fsdp2\.parallel\.(?:expert|sequence|tensor)\b", re.MULTILINE
)


def test_other_rooms_import_the_interface_alone():
    """`TRANSFORMATIONS`, a public name, and `generate`, which may get a model without a run."""
    files = {
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        if IMPORTS.search(file.read_text())
    }
    folders = ("parallel/expert/", "parallel/sequence/", "parallel/tensor/")
    others = {file for file in files if not file.startswith(folders)}
    assert others == {"__init__.py", "trainer/extensions/hugging_face.py", "prepare/model.py"}


def test_kinds_of_parallelism_do_not_know_each_other():
    for one, other in itertools.permutations(("expert", "sequence", "tensor"), 2):
        for file in (PACKAGE / "parallel" / one).glob("*.py"):
            assert f"composer_fsdp2.parallel.{other}." not in file.read_text()


def test_a_rank_gathers_the_parts_that_it_holds():
    model = nn.Sequential(
        nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4)), nn.Linear(8, 4, bias=False)
    )
    names = [name for name, _ in model.named_parameters()]
    given: Any = {"reshard_after_forward": True, "reason": ""}
    parts = ShardUnit(module="0", params=(*names[:4],), numel=256, holders=4, **given)
    root = ShardUnit(module="", params=(*names[4:],), numel=32, **given)
    plan = LayerPlan(degree=2, cuts={}, padding={}, counts={})
    shape = MeshShape(shard=2, tensor=2)
    sizes = TensorParallel().sizes(ModuleTree.read(model), plan, WrapPlan((parts, root)), shape)
    assert (sizes.held, sizes.gathered, sizes.largest) == (4 * 8 * 8 // 4 + 32 // 2, 8 * 8, "0")


def test_a_parameter_of_no_unit_is_never_gathered():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))
    root = ShardUnit(
        module="", params=("1.weight",), numel=32, reshard_after_forward=True, reason=""
    )
    plan = LayerPlan(degree=2, cuts={}, padding={}, counts={})
    shape = MeshShape(shard=2, tensor=2)
    sizes = TensorParallel().sizes(ModuleTree.read(model), plan, WrapPlan((root,)), shape)
    assert (sizes.gathered, sizes.largest) == (32, "<root>")


def test_an_algorithm_of_the_user_may_have_the_name_of_one_that_draws():
    class MixUp:
        pass

    settings = parse_config({"sequence_parallel": 2})
    SequenceParallel().check_items(settings, [MixUp()], None)
