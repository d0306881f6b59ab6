"""MLPs in tiles: the same numbers, one tile in memory, and only where it can be done."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from composer_fsdp2.blocks.activation import apply_activation, plan_activation
from composer_fsdp2.blocks.tiled_mlp import TiledMLP, TilingPlan, plan_tiling
from composer_fsdp2.config.blocks import ActivationSpec, TilingSpec
from composer_fsdp2.errors import PlanError
from composer_fsdp2.plan.module_tree import ModuleTree
from tests.support.alive import Alive


class Wide(nn.Sequential):
    """An MLP as language models have it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Model(nn.Module):
    def __init__(self, mlp: nn.Module | None = None, name: str = "mlp") -> None:
        super().__init__()
        self.name = name
        self.add_module(name, mlp or Wide())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + getattr(self, self.name)(x)


def tiled(model: nn.Module, shards: int = 4, **spec) -> nn.Module:
    plan = plan_tiling(ModuleTree.read(model), TilingSpec(shards=shards, **spec))
    TiledMLP().apply(ModuleTree.read(model), plan)
    return model


def cut(model: nn.Module, shards: int | None) -> nn.Module:
    return model if shards is None else tiled(model, shards)


class Flat(Wide):
    """Asks for a view of its input, as GPT-2's layers and experts do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.view(-1, x.shape[-1])).view(x.shape)


@pytest.mark.table("1-Wide", "16-Wide")
@pytest.mark.parametrize("kind", [Wide, Flat])
@pytest.mark.parametrize("length", [1, 3, 16, 17])
def test_the_numbers_are_the_same(length, kind):
    torch.manual_seed(0)
    whole = Model(kind())
    cut = tiled(copy.deepcopy(whole))
    found = []
    for model in (whole, cut):
        x = torch.randn(2, length, 8, generator=torch.Generator().manual_seed(1))
        x.requires_grad_()
        model(x).square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    for expected, got in zip(*found, strict=True):
        assert (expected - got).abs().max() <= 1e-6 * max(1.0, expected.abs().max())
    assert list(cut.state_dict()) == list(whole.state_dict())


@pytest.mark.matrix
def test_one_tile_exists_at_a_time():
    peaks, held = {}, {}
    for shards in (None, 2, 8):
        model = Model() if shards is None else tiled(Model(), shards)
        x = torch.randn(2, 512, 8, requires_grad=True)
        model(x)  # compares
        with Alive() as alive:
            loss = model(x).sum()
            held[shards] = alive.bytes()
            loss.backward()
        peaks[shards] = alive.peak
    inner = 2 * 512 * 4 * 8 * 4
    """bytes of one activation between the two layers, of which a whole MLP keeps two"""
    assert held[None] - held[8] >= 2 * inner
    assert held[8] == held[2]
    assert peaks[8] < peaks[2] < peaks[None]
    assert peaks[None] - peaks[8] > 2 * inner


def in_block(make: Callable[[], nn.Module]) -> nn.Module:
    """A model of one block, of which `selective` keeps products."""
    torch.manual_seed(0)
    model = nn.Sequential(make())
    plan = plan_activation(model, ActivationSpec(mode="selective", names=("0",)))
    apply_activation(model, plan)
    return model


@pytest.mark.table("8")
@pytest.mark.parametrize("width", [8, 48])
def test_inside_a_block_whose_products_are_kept(width: int):
    """The comparison of the first call is no part of what runs again."""
    found = []
    for shards in (None, 3):
        model = in_block(lambda n=shards: cut(Model(Wide(width)), n))
        for _ in range(2):
            x = torch.randn(2, 12, width, generator=torch.Generator().manual_seed(1))
            x.requires_grad_()
            model(x).square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    for expected, got in zip(*found, strict=True):
        assert (expected - got).abs().max() <= 1e-6 * max(1.0, expected.abs().max())


def test_products_of_tiles_are_not_kept():
    held = {}
    for shards in (None, 8):
        model = in_block(lambda n=shards: cut(Model(), n))
        x = torch.randn(2, 512, 8, requires_grad=True)
        model(x)  # compares
        with Alive() as alive:
            loss = model(x).sum()
            held[shards] = alive.bytes()
            loss.backward()
    products = 2 * 512 * (4 * 8 + 8) * 4
    assert held[None] - held[8] >= 0.9 * products


def test_evaluation_and_generation():
    model = Model()
    x = torch.randn(1, 9, 8)
    expected, last = model(x), model(x[:, :1])
    cut = tiled(model).eval()
    with torch.no_grad():
        torch.testing.assert_close(cut(x), expected)
        assert torch.equal(cut(x[:, :1]), last)


def test_comparing_draws_no_numbers_and_changes_no_mode():
    model = tiled(Model(nn.Sequential(Wide(), nn.Dropout(0.5))))
    model.mlp[0].eval()
    torch.manual_seed(0)
    model.mlp.forward._difference(torch.ones(1, 8, 8), torch.ones(1, 8, 8).tensor_split(4, 1))
    assert torch.equal(torch.get_rng_state(), torch.manual_seed(0).get_state())
    assert (model.mlp.training, model.mlp[0].training) == (True, False)


def test_what_is_chosen():
    model = nn.ModuleDict({"a": Model(), "b": Model(name="inner"), "mlps": nn.Linear(2, 2)})
    spec = TilingSpec(shards=2)
    for name in ("ffn", "feed_forward"):
        assert plan_tiling(ModuleTree.read(Model(name=name)), spec).modules == (name,)
    assert plan_tiling(ModuleTree.read(model), spec) == TilingPlan(modules=("a.mlp",), shards=2)
    by_name = TilingSpec(shards=2, names=("*.inner",), classes=("Wide",))
    assert plan_tiling(ModuleTree.read(model), by_name).modules == ("a.mlp", "b.inner")
    assert str(plan_tiling(ModuleTree.read(model), spec)) == "in 2 tiles: a.mlp"


class Mixes(nn.Module):
    """Positions see each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(dim=1)


