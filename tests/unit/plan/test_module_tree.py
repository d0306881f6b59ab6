"""Which names stand for the same weight, and the tree everything else is decided on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)

from composer_fsdp2.errors import PlanError
from composer_fsdp2.plan.module_tree import (
    ModuleTree,
    canonical_param_ids,
    has_forward,
    tied_groups,
)
from tests.support.models import AcrossChildren, Block, Grandchild, TinyLM


class Holder(nn.Module):
    """Parameters by name."""

    def __init__(self, **params: torch.Tensor) -> None:
        super().__init__()
        for name, value in params.items():
            param = value if isinstance(value, nn.Parameter) else nn.Parameter(value)
            self.register_parameter(name, param)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


EMBED_AND_HEAD = (("embed.weight", "head.weight"),)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("tie", "groups"),
    [
        ("none", ()),
        ("two modules", EMBED_AND_HEAD),
        ("storage", EMBED_AND_HEAD),
        ("inside one module", (("extra.there", "extra.back"),)),
        ("all layers", (tuple(f"blocks.{n}.mix.weight" for n in range(3)),)),
        (
            "module registered twice",
            tuple(
                (f"blocks.0.{name}", f"last.{name}")
                for name in (
                    "norm.weight",
                    "norm.bias",
                    "up.weight",
                    "up.bias",
                    "down.weight",
                    "down.bias",
                )
            ),
        ),
    ],
)
def test_every_layout_of_ties(tie, groups, device):
    with torch.device(device):
        model = TinyLM(tie)
    assert tied_groups(model) == groups


def test_across_direct_children():
    assert tied_groups(AcrossChildren()) == EMBED_AND_HEAD


def test_a_grandchild_registered_again_has_two_names():
    groups = tied_groups(Grandchild())
    assert ("net.embed.weight", "embedding.weight") in groups
    assert ("net.blocks.2.up.bias", "inner.2.up.bias") in groups
    assert len(groups) == 1 + 3 * 6


# --- two parameters over one storage ---


def test_neighbours_in_one_storage_are_no_tie():
    flat = torch.zeros(30)
    model = Holder(a=flat[:10], b=flat[10:20].view(2, 5), c=flat[20:])
    assert tied_groups(model) == ()


def test_neighbours_in_a_file_mapping_are_no_tie(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(120))
    flat = torch.from_file(str(path), shared=False, size=30)
    assert tied_groups(Holder(a=flat[:10], b=flat[10:])) == ()
    assert tied_groups(Holder(a=flat[:10], b=flat[:10])) == (("a", "b"),)


def test_neighbours_of_different_dtypes_are_no_tie():
    """Both start at element 10, of 4 and of 2 bytes."""
    flat = torch.zeros(80, dtype=torch.uint8)
    model = Holder(
        a=flat[20:40].view(torch.bfloat16),
        b=flat[40:80].view(torch.float32),
    )
    assert model.a.storage_offset() == model.b.storage_offset() == 10
    assert tied_groups(model) == ()


def test_the_same_bytes_as_another_dtype_are_an_error():
    flat = torch.zeros(10)
    with pytest.raises(PlanError, match="'a' and 'b' share memory"):
        tied_groups(Holder(a=flat, b=flat.view(torch.int32).view(torch.float16)[:10]))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(lambda t: t[:12], lambda t: t[6:18], id="overlap"),
        pytest.param(lambda t: t, lambda t: t[:6], id="prefix"),
        pytest.param(lambda t: t[:12], lambda t: t[:12].view(3, 4), id="other shape"),
        pytest.param(lambda t: t[:9].view(3, 3), lambda t: t[:9].view(3, 3).t(), id="transposed"),
        pytest.param(lambda t: t[3:5], lambda t: t, id="inside"),
    ],
)
def test_different_views_of_one_memory_are_an_error(first, second):
    flat = torch.zeros(24)
    with pytest.raises(PlanError) as caught:
        tied_groups(Holder(one=first(flat), other=second(flat)))
    message = str(caught.value)
    assert "'one'" in message
    assert "'other'" in message
    assert "share memory" in message
    assert ".clone()" in message


def test_a_chain_of_ties_has_the_first_name_as_representative():
    data = torch.zeros(4)
    model = Holder(a=data, b=data.view(4), c=torch.zeros(4), d=data)
    assert tied_groups(model) == (("a", "b", "d"),)
    found = canonical_param_ids(ModuleTree.read(model).params)
    assert {name: found[id(p)] == id(model.a) for name, p in model._parameters.items()} == {
        "a": True,
        "b": True,
        "c": False,
        "d": True,
    }


def test_identity_and_storage_ties_make_one_group():
    model = TinyLM("storage")
    model.extra = nn.Linear(1, 1)
    model.extra.weight = model.head.weight
    assert tied_groups(model) == (("embed.weight", "extra.weight", "head.weight"),)


def test_empty_parameters_tie_by_identity_only():
    """All empty tensors may have the same address."""
    empty = torch.zeros(0, 4)
    assert tied_groups(Holder(a=empty, b=empty)) == ()
    param = nn.Parameter(empty)
    assert tied_groups(Holder(a=param, b=param)) == (("a", "b"),)


def test_absent_parameters_have_no_name():
    model = nn.Linear(2, 2, bias=False)
    assert [ref.name for ref in ModuleTree.read(model).params] == ["weight"]


class Elsewhere(torch.Tensor):
    """Stands for tensors that keep their data in another one, as DTensor does."""


def test_tensor_subclasses_tie_by_identity_only():
    data = torch.zeros(4).as_subclass(Elsewhere)
    assert tied_groups(Holder(a=nn.Parameter(data), b=nn.Parameter(data))) == ()
    param = nn.Parameter(data)
    assert tied_groups(Holder(a=param, b=param)) == (("a", "b"),)


# --- the tree ---


class Pair(nn.Module):
    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(self.left(x))


def paths(tree: ModuleTree) -> list[str]:
    return [entry.path for entry in tree.paths]


def postorder(tree: ModuleTree) -> list[str]:
    return [tree.paths[tree.first_path[key]].path for key in tree.postorder]


def test_paths_in_the_order_of_registration():
    tree = ModuleTree.read(Pair(Pair(nn.Identity(), nn.Identity()), nn.Identity()))
    assert paths(tree) == ["", "left", "left.left", "left.right", "right"]
    assert postorder(tree) == ["left.left", "left.right", "left", "right", ""]
    assert [path for path, _ in tree.modules()] == paths(tree)


def test_a_module_registered_twice_has_two_visits_and_one_name():
    shared = nn.Linear(1, 1)
    model = Pair(Pair(shared, nn.Identity()), shared)
    tree = ModuleTree.read(model)
    assert paths(tree) == ["", "left", "left.left", "left.right", "right"]
    assert [path for path, _ in tree.modules()] == ["", "left", "left.left", "left.right"]
    assert [ref.name for ref in tree.params] == [
        "left.left.weight",
        "left.left.bias",
        "right.weight",
        "right.bias",
    ]


def test_children_before_parents_on_every_path():
    """The shared module first appears deep, and again above a parent of its own."""
    shared = Pair(nn.Identity(), nn.Identity())
    model = Pair(Pair(nn.Identity(), shared), Pair(shared, nn.Identity()))
    tree = ModuleTree.read(model)
    done = [tree.first_path[key] for key in tree.postorder]
    for entry in tree.paths[1:]:
        parent = tree.first_path[id(tree.paths[entry.parent].module)]
        assert done.index(tree.first_path[id(entry.module)]) < done.index(parent)


def test_a_module_that_contains_itself_is_refused():
    model = Pair(nn.Linear(1, 1), nn.Identity())
    model.right = Pair(nn.Identity(), model)
    for read in (ModuleTree.read, tied_groups):
        with pytest.raises(PlanError, match=r"'right\.right' is the whole model again"):
            read(model)


def test_a_module_that_is_its_own_child():
    model = nn.Linear(1, 1)
    model.again = model
    with pytest.raises(PlanError, match="'again' is the whole model again"):
        ModuleTree.read(model)


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, offload_wrapper])
def test_activation_wrappers_do_not_show_in_names(wrap):
    model = TinyLM("two modules")
    plain = [ref.name for ref in ModuleTree.read(model).params]
    model.blocks[0].up = wrap(model.blocks[0].up)
    for index in range(3):
        model.blocks[index] = wrap(model.blocks[index])
    assert [ref.name for ref in ModuleTree.read(model).params] == plain
    assert plain == list(model.state_dict())
    assert tied_groups(model) == EMBED_AND_HEAD


def test_the_deepest_common_parent_that_has_a_forward():
    model = nn.Sequential(nn.ModuleList([Block(), Block()]), Pair(Block(), Block()))
    tree = ModuleTree.read(model)
    at = {entry.path: index for index, entry in enumerate(tree.paths)}

    def common(*names: str) -> str:
        return tree.paths[tree.lowest_common_parent(at[name] for name in names)].path

    assert common("0.0.up", "0.0.down") == "0.0"
    assert common("0.0.up", "0.0") == "0.0"
    assert common("0.0", "0.1") == ""
    assert common("1.left.up", "1.right") == "1"
    assert common("0.0.up", "1.left") == ""
    assert common("1.left.up") == "1.left.up"


def test_what_has_a_forward():
    assert has_forward(nn.Linear(1, 1))
    assert has_forward(nn.Sequential())
    assert not has_forward(nn.ModuleList())
    assert not has_forward(nn.ModuleDict())
    assert not has_forward(nn.Module())
    given_one = nn.Module()
    given_one.forward = lambda x: x
    assert has_forward(given_one)
