"""Composer's conventions for a model: wrapping, activation checkpointing, methods and counts."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from composer.models import ComposerModel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchmetrics import Metric, MetricCollection

from composer_fsdp2.config.fsdp1 import convert_fsdp1_unit
from composer_fsdp2.config.wrapping import WrapPolicy, parse_unit_settings
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.parallel.parallelism import BatchGroup
from composer_fsdp2.plan.mesh_shape import MeshShape
from composer_fsdp2.plan.module_tree import ModuleTree, attribute_of, has_forward
from composer_fsdp2.plan.rules import (
    by_hf_blocks,
    find_embedding_and_head,
    policy_rules,
    root_rule,
    with_fp32_islands,
)
from composer_fsdp2.plan.unit_size import is_small_end
from composer_fsdp2.plan.wrap_plan import Decision, Rule, WrapPlan

__all__ = ["ENCODING", "activation_choice", "count_flops_once", "eval_methods", "trainer_rules"]

ENCODING = (
    "_prepare_encoder_decoder_kwargs_for_generation",
    "_prepare_text_encoder_decoder_kwargs_for_generation",
)
"""methods in which `generate` of transformers 4 and 5 calls the encoder"""


def eval_methods(tree: ModuleTree, plan: WrapPlan) -> list[tuple[str, str]]:
    """Returns methods that run a unit without the hooks of its `forward`.

    The Trainer evaluates through `eval_forward`; `generate` of a PEFT model calls that of the model
    inside, and that of a model with an encoder calls the encoder.
    """
    unit_names = {unit.module for unit in plan.units}
    units = [(name, module) for name, module in tree.modules() if name in unit_names]
    adapted = [(n, m) for n, m in units if attribute_of(m, "get_base_model")]
    methods = [(n, "generate") for n, m in adapted if attribute_of(m, "generate") is not None]
    methods += [(n, e) for n, m in units for e in ENCODING if attribute_of(m, e) is not None]
    if "" in unit_names and isinstance(tree.root, ComposerModel):
        methods.append(("", "eval_forward"))
    return methods


def trainer_rules(
    tree: ModuleTree,
    policy: WrapPolicy,
    shape: MeshShape | None = None,
    *,
    keep_fp32: Sequence[str] | None = None,
    gathered_in: torch.dtype | None = torch.float32,
) -> list[Rule]:
    """Returns the rules for a model in Composer's Trainer, in order of precedence.

    Metrics are left alone; then `_fsdp_wrap` on a module, unless it is an adapter; then the
    `wrap_policy`; then `fsdp_wrap_fn` of the direct child a module lies in, or the model's Hugging
    Face block list when there is no such function; then untied embeddings and heads; then small
    norms and embeddings with `_fsdp_wrap`; then the direct children of a ComposerModel. A policy
    that selects blocks replaces `fsdp_wrap_fn`. A model of another class is the root, with its own
    `fsdp_wrap_fn`.

    Args:
        tree: a ComposerModel or any other module.
        policy: `wrap_policy` of the settings.
        shape: the run's mesh, with which a mesh in an answer of `fsdp_wrap_fn` is compared.
        keep_fp32: globs of modules that are gathered in float32.
        gathered_in: the dtype in which the run gathers; `None` is that of the parameters.

    Raises:
        PlanError: for parts of the policy that match nothing.
    """
    model = tree.root
    tops = _tops(model)
    metrics = {
        id(module): Decision(wrap=False, reason="metric")
        for child in model.children()
        if model not in tops and _is_metric(child)
        for module in child.modules()
    }
    ends = find_embedding_and_head(tree, policy)
    marked, marked_ends = _marked(tree, tops, ends)
    rules = [_decided(metrics), _decided(marked), *policy_rules(tree, policy)]
    if not policy.selects_blocks:
        blocks = _hook_rule(tops, shape) or by_hf_blocks(tree)
        rules += [blocks] if blocks else []
    rules += [_decided(ends), _decided(marked_ends)]
    if model in tops:
        rules.append(root_rule)
    else:
        # Containers cannot be units, and a grandchild registered again stays in its own parent.
        inside = {id(module) for top in tops for module in top.modules() if module is not top}
        child = Decision(wrap=True, reason="direct child", is_block=False)
        apart = [top for top in tops if has_forward(top) and id(top) not in inside]
        rules.append(_decided({id(top): child for top in apart}))
    return with_fp32_islands(tree, keep_fp32, gathered_in, rules)


def _tops(model: nn.Module) -> list[nn.Module]:
    """Returns modules whose wrap functions count: a ComposerModel's children, else the model."""
    if not isinstance(model, ComposerModel):
        return [model]
    return [child for child in model.children() if not _is_metric(child)]


def _is_metric(module: nn.Module) -> bool:
    return isinstance(module, Metric | MetricCollection)


def _decided(decisions: Mapping[int, Decision]) -> Rule:
    """Returns a rule for decisions of single modules, as `id(module): decision`."""
    return lambda _name, module: decisions.get(id(module))