class Two(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x, 1


class Pools(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim=1, keepdim=True)


@pytest.mark.parametrize(
    ("mlp", "said"),
    [
        (Mixes(), "gives other numbers in tiles"),
        (Two(), "returns a tuple"),
        (Pools(), "does not return one row for each position"),
    ],
)
def test_modules_that_mix_positions_are_found_by_their_numbers(mlp, said):
    model = tiled(Model(mlp))
    with pytest.raises(PlanError, match=f"'mlp' was chosen for tiled_mlp, but.*{said}"):
        model.mlp(torch.randn(1, 8, 8))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((torch.ones(8, 8),), {}), ((torch.ones(1, 8, 8), 2), {}), ((), {"x": torch.ones(1, 8, 8)})],
)
def test_calls_that_say_nothing_about_the_sequence(args, kwargs):
    with pytest.raises(PlanError, match=r"'mlp' runs in tiles .* is called with"):
        tiled(Model()).mlp(*args, **kwargs)


@pytest.mark.parametrize(
    ("mlp", "spec", "units", "said"),
    [
        (Wide(), {"names": ("mpl",)}, (), "names holds 'mpl'.*Did you mean 'mlp'"),
        (Wide(), {"classes": ("Wid",)}, (), "names 'Wid'.*Did you mean 'Wide'"),
        (Wide(), {}, ("mlp",), "'mlp' is an FSDP unit"),
        (Wide(), {}, ("mlp.0",), r"'mlp\.0' is an FSDP unit"),
        (Wide(), {"names": ("mlp", "mlp.0")}, (), r"'mlp\.0' was chosen.*lies in 'mlp'"),
        (nn.Sequential(nn.BatchNorm1d(8)), {}, (), "batch norm"),
        (nn.ModuleList([Wide()]), {}, (), "no forward"),
    ],
)
def test_modules_that_cannot_be_cut(mlp, spec, units, said):
    with pytest.raises(PlanError, match=said):
        plan_tiling(ModuleTree.read(Model(mlp)), TilingSpec(shards=2, **spec), units=units)


def test_parts_that_a_rank_may_leave_out():
    """All ranks compare the first tiles together, and one that never calls the part would not."""
    model = nn.ModuleDict({"tower": Model(), "blocks": Model()})
    tree, spec = ModuleTree.read(model), TilingSpec(shards=2)
    assert plan_tiling(tree, spec, conditional=["tower"]).modules == ("blocks.mlp",)
    named = TilingSpec(shards=2, names=("*.mlp",))
    with pytest.raises(PlanError, match=r"'tower.mlp' was chosen .* may leave 'tower' out"):
        plan_tiling(tree, named, conditional=["tower"])


def test_a_model_without_mlps():
    with pytest.raises(PlanError, match="no module is called mlp or ffn or feed_forward"):
        plan_tiling(ModuleTree.read(nn.Sequential(nn.Linear(2, 2))), TilingSpec(shards=2))
