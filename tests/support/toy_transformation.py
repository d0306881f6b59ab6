"""A transformation in one file: multiplies what every block returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from composer_fsdp2.blocks.transformation import ModelFacts, Transformation
from composer_fsdp2.errors import PlanError
from composer_fsdp2.plan.module_tree import ModuleTree
from tests.support.toy_setting import OUTPUT_FACTOR


@dataclass(frozen=True, slots=True)
class ToyPlan:
    modules: tuple[str, ...]
    factor: int


class Toy(Transformation[ToyPlan]):
    def plan(self, facts: ModelFacts) -> ToyPlan | None:
        factor = OUTPUT_FACTOR.of(facts.settings)
        return ToyPlan(facts.blocks, factor) if factor != 1 else None

    def check(self, plan: ToyPlan, facts: ModelFacts) -> None:
        if not plan.modules:
            raise PlanError("toy_output_factor finds no block. Choose blocks with wrap_policy.")

    def apply(self, tree: ModuleTree, plan: ToyPlan) -> None:
        for name in plan.modules:
            multiply_output(tree.root.get_submodule(name), plan.factor)

    def describe(self, plan: ToyPlan) -> str:
        return f"output times {plan.factor}: {', '.join(plan.modules)}"


def multiply_output(block: nn.Module, factor: int) -> None:
    block.register_forward_hook(lambda _module, _inputs, output: output * factor)
