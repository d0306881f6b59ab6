"""Deciding which modules become FSDP units. Pure: names and numbers in, names and numbers out.

[Note: units and owners] A *unit* is what one collective gathers and reduces. Every parameter has
exactly one *owner* unit: the nearest chosen module above it. All names of a tied parameter have the
same owner: when they lie below different units, the weight moves up to the lowest common parent
that has a `forward`, which becomes a unit if it was none. The other parameters of the units below
stay where they are.
"""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2.config.messages import nearest
from composer_fsdp2.config.wrapping import Reshard
from composer_fsdp2.errors import PlanError
from composer_fsdp2.plan.checks import check_model, left_whole, refuse_unreadable
from composer_fsdp2.plan.conditional_modules import move_units
from composer_fsdp2.plan.module_tree import (
    ModuleTree,
    ParamRef,
    group_ties,
    has_forward,
    is_wrapper,
)
from composer_fsdp2.plan.unit_size import (
    NO_BOUNDS,
    UnitSizes,
    divide_units,
    name_joined,
    small_units,
)
from composer_fsdp2.plan.wrap_plan import Decision, Rule, ShardUnit, WrapPlan, first_answer
from composer_fsdp2.text import listed, quoted

__all__ = ["plan_wrapping"]


def plan_wrapping(
    model: nn.Module | ModuleTree,
    rules: Sequence[Rule],
    *,
    reshard_after_forward: Reshard = "auto",
    tied_weights: Literal["lift", "error"] = "lift",
    ignored_params: Iterable[str] = (),
    frozen: Literal["shard", "replicate"] = "shard",
    sizes: UnitSizes = NO_BOUNDS,
    optional: Collection[str] = (),
) -> WrapPlan:
    """Decides which modules become FSDP units.

    Collective: no. Linear in the number of modules; works on the meta device.

    Args:
        model: the whole model, whose name is '', or its tree.
        rules: asked in order for every module; the first answer wins, no answer is no unit.
        reshard_after_forward: for units whose decision does not say.
        tied_weights: what to do with a weight shared between units.
        ignored_params: globs of parameter names that belong to no unit.
        frozen: `replicate` leaves frozen parameters out of all units as well.
        sizes: bounds of what a unit gathers.
        optional: names of modules that some rank may leave out of a step; neither they nor what is
            in them become units (see [Note: modules that may be left out]).

    Returns:
        The units, children before parents, with names and numbers of elements only.

    Raises:
        PlanError: with every scalar, non-contiguous or mixed-dtype parameter, container without
            `forward`, unmatched pattern or forbidden tie in one message.

    Example:
        >>> from torch import nn
        >>> from composer_fsdp2 import plan_wrapping
        >>> from composer_fsdp2.plan.rules import by_class, root_rule
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> plan = plan_wrapping(model, [by_class("Linear"), root_rule])
        >>> [(unit.module, unit.numel) for unit in plan.units]
        [('0', 40), ('1', 18), ('', 0)]
    """
    tree = ModuleTree.read(model)
    refuse_unreadable(tree)
    weight_of = tree.weight_of
    chosen: dict[int, Decision] = {}
    refused: set[int] = set()
    problems: list[str] = []
    for path, module in tree.modules():
        # An activation wrapper is its module under the same name.
        decision = None if is_wrapper(module) else first_answer(rules, path, module)
        if decision is not None and not decision.wrap:
            refused.add(id(module))
        elif decision is not None:
            chosen[id(module)] = decision
            if not has_forward(module):
                problems.append(_container(path, module, decision))
    refused |= move_units(tree, frozenset(optional), chosen, problems)
    ignored = _match_ignored(tree, ignored_params, weight_of, problems)
    replicated = _frozen(tree, weight_of, problems) if frozen == "replicate" else []
    ignored |= {weight_of[id(ref.param)] for ref in replicated} or left_whole(
        tree.params, weight_of
    )
    refs = [ref for ref in tree.params if weight_of[id(ref.param)] not in ignored]
    ties = group_ties(refs, weight_of)

    units = _settle_units(tree, refs, ties, chosen, tied_weights, problems)
    owned, around = _owned(tree, refs, ties, units), _nesting(tree, units, chosen)
    joining, ends = small_units(tree, owned, around, chosen, sizes)
    chosen = {key: decision for key, decision in chosen.items() if key not in joining}
    units = _settle_units(tree, refs, ties, chosen, tied_weights, problems, sizes, refused)
    name_joined(tree, ends, units, chosen)

    owned = _owned(tree, refs, ties, units)
    for unit, unit_refs in owned.items():
        sizes.warn_of_large(tree.paths[unit].path, unit_refs)
    whole = {units[ref.path_index] for ref in replicated}
    made = [*_make_units(tree, owned, weight_of, units, chosen, reshard_after_forward, whole)]
    if tied_weights == "error":
        problems += _forbidden_ties(tree, units, ties)
    problems += check_model(tree, made, refs, ties)
    if problems:
        lines = [f"  {number}. {text}" for number, text in enumerate(problems, 1)]
        head = f"The model cannot be divided into FSDP units, for {len(problems)} reasons:"
        raise PlanError(problems[0] if len(problems) == 1 else "\n".join([head, *lines]))
    tied = tuple(tuple(ref.name for ref in group) for group in ties)
    ignored_names = tuple(ref.name for ref in tree.params if weight_of[id(ref.param)] in ignored)
    costs = NO_BOUNDS.bytes_of(replicated), sizes.bytes_of(replicated)
    return WrapPlan(tuple(made), tied, ignored_names, *costs)


