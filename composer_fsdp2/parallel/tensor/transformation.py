"""Tensor parallelism: divides layers between ranks, before FSDP2 shards each rank's part.

[Note: one stream] Ranks of a group compute the same outside of divided layers, so dropout there
must draw the same numbers on all of them. Each takes the random state of the group's first rank
before the first step. Composer gives every rank a seed of its own, and gives back the states of a
checkpoint by rank, so this happens again in each `fit`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composer_fsdp2.blocks.transformation import ModelFacts
from composer_fsdp2.config.schema import FSDP2Config
from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.parallel.form import group_dividing
from composer_fsdp2.parallel.parallelism import (
    DRAWN,
    DRAWS,
    TRIED,
    AppliedParallelism,
    GroupSizes,
    Parallelism,
    SameBatchGroup,
    untried_items,
)
from composer_fsdp2.parallel.state_dicts import show_model_order_of_states
from composer_fsdp2.plan.conditional_modules import conditional_modules
from composer_fsdp2.plan.mesh_shape import TENSOR_AXIS, MeshShape
from composer_fsdp2.plan.module_tree import ModuleTree, attribute_of
from composer_fsdp2.plan.wrap_plan import WrapPlan
from composer_fsdp2.ranks import is_fake
from composer_fsdp2.torch_private.tensors import is_plain, root_mesh

if TYPE_CHECKING:
    from composer_fsdp2.parallel.tensor.layers import LayerPlan

__all__ = ["TensorParallel", "draw_together"]

log = logging.getLogger(__name__)


class TensorParallel(Parallelism["LayerPlan"]):
    """Divides layers between ranks: `tensor_parallel`."""

    def check_items(
        self, settings: FSDP2Config, items: Iterable[Any], microbatch_size: Any
    ) -> None:
        """Refuses callbacks and algorithms that have not been tried, and `auto`."""
        if settings.tensor_parallel is None or settings.tensor_parallel.degree == 1:
            return
        if microbatch_size == "auto":
            raise ConfigError(
                "device_train_microbatch_size is auto, and tensor parallelism is asked for. One "
                "rank that runs out of memory in the middle of a layer would leave its group "
                "waiting. Write a number of samples."
            )
        for name in untried_items(items):
            weights = (
                "It may read or change weights, of which a rank has a part in an order of its own."
            )
            raise ConfigError(
                f"{name} and tensor parallelism are both asked for. "
                f"{DRAWN if name in DRAWS else weights} Leave it out, or take 'tp' out of "
                f"parallelism_config. These go with it: {', '.join(TRIED)}."
            )

    def plan(self, facts: ModelFacts) -> LayerPlan | None:
        """Returns the layers to divide."""
        spec = facts.settings.tensor_parallel
        if spec is None or spec.degree == 1:
            return None
        if facts.compute == torch.float16:
            raise ConfigError(
                "The precision is amp_fp16, and tensor parallelism is asked for. Torch does not "
                "tell all ranks of both axes that one gradient is infinite: some of them would "
                "step, and have another scale of gradients from then on. Write amp_bf16."
            )
        if facts.odd_optimizer:
            raise PlanError(
                f"{facts.odd_optimizer} and tensor parallelism are both asked for. It is not known "
                "to compute each element by itself, and a rank has a part of a matrix, in an order "
                "of its own. Use AdamW, Lion, SGD or another optimizer that steps element by "
                "element, or composer_fsdp2.Muon."
            )
        if (why := next(_untried(facts), None)) is not None:
            raise PlanError(
                f"tensor_parallel has degree {spec.degree}, and {why}. Ranks would compute another "
                "model, or wait for each other. Leave tensor parallelism out, or that."
            )
        # Imported on demand: see [Note: dividing].
        from composer_fsdp2.parallel.tensor.layers import plan_layers

        expert_modules = [unit.module for unit in facts.units.units if unit.holders > 1]
        return plan_layers(facts.tree, spec, facts.shard_ranks, expert_modules)

    def apply_on(self, tree: ModuleTree, plan: LayerPlan, mesh: DeviceMesh) -> AppliedParallelism:
        """Divides the layers of the plan. Collective: yes, over the default group."""
        from composer_fsdp2.parallel.tensor.divide import divide_layers

        if plan.whole and dist.get_rank() == 0:
            log.warning(
                "tensor_parallel leaves %s whole on each rank of a group, because the degree %d "
                "does not divide its vocabulary or it is not a plain layer.",
                ", ".join(plan.whole),
                plan.degree,
            )
        # Cut out of the same mesh as FSDP2's axes: torch refuses to shard a DTensor otherwise.
        axis = root_mesh(mesh)[TENSOR_AXIS]
        divide_layers(tree, plan, axis)
        return _TensorGroup(axis.get_group())

    def sizes(
        self, tree: ModuleTree, plan: LayerPlan, units: WrapPlan, shape: MeshShape
    ) -> GroupSizes:
        """Returns sizes of a rank's shards and of its largest gathered unit."""
        same, owners = tree.weight_of, units.owner_of()
        modules, cut = dict(tree.modules()), set[int]()
        for ref in tree.params:
            name, _, attribute = ref.name.rpartition(".")
            layer_cut = plan.cuts.get(name)
            if layer_cut is not None and layer_cut.dim_of(attribute, modules[name]) is not None:
                cut.add(same[id(ref.param)])
        gathered: dict[str, int] = {}
        shard_elements = shard_bytes = divided = elements = 0
        for number, ref in {same[id(ref.param)]: ref for ref in reversed(tree.params)}.items():
            size = ref.param.numel()
            unit = owners.get(ref.name)
            holders = 1 if unit is None else unit.holders
            part = -(-size // plan.degree) if number in cut or holders > 1 else size
            share = -(-part // shape.shard)  # the first rank's, which has the most
            elements, divided = elements + size, divided + size * (number in cut)
            shard_elements, shard_bytes = (
                shard_elements + share,
                shard_bytes + share * ref.param.element_size(),
            )
            if unit is not None:
                name = unit.module or "<root>"
                gathered[name] = gathered.get(name, 0) + (size // holders if holders > 1 else part)
        largest = max(gathered, key=lambda name: gathered[name])
        return GroupSizes(
            mesh=shape.describe(),
            layers=len(plan.cuts),
            divided=divided,
            elements=elements,
            held=shard_elements,
            held_bytes=shard_bytes,
            gathered=gathered[largest],
            largest=largest,
        )


def _untried(facts: ModelFacts) -> Iterator[str]:
    """Yields parts of a model that have not been tried with tensor parallelism.

    Settings are refused where they are declared, in `config.parallel`.
    """
    from composer_fsdp2.parallel.tensor.known import unknown_adapter

    modules = dict(facts.tree.modules())
    for name in conditional_modules(facts.tree):
        # Experts are lists, and each of them is divided: a group leaves out the same ones.
        if not isinstance(modules[name], nn.ModuleList | nn.ModuleDict):
            yield f"'{name}' may be left out by a rank (a tower)"
    if (why := unknown_adapter(facts.tree)) is not None:
        yield why
    for name, module in modules.items():
        if attribute_of(module, "alibi") is True:
            yield f"'{name}' uses ALiBi, whose slopes are those of all heads"
    for ref in facts.tree.params:
        if not is_plain(ref.param.data):
            yield f"'{ref.name}' is divided or quantised already"
    sizes = [unit.reshard_after_forward for unit in facts.units.units]
    if any(type(size) is int for size in (facts.settings.reshard_after_forward, *sizes)):
        yield "reshard_after_forward is a number, which has not been tried with it"


# --- In the steps of the run ---


class _TensorGroup(SameBatchGroup):
    """Compares the batches of a group and shares random states; see [Note: one stream]."""

    why = "in one group of tensor parallelism", "add up parts of different samples"

    def connect_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Has state dicts of the optimizer show the order of the model."""
        show_model_order_of_states(optimizer)

    def before_forward(self, model: nn.Module, inputs: Any) -> None:
        """Compares batches. Collective: yes, over the default group, at times of `compare`."""
        if self.compare(inputs, model.training) and model.training:
            self.share_random_state(next(model.parameters()).device)

    def share_random_state(self, device: torch.device) -> None:
        """Gives all ranks the random state of the group's first rank. Collective: yes."""
        first = dist.get_global_rank(self.group, 0)
        # NCCL sends nothing from CPU memory.
        state = torch.get_rng_state().to(device)
        dist.broadcast(state, src=first, group=self.group)
        torch.set_rng_state(state.cpu())
        if device.type != "cpu":
            module: Any = torch.get_device_module(device)
            state = module.get_rng_state(device).to(device)
            dist.broadcast(state, src=first, group=self.group)
            module.set_rng_state(state.cpu(), device)


def draw_together(model: nn.Module, prompts: Any) -> None:
    """Prepares the ranks of a tensor group to draw words: one random state from here on.

    Collective: yes, over the default group, for a model with divided layers.

    Raises:
        PlanError: the same on every rank, if prompts in any group differ.
    """
    groups = (group_dividing(param) for param in model.parameters())
    group = next((group for group in groups if group is not None), None)
    # No run is asked: `generate` belongs to the model inside of a ComposerModel.
    if group is not None and not is_fake():
        ranks = _TensorGroup(group)
        ranks.check(prompts)
        ranks.share_random_state(next(model.parameters()).device)
