"""Expert parallelism: the transformation of a model whose experts ranks hold between them."""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composer_fsdp2.blocks.transformation import ModelFacts, Transformation
from composer_fsdp2.errors import PlanError
from composer_fsdp2.parallel.expert.experts import Experts
from composer_fsdp2.parallel.expert.mesh import ExpertMesh
from composer_fsdp2.parallel.expert.plan import ExpertPlan, plan_experts, with_expert_units
from composer_fsdp2.parallel.expert.routers import known_block
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.wrap_plan import WrapPlan

__all__ = ["ExpertParallel"]


class ExpertParallel(Transformation[ExpertPlan]):
    """Puts the experts of a rank in the place of each list of experts: `expert_parallel`."""

    exchanges_modules: ClassVar[bool] = True

    def plan(self, facts: ModelFacts) -> ExpertPlan | None:
        """Returns the lists of experts."""
        spec = facts.settings.expert_parallel
        if spec is None or spec.degree == 1:
            return None
        plan = plan_experts(facts.tree, spec, facts.shard_ranks)
        _refuse_quantised(facts.tree, plan)
        return plan

    def check(self, plan: ExpertPlan, facts: ModelFacts) -> None:
        """Refuses groups of ranks that keep gathered weights: experts lie on other ranks."""
        sizes = [facts.settings.reshard_after_forward]
        sizes += [unit.reshard_after_forward for unit in facts.units.units]
        if any(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
            raise PlanError(
                "reshard_after_forward is a number beside expert_parallel, which has not been "
                "tried: its groups are those of other weights. Ranks might keep other experts than "
                "their own. Write true or false."
            )

    def adjust_units(self, plan: ExpertPlan, units: WrapPlan) -> WrapPlan:
        """Returns units of which the experts of each list are one."""
        return with_expert_units(plan, units)

    def apply(self, tree: ModuleTree, plan: ExpertPlan) -> None:
        """Refused: it needs the mesh of the run."""
        raise NotImplementedError

    def apply_on(self, tree: ModuleTree, plan: ExpertPlan, mesh: DeviceMesh) -> None:
        """Connects the blocks. Collective: yes, over the default group."""
        modules = dict(tree.modules())
        ranks = ExpertMesh.build(mesh, plan.degree)
        for held in plan.lists:
            block, experts = modules[held.name.rpartition(".")[0]], modules[held.name]
            known = known_block(block)
            assert known is not None
            assert isinstance(experts, nn.ModuleList)
            own = Experts(experts, ranks, calls_all=known.calls_all)
            block.experts = own
            known.connect(block, own)


def _refuse_quantised(tree: ModuleTree, plan: ExpertPlan) -> None:
    inside = tuple(f"{held.name}." for held in plan.lists)
    for ref in tree.params:
        whole = ref.param.is_floating_point() and type(ref.param.data).__name__ == "Tensor"
        if ref.name.startswith(inside) and not whole:
            raise PlanError(
                f"'{ref.name}' is quantised or divided already, and belongs to an expert. It has "
                "not been tried to send tokens to such experts. Leave expert_parallel out, or load "
                "the weights in bf16 or fp32."
            )
