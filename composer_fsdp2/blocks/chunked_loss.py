"""Cross entropy on one part of the tokens after the other; knows nothing of FSDP.

[Note: chunked logits] Logits are as wide as the vocabulary, and a loss in fp32 keeps them several
times. In training, a head in the plan returns `ChunkedLogits`: what it was called with, and what is
done to its result up to `cross_entropy`, which then runs head and loss together, chunk by chunk,
each computed again in backward, so that one chunk's logits exist at a time. The unit that owns the
head keeps its weights from the head to the loss; they are gathered once, and autograd adds the
gradients of the chunks before FSDP sees them. A gradient is a sum of sums, which rounds otherwise.
A head that tensor parallelism divides by the vocabulary computes its part of a chunk's logits, and
the ranks tell each other what the loss needs: see [Note: divided vocabulary] in
`blocks.vocabulary_loss`. One chunk is then computed once.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2.blocks.chunked_logits import ChunkedHead
from composer_fsdp2.blocks.transformation import ModelFacts, Transformation
from composer_fsdp2.config.blocks import ChunkingSpec
from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.patterns import outer_names, select_modules
from composer_fsdp2.plan.rules import output_heads
from composer_fsdp2.plan.wrap_plan import WrapPlan

__all__ = [
    "ChunkedLoss",
    "ChunkingPlan",
    "kept_for_loss",
    "plan_chunking",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkingPlan:
    """Which heads compute with the loss. Names and numbers only."""

    heads: tuple[str, ...]
    chunks: int

    def __str__(self) -> str:
        return f"loss in {self.chunks} chunks: {', '.join(self.heads)}"


def plan_chunking(model: nn.Module | ModuleTree, settings: ChunkingSpec) -> ChunkingPlan:
    """Decides which heads leave their logits to the loss.

    Collective: no.

    Args:
        model: the whole model, before anything is wrapped, or its tree.
        settings: `chunked_loss`.

    Raises:
        PlanError: when there is no head.
    """
    tree = ModuleTree.read(model)
    if settings.names:
        heads = list(select_modules(tree, "chunked_loss.names", settings.names))
    else:
        found = {id(head) for head in output_heads(tree)}
        heads = [name for name, module in tree.modules() if id(module) in found]
    if not heads:
        raise PlanError(
            "chunked_loss is on, but the model names no output head, and no module is called "
            "lm_head. Nothing would be cut. Write the name of the head in chunked_loss.names."
        )
    return ChunkingPlan(heads=tuple(heads), chunks=settings.chunks)


def kept_for_loss(plan: WrapPlan, chunked: ChunkingPlan) -> WrapPlan:
    """Returns the units, of which those that own a head keep their weights after forward.

    Collective: no.

    Raises:
        PlanError: for a unit inside a head.
    """
    for name in (name for unit in plan.units for name in unit.modules):
        if around := set(outer_names(name)).difference([name]).intersection(chunked.heads):
            raise PlanError(
                f"'{name}' inside the head '{min(around)}' is an FSDP unit. With chunked_loss it "
                "would be gathered once for each chunk. Take it out of wrap_policy, or "
                "chunked_loss out."
            )
    prefixes = tuple(f"{head}." for head in chunked.heads)
    units = [
        replace(unit, reshard_after_forward=False)
        if any(name.startswith(prefixes) for name in unit.params)
        else unit
        for unit in plan.units
    ]
    return replace(plan, units=tuple(units))


class ChunkedLoss(Transformation[ChunkingPlan]):
    """Runs head and loss on one part of the tokens after the other: `chunked_loss`."""

    def plan(self, facts: ModelFacts) -> ChunkingPlan | None:
        """Returns the heads that leave their logits to the loss."""
        spec, tensor = facts.settings.chunked_loss, facts.settings.tensor_parallel
        if spec is not None and spec.chunks == 1 and (tensor is None or tensor.degree == 1):
            raise ConfigError(
                "chunked_loss.chunks is 1. One part is the whole, unless tensor_parallel divides "
                "it by the vocabulary. Write a number of parts >= 2, or leave chunked_loss out."
            )
        return None if spec is None else plan_chunking(facts.tree, spec)

    def adjust_units(self, plan: ChunkingPlan, units: WrapPlan) -> WrapPlan:
        """Returns the units with those of the heads kept after forward."""
        return kept_for_loss(units, plan)

    def apply(self, tree: ModuleTree, plan: ChunkingPlan) -> None:
        """Lets the heads of the plan leave their logits to the loss, in place.

        Collective: no. See [Note: chunked logits]. Only in training, with gradients: an evaluation
        gets the logits themselves. An embedding that is the head as well goes on looking up tokens.
        """
        divided: list[nn.Parameter] = []
        for name in plan.heads:
            module = tree.root.get_submodule(name)
            module.forward = ChunkedHead(name, module, module.forward, plan.chunks)
            divided += [param for param in module.parameters() if isinstance(param, DTensor)]
        if plan.chunks == 1 and not divided:
            warnings.warn(
                f"chunked_loss: {{chunks: 1}} has no effect: {', '.join(plan.heads)} is whole on "
                "each rank of a tensor group, and so are the logits. Write more chunks.",
                stacklevel=2,
            )
