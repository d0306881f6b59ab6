"""Deciding whether the sequences of a model can be divided. Changes nothing but in `apply`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composer_fsdp2.blocks.transformation import ModelFacts, Transformation
from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.parallel.sequence.attention import (
    IMPLEMENTATION,
    original_function,
    uses_interface,
)
from composer_fsdp2.parallel.sequence.group import SequenceGroup, register_interface
from composer_fsdp2.plan.module_tree import ModuleTree, attribute_of

__all__ = ["SequenceParallel", "SequencePlan"]

_TRIED = ("sdpa", "eager")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePlan:
    """Which modules attend over the whole sequence, and how."""

    model: str
    """name of the module that is given batches"""
    attention: tuple[str, ...]
    degree: int
    method: str

    def __str__(self) -> str:
        return (
            f"sequence parallelism of {self.degree} ranks ({self.method}): "
            f"{', '.join(self.attention)}"
        )


class SequenceParallel(Transformation[SequencePlan]):
    """`sequence_parallel`."""

    def plan(self, facts: ModelFacts) -> SequencePlan | None:
        """Returns the attention modules, or refuses the model."""
        spec = facts.settings.sequence_parallel
        if spec is None or spec.degree == 1:
            return None
        modules = dict(facts.tree.modules())
        name = _model_in(modules, spec.degree)
        attention = tuple(n for n, m in modules.items() if uses_interface(m))
        for refuse in (_no_attention, _other_attention, _mixing, _loss, _router):
            if (why := refuse(modules, name, attention)) is not None:
                raise PlanError(
                    f"sequence_parallel has degree {spec.degree}, and {why}. Ranks would compute "
                    "another model than one process. Leave sequence_parallel out for this model."
                )
        method = _method(spec, [modules[n] for n in attention], attention)
        return SequencePlan(model=name, attention=attention, degree=spec.degree, method=method)

    def apply(self, tree: ModuleTree, plan: SequencePlan) -> None:
        """Refused: it needs the mesh of the run."""
        raise NotImplementedError

    def apply_on(self, tree: ModuleTree, plan: SequencePlan, mesh: DeviceMesh) -> None:
        """Connects the model. Collective: yes, over the default group."""
        modules = dict(tree.modules())
        groups = dist.get_world_size() // plan.degree
        axes = init_device_mesh(
            mesh.device_type, (groups, plan.degree), mesh_dim_names=("data", "sp")
        )
        register_interface()
        found = {}
        for name in plan.attention:
            module: Any = modules[name]
            implementation = module.config._attn_implementation
            function = original_function(module, implementation)
            found[name] = (module, function, implementation == "eager")
            # The model's own configuration stays: its masks and its checkpoints depend on it.
            module.config = copy.copy(module.config)
            module.config._attn_implementation = IMPLEMENTATION
        SequenceGroup(modules[plan.model], found, axes["sp"].get_group(), plan.method)


def _model_in(modules: dict[str, nn.Module], degree: int) -> str:
    """The outermost model of transformers."""
    for name, module in modules.items():
        if attribute_of(module, "base_model_prefix") and attribute_of(module, "config"):
            return name
    raise PlanError(
        f"sequence_parallel has degree {degree}, and the model is none of transformers. It is not "
        "known where its attention is. Leave sequence_parallel out for this model."
    )


def _no_attention(_modules: Any, _name: str, attention: tuple[str, ...]) -> str | None:
    return None if attention else "no module calls the attention interface of transformers"


def _other_attention(
    modules: dict[str, nn.Module], _name: str, attention: tuple[str, ...]
) -> str | None:
    for name in attention:
        module: Any = modules[name]
        implementation = module.config._attn_implementation
        if implementation not in _TRIED:
            return (
                f"'{name}' computes with {implementation}, which has not been tried (write "
                f"attn_implementation: {' or '.join(_TRIED)})"
            )
        if attribute_of(module, "is_causal") is False or attribute_of(module, "is_cross_attention"):
            return f"'{name}' sees later tokens, or another sequence"
    kinds = {type(modules[name]) for name in attention}
    for name, module in modules.items():
        looks = {"q_proj", "query_key_value", "c_attn", "Wqkv", "qkv_proj", "q_a_proj"}
        if type(module) not in kinds and looks & set(module._modules):
            return f"'{name}' ({type(module).__name__}) is an attention of another kind"
    return None


_MIXING = (nn.RNNBase, nn.modules.conv._ConvNd, nn.MultiheadAttention, nn.BatchNorm1d)
_MIXING_NAMES = ("mamba", "conv1d", "ssm", "rwkv", "retention", "recurrent", "lightningattention")


def _mixing(modules: dict[str, nn.Module], _name: str, _attention: Any) -> str | None:
    for name, module in modules.items():
        kind = type(module)
        is_linear = kind.__name__ == "Conv1D"  # transformers' linear layer of GPT-2
        named = any(word in kind.__name__.lower() for word in _MIXING_NAMES)
        if isinstance(module, _MIXING) or (named and not is_linear):
            return f"'{name}' ({kind.__name__}) mixes positions, of which a rank has a part"
    return None


def _loss(modules: dict[str, nn.Module], name: str, _attention: Any) -> str | None:
    loss: Any = attribute_of(modules[name], "loss_function")
    if loss is None:
        return f"{type(modules[name]).__name__} computes its loss by itself"
    code = getattr(loss, "__code__", None)
    if code is None or "shift_labels" not in code.co_varnames:
        return f"the loss of {type(modules[name]).__name__} is not that of a causal language model"
    return None


def _router(modules: dict[str, nn.Module], name: str, _attention: Any) -> str | None:
    config: Any = attribute_of(modules[name], "config")
    if getattr(config, "output_router_logits", False):
        return "output_router_logits is on: the balance of experts is not a mean over tokens"
    return None


def _method(spec: Any, modules: list[Any], names: tuple[str, ...]) -> str:
    """Which exchange; `auto` takes the one that sends fewer bytes, if heads allow it."""
    if spec.method == "gather_kv":
        return spec.method
    methods = set[str]()
    for name, module in zip(names, modules, strict=True):
        heads = module.config.num_attention_heads
        kv_heads = getattr(module.config, "num_key_value_heads", None) or heads
        if heads % spec.degree:
            if spec.method == "ulysses":
                divisors = ", ".join(str(n) for n in _divisors(heads))
                raise ConfigError(
                    f"sequence_parallel.degree is {spec.degree}, and '{name}' has {heads} heads, "
                    f"which {spec.degree} ranks cannot share. Ulysses gives each rank whole heads. "
                    f"Write one of {divisors}, or method: gather_kv."
                )
            return "gather_kv"
        sent = 2 * heads + 2 * max(kv_heads, spec.degree)
        methods.add("ulysses" if sent <= 2 * kv_heads * spec.degree else "gather_kv")
    return spec.method if spec.method == "ulysses" or len(methods) > 1 else methods.pop()


def _divisors(number: int) -> Iterator[int]:
    return (n for n in range(1, number + 1) if number % n == 0)