def _container(path: str, module: nn.Module, decision: Decision) -> str:
    kind = type(module).__name__
    fact = f"{quoted(path, 'The model')} ({kind}) was chosen by {decision.reason}, but "
    if type(module).forward is not nn.Module.forward:
        return (
            f"{fact}it is a ModuleList or ModuleDict, which FSDP2 takes for a container without a "
            "forward. Derive the class from nn.Module and hold the list in it, or choose the "
            "modules inside."
        )
    return (
        f"{fact}a {kind} has no forward. FSDP gathers parameters when forward is called, so they "
        "would never be there. Choose the modules inside it."
    )


def _match_ignored(
    tree: ModuleTree, patterns: Iterable[str], weight_of: Mapping[int, int], problems: list[str]
) -> set[int]:
    """Returns the ignored weights; one ignored name is enough for a tied weight."""
    ignored: set[int] = set()
    for pattern in patterns:
        matched = [ref for ref in tree.params if fnmatch.fnmatchcase(ref.name, pattern)]
        ignored.update(weight_of[id(ref.param)] for ref in matched)
        if not matched:
            hint = nearest(pattern, [ref.name for ref in tree.params])
            problems.append(
                f"'{pattern}' of ignored_params matches no parameter. What you meant to leave "
                f"alone would be sharded.{hint} Correct it or take it out."
            )
    problems += [
        f"'{ref.name}' is left out by ignored_params and trainable. Nobody would average its "
        "gradient, and the ranks would drift apart. Freeze it, or take it out of ignored_params."
        for ref in tree.params
        if weight_of[id(ref.param)] in ignored
        and ref.param.requires_grad
        and not isinstance(ref.param, DTensor)
    ]
    return ignored


def _frozen(tree: ModuleTree, weight_of: Mapping[int, int], problems: list[str]) -> list[ParamRef]:
    """Returns every name of the weights that no name trains; the ranks of a DTensor are settled."""
    trained = {weight_of[id(ref.param)] for ref in tree.params if ref.param.requires_grad}
    refs = [
        ref
        for ref in tree.params
        if weight_of[id(ref.param)] not in trained and not isinstance(ref.param, DTensor)
    ]
    if not refs or not trained:
        problems.append(
            f"frozen is 'replicate', and {'every' if refs else 'no'} parameter of the model is "
            f"frozen. There would be nothing to {'shard' if refs else 'replicate'}. Freeze what is "
            "not trained before the model is prepared, or take the setting out."
        )
    return refs


def _settle_units(
    tree: ModuleTree,
    refs: list[ParamRef],
    ties: list[list[ParamRef]],
    chosen: dict[int, Decision],
    tied_weights: str,
    problems: list[str],
    sizes: UnitSizes | None = None,
    refused: Iterable[int] = (),
) -> list[int]:
    """Returns the unit of every path (index of the unit's first path), after adding missing units.

    Ties need the units that hold them; with `sizes`, units that are too large or of several dtypes
    are divided. Adding a unit can put another tied pair on two sides of it, so this repeats until
    none is left; every round adds at least one unit.
    """
    while True:
        units: list[int] = []
        for module_path in tree.paths:
            above = units[module_path.parent] if module_path.parent >= 0 else -1
            key = id(module_path.module)
            units.append(tree.first_path[key] if key in chosen else above)
        added: dict[int, Decision] = {}
        if any(units[ref.path_index] < 0 for ref in refs):
            added[id(tree.root)] = Decision(wrap=True, reason="root")
        for group in ties if tied_weights == "lift" else ():
            if _crosses(units, group):
                parent = tree.key_of(tree.lowest_common_parent(ref.path_index for ref in group))
                if parent not in chosen:
                    added[parent] = Decision(wrap=True, reason=f"holds tied '{group[0].name}'")
        if not added and sizes is not None:
            unavailable = {*chosen, *refused}
            added = divide_units(tree, _owned(tree, refs, ties, units), chosen, unavailable, sizes)
        if not added:
            return units
        if id(tree.root) in added and not has_forward(tree.root):
            problems.append(_container("", tree.root, added[id(tree.root)]))
        chosen.update(added)


