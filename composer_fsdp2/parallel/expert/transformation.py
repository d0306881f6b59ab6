"""Expert parallelism: the transformation of a model whose experts ranks share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composer_fsdp2.blocks.transformation import ModelFacts
from composer_fsdp2.config.schema import FSDP2Config
from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.parallel.form import ExpertMesh
from composer_fsdp2.parallel.parallelism import AppliedParallelism, Parallelism, untried_items
from composer_fsdp2.plan.mesh_shape import REPLICATE_AXIS, TENSOR_AXIS
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.wrap_plan import WrapPlan
from composer_fsdp2.torch_private.tensors import is_plain, root_mesh

if TYPE_CHECKING:
    from composer_fsdp2.parallel.expert.plan import ExpertPlan

__all__ = ["ExpertParallel"]

_EXPERTS, _SHARDS = "ep", "efsdp"
"""axes of the mesh of experts, `dp_replicate x efsdp x ep`"""


class ExpertParallel(Parallelism["ExpertPlan"]):
    """Replaces each list of experts by the experts of a rank: `expert_parallel`."""

    exchanges_modules: ClassVar[bool] = True

    def check_items(
        self, settings: FSDP2Config, items: Iterable[Any], microbatch_size: Any
    ) -> None:
        """Refuses callbacks and algorithms that have not been tried, and `auto`."""
        if settings.expert_parallel is None or settings.expert_parallel.degree == 1:
            return
        if microbatch_size == "auto":
            raise ConfigError(
                "device_train_microbatch_size is auto, and expert parallelism is asked for. One "
                "rank that runs out of memory in the middle of a layer would leave its group "
                "waiting. Write a number of samples."
            )
        for name in untried_items(items):
            raise ConfigError(
                f"{name} and expert parallelism are both asked for. It may read or change weights, "
                "and a rank has those of its own experts alone. Leave it out, or take 'ep' out of "
                "parallelism_config."
            )

    def plan(self, facts: ModelFacts) -> ExpertPlan | None:
        """Returns the lists of experts."""
        spec = facts.settings.expert_parallel
        if spec is None or spec.degree == 1:
            if facts.settings.unused_parameters is False:
                # Ranks would wait for a unit that one of them does not call.
                from composer_fsdp2.parallel.expert.routers import known_router

                modules = dict(facts.tree.modules())
                for unit in facts.units.units:
                    block, _, rest = unit.module.partition(".experts.")
                    router = known_router(modules[block]) if rest and block in modules else None
                    if router is not None and not router.calls_all:
                        raise PlanError(
                            f"'{unit.module}' is a unit, and {type(modules[block]).__name__} does "
                            "not call an expert without a token. The other ranks would wait for "
                            "it. Write `ep: {degree: N}`, or take the class of experts out of "
                            "wrap_policy."
                        )
            return None
        # Imported on demand: see [Note: dividing].
        from composer_fsdp2.parallel.expert.plan import plan_experts

        plan = plan_experts(facts, spec)
        if facts.compute == torch.float16:
            raise ConfigError(
                "The precision is amp_fp16, and expert parallelism is asked for. Torch does not "
                "tell all ranks that the gradient of an expert is infinite: some of them would "
                "step, and have another scale of gradients from then on. Write amp_bf16."
            )
        if facts.odd_optimizer:
            raise PlanError(
                f"{facts.odd_optimizer} and expert parallelism are both asked for. It is not known "
                "to compute each element by itself, and torch steps no experts together with other "
                "weights. Use AdamW, Lion, SGD or another optimizer that steps element by element, "
                "or composer_fsdp2.Muon."
            )
        for ref in facts.tree.params:
            is_supported = ref.param.is_floating_point() and is_plain(ref.param.data)
            if ref.name.startswith(plan.inside) and not is_supported:
                raise PlanError(
                    f"'{ref.name}' is quantised or divided already, and belongs to an expert. It "
                    "has not been tried to send tokens to such experts. Leave expert_parallel out, "
                    "or load the weights in bf16 or fp32."
                )
        # Groups of ranks that keep gathered weights; experts lie on other ranks.
        sizes = [unit.reshard_after_forward for unit in facts.units.units]
        if any(type(size) is int for size in (facts.settings.reshard_after_forward, *sizes)):
            raise PlanError(
                "reshard_after_forward is a number beside expert_parallel, which has not been "
                "tried: its groups are those of other weights. Ranks might keep other experts than "
                "their own. Write true or false."
            )
        return plan

    def adjust_units(self, plan: ExpertPlan, units: WrapPlan) -> WrapPlan:
        """Returns units in which each list of experts is a unit."""
        from composer_fsdp2.parallel.expert.plan import with_expert_units

        return with_expert_units(plan, units)

    def apply_on(self, tree: ModuleTree, plan: ExpertPlan, mesh: DeviceMesh) -> AppliedParallelism:
        """Connects the blocks. Collective: yes, over the default group."""
        from composer_fsdp2.parallel.expert.experts import Experts
        from composer_fsdp2.parallel.expert.routers import known_router
        from composer_fsdp2.parallel.expert.stacked import StackedExperts

        modules = dict(tree.modules())
        root, tensor = root_mesh(mesh), None
        if TENSOR_AXIS in (root.mesh_dim_names or ()):
            tensor = root[TENSOR_AXIS]
            mesh = DeviceMesh(
                mesh.device_type, root.mesh.flatten(-2), mesh_dim_names=mesh.mesh_dim_names
            )
        # The degree divides the ranks of one replica, a multiple of those with the same tokens.
        sizes = (*mesh.mesh.shape[:-1], mesh.mesh.shape[-1] // plan.degree, plan.degree)
        names = (REPLICATE_AXIS, _SHARDS, _EXPERTS)[-len(sizes) :]
        # A second root: one parameter may not lie on axes of two, and no expert lies on `ep`.
        root = DeviceMesh(mesh.device_type, mesh.mesh.reshape(sizes), mesh_dim_names=names)
        single = [DeviceMesh(mesh.device_type, [rank]) for rank in (0, 1)]
        group = root.get_group(_EXPERTS)
        ranks = ExpertMesh(
            shards=root[names[:-1]],
            group=group,
            data_parallel=mesh,
            tensor=tensor,
            remote=single[int(dist.get_rank() == 0)],
            groups=(root.get_group(_SHARDS), group),
        )
        for expert_list in plan.lists:
            block, experts = modules[expert_list.name.rpartition(".")[0]], modules[expert_list.name]
            if not isinstance(experts, nn.ModuleList):
                StackedExperts(experts, ranks, expert_list.count)
                continue
            router = known_router(block)
            assert router is not None
            block.experts = local_experts = Experts(experts, ranks, calls_all=router.calls_all)
            router.connect(block, local_experts)
        return _AppliedExperts()


class _AppliedExperts(AppliedParallelism):
    def connect_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Has state dicts of the optimizer show the experts as FSDP2 alone would shard them."""
        from composer_fsdp2.parallel.expert.views import show_all_states

        show_all_states(optimizer)
