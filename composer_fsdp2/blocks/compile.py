"""`torch.compile` block by block, on any module; knows nothing of FSDP.

[Note: compiled blocks] What is compiled is the forward of a block, activation checkpointing
included, unless what runs again has to be given a context, which no graph holds. It is exchanged in
place, so names stay. Hooks are called around it and not compiled: those of FSDP, the cast of
inputs, and those that take saved tensors to the CPU. Blocks of one class share code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from composer_fsdp2.blocks.transformation import ModelFacts, Transformation
from composer_fsdp2.config.blocks import ActivationSpec, CompileSpec
from composer_fsdp2.config.messages import nearest
from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.plan.module_tree import ModuleTree, is_wrapper
from composer_fsdp2.shard.torch_private.tensors import (
    OffloadWrapper,
    compile_within,
    compiler_backends,
    compiler_modes,
    wrapped_module,
)

__all__ = ["CompileBlocks", "CompilePlan", "apply_compile", "plan_compile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilePlan:
    """Which modules are compiled, and how. Names and numbers only."""

    modules: tuple[str, ...]
    settings: CompileSpec
    memory_budget: float | None = None

    def __str__(self) -> str:
        budget = "" if self.memory_budget is None else f", memory budget {self.memory_budget}"
        return f"compiled ({self.settings.backend}{budget}): {', '.join(self.modules)}"


def plan_compile(
    blocks: Iterable[str], settings: CompileSpec, *, memory_budget: float | None = None
) -> CompilePlan:
    """Decides what is compiled.

    Collective: no.

    Args:
        blocks: names of the blocks.
        settings: `compile`.
        memory_budget: that of `activation_checkpointing`.

    Raises:
        ConfigError: for a backend or mode that torch does not have or that records CUDA graphs.
        PlanError: when there are no blocks.
    """
    modes = compiler_modes()
    for key, value, known in (
        ("backend", settings.backend, compiler_backends()),
        ("mode", settings.mode, list(modes)),
    ):
        if value is not None and value not in known:
            raise ConfigError(
                f"'compile.{key}' is '{value}', which torch does not know. The first batch would "
                f"fail.{nearest(value, known)} There are {', '.join(known)}."
            )
        if value == "cudagraphs" or (key == "mode" and value is not None and modes[value]):
            raise ConfigError(
                f"'compile.{key}' is '{value}', with which torch records CUDA graphs. They read "
                "weights where these were when they were recorded, and FSDP2 gathers to another "
                "address each time. Leave it out, or write mode: max-autotune-no-cudagraphs."
            )
    for key, value, able in (
        ("compile.mode", settings.mode, ("inductor",)),
        ("activation_checkpointing.memory_budget", memory_budget, _KEEPS_BUDGETS),
    ):
        if value is not None and settings.backend not in able:
            raise ConfigError(
                f"'{key}' is {value!r}, which the backend {settings.backend} has no use for. It "
                f"would have no effect. Leave it out, or write backend: {able[0]}."
            )
    names = tuple(blocks)
    if not names:
        raise PlanError(
            "compile is on, but the model has no blocks. Nothing would be compiled. Choose blocks "
            "with `wrap_policy`, or compile the whole model with compile_config of the Trainer."
        )
    return CompilePlan(modules=names, settings=settings, memory_budget=memory_budget)


class CompileBlocks(Transformation[CompilePlan]):
    """Compiles each block: `compile`, `activation_checkpointing.memory_budget`."""

    def plan(self, facts: ModelFacts) -> CompilePlan | None:
        """Returns the blocks to compile."""
        spec = facts.settings.compile
        if spec is False:
            return None
        spec = CompileSpec() if spec is True else spec
        recompute = facts.settings.activation_checkpointing
        budget = recompute.memory_budget if isinstance(recompute, ActivationSpec) else None
        return plan_compile(facts.blocks, spec, memory_budget=budget)

    def apply(self, tree: ModuleTree, plan: CompilePlan) -> None:
        """Compiles the blocks, the wrappers of activation checkpointing included."""
        apply_compile(tree, plan)


_KEEPS_BUDGETS = ("inductor", "aot_eager")
"""backends that split a graph with torch's own partitioner"""


def apply_compile(model: nn.Module | ModuleTree, plan: CompilePlan) -> None:
    """Compiles the modules of the plan in place; see [Note: compiled blocks].

    Collective: no. To be called after `apply_activation`. The work is done in the first batch.
    """
    tree, spec = ModuleTree.read(model), plan.settings
    backend: Any = spec.backend
    mode = spec.mode
    if plan.memory_budget is not None:
        backend, mode = _Budgeted(spec.backend, spec.mode, plan.memory_budget), None
    for name in plan.modules:
        above, _, last = name.rpartition(".")
        module: Any = tree.root.get_submodule(above)._modules[last] if name else tree.root
        # The graph is around wrappers, but for the one that offloads, and but for contexts that
        # are entered when a block runs again.
        while isinstance(module, OffloadWrapper) or (tree.recalls and is_wrapper(module)):
            module = wrapped_module(module)
        # `module.compile()` would compile the hooks too, and those of FSDP2 end a graph.
        module.forward = torch.compile(
            module.forward,
            backend=backend,
            mode=mode,
            fullgraph=spec.fullgraph,
            dynamic=spec.dynamic,
        )


@dataclass(frozen=True, slots=True)
class _Budgeted:
    """A backend that splits a block's graph by a memory budget; equal ones share compiled code."""

    backend: str
    mode: str | None
    budget: float

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        return compile_within(self.budget, self.backend, self.mode, graph, inputs)