def _crosses(units: list[int], group: list[ParamRef]) -> bool:
    return len({units[ref.path_index] for ref in group}) > 1


def _forbidden_ties(
    tree: ModuleTree, units: list[int], ties: list[list[ParamRef]]
) -> Iterator[str]:
    for group in (group for group in ties if _crosses(units, group)):
        paths = sorted({tree.paths[units[ref.path_index]].path or "<root>" for ref in group})
        yield (
            f"{listed(paths)} were all chosen as FSDP units but share the parameter "
            f"'{group[0].name}' (also {listed(ref.name for ref in group[1:])}). Sharding them "
            "apart would untie them. Choose fewer of them, or set `tied_weights: lift` to shard "
            "the weight with their parent."
        )


def _owned(
    tree: ModuleTree, refs: list[ParamRef], ties: list[list[ParamRef]], units: list[int]
) -> dict[int, list[ParamRef]]:
    """Returns each unit's weights; a tied weight belongs to its names' lowest common unit."""
    lifted: dict[int, int] = {}
    for group in (group for group in ties if _crosses(units, group)):
        owner = units[tree.lowest_common_parent(ref.path_index for ref in group)]
        lifted.update((id(ref.param), owner) for ref in group)
    owned: dict[int, list[ParamRef]] = defaultdict(list)
    for ref in refs:
        owned[lifted.get(id(ref.param), units[ref.path_index])].append(ref)
    owned.pop(-1, None)  # ties between units without a unit around them
    return owned


def _make_units(
    tree: ModuleTree,
    owned: Mapping[int, list[ParamRef]],
    weight_of: Mapping[int, int],
    units: list[int],
    chosen: Mapping[int, Decision],
    run_reshard: Reshard,
    replicated: Collection[int],
) -> Iterator[ShardUnit]:
    """Yields the units, children before parents, without empty units but replicated blocks.

    These stay units, because activation checkpointing and compile go by the blocks of the plan.
    """
    enclosing_of = _nesting(tree, units, chosen)
    enclosing = set(enclosing_of.values())
    # First paths of modules with a trainable parameter in them, at whatever depth.
    trained = {ref.path_index for ref in tree.params if ref.param.requires_grad}
    above = {index for path in trained for index in tree.line_to(path)}
    needed = {tree.first_path[tree.key_of(index)] for index in above}
    for key in (key for key in tree.postorder if key in chosen):
        index = tree.first_path[key]
        # A unit without parameters of its own still ties the units inside it together (one
        # prefetch order and one set of streams); without those either, it would do nothing.
        refs = owned.get(index, [])
        is_block = chosen[key].is_block and chosen[key].role is None
        if not refs and index not in enclosing and not (is_block and index in replicated):
            continue
        weights = {weight_of[id(ref.param)]: ref.param.numel() for ref in refs}
        decision, top_level = chosen[key], index not in enclosing_of
        # What runs next to a head is all of the model around it.
        trains = (enclosing_of.get(index) if decision.role == "head" else index) in needed
        at_once = trains and (top_level or decision.role == "head")
        yield ShardUnit(
            module=tree.paths[index].path,
            params=tuple(ref.name for ref in refs),
            numel=sum(weights.values()),
            reshard_after_forward=_resolve_reshard(decision, at_once, run_reshard),
            reason=decision.reason,
            mixed_precision=decision.settings.mixed_precision,
            top_level=top_level,
            role=decision.role,
            is_block=decision.is_block,
        )


def _nesting(tree: ModuleTree, units: list[int], chosen: Mapping[int, Decision]) -> dict[int, int]:
    """Maps first paths of nested units to the first path of the unit around them."""
    return {
        tree.first_path[id(module_path.module)]: units[module_path.parent]
        for module_path in tree.paths
        if id(module_path.module) in chosen
        and module_path.parent >= 0
        and units[module_path.parent] >= 0
    }


def _resolve_reshard(decision: Decision, used_at_once: bool, run_reshard: Reshard) -> bool | int:
    """Resolves `reshard_after_forward` of one unit.

    A top-level unit is needed again right after forward, so freeing it would only gather it twice;
    a run-wide int leaves it alone for the same reason. One with nothing to train below it (a
    teacher) has no backward, and would be kept for good.
    """
    unit_reshard = decision.settings.reshard_after_forward
    reshard = run_reshard if unit_reshard is None else unit_reshard
    if isinstance(reshard, bool):
        return reshard
    if reshard == "auto":
        return not used_at_once
    return False if used_at_once and unit_reshard is None else reshard
