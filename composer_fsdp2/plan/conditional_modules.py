"""Modules that a rank may leave out of a step: experts that got no token, towers without an image.

[Note: modules that may be left out] All ranks issue the same collectives, so a unit that one rank
leaves out stops the others, or hands them the parameters of another unit. Whether a module will be
called is known only once it is. Such a module is therefore no unit: its parameters belong to the
nearest module around it that has a `forward`, which runs on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.patterns import select_modules

__all__ = ["conditional_modules"]

_ROUTERS = frozenset({"gate", "gating", "router", "wg"})


def conditional_modules(tree: ModuleTree, patterns: Iterable[str] = ()) -> list[str]:
    """Names of the outermost modules that a rank may leave out, by structure and by `patterns`.

    Lists of experts, and the towers of a Hugging Face model whose main input is text.

    Collective: no.

    Raises:
        PlanError: for a pattern that matches nothing.
    """
    named = select_modules(tree, "unused_parameters", list(patterns))
    towers = _towers(tree)
    inside: set[int] = set()
    found: list[str] = []
    for index in tree.first_path.values():
        entry = tree.paths[index]
        module, name = entry.module, entry.path.rpartition(".")[2]
        if entry.parent < 0 or id(module) in inside:
            continue
        above = tree.paths[entry.parent].module
        if id(module) in towers or entry.path in named or _holds_experts(module, name, above):
            found.append(entry.path)
            inside.update(id(part) for part in module.modules())
    return found


def _holds_experts(module: nn.Module, name: str, above: nn.Module) -> bool:
    """Whether it is a container of equal modules, called experts or chosen by a router."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict) or len(module) < 2:
        return False
    if "expert" not in name.lower():
        parts: dict[str, Any] = {**dict(above.named_children()), **above._parameters}
        routers = [parts[router] for router in _ROUTERS if parts.get(router) is not None]
        params = [p for r in routers for p in (r.parameters() if isinstance(r, nn.Module) else [r])]
        # A router has one row or column for each expert.
        if not any(param.ndim == 2 and len(module) in param.shape for param in params):
            return False
    members = module.children()
    shapes = {(type(m), *(param.shape for param in m.parameters())) for m in members}
    return len(shapes) == 1


def _towers(tree: ModuleTree) -> set[int]:
    """Models inside a Hugging Face model that read something else than its text.

    A composite configuration lists those of its parts, and says which one is that of the text.
    """
    towers: set[int] = set()
    for _, owner in tree.modules():
        config = getattr(owner, "config", None)
        parts = getattr(type(config), "sub_configs", None)
        if not parts or getattr(owner, "main_input_name", None) != "input_ids":
            continue
        text = type(config.get_text_config())  # pyright: ignore[reportOptionalMemberAccess]
        others = {type(getattr(config, name, None)) for name in parts} - {text, type(config)}
        towers.update(
            id(module)
            for module in owner.modules()
            if type(getattr(module, "config", None)) in others - {type(None)}
        )
    return towers
