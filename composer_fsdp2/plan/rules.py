"""Ready rules for `plan_wrapping`, among them those a `wrap_policy` asks for."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from composer_fsdp2.config.wrapping import PrecisionSpec, UnitSettings, WrapPolicy
from composer_fsdp2.errors import PlanError
from composer_fsdp2.plan.module_tree import (
    ModuleTree,
    attribute_of,
    has_forward,
    inside_wrappers,
    may_be_unit,
    own_parameters,
)
from composer_fsdp2.plan.patterns import (
    matcher,
    select_modules,
    unmatched_classes,
    unmatched_names,
)
from composer_fsdp2.plan.unit_size import WORTH_A_UNIT_BYTES
from composer_fsdp2.plan.wrap_plan import Decision, Role, Rule, first_answer

__all__ = [
    "by_class",
    "by_hf_blocks",
    "by_name",
    "find_embedding_and_head",
    "output_heads",
    "policy_rules",
    "root_rule",
    "with_fp32_islands",
]

FP32 = PrecisionSpec(param_dtype="fp32", reduce_dtype="fp32")


def root_rule(name: str, module: nn.Module) -> Decision | None:
    """Makes the root a unit, which owns all parameters that no other unit owns."""
    return Decision(wrap=True, reason="root") if name == "" else None


def by_class(*classes: str | type[nn.Module], settings: UnitSettings | None = None) -> Rule:
    """Makes a unit of every instance of the classes, given by name or as types.

    A name is that of the class itself, without its bases.
    """
    names = {cls if isinstance(cls, str) else cls.__name__ for cls in classes}
    settings = settings or UnitSettings()
    decisions = {
        name: Decision(wrap=True, reason=f"class {name}", settings=settings) for name in names
    }
    return lambda _name, module: decisions.get(type(module).__name__)


def by_name(pattern: str, settings: UnitSettings | None = None) -> Rule:
    """Makes a unit of every module whose name matches a glob, or `re:` and a regular expression."""
    matches = matcher(pattern)
    decision = Decision(wrap=True, reason=f"name {pattern}", settings=settings or UnitSettings())
    return lambda name, _module: decision if matches(name) else None


def _by_id(keys: Iterable[int], decision: Decision) -> Rule:
    decisions = dict.fromkeys(keys, decision)
    return lambda _name, module: decisions.get(id(module))


def by_hf_blocks(tree: ModuleTree) -> Rule | None:
    """Makes units of the blocks a Hugging Face model lists in `_no_split_modules`.

    The list is a hint about devices and not about sharding: some models name an embedding or a
    block's own mixer in it. Units are made of repeated blocks, the members of a container.

    Returns:
        The rule, or `None` when nothing in the model has such a list.
    """
    modules = [module for _, module in tree.modules()]
    listed = {
        name for module in modules for name in attribute_of(module, "_no_split_modules") or ()
    }
    members = {
        id(child)
        for module in modules
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        for child in module.children()
        if type(child).__name__ in listed
    }
    return _by_id(members, Decision(wrap=True, reason="_no_split_modules")) if members else None


def policy_rules(tree: ModuleTree, policy: WrapPolicy) -> list[Rule]:
    """Returns the rules of a `wrap_policy`, in order: names, classes, embeddings, head, size.

    Raises:
        PlanError: with every part of the policy that matches nothing.
    """
    problems = [
        *unmatched_classes(tree, (s.pattern for s in policy.classes), "wrap_policy.classes"),
        *unmatched_names(tree, (s.pattern for s in policy.names), "wrap_policy.names"),
    ]
    rules = [by_name(selector.pattern, selector.settings) for selector in policy.names]
    rules += [by_class(selector.pattern, settings=selector.settings) for selector in policy.classes]
    if policy.embeddings:
        embeddings = [module for _, module in tree.modules() if isinstance(module, nn.Embedding)]
        rules.append(_members(embeddings, "embeddings", policy.embeddings, problems))
    if policy.lm_head:
        rules.append(_members(output_heads(tree), "lm_head", policy.lm_head, problems, role="head"))
    if policy.min_num_params is not None:
        # Modules with that many elements outside nested units, from the leaves up.
        large: list[nn.Module] = []
        params_of: dict[int, dict[int, int]] = {}
        for key in tree.postorder:
            index = tree.first_path[key]
            path, module = tree.paths[index].path, tree.paths[index].module
            params = {id(p): p.numel() for p in own_parameters(module)}
            for child in module.children():
                params.update(params_of.get(id(child), {}))
            picked = first_answer(rules, path, module)
            is_large = sum(params.values()) >= policy.min_num_params and may_be_unit(tree, index)
            if is_large and not picked:
                large.append(module)
            params_of[key] = {} if picked or is_large else params
        rules.append(_members(large, "min_num_params", UnitSettings(), problems))
    if problems:
        raise PlanError("\n".join(problems))
    return rules


def find_embedding_and_head(tree: ModuleTree, policy: WrapPolicy) -> dict[int, Decision]:
    """Finds embeddings and heads to take out of their model's root unit, as `id(module): decision`.

    The root keeps what it gathered through the whole of backward. A head of its own is free once
    its gradient is there, an embedding right after the forward: its backward reads nothing of it.
    Each is gathered once a step, as in the root. Only ends of models that name both (by Hugging
    Face's getters, which MPT has too), whose weights nothing else holds, and of some size.
    """
    candidates: dict[int, tuple[nn.Module, Decision]] = {}
    for _, owner in tree.modules():
        embedding, head = _asked(owner, "get_input_embeddings"), _asked(owner, _HEAD)
        if head is None or head is embedding:
            continue  # without a head of its own, logits may come from the embedding
        if policy.embeddings is None and isinstance(embedding, nn.Embedding):
            decision = Decision(wrap=True, reason="embeddings", role="embedding", is_block=False)
            candidates[id(embedding)] = embedding, decision
        if policy.lm_head is None and isinstance(head, nn.Linear):
            decision = Decision(wrap=True, reason="lm_head", role="head", is_block=False)
            candidates[id(head)] = head, decision
    if not candidates:
        return {}
    weight_of = tree.weight_of
    names = Counter(weight_of[id(ref.param)] for ref in tree.params)
    return {
        key: decision
        for key, (module, decision) in candidates.items()
        if sum(param.nbytes for param in module.parameters()) >= WORTH_A_UNIT_BYTES
        and all(names[weight_of.get(id(param), 0)] == 1 for param in module.parameters())
    }


_HEAD = "get_output_embeddings"


def _asked(owner: nn.Module, getter: str) -> object:
    """Returns the embedding or head that a model's getter names, if the getter names one."""
    if hasattr(type(owner), getter):  # asking the module itself is slow where there is none
        # transformers' `get_input_embeddings` raises this where a model does not say what they are.
        with contextlib.suppress(NotImplementedError):
            return getattr(owner, getter)()
    return None


def with_fp32_islands(
    tree: ModuleTree,
    patterns: Sequence[str] | None,
    gathered_in: torch.dtype | None,
    rules: Sequence[Rule],
) -> list[Rule]:
    """Wraps rules so that some modules stay in fp32.

    An island takes fp32 in and gives the dtype around it back. Units the rules find in it compute
    in fp32 as well.

    Args:
        tree: of the whole model.
        patterns: of the modules; `None` is what Hugging Face models list.
        gathered_in: dtype in which units are gathered; `None` is the parameters' own.
        rules: decide about each module, the first answer counts.

    Raises:
        PlanError: for a pattern that matches nothing.
    """
    modules = list(select_modules(tree, "keep_fp32", patterns or ()).values())
    for _, owner in tree.modules() if patterns is None else ():
        # Source: `_keep_in_fp32_modules` is for fp16 alone, `_keep_in_fp32_modules_strict` for
        # bf16 too. Both hold parts of names.
        names = {*(attribute_of(owner, "_keep_in_fp32_modules_strict") or ())}
        if gathered_in == torch.float16:
            names |= {*(getattr(owner, "_keep_in_fp32_modules", None) or ())}
        if names:
            inside = owner.named_modules()
            modules += [module for name, module in inside if name.rpartition(".")[2] in names]
    # A decision for each outermost module, and `None` for each module inside one.
    decisions: dict[int, Decision | None] = {}
    for module in map(inside_wrappers, modules):
        first = next(module.parameters(), None)
        if id(module) in decisions or first is None or not has_forward(module):
            continue
        around = gathered_in or first.dtype
        if around in (torch.float32, torch.float64):  # nothing is rounded to less
            continue
        settings = UnitSettings(mixed_precision=replace(FP32, output_dtype=str(around)))
        decisions.update((id(part), None) for part in module.modules())
        decisions[id(module)] = Decision(
            wrap=True, reason="keep_fp32", settings=settings, role="fp32", is_block=False
        )

    def rule(name: str, module: nn.Module) -> Decision | None:
        island, decision = decisions.get(id(module)), first_answer(rules, name, module)
        if island is not None or decision is None:
            return island
        if id(module) not in decisions or not decision.wrap:
            return decision
        return replace(decision, settings=replace(decision.settings, mixed_precision=FP32))

    return [rule]


def _members(
    modules: Sequence[nn.Module],
    key: str,
    settings: UnitSettings,
    problems: list[str],
    role: Role | None = None,
) -> Rule:
    """Returns a rule for modules already found; finding none is a problem."""
    if not modules:
        problems.append(
            f"wrap_policy.{key} matches no module of this model. It would have no effect. "
            "Take it out, or choose the modules with wrap_policy.names."
        )
    is_block = key == "min_num_params"
    decision = Decision(wrap=True, reason=key, settings=settings, role=role, is_block=is_block)
    return _by_id(map(id, modules), decision)


def output_heads(tree: ModuleTree) -> list[nn.Module]:
    """Returns the heads that Hugging Face models name, and modules called `lm_head`."""
    named = [_asked(module, _HEAD) for _, module in tree.modules()]
    called = [module for name, module in tree.modules() if name.rpartition(".")[2] == "lm_head"]
    heads = {id(head): head for head in (*named, *called) if isinstance(head, nn.Module)}
    return list(heads.values())
