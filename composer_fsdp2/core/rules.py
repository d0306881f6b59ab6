"""Ready rules for `plan_wrapping`, among them those a `wrap_policy` asks for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from composer_fsdp2.core.config import UnitSettings, WrapPolicy
from composer_fsdp2.core.patterns import matcher, unmatched_classes, unmatched_names
from composer_fsdp2.core.plan import Decision, Rule
from composer_fsdp2.core.tying import ModuleTree, has_forward
from composer_fsdp2.errors import PlanError

__all__ = ["by_class", "by_hf_blocks", "by_name", "policy_rules", "root_rule"]


def root_rule(name: str, module: nn.Module) -> Decision | None:
    """Makes the root a unit; it takes whatever no other unit owns."""
    return Decision(wrap=True, reason="root") if name == "" else None


def by_class(*classes: str | type[nn.Module], settings: UnitSettings | None = None) -> Rule:
    """Makes a unit of every instance of the classes, given by name or as types.

    A name is that of the class itself, without its bases.
    """
    names = {cls if isinstance(cls, str) else cls.__name__ for cls in classes}
    settings = settings or UnitSettings()

    def rule(_name: str, module: nn.Module) -> Decision | None:
        kind = type(module).__name__
        if kind not in names:
            return None
        return Decision(wrap=True, reason=f"class {kind}", settings=settings)

    return rule


def by_name(pattern: str, settings: UnitSettings | None = None) -> Rule:
    """Makes a unit of every module whose name matches a glob, or `re:` and a regular expression."""
    matches = matcher(pattern)
    settings = settings or UnitSettings()

    def rule(name: str, _module: nn.Module) -> Decision | None:
        if not matches(name):
            return None
        return Decision(wrap=True, reason=f"name {pattern}", settings=settings)

    return rule


def by_hf_blocks(model: nn.Module) -> Rule | None:
    """Makes units of the blocks a Hugging Face model lists in `_no_split_modules`.

    The list is a hint about devices and not about sharding: some models name an embedding or a
    block's own mixer in it. Units are made of repeated blocks, the members of a container.

    Returns:
        The rule, or `None` when nothing in the model has such a list.
    """
    listed: set[str] = set()
    for module in model.modules():
        listed.update(getattr(module, "_no_split_modules", None) or ())
    members = {
        id(child)
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        for child in module.children()
        if type(child).__name__ in listed
    }
    if not members:
        return None

    def rule(_name: str, module: nn.Module) -> Decision | None:
        if id(module) not in members:
            return None
        return Decision(wrap=True, reason="_no_split_modules")

    return rule


def policy_rules(model: nn.Module, policy: WrapPolicy) -> list[Rule]:
    """The rules a `wrap_policy` asks for, in order: names, classes, embeddings, head, size.

    Raises:
        PlanError: with every part of the policy that matches nothing.
    """
    if policy == WrapPolicy():
        return []
    tree = ModuleTree.read(model)
    problems = [
        *unmatched_classes(tree, (s.pattern for s in policy.classes), "wrap_policy.classes"),
        *unmatched_names(tree, (s.pattern for s in policy.names), "wrap_policy.names"),
    ]
    rules = [by_name(selector.pattern, selector.settings) for selector in policy.names]
    rules += [by_class(selector.pattern, settings=selector.settings) for selector in policy.classes]
    if policy.embeddings is not None:
        found = [module for _, module in tree.modules() if isinstance(module, nn.Embedding)]
        rules += _members(found, "embeddings", policy.embeddings, problems)
    if policy.lm_head is not None:
        rules += _members(_output_heads(tree), "lm_head", policy.lm_head, problems)
    if policy.min_num_params is not None:
        large = _large_modules(tree, policy.min_num_params, rules)
        rules += _members(large, "min_num_params", UnitSettings(), problems)
    if problems:
        raise PlanError("\n".join(problems))
    return rules


def _members(
    modules: Sequence[nn.Module], key: str, settings: UnitSettings, problems: list[str]
) -> list[Rule]:
    """A rule for modules already found; finding none is a problem."""
    if not modules:
        problems.append(
            f"wrap_policy.{key} matches no module of this model. It would have no effect. "
            "Take it out, or choose the modules with wrap_policy.names."
        )
    ids = {id(module) for module in modules}

    def rule(_name: str, module: nn.Module) -> Decision | None:
        return Decision(wrap=True, reason=key, settings=settings) if id(module) in ids else None

    return [rule]


def _output_heads(tree: ModuleTree) -> list[nn.Module]:
    """What Hugging Face models name as their head, and modules called `lm_head`."""
    heads: dict[int, nn.Module] = {}
    for name, module in tree.modules():
        getter = getattr(module, "get_output_embeddings", None)
        head = getter() if callable(getter) else None
        for candidate in (head, module if name.rpartition(".")[2] == "lm_head" else None):
            if isinstance(candidate, nn.Module):
                heads[id(candidate)] = candidate
    return list(heads.values())


def _large_modules(tree: ModuleTree, least: int, before: list[Rule]) -> list[nn.Module]:
    """Modules with at least `least` elements outside nested units, found from the leaves up."""
    chosen: list[nn.Module] = []
    held: dict[int, dict[int, int]] = {}
    for key in tree.finished:
        visit = tree.visits[tree.first_visit[key]]
        params = {id(p): p.numel() for p in visit.module._parameters.values() if p is not None}
        for child in visit.module.children():
            params.update(held.get(id(child), {}))
        picked = any(rule(visit.path, visit.module) for rule in before)
        large = sum(params.values()) >= least and _may_be_unit(tree, visit.parent, visit.module)
        if large and not picked:
            chosen.append(visit.module)
        held[key] = {} if picked or large else params
    return chosen


def _may_be_unit(tree: ModuleTree, parent: int, module: nn.Module) -> bool:
    """`MultiheadAttention` reads its projection's weight without calling it."""
    inside_attention = parent >= 0 and isinstance(tree.visits[parent].module, nn.MultiheadAttention)
    return has_forward(module) and not inside_attention
