"""`torch.compile` block by block, on any module; knows nothing of FSDP.

[Note: compiled blocks] What is compiled is the forward of a block, activation checkpointing
included, unless what runs again has to be given a context, which no graph holds. It is exchanged in
place, so names stay. Hooks are called around it and not compiled: those of FSDP, the cast of
inputs, and those that take saved tensors to the CPU. Blocks of one class share code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from composer_fsdp2.blocks.chunked_loss import ChunkedHead
from composer_fsdp2.blocks.transformation import ModelFacts, Transformation
from composer_fsdp2.config.blocks import ActivationSpec, CompileSpec
from composer_fsdp2.config.messages import nearest
from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.plan.module_tree import ModuleTree, is_wrapper
from composer_fsdp2.torch_private.tensors import (
    OffloadWrapper,
    compile_within,
    compiler_backends,
    compiler_modes,
    wrapped_module,
)

__all__ = ["CompileBlocks", "CompilePlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilePlan:
    """Which modules are compiled, and how. Names and numbers only."""

    modules: tuple[str, ...]
    settings: CompileSpec
    memory_budget: float | None = None

    def __str__(self) -> str:
        budget = "" if self.memory_budget is None else f", memory budget {self.memory_budget}"
        return f"compiled ({self.settings.backend}{budget}): {', '.join(self.modules)}"


class CompileBlocks(Transformation[CompilePlan]):
    """Compiles each block: `compile`, `activation_checkpointing.memory_budget`."""

    def plan(self, facts: ModelFacts) -> CompilePlan | None:
        """Returns the blocks to compile.

        Raises:
            ConfigError: for a backend or mode that torch does not have or that records CUDA graphs.
            PlanError: when there are no blocks.
        """
        spec = facts.settings.compile
        if spec is False:
            return None
        spec = CompileSpec() if spec is True else spec
        recompute = facts.settings.activation_checkpointing
        budget = recompute.memory_budget if isinstance(recompute, ActivationSpec) else None
        modes = compiler_modes()
        for key, value, choices in (
            ("backend", spec.backend, compiler_backends()),
            ("mode", spec.mode, list(modes)),
        ):
            if value is not None and value not in choices:
                raise ConfigError(
                    f"'compile.{key}' is '{value}', which torch does not know. The first batch "
                    f"would fail.{nearest(value, choices)} There are {', '.join(choices)}."
                )
            if value == "cudagraphs" or (key == "mode" and value is not None and modes[value]):
                raise ConfigError(
                    f"'compile.{key}' is '{value}', with which torch records CUDA graphs. They "
                    "read weights where these were when they were recorded, and FSDP2 gathers to "
                    "another address each time. Leave it out, or write mode: "
                    "max-autotune-no-cudagraphs."
                )
        for key, value, able in (
            ("compile.mode", spec.mode, ("inductor",)),
            ("activation_checkpointing.memory_budget", budget, _KEEPS_BUDGETS),
        ):
            if value is not None and spec.backend not in able:
                raise ConfigError(
                    f"'{key}' is {value!r}, which the backend {spec.backend} has no use for. It "
                    f"would have no effect. Leave it out, or write backend: {able[0]}."
                )
        if not facts.blocks:
            raise PlanError(
                "compile is on, but the model has no blocks. Nothing would be compiled. Choose "
                "blocks with `wrap_policy`, or compile the whole model with compile_config of the "
                "Trainer."
            )
        return CompilePlan(modules=facts.blocks, settings=spec, memory_budget=budget)

    def apply(self, tree: ModuleTree, plan: CompilePlan) -> None:
        """Compiles the blocks in place; the work is done in the first batch."""
        spec = plan.settings
        arguments: dict[str, Any] = {"backend": spec.backend, "mode": spec.mode}
        if plan.memory_budget is not None:
            arguments = {"backend": _Budgeted(spec.backend, spec.mode, plan.memory_budget)}
        for name in plan.modules:
            above, _, last = name.rpartition(".")
            module: Any = tree.root.get_submodule(above)._modules[last] if name else tree.root
            # The graph is around wrappers, but for the one that offloads, and but for a
            # context that is entered when a block runs again.
            while isinstance(module, OffloadWrapper) or (tree.recall and is_wrapper(module)):
                module = wrapped_module(module)
            if not isinstance(module.forward, ChunkedHead):  # which computes when the loss asks
                # `module.compile()` would compile the hooks too, and those of FSDP2 end a graph.
                module.forward = torch.compile(
                    module.forward, fullgraph=spec.fullgraph, dynamic=spec.dynamic, **arguments
                )


_KEEPS_BUDGETS = ("inductor", "aot_eager")
"""backends that split a graph with torch's own partitioner"""


@dataclass(frozen=True, slots=True)
class _Budgeted:
    """A backend that splits a block's graph by a memory budget; equal ones share compiled code."""

    backend: str
    mode: str | None
    budget: float

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        return compile_within(self.budget, self.backend, self.mode, graph, inputs)
