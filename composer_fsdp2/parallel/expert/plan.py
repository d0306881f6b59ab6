"""Decides which lists of experts ranks share, on names and numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from composer_fsdp2.blocks.transformation import ModelFacts
from composer_fsdp2.config.parallel import ExpertSpec
from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.parallel.expert.routers import BLOCKS, known_router
from composer_fsdp2.parallel.expert.stacked import holds_stack, stack_size
from composer_fsdp2.plan.conditional_modules import conditional_modules
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.patterns import matcher, unmatched_names
from composer_fsdp2.plan.wrap_plan import ShardUnit, WrapPlan
from composer_fsdp2.text import divisors

__all__ = ["REASON", "ExpertList", "ExpertPlan", "plan_experts", "with_expert_units"]

REASON = "experts of a rank"
"""reason of units that are a rank's experts of a layer"""

_LISTS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertList:
    """The experts of one layer."""

    name: str
    count: int
    """experts of the layer, over all ranks"""
    elements: int
    """elements of their parameters, over all ranks"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """Lists of experts that ranks share."""

    degree: int
    lists: tuple[ExpertList, ...]

    @property
    def inside(self) -> tuple[str, ...]:
        """Returns how names of the parts of experts begin."""
        return tuple(f"{experts.name}." for experts in self.lists)

    def __str__(self) -> str:
        """The line of `verbose`: how many experts of each list a rank has."""
        counts = sorted({experts.count // self.degree for experts in self.lists})
        each = " or ".join(map(str, counts))
        return (
            f"expert_parallel: {len(self.lists)} lists of experts over {self.degree} ranks, "
            f"{each} experts of a list on each: {', '.join(experts.name for experts in self.lists)}"
        )


def plan_experts(facts: ModelFacts, spec: ExpertSpec) -> ExpertPlan:
    """Finds the lists of experts and checks that ranks can share them.

    Collective: no.

    Raises:
        ConfigError: the degree fits neither the ranks nor the experts.
        PlanError: there are no experts, or those of a kind that is not known.
    """
    tree, tensor = facts.tree, facts.settings.tensor_parallel
    step = 1 if tensor is None else tensor.degree
    ranks = facts.shard_ranks * step
    if spec.degree % step:
        raise ConfigError(
            f"expert_parallel.degree is {spec.degree}, and tensor_parallel.degree is {step}. The "
            f"{step} ranks that divide a layer have the same tokens and send a part of them each, "
            f"so they belong to one group of experts. Use one of {divisors(ranks, step=step)}."
        )
    modules = dict(tree.modules())
    names = _chosen(tree, spec, modules)
    for name in names:
        if (why := _why_not(name, modules)) is not None:
            raise PlanError(
                f"expert_parallel has degree {spec.degree}, and {why}. Tokens would go to other "
                "experts than in one process. Leave that list out with `modules`, or leave "
                "expert_parallel out for this model."
            )
    lists: list[ExpertList] = []
    for name in names:
        elements = sum(param.numel() for param in modules[name].parameters())
        count = stack_size(modules[name]) or len(list(modules[name].children()))
        if count % spec.degree:
            raise ConfigError(
                f"expert_parallel.degree is {spec.degree}, which does not divide the {count} "
                f"experts of '{name}'. Every rank holds as many as the others. Use one of "
                f"{divisors(ranks, count, step=step) or 'none, and leave expert_parallel out'}."
            )
        # Ranks tell each other of each trained weight, and a unit without any reduces nothing.
        experts = list(modules[name].children()) if isinstance(modules[name], _LISTS) else []
        share = count // spec.degree
        parts = (experts[at : at + share] for at in range(0, count, share))
        weights = ([p for expert in part for p in expert.parameters()] for part in parts)
        # Quantised weights are refused later, by name.
        trained = [sum(p.requires_grad or not p.is_floating_point() for p in w) for w in weights]
        if len(set(trained)) > 1:
            raise PlanError(
                f"expert_parallel has degree {spec.degree}, and its ranks would hold "
                f"{', '.join(map(str, trained))} trained weights of '{name}' (`requires_grad`). "
                "Ranks with more of them would wait for the others. Train as many on each rank, "
                "or leave that list out with `modules`."
            )
        lists.append(ExpertList(name=name, count=count, elements=elements))
    return ExpertPlan(degree=spec.degree, lists=tuple(lists))


def _chosen(tree: ModuleTree, spec: ExpertSpec, modules: dict[str, nn.Module]) -> list[str]:
    """Returns names of lists of experts, and of modules with tensors of experts, as set."""
    if problems := list(unmatched_names(tree, spec.modules, "expert_parallel.modules")):
        raise PlanError("\n".join(problems))
    optional = set(conditional_modules(tree))
    lists = [
        name
        for name, module in modules.items()
        if (name in optional and isinstance(module, _LISTS))
        or holds_stack(name, module)
        or stack_size(module) is not None
    ]
    matchers = [matcher(pattern) for pattern in spec.modules]
    names = [name for name in lists if not matchers or any(m(name) for m in matchers)]
    unmet = [p for p, m in zip(spec.modules, matchers, strict=True) if not any(map(m, lists))]
    if unmet:
        raise PlanError(
            f"expert_parallel.modules holds '{unmet[0]}', which matches no list of experts. It "
            f"would have no effect. Lists of experts in this model: {', '.join(lists) or 'none'}."
        )
    if not names:
        raise PlanError(
            "expert_parallel is asked for, and the model has no list of experts, and no tensor of "
            "them, that ranks can hold between them. It would have no effect: megablocks' mb_dmoe "
            "sends tokens itself, over moe_world_size ranks. Leave it out."
        )
    return names


def _why_not(name: str, modules: dict[str, nn.Module]) -> str | None:
    above, _, attribute = name.rpartition(".")
    experts, block = modules[name], modules[above]
    if attribute == "base_layer":
        return (
            f"{type(block).__name__} ('{above}') adapts a tensor with all experts of a layer "
            "(`target_parameters` of PEFT), of which a rank has its own alone"
        )
    if stack_size(experts) is not None:
        return None
    if holds_stack(name, experts):
        return (
            f"it is not known how {type(experts).__name__} ('{name}') computes its experts, which "
            "lie in one tensor; classes of transformers 5 are known whose forward it exchanges "
            "(`use_experts_implementation`)"
        )
    kind = type(block).__name__
    if attribute != "experts" or type(experts) is not nn.ModuleList or known_router(block) is None:
        blocks = ", ".join(sorted(BLOCKS))
        return (
            f"it is not known how {kind} ('{above}') routes to '{name}'; these blocks of "
            f"transformers are known: {blocks}"
        )
    return None


def with_expert_units(plan: ExpertPlan, units: WrapPlan) -> WrapPlan:
    """Returns units in which each list of experts is a unit. Collective: no.

    Raises:
        PlanError: a part of a list is a unit already, or tied to a weight outside.
    """
    changed: list[ShardUnit] = []
    for unit in units.units:
        rest = unit
        for experts, start in zip(plan.lists, plan.inside, strict=True):
            if unit.module.startswith(start):
                raise PlanError(
                    f"'{unit.module}' lies in the experts '{experts.name}' and was chosen as a "
                    f"unit ({unit.reason}). The experts of a rank are gathered together, for an "
                    "expert may get no token. Choose the block around them."
                )
            params = tuple(name for name in rest.params if name.startswith(start))
            if params:
                expert_unit = ShardUnit(
                    module=experts.name,
                    params=params,
                    numel=experts.elements,
                    # Freed as the block around them, unless that is the model itself.
                    reshard_after_forward=unit.reshard_after_forward or unit.top_level,
                    reason=REASON,
                    holders=plan.degree,
                    mixed_precision=unit.mixed_precision,
                    is_block=False,
                )
                changed.append(expert_unit)
                outside = tuple(name for name in rest.params if not name.startswith(start))
                rest = replace(rest, params=outside, numel=rest.numel - experts.elements)
        changed.append(rest)
    made = {unit.module for unit in changed if unit.reason == REASON}
    for names in units.tied:
        if any(name.startswith(f"{unit}.") for name in names for unit in made):
            raise PlanError(
                f"{' and '.join(map(repr, names))} are one weight, and at least one of them "
                "belongs to an expert. A rank holds some of the experts alone, so the weight would "
                "be untied. Leave expert_parallel out for this model."
            )
    return replace(units, units=tuple(changed))
