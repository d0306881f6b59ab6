"""Activation checkpointing on any module; knows nothing of FSDP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)

from composer_fsdp2.core.tying import ModuleTree, has_forward, is_wrapper
from composer_fsdp2.errors import PlanError

__all__ = ["ActivationPlan", "apply_activation", "plan_activation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPlan:
    """Which modules forget their activations, and how they get them back. Names only."""

    modules: tuple[str, ...]
    recompute: bool
    """runs forward again in backward"""
    offload: bool
    """keeps what is saved in CPU memory"""

    def __str__(self) -> str:
        ways = [w for w, on in (("recompute", self.recompute), ("offload", self.offload)) if on]
        return f"activations ({' + '.join(ways)}): {', '.join(self.modules)}"


def plan_activation(
    model: nn.Module,
    choose: Callable[[str, nn.Module], bool],
    *,
    recompute: bool = True,
    offload: bool = False,
) -> ActivationPlan:
    """Decides which modules are checkpointed.

    Collective: no. The root is never wrapped.

    Args:
        model: the whole model.
        choose: whether the module of this name is to be wrapped.
        recompute: `activation_checkpointing`.
        offload: `activation_cpu_offload`.

    Raises:
        PlanError: when no module is chosen, or one without `forward`.
    """
    modules = ModuleTree.read(model).modules()
    named = [(name, module) for name, module in modules if name and not is_wrapper(module)]
    chosen = [(name, module) for name, module in named if choose(name, module)]
    if not chosen:
        raise PlanError(
            "Activation checkpointing is on, but no module was chosen for it. Nothing would be "
            "saved. Give the model an `activation_checkpointing_fn` that returns true for its "
            "blocks, or choose FSDP units with `wrap_policy`."
        )
    empty = [name for name, module in chosen if not has_forward(module)]
    if empty:
        raise PlanError(
            f"'{empty[0]}' was chosen for activation checkpointing but has no forward. There is "
            "nothing to run again. Choose the modules inside it."
        )
    return ActivationPlan(
        modules=tuple(name for name, _ in chosen), recompute=recompute, offload=offload
    )


def apply_activation(model: nn.Module, plan: ActivationPlan) -> None:
    """Wraps the modules of the plan in place; a module registered twice is wrapped once.

    What is in such a wrapper already is left as it is.

    Collective: no. Always non-reentrant. Names in `state_dict()` stay as they are;
    `named_modules()` and `named_parameters()` of outer modules gain `_checkpoint_wrapped_module`.
    """
    tree = ModuleTree.read(model)
    wanted = set(plan.modules)
    wrapped = {visit.path for visit in tree.visits if is_wrapper(visit.module)}
    wrappers: dict[int, nn.Module] = {}
    for name, module in tree.modules():
        if name in wanted and name not in wrapped:
            wrappers[id(module)] = _wrap(module, plan)
    for _, parent in tree.modules():
        for name, child in parent._modules.items():
            if child is not None and id(child) in wrappers:
                parent._modules[name] = wrappers[id(child)]


def _wrap(module: nn.Module, plan: ActivationPlan) -> nn.Module:
    if plan.recompute:
        module = checkpoint_wrapper(module)
    return offload_wrapper(module) if plan.offload else module
