"""Modules that may be no units: a rank may leave them out of a step, or they are in a graph.

[Note: modules that may be left out] All ranks issue the same collectives, so a unit that one rank
leaves out stops the others, or hands them the parameters of another unit. Whether a module will be
called is known only once it is. Such a module is therefore no unit: its parameters belong to the
nearest module around it that has a `forward`, which runs on every rank.

[Note: hooks in a graph] A unit gathers in hooks, which torch's compiler does not trace: a user's
graph ends there and begins anew, or is an error where `fullgraph=True` forbids that.
`torch.compile(part)` compiles what is inside the part, so the part itself may be a unit.
`part.compile()` compiles its hooks too, so only what is around it may.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import nn

from composer_fsdp2.config.wrapping import UnitSettings
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.patterns import select_modules
from composer_fsdp2.plan.wrap_plan import LEFT_OUT, Decision
from composer_fsdp2.text import listed
from composer_fsdp2.torch_private.tensors import compiled_call, is_compiled, is_whole_graph

__all__ = ["conditional_modules", "move_units"]

_ROUTERS = frozenset({"gate", "gating", "router", "wg"})


def conditional_modules(tree: ModuleTree, patterns: Iterable[str] = ()) -> Iterator[str]:
    """Yields names of the outermost modules that a rank may leave out, by structure and `patterns`.

    Lists of experts, and the towers of a Hugging Face model whose main input is text.

    Collective: no.

    Raises:
        PlanError: for a pattern that matches nothing.
    """
    named = select_modules(tree, "unused_parameters", list(patterns))
    # Towers: models inside a Hugging Face model that read something else than its text. A composite
    # configuration lists those of its parts, and says which of them is that of the text.
    towers: set[int] = set()
    for _, owner in tree.modules():
        config = getattr(owner, "config", None)
        parts = getattr(type(config), "sub_configs", None)
        if parts and getattr(owner, "main_input_name", None) == "input_ids":
            text = type(config.get_text_config())  # pyright: ignore[reportOptionalMemberAccess]
            others = {type(getattr(config, name, None)) for name in parts}
            others -= {text, type(config), type(None)}
            reading = (m for m in owner.modules() if type(getattr(m, "config", None)) in others)
            towers.update(map(id, reading))
    inside: set[int] = set()
    for index in tree.first_path.values():
        module_path = tree.paths[index]
        module, name = module_path.module, module_path.path.rpartition(".")[2]
        if module_path.parent < 0 or id(module) in inside:
            continue
        above = tree.paths[module_path.parent].module
        if id(module) in towers or module_path.path in named or _holds_experts(module, name, above):
            inside.update(id(part) for part in module.modules())
            yield module_path.path


def _holds_experts(module: nn.Module, name: str, above: nn.Module) -> bool:
    """Whether a module is a container of equal modules, called experts or chosen by a router."""
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


def move_units(
    tree: ModuleTree, optional: Collection[str], chosen: dict[int, Decision], problems: list[str]
) -> set[int]:
    """Moves units out of optional modules and out of graphs. Collective: no.

    Args:
        tree: the model before sharding.
        optional: names of modules that some rank may leave out of a step.
        chosen: decision of each unit by id(module); is changed.
        problems: sentences about the plan; some are appended.

    Returns:
        id of the modules that may be no units.
    """

    def around_optional(index: int) -> int | None:
        module_path = tree.paths[index]
        return (
            tree.lowest_common_parent([module_path.parent])
            if module_path.path in optional
            else None
        )

    inside, moved = _move(tree, chosen, around_optional, LEFT_OUT)
    problems += [
        f"'{path}' was chosen by {decision.reason} as a unit with settings of its own, and some "
        "ranks may leave it out of a step. The others would wait for it, so it is gathered with "
        "the module around it and cannot have its own settings. Take them out, or write "
        "`unused_parameters: false` if every rank calls it in every step."
        for path, decision, _ in moved
        if decision.settings != UnitSettings()
    ]
    if moved:
        hosts = listed(dict.fromkeys(host for _, _, host in moved))
        warnings.warn(
            f"{listed(path for path, _, _ in moved)} were chosen as units, and some ranks may "
            f"leave them out of a step. The others would wait for them, so {hosts} gathers them "
            "whole, which takes more memory. Write `unused_parameters: false` if every rank calls "
            "all of them in every step.",
            stacklevel=3,
        )
    return inside | _move_out_of_graphs(tree, chosen, problems)


def _move_out_of_graphs(
    tree: ModuleTree, chosen: dict[int, Decision], problems: list[str]
) -> set[int]:
    """Moves units out of modules that the user compiled as one graph; as `move_units`."""
    once = [(id(module), module) for _, module in tree.modules()]
    in_place = {key for key, module in once if is_whole_graph(compiled_call(module))}
    # `vars`, because `torch.compile` returns a module that passes questions on to the one inside.
    inside = {
        key
        for key, module in once
        if any(
            is_whole_graph(vars(module).get(attribute)) for attribute in ("dynamo_ctx", "forward")
        )
    }
    if id(tree.root) in in_place:
        problems.append(
            "The model was compiled in place with fullgraph=True "
            "(`model.compile(fullgraph=True)`), hooks included. FSDP2 gathers in a hook of the "
            "model, which the compiler does not trace. Leave the call out and set `compile: true`, "
            "which compiles the blocks between the hooks."
        )
    for index in tree.first_path.values():
        parent = tree.paths[index].parent
        in_compiled = parent >= 0 and is_compiled(tree.paths[parent].module)
        if in_compiled and tree.key_of(index) in chosen:
            # What `torch.compile` returned is the unit, instead of the module in it.
            chosen.setdefault(tree.key_of(parent), chosen.pop(tree.key_of(index)))

    def around_graph(index: int) -> int | None:
        parent = tree.paths[index].parent
        if parent < 0:
            return None
        if tree.key_of(index) in in_place:
            return tree.lowest_common_parent([parent])
        return parent if tree.key_of(parent) in inside else None

    in_graphs, moved = _move(tree, chosen, around_graph, "compiled as one graph")
    if moved:
        inner, _, outer = moved[0]
        more = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
        warnings.warn(
            f"'{inner}'{more} would be units, and lie in what you compiled with fullgraph=True. A "
            f"unit gathers in a hook, which the graph cannot hold, so '{outer}' "
            "gathers them whole, which takes more memory. Compile the blocks instead: "
            "`compile: true`.",
            stacklevel=4,
        )
    return in_graphs


def _move(
    tree: ModuleTree,
    chosen: dict[int, Decision],
    host_of: Callable[[int], int | None],
    reason: str,
) -> tuple[set[int], list[tuple[str, Decision, str]]]:
    """Makes a unit of the host of each path instead of the units in it.

    Returns:
        id of the modules inside; name and decision of each unit that moved, and its host's name.
    """
    hosts: dict[int, int] = {}
    moved: list[tuple[str, Decision, str]] = []
    for index in tree.first_path.values():
        module_path = tree.paths[index]
        host = hosts[module_path.parent] if module_path.parent in hosts else host_of(index)
        if host is not None:
            hosts[index] = host
            if (decision := chosen.pop(id(module_path.module), None)) is not None:
                chosen.setdefault(tree.key_of(host), Decision(wrap=True, reason=reason))
                moved.append((module_path.path, decision, tree.paths[host].path or "<root>"))
    return {tree.key_of(index) for index in hosts}, moved
