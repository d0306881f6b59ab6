"""Units and a user's own `torch.compile`.

[Note: hooks in a graph] A unit gathers in hooks, which torch's compiler does not trace: the graph
ends there and begins anew, or is an error where `fullgraph=True` forbids that.
`torch.compile(part)` compiles what is inside the part, so the part itself may be a unit.
`part.compile()` compiles its hooks too, so only what is around it may.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.wrap_plan import Decision
from composer_fsdp2.shard.torch_private.tensors import compiled_call, is_compiled, is_whole_graph

__all__ = ["keep_graphs_whole"]


@dataclass(slots=True, eq=False)
class _Moved:
    """Units that leave a compiled module, and where to."""

    hosts: dict[int, int] = field(default_factory=dict[int, int])
    """path -> path of the module that gathers for it"""
    names: dict[str, str] = field(default_factory=dict[str, str])
    """name of a unit -> that of the unit instead"""


def keep_graphs_whole(
    tree: ModuleTree, chosen: dict[int, Decision], problems: list[str]
) -> set[int]:
    """Moves units out of what a user compiled as one graph; returns id of what may be none.

    Collective: no. See [Note: hooks in a graph].
    """
    graphs = {id(module): _compiled(module) for _, module in tree.modules()}
    if not any(graphs.values()) and not any(is_compiled(module) for _, module in tree.modules()):
        return set()
    moved = _Moved()
    for index in tree.first_path.values():
        entry = tree.paths[index]
        if entry.parent in moved.hosts:
            _move(tree, index, moved.hosts[entry.parent], chosen, moved)
        elif (how := graphs[id(entry.module)]) == "in place" and entry.parent < 0:
            problems.append(_whole_model())
        elif how == "in place":
            host = tree.lowest_common_parent([entry.parent])
            _move(tree, index, host, chosen, moved)
        elif entry.parent >= 0 and (above := graphs[id(tree.paths[entry.parent].module)]):
            if above != "in place":
                _move(tree, index, entry.parent, chosen, moved)
        elif entry.parent >= 0 and is_compiled(tree.paths[entry.parent].module):
            _exchange(tree, index, chosen)
    if moved.names:
        _warn(moved.names)
    return {id(tree.paths[index].module) for index in moved.hosts}


def _compiled(module: nn.Module) -> Literal["inside", "in place"] | None:
    """Returns which part of a module is one graph."""
    if is_whole_graph(compiled_call(module)):
        return "in place"
    # `vars`, because `torch.compile` returns a module that passes questions on to the one inside.
    if is_whole_graph(vars(module).get("dynamo_ctx")) or is_whole_graph(
        vars(module).get("forward")
    ):
        return "inside"
    return None


def _move(
    tree: ModuleTree, index: int, host: int, chosen: dict[int, Decision], moved: _Moved
) -> None:
    moved.hosts[index] = host
    inner, outer = tree.paths[index], tree.paths[host]
    decision = chosen.pop(id(inner.module), None)
    if decision is None:
        return
    if inner.parent == host and is_compiled(outer.module):
        chosen.setdefault(id(outer.module), decision)
        return
    chosen.setdefault(id(outer.module), Decision(wrap=True, reason="compiled as one graph"))
    moved.names[inner.path] = outer.path


def _exchange(tree: ModuleTree, index: int, chosen: dict[int, Decision]) -> None:
    """Makes what `torch.compile` returned the unit, instead of the module in it."""
    entry = tree.paths[index]
    decision = chosen.pop(id(entry.module), None)
    if decision is not None:
        chosen.setdefault(id(tree.paths[entry.parent].module), decision)


def _whole_model() -> str:
    return (
        "The model was compiled in place with fullgraph=True (`model.compile(fullgraph=True)`), "
        "hooks included. FSDP2 gathers in a hook of the model, which the compiler does not trace. "
        "Leave the call out and set `compile: true`, which compiles the blocks between the hooks."
    )


def _warn(names: dict[str, str]) -> None:
    inner, outer = next(iter(names.items()))
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    warnings.warn(
        f"'{inner}'{more} would be units, and lie in what you compiled with fullgraph=True. "
        f"A unit gathers in a hook, which the graph cannot hold, so '{outer or '<root>'}' gathers "
        "them whole, which takes more memory. Compile the blocks instead: `compile: true`.",
        stacklevel=3,
    )
