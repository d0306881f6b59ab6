"""MLPs on one part of the sequence after the other; knows nothing of FSDP.

[Note: tiles] An MLP treats positions alone, and what it makes in between is several times as wide
as its input. Run on one tile of the sequence after the other, each computed again in backward, only
one tile's worth of it exists at a time. The weights stay gathered with their block, and autograd
adds the gradients of the tiles before FSDP sees them: nothing more is sent. Dropout draws other
numbers than for the whole, and a gradient is a sum of sums, which rounds otherwise.
"""

from __future__ import annotations

import contextlib
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
from composer_fsdp2.plan.module_tree import ModuleTree, has_forward
from composer_fsdp2.plan.patterns import outer_names, select_modules
from composer_fsdp2.ranks import raise_on_all_ranks
from composer_fsdp2.torch_private.tensors import BatchNorm

__all__ = ["TiledMLP", "TilingPlan", "plan_tiling"]

_USUAL_NAMES = ("mlp", "ffn", "feed_forward")


@dataclass(frozen=True, slots=True, kw_only=True)
class TilingPlan:
    """Which modules run in tiles. Names and numbers only."""

    modules: tuple[str, ...]
    shards: int

    def __str__(self) -> str:
        return f"in {self.shards} tiles: {', '.join(self.modules)}"


def plan_tiling(
    tree: ModuleTree,
    settings: TilingSpec,
    *,
    units: Collection[str] = (),
    conditional: Collection[str] = (),
) -> TilingPlan:
    """Decides which modules run in tiles.

    Collective: no.

    Args:
        tree: of the whole model, before anything is wrapped.
        settings: `tiled_mlp`.
        units: names of the modules that gather their own parameters.
        conditional: names of modules that a rank may leave out of a step. What is in them is
            chosen by name alone, and then refused: all ranks compare the first tiles together.

    Raises:
        PlanError: when nothing is chosen, or something that cannot be cut.
    """
    if settings.classes or settings.names:
        chosen = select_modules(tree, "tiled_mlp.names", settings.names, settings.classes)
        chosen.pop("", None)
    else:
        chosen = {
            name: module
            for name, module in tree.modules()
            if name.rpartition(".")[2] in _USUAL_NAMES
            and not set(outer_names(name)).intersection(conditional)
        }
    if not chosen:
        raise PlanError(
            "tiled_mlp is on, but no module is called "
            f"{' or '.join(_USUAL_NAMES)}. Nothing would be cut. Write the names of the MLPs in "
            "tiled_mlp.names."
        )
    for name, module in chosen.items():
        around = set(outer_names(name)) - {name}
        # What can be seen to be no MLP without running it.
        if outer := sorted(around & set(chosen)):
            reason = f"it lies in '{outer[0]}', which is cut as well"
        elif not has_forward(module):
            reason = "it has no forward"
        elif parts := sorted(set(outer_names(name)).intersection(conditional)):
            reason = (
                f"a rank may leave '{parts[0]}' out of a step, and all ranks compare the "
                "first tiles together (where all call it in every step: unused_parameters: false)"
            )
        elif inside := [unit for unit in units if name in outer_names(unit)]:
            reason = f"'{inside[0]}' is an FSDP unit, and would be gathered once for each tile"
        elif any(isinstance(part, BatchNorm) for part in module.modules()):
            reason = "it holds a batch norm, which computes with all positions"
        else:
            continue
        raise PlanError(
            f"'{name}' was chosen for tiled_mlp, but {reason}. Tiles are for modules that treat "
            "every position alone, with the weights of their block. Choose others with "
            "tiled_mlp.names."
        )
    return TilingPlan(modules=tuple(chosen), shards=settings.shards)


class TiledMLP(Transformation[TilingPlan]):
    """Runs MLPs on one tile of the sequence after the other: `tiled_mlp`."""

    def plan(self, facts: ModelFacts) -> TilingPlan | None:
        """Returns the MLPs to cut."""
        if facts.settings.tiled_mlp is None:
            return None
        units = [unit.module for unit in facts.units.units if unit.module]
        spec, conditional = facts.settings.tiled_mlp, facts.conditional
        return plan_tiling(facts.tree, spec, units=units, conditional=conditional)

    def apply(self, tree: ModuleTree, plan: TilingPlan) -> None:
        """Makes the modules of the plan run in tiles, in place; see [Note: tiles].

        Collective: no; but the first call of the first module of each class is, over the default
        group: it compares tiles with the whole and raises a `PlanError` on every rank where they
        differ.
        """
        compared: set[type[nn.Module]] = set()
        for name in plan.modules:
            module = tree.root.get_submodule(name)
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
        inputs: Any = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(inputs, torch.Tensor) or inputs.ndim < 3:
            shapes = [getattr(value, "shape", value) for value in (*args, *kwargs.values())]
            raise PlanError(
                f"'{self.name}' runs in tiles (tiled_mlp), but is called with {shapes}. It is not "
                "known where the sequence is. Choose modules that are called with one tensor, "
                "(batch, sequence, width), or leave tiled_mlp out."
            )
        tiles = inputs.tensor_split(max(1, min(self.shards, inputs.size(1))), dim=1)
        with contextlib.nullcontext() if torch.compiler.is_compiling() else keeping_nothing():
            if type(self.module) not in self.compared:
                # A rank with one token compares nothing, and others may have more.
                fault = self._difference(inputs, tiles) if len(tiles) > 1 else None
                error = PlanError(
                    f"'{self.name}' was chosen for tiled_mlp, but {fault}. It does not treat every "
                    "position alone, and would train another model. Choose others with "
                    "tiled_mlp.names."
                )
                facts = {"~tiles": len(tiles)}
                everyone = raise_on_all_ranks(facts, None if fault is None else error)
                if any(facts["~tiles"] > 1 for facts in everyone):
                    self.compared.add(type(self.module))
            if len(tiles) > 1:
                outputs: Any = [checkpoint(self._tile, tile, use_reentrant=False) for tile in tiles]
                return torch.cat(outputs, dim=1)
        return self.whole(inputs)  # a token at a time, as in generation

    def _tile(self, tile: torch.Tensor) -> Any:
        # What is kept until backward is a part of the input; modules may ask for a `view`.
        return self.whole(tile.contiguous())

    @torch.no_grad()
    def _difference(self, inputs: torch.Tensor, tiles: tuple[torch.Tensor, ...]) -> str | None:
        """Runs the MLP whole and in tiles, without dropout, and returns how the results differ."""
        training = [(part, part.training) for part in self.module.modules()]
        self.module.eval()
        try:
            expected, parts = self.whole(inputs), [self._tile(tile) for tile in tiles]
        finally:
            for part, was in training:
                part.training = was
        if not isinstance(expected, torch.Tensor):
            return f"returns a {type(expected).__name__} and not one tensor"
        if [part.shape[:2] for part in parts] != [tile.shape[:2] for tile in tiles]:
            return "does not return one row for each position"
        difference = (torch.cat(parts, dim=1) - expected).abs().max()
        steps = 100 if expected.dtype.itemsize > 2 else 4
        most = steps * torch.finfo(expected.dtype).eps * expected.abs().max()
        if not difference <= most:  # NaN is not <=
            return f"gives other numbers in tiles, by up to {difference.item():.1e}"
        return None
