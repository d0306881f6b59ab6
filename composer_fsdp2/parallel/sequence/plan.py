"""Decides whether and how sequences of a model can be divided, and connects its attention."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composer_fsdp2.blocks.transformation import ModelFacts
from composer_fsdp2.config.parallel import SequenceSpec
from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.parallel.sequence.group import SequenceGroup
from composer_fsdp2.parallel.sequence.kinds import (
    MPT,
    AttentionKind,
    calls_loss_function,
    kind_of,
    next_word_loss,
    own_loss,
)
from composer_fsdp2.plan.module_tree import ModuleTree, attribute_of
from composer_fsdp2.plan.rules import output_heads
from composer_fsdp2.text import divisors

__all__ = ["SequencePlan", "connect_attention", "plan_sequences"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePlan:
    """Which modules attend over the whole sequence, and how."""

    model: str
    """name of the module that is given batches"""
    decoder: str
    """name of the module whose inputs are cut: the model, or its decoder of text"""
    towers: tuple[str, ...]
    """modules outside of the decoder that each rank computes on the whole batch"""
    attention: Mapping[str, AttentionKind]
    """by name"""
    degree: int
    tensor_degree: int
    """ranks of a tensor group, which have the same positions"""
    method: str
    frees: bool
    """whether gathered keys and values are freed until backward"""
    documents: str
    """`as_model` or `apart`, as the setting"""

    def __str__(self) -> str:
        towers = f"; whole on each rank: {', '.join(self.towers)}" if self.towers else ""
        return (
            f"sequence parallelism of {self.degree} ranks ({self.method}): "
            f"{', '.join(self.attention)}{towers}"
        )


def plan_sequences(facts: ModelFacts, spec: SequenceSpec) -> SequencePlan:
    """Returns the attention modules, or refuses the model. Collective: no.

    Raises:
        ConfigError: the heads of the model do not allow the method.
        PlanError: ranks would compute another model.
    """
    if (owner := own_loss(facts.tree.root)) is not None:
        raise PlanError(
            f"sequence_parallel has degree {spec.degree}, and {owner} computes its loss from "
            "logits by itself. A rank has those of its part of each sequence. Use a "
            "HuggingFaceModel, whose model computes the loss, or leave sequence_parallel out."
        )
    every = dict(facts.tree.modules())
    name = _model_in(every, spec.degree)
    model: Any = every[name]
    config, decoder = attribute_of(model, "config"), name
    # A model for images or sound computes text in a module of its own; others divide as they are.
    if any(getattr(config, f"{kind}_config", None) for kind in ("vision", "audio")):
        text_model = model.get_decoder()
        decoder = next((n for n, module in every.items() if module is text_model), name)
    # What a tower mixes lies in the whole batch, which each rank has.
    modules = every if decoder == name else _below(every, decoder)
    attention = {n: kind for n, m in modules.items() if (kind := kind_of(m)) is not None}
    whys = itertools.chain(
        _unknown_attention(modules, attention),
        _unknown_model(every[name], modules[decoder], has_own_loss=MPT not in attention.values()),
    )
    if (why := next(whys, None)) is not None:
        raise PlanError(
            f"sequence_parallel has degree {spec.degree}, and {why}. Ranks would compute "
            "another model than one process. Leave sequence_parallel out for this model."
        )
    around = [n for n in every if f"{decoder}.".startswith(f"{n}." if n else "")]
    # Modules beside the decoder with layers of their own, such as a tower and a merger.
    towers = [
        path
        for path, module in every.items()
        if decoder != name
        and (path not in around and path.rpartition(".")[0] in around)
        and f"{path}.".startswith(name)
        and module._modules
    ]
    tensor, recompute = facts.settings.tensor_parallel, facts.settings.activation_checkpointing
    tensor_degree = 1 if tensor is None else tensor.degree
    return SequencePlan(
        model=name,
        decoder=decoder,
        towers=tuple(towers),
        attention=attention,
        degree=spec.degree,
        tensor_degree=tensor_degree,
        method=_method(spec, modules, attention, tensor_degree),
        frees=not recompute or getattr(recompute, "memory_budget", None) is not None,
        documents=spec.documents,
    )


def connect_attention(tree: ModuleTree, plan: SequencePlan, mesh: DeviceMesh) -> SequenceGroup:
    """Connects the attention of the model. Collective: yes, over the default group."""
    modules = dict(tree.modules())
    groups = dist.get_world_size() // plan.degree // plan.tensor_degree
    # Ranks of a tensor group have the same positions, and are next to each other.
    sizes = (groups, plan.degree, plan.tensor_degree)
    # A mesh of its own, because FSDP2 shards over all of these ranks and knows no such axis.
    axes = init_device_mesh(mesh.device_type, sizes, mesh_dim_names=("data", "sp", "tp"))
    attention, model = {name: modules[name] for name in plan.attention}, modules[plan.model]
    first, kind = next(iter(plan.attention.items()))
    decoder_modules = modules if plan.decoder == plan.model else _below(modules, plan.decoder)
    rules = kind.mask_rules(model, decoder_modules, first, torch.device(mesh.device_type))
    if plan.documents == "apart":
        rules = dataclasses.replace(rules, documents="always", takes_sequence_id=True)
    around = [
        module
        for name, module in modules.items()
        if name != plan.model and f"{plan.model}.".startswith(f"{name}." if name else "")
    ]
    # PEFT's wrapper is called with batches, and calls the `forward` of the model inside.
    wrappers = [
        m for m in around if attribute_of(m, "peft_config") and attribute_of(m, "base_model")
    ]
    learned = next(
        (
            (name, module.num_embeddings - (attribute_of(module, "offset") or 0))
            for name, module in decoder_modules.items()
            if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _POSITIONS
        ),
        None,
    )
    head_ids = {id(head) for head in output_heads(tree)}
    group = SequenceGroup(
        model,
        attention,
        axes["sp"].get_group(),
        plan.method,
        frees=plan.frees,
        outermost=wrappers[0] if wrappers else model,
        decoder=None if plan.decoder == plan.model else modules[plan.decoder],
        learned=learned,
        heads={name: module for name, module in modules.items() if id(module) in head_ids},
        rules=rules,
    )
    # A compiled graph ends here: the parts of the sequence are those of each forward.
    attend: Any = torch.compiler.disable(group.attend)
    for name, kind in plan.attention.items():
        kind.connect(modules[name], attend)
    # A block that runs again in backward is not called through the model.
    tree.recall = group.recalling
    return group


def _parameters_of(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(type(module).forward).parameters


def _model_in(modules: dict[str, nn.Module], degree: int) -> str:
    """Returns the outermost model that takes positions, or calls no model inside of it."""
    models = [
        name
        for name, module in modules.items()
        if attribute_of(module, "base_model_prefix") and attribute_of(module, "config")
    ]
    if not models:
        raise PlanError(
            f"sequence_parallel has degree {degree}, and the model is none of transformers. It is "
            "not known where its attention is. Leave sequence_parallel out for this model."
        )
    for name in models:
        parameters = _parameters_of(modules[name])
        # Wrappers of adapters give positions to the model inside without looking at them.
        hands_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if not hands_on or "position_ids" in parameters:
            return name
    return models[0]


def _below(modules: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {n: m for n, m in modules.items() if n == name or n.startswith(f"{name}.")}


_POSITIONS = {"wpe", "embed_positions", "position_embeddings", "position_embedding"}
"""names of embeddings of positions"""
_PROJECTIONS = {"q_proj", "query_key_value", "c_attn", "Wqkv", "Wq", "qkv_proj", "q_a_proj"}
"""names of layers in an attention"""
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)
_MIXING = (nn.RNNBase, *_CONVOLUTIONS, nn.MultiheadAttention, nn.BatchNorm1d)
_MIXING_NAMES = re.compile(
    "mamba|conv1d|rwkv|retention|recurrent|lightningattention", re.IGNORECASE
)
_STATE_SPACE = re.compile("SSM|^ssm|_ssm|[a-z]Ssm")  # not GptOssModel


def _unknown_attention(
    modules: dict[str, nn.Module], attention: Mapping[str, AttentionKind]
) -> Iterator[str]:
    """Yields why modules cannot see divided sequences as in one process."""
    if not attention:
        yield (
            "no module calls the attention interface of transformers or sequence_attention, nor is "
            "one of MPT"
        )
    for name, kind in attention.items():
        if (why := kind.why_not(name, modules[name])) is not None:
            yield why
    # An attention of another kind has projections. It would attend to one rank's part in silence.
    known_classes = {type(modules[name]) for name in attention}
    for name, module in modules.items():
        kind_name = type(module).__name__
        if attribute_of(module, "gradient_checkpointing") is True:
            yield (
                f"transformers runs '{name}' again in backward (gradient_checkpointing), where its "
                "sequence is not known (write activation_checkpointing: true instead)"
            )
        if type(module) not in known_classes and _PROJECTIONS & set(module._modules):
            yield f"'{name}' ({kind_name}) is an attention of another kind"
        named = _MIXING_NAMES.search(kind_name) or _STATE_SPACE.search(kind_name)
        is_linear = kind_name == "Conv1D"  # transformers' linear layer of GPT-2
        if isinstance(module, _MIXING) or (named and not is_linear):
            yield f"'{name}' ({kind_name}) mixes positions, of which a rank has a part"
        if (why := MPT.why_not_model(module)) is not None:
            yield why


def _unknown_model(model: nn.Module, decoder: nn.Module, *, has_own_loss: bool) -> Iterator[str]:
    """Yields why a model cannot be given parts of a sequence."""
    model_name = type(model).__name__
    if "position_ids" not in _parameters_of(decoder):
        yield f"{model_name} takes no position_ids, so it would count from each rank's first"
    if has_own_loss and (decoder is model or next_word_loss(model) is None):
        if not calls_loss_function(model):
            yield f"{model_name} computes its loss by itself"
        # Transformers gives causal models this loss, and others one that takes no shifted labels.
        code = getattr(attribute_of(model, "loss_function"), "__code__", None)
        if code is None or "shift_labels" not in code.co_varnames:
            yield f"the loss of {model_name} is not that of a causal language model"
    if getattr(attribute_of(model, "config"), "output_router_logits", False):
        yield "output_router_logits is on: the balance of experts is not a mean over tokens"


def _method(
    spec: SequenceSpec,
    modules: dict[str, Any],
    attention: Mapping[str, AttentionKind],
    tensor_degree: int,
) -> str:
    """Returns the method; `auto` takes the exchange with fewer bytes, if heads allow it.

    Heads are those that tensor parallelism leaves a rank.
    """
    if spec.method == "gather_kv":
        return spec.method
    methods = set[str]()
    for name, kind in attention.items():
        heads, kv_heads = (count // tensor_degree for count in kind.heads_of(modules[name]))
        # As attention sinks are.
        params = modules[name]._parameters.items()
        of_heads = [key for key, param in params if param is not None and heads in param.shape]
        if not of_heads and heads % spec.degree == 0:
            # Ulysses sends queries, keys, values and the output; each rank has a key head at least.
            sent = 2 * heads + 2 * max(kv_heads, spec.degree)
            methods.add("ulysses" if sent <= 2 * kv_heads * spec.degree else "gather_kv")
            continue
        if spec.method != "ulysses":
            return "gather_kv"
        if of_heads:
            raise ConfigError(
                f"sequence_parallel.method is ulysses, and '{name}' has a weight of each head "
                f"('{of_heads[0]}'). Ulysses gives each rank some of the heads, and every weight. "
                "Write method: gather_kv."
            )
        raise ConfigError(
            f"sequence_parallel.degree is {spec.degree}, and '{name}' has {heads} heads, "
            f"which {spec.degree} ranks cannot share. Ulysses gives each rank whole heads. "
            f"Write one of {divisors(heads)}, or method: gather_kv."
        )
    return spec.method if spec.method == "ulysses" or len(methods) > 1 else methods.pop()
