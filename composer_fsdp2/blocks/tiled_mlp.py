"""MLPs on one part of the sequence after the other; knows nothing of FSDP.

[Note: tiles] An MLP treats positions alone, and what it makes in between is several times as wide
as its input. Run on one tile of the sequence after the other, each computed again in backward, only
one tile's worth of it exists at a time. The weights stay gathered with their block, and autograd
adds the gradients of the tiles before FSDP sees them: nothing more is sent. Dropout draws other
numbers than for the whole, and a gradient is a sum of sums, which rounds otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from composer_fsdp2.blocks.activation import keeping_nothing
from composer_fsdp2.blocks.transformation import ModelFacts, Transformation
from composer_fsdp2.config.blocks import TilingSpec
from composer_fsdp2.errors import PlanError
from composer_fsdp2.plan.block_positions import outer_names
from composer_fsdp2.plan.module_tree import ModuleTree, has_forward
from composer_fsdp2.plan.patterns import matcher, unmatched_classes, unmatched_names
from composer_fsdp2.ranks import raise_on_all_ranks
from composer_fsdp2.shard.torch_private.tensors import BatchNorm

__all__ = ["TiledMLP", "TilingPlan", "apply_tiling", "plan_tiling"]

_USUAL_NAMES = ("mlp", "ffn", "feed_forward")


@dataclass(frozen=True, slots=True, kw_only=True)
class TilingPlan:
    """Which modules run in tiles. Names and numbers only."""

    modules: tuple[str, ...]
    shards: int

    def __str__(self) -> str:
        return f"in {self.shards} tiles: {', '.join(self.modules)}"


def plan_tiling(
    model: nn.Module | ModuleTree, settings: TilingSpec, *, units: Collection[str] = ()
) -> TilingPlan:
    """Decides which modules run in tiles.

    Collective: no.

    Args:
        model: the whole model, before anything is wrapped, or its tree.
        settings: `tiled_mlp`.
        units: names of the modules that gather their own parameters.

    Raises:
        PlanError: when nothing is chosen, or something that cannot be cut.
    """
    tree = ModuleTree.read(model)
    chosen = _chosen(tree, settings)
    if not chosen:
        raise PlanError(
            "tiled_mlp is on, but no module is called "
            f"{' or '.join(_USUAL_NAMES)}. Nothing would be cut. Write the names of the MLPs in "
            "tiled_mlp.names."
        )
    for name, module in chosen.items():
        _check(name, module, chosen, units)
    return TilingPlan(modules=tuple(chosen), shards=settings.shards)


class TiledMLP(Transformation[TilingPlan]):
    """Runs MLPs on one part of the sequence after the other: `tiled_mlp`."""

    def plan(self, facts: ModelFacts) -> TilingPlan | None:
        """Returns the MLPs to cut."""
        if facts.settings.tiled_mlp is None:
            return None
        units = [name for unit in facts.units.units for name in unit.modules if name]
        return plan_tiling(facts.tree, facts.settings.tiled_mlp, units=units)

    def apply(self, tree: ModuleTree, plan: TilingPlan) -> None:
        """Makes the modules of the plan run in tiles."""
        apply_tiling(tree.root, plan)


def _chosen(tree: ModuleTree, settings: TilingSpec) -> dict[str, nn.Module]:
    problems = [
        *unmatched_classes(tree, settings.classes, "tiled_mlp.classes"),
        *unmatched_names(tree, settings.names, "tiled_mlp.names"),
    ]
    if problems:
        raise PlanError("\n".join(problems))
    named = {name: module for name, module in tree.modules() if name}
    if not settings.classes and not settings.names:
        return {n: m for n, m in named.items() if n.rpartition(".")[2] in _USUAL_NAMES}
    matches = [matcher(pattern) for pattern in settings.names]
    return {
        name: module
        for name, module in named.items()
        if type(module).__name__ in settings.classes or any(match(name) for match in matches)
    }


def _check(name: str, module: nn.Module, chosen: Collection[str], units: Collection[str]) -> None:
    """Refuses what can be seen to be no MLP without running it."""
    around = set(outer_names(name)) - {name}
    if outer := sorted(around & set(chosen)):
        reason = f"it lies in '{outer[0]}', which is cut as well"
    elif not has_forward(module):
        reason = "it has no forward"
    elif inside := [unit for unit in units if name in outer_names(unit)]:
        reason = f"'{inside[0]}' is an FSDP unit, and would be gathered once for each tile"
    elif any(isinstance(part, BatchNorm) for part in module.modules()):
        reason = "it holds a batch norm, which computes with all positions"
    else:
        return
    raise PlanError(
        f"'{name}' was chosen for tiled_mlp, but {reason}. Tiles are for modules that treat every "
        "position alone, with the weights of their block. Choose others with tiled_mlp.names."
    )


def apply_tiling(model: nn.Module, plan: TilingPlan) -> None:
    """Makes the modules of the plan run in tiles, in place; see [Note: tiles].

    Collective: no; but the first call of the first module of each class is, over the default group:
    it compares tiles with the whole and raises a `PlanError` on every rank where they differ.
    """
    compared: set[type[nn.Module]] = set()
    for name in plan.modules:
        module = model.get_submodule(name)
        module.forward = _Tiled(name, module, module.forward, plan.shards, compared)


@dataclass(slots=True, eq=False)
class _Tiled:
    """The forward of a module, in tiles of dimension 1."""

    name: str
    module: nn.Module
    whole: Callable[..., Any]
    shards: int
    compared: set[type[nn.Module]] = field(repr=False)
    """classes for which tiles were found to equal the whole"""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        inputs = self._only_tensor(args, kwargs)
        if inputs.size(1) < 2:
            return self.whole(inputs)  # a token at a time, as in generation
        tiles = inputs.tensor_split(min(self.shards, inputs.size(1)), dim=1)
        if torch.compiler.is_compiling():
            return self._in_tiles(inputs, tiles)
        with keeping_nothing():
            return self._in_tiles(inputs, tiles)

    def _in_tiles(self, inputs: torch.Tensor, tiles: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if type(self.module) not in self.compared:
            raise_on_all_ranks({}, self._difference(inputs, tiles))
            self.compared.add(type(self.module))
        outputs: list[Any] = [checkpoint(self._tile, tile, use_reentrant=False) for tile in tiles]
        return torch.cat(outputs, dim=1)

    def _tile(self, tile: torch.Tensor) -> Any:
        # What is kept until backward is a part of the input; modules may ask for a `view`.
        return self.whole(tile.contiguous())

    def _only_tensor(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor) and args[0].ndim > 2:
            return args[0]
        given = [getattr(value, "shape", value) for value in (*args, *kwargs.values())]
        raise PlanError(
            f"'{self.name}' runs in tiles (tiled_mlp), but is called with {given}. It is not known "
            "where the sequence is. Choose modules that are called with one tensor, (batch, "
            "sequence, width), or leave tiled_mlp out."
        )

    @torch.no_grad()
    def _difference(
        self, inputs: torch.Tensor, tiles: tuple[torch.Tensor, ...]
    ) -> PlanError | None:
        """Runs both ways without dropout."""
        training = [(part, part.training) for part in self.module.modules()]
        self.module.eval()
        try:
            expected, found = self.whole(inputs), [self._tile(tile) for tile in tiles]
        finally:
            for part, was in training:
                part.training = was
        if not isinstance(expected, torch.Tensor):
            return self._refusal(f"returns a {type(expected).__name__} and not one tensor")
        if [part.shape[:2] for part in found] != [tile.shape[:2] for tile in tiles]:
            return self._refusal("does not return one row for each position")
        difference = (torch.cat(found, dim=1) - expected).abs().max()
        if not difference <= _rounding(expected.dtype) * expected.abs().max():  # NaN is not <=
            return self._refusal(f"gives other numbers in tiles, by up to {difference.item():.1e}")
        return None

    def _refusal(self, why: str) -> PlanError:
        return PlanError(
            f"'{self.name}' was chosen for tiled_mlp, but {why}. It does not treat every position "
            "alone, and would train another model. Choose others with tiled_mlp.names."
        )


def _rounding(dtype: torch.dtype) -> float:
    return 100 * torch.finfo(dtype).eps if dtype.itemsize > 2 else 4 * torch.finfo(dtype).eps