def _marked(
    tree: ModuleTree, tops: list[nn.Module], ends: Mapping[int, Decision]
) -> tuple[dict[int, Decision], dict[int, Decision]]:
    """Reads `_fsdp_wrap` of modules, as `id(module): decision`, small ends in the second mapping.

    LLM Foundry marks everything beside the blocks of an MPT model, the final norm too; see [Note:
    small ends].
    """
    unasked = {id(top) for top in tops if top is tree.root}
    # PEFT's adapters stay in the unit of their layer. LLM Foundry marks every adapter as a unit,
    # because FSDP1 could not freeze a part of a unit.
    for _, layer in tree.modules():
        base = attribute_of(layer, "base_layer")
        if isinstance(base, nn.Module) and hasattr(layer, "adapter_layer_names"):
            inner = {id(module) for module in (layer, *base.modules())}
            unasked.update(id(module) for module in layer.modules() if id(module) not in inner)
    decisions: dict[int, Decision] = {}
    small: dict[int, Decision] = {}
    for _, module in tree.modules():
        mark, key = attribute_of(module, "_fsdp_wrap"), id(module)
        if mark is None or key in unasked:
            continue
        if mark and key in ends:
            decisions[key] = ends[key]  # LLM Foundry marks the head of an MPT model
        elif mark and is_small_end(module):
            small[key] = Decision(wrap=True, reason="_fsdp_wrap", joins=True)
        else:
            decisions[key] = Decision(wrap=bool(mark), reason="_fsdp_wrap")
    return decisions, small


def _hook_rule(tops: list[nn.Module], shape: MeshShape | None) -> Rule | None:
    """Returns the rule that calls `fsdp_wrap_fn` of top modules for all modules inside them."""
    hooks = [(top, getattr(top, "fsdp_wrap_fn", None)) for top in tops]
    hook_of = {
        id(module): hook
        for top, hook in hooks
        if callable(hook)
        for module in top.modules()
        if module is not top
    }
    if not hook_of:
        return None

    def rule(name: str, module: nn.Module) -> Decision | None:
        hook = hook_of.get(id(module))
        answer: Any = None if hook is None else hook(module)
        if not answer:
            return None
        if isinstance(answer, bool):
            return Decision(wrap=True, reason="fsdp_wrap_fn")
        if not isinstance(answer, Mapping):
            raise ConfigError(
                f"fsdp_wrap_fn returned a {type(answer).__name__} for '{name}'. Whether it becomes "
                "a unit is then unknown. Return true, false, or a mapping of settings of the unit."
            )
        answer = dict(answer)
        if (mesh := answer.pop("device_mesh", None)) is not None:
            _check_mesh(name, mesh, shape)
        conversion = convert_fsdp1_unit(f"'{name}'", answer)
        for note in conversion.notes:
            warnings.warn(f"FSDP1 to FSDP2: {note}", stacklevel=2)
        settings = parse_unit_settings(f"fsdp_wrap_fn of '{name}'", conversion.settings)
        return Decision(wrap=True, reason="fsdp_wrap_fn", settings=settings)

    return rule


def _check_mesh(name: str, mesh: Any, shape: MeshShape | None) -> None:
    """Refuses a mesh that is not the run's, which LLM Foundry's experts are given."""
    ranks = mesh.mesh if isinstance(mesh, DeviceMesh) else None
    if ranks is not None and shape is not None:
        # A single replica is one mesh with or without an axis for replicas.
        ranks_of_run = torch.arange(shape.shard * (shape.replicate or 1)).view(-1, shape.shard)
        if torch.equal(ranks.cpu().view(-1, ranks.shape[-1]), ranks_of_run):
            return
    shown = f"a {type(mesh).__name__}" if ranks is None else f"the ranks {ranks.tolist()}"
    raise ConfigError(
        f"fsdp_wrap_fn gives '{name}' its own 'device_mesh', {shown}, which is not that of the "
        "run. Its gradients would be averaged over other ranks than those that computed them. Take "
        "it out, or set the degrees of the whole run; experts that are split over ranks "
        "(moe_world_size above 1) are not supported."
    )


def activation_choice(
    tree: ModuleTree, blocks: Collection[str]
) -> Callable[[str, nn.Module], bool]:
    """Returns the function that chooses modules to checkpoint, by name and module.

    It reads `_activation_checkpointing` on a module, then `activation_checkpointing_fn` of the
    direct child the module lies in. A model with neither is checkpointed at its FSDP blocks.

    Args:
        tree: a ComposerModel or any other module.
        blocks: names from `WrapPlan.blocks`.
    """
    hooks = [(top, getattr(top, "activation_checkpointing_fn", None)) for top in _tops(tree.root)]
    hook_of = {id(m): hook for top, hook in hooks if callable(hook) for m in top.modules()}
    marks = (attribute_of(module, "_activation_checkpointing", ...) for _, module in tree.modules())
    if not hook_of and all(mark is ... for mark in marks):
        return lambda name, _module: name in blocks

    def chosen(_name: str, module: nn.Module) -> bool:
        choice = getattr(module, "_activation_checkpointing", None)
        hook = hook_of.get(id(module))
        if choice is None and hook is not None:
            choice = hook(module)
        return bool(choice)

    return chosen


def count_flops_once(model: nn.Module, group: BatchGroup | None) -> None:
    """Has a model count the operations of a batch once for each group. Collective: no.

    SpeedMonitor adds up the count of every rank for its batch, and divides by the ranks.
    """
    counted = attribute_of(model, "flops_per_batch")
    if group is not None and callable(counted):
        setattr(model, "flops_per_batch", functools.partial(_share, counted, group.size))  # noqa: B010


def _share(count: Callable[..., Any], size: int, batch: Any) -> float:
    return count(batch) / size
