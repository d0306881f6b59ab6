"""Modules that a rank may leave out of a step: experts that got no token, towers without an image.

[Note: modules that may be left out] All ranks issue the same collectives, so a unit that one rank
leaves out stops the others, or hands them the parameters of another unit. Whether a module will be
called is known only once it is. Such a module is therefore no unit: its parameters belong to the
nearest module around it that has a `forward`, which runs on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from composer_fsdp2.errors import PlanError
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.patterns import matcher, unmatched_names

__all__ = ["conditional_modules"]

_ROUTERS = frozenset({"gate", "gating", "router", "wg"})


def conditional_modules(tree: ModuleTree, patterns: Iterable[str] = ()) -> list[str]:
    """Names of the outermost modules that a rank may leave out, by structure and by `patterns`.

    Lists of experts, and the towers of a Hugging Face model whose main input is text.

    Collective: no.

    Raises:
        PlanError: for a pattern that matches nothing.
    """
    patterns = list(patterns)
    if problems := list(unmatched_names(tree, patterns, "unused_parameters")):
        raise PlanError("\n".join(problems))
    matchers = [matcher(pattern) for pattern in patterns]
    towers = _towers(tree)
    inside: set[int] = set()
    found: list[str] = []
    for index in tree.first_path.values():
        entry = tree.paths[index]
        if entry.parent < 0:
            continue
        above, named = tree.paths[entry.parent].module, entry.path.rpartition(".")[2]
        if id(entry.module) in inside:
            continue
        if (
            id(entry.module) in towers
            or _holds_experts(entry.module, named, above)
            or any(matches(entry.path) for matches in matchers)
        ):
            found.append(entry.path)
            inside.update(id(module) for module in entry.module.modules())
    return found


def _holds_experts(module: nn.Module, name: str, above: nn.Module) -> bool:
    """Whether it is a container of equal modules, called experts or chosen by a router."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict) or len(module) < 2:
        return False
    if "expert" not in name.lower() and not _routes(above, len(module)):
        return False
    return len({_shape(member) for member in module.children()}) == 1


def _shape(module: nn.Module) -> tuple[object, ...]:
    return type(module), *(param.shape for param in module.parameters())


def _routes(module: nn.Module, count: int) -> bool:
    """Whether something in it, called a router, has one row or column for each of so many."""
    children = {name: list(child.parameters()) for name, child in module.named_children()}
    own = {name: [param] for name, param in module._parameters.items() if param is not None}
    return any(
        param.ndim == 2 and count in param.shape
        for name, params in (children | own).items()
        if name in _ROUTERS
        for param in params
    )


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
