"""Deciding whether the sequences of a model can be divided. Changes nothing but in `apply`."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composer_fsdp2.blocks.transformation import ModelFacts, Transformation
from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.parallel.axis import tensor_axis
from composer_fsdp2.parallel.sequence import hugging_face, mpt, own
from composer_fsdp2.parallel.sequence.group import SequenceGroup
from composer_fsdp2.parallel.sequence.masks import MaskRules
from composer_fsdp2.plan.module_tree import ModuleTree, attribute_of
from composer_fsdp2.plan.rules import output_heads

__all__ = ["SequenceParallel", "SequencePlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePlan:
    """Which modules attend over the whole sequence, and how."""

    model: str
    """name of the module that is given batches"""
    attention: tuple[str, ...]
    degree: int
    method: str
    frees: bool
    """whether gathered keys and values are freed until backward"""
    documents: str
    """`as_model` or `apart`, as the setting"""

    def __str__(self) -> str:
        return (
            f"sequence parallelism of {self.degree} ranks ({self.method}): "
            f"{', '.join(self.attention)}"
        )


class SequenceParallel(Transformation[SequencePlan]):
    """Divides each sequence between ranks: `sequence_parallel`."""

    def plan(self, facts: ModelFacts) -> SequencePlan | None:
        """Returns the attention modules, or refuses the model."""
        spec = facts.settings.sequence_parallel
        if spec is None or spec.degree == 1:
            return None
        modules = dict(facts.tree.modules())
        name = _model_in(modules, spec.degree)
        attention = tuple(n for n, m in modules.items() if _kind_of(m) is not None)
        for refuse in (_attention, _mixing, _positions, _loss, _router):
            if (why := refuse(modules, name, attention)) is not None:
                raise PlanError(
                    f"sequence_parallel has degree {spec.degree}, and {why}. Ranks would compute "
                    "another model than one process. Leave sequence_parallel out for this model."
                )
        tensor, recompute = facts.settings.tensor_parallel, facts.settings.activation_checkpointing
        method = _method(
            spec, [modules[n] for n in attention], attention, 1 if tensor is None else tensor.degree
        )
        return SequencePlan(
            model=name,
            attention=attention,
            degree=spec.degree,
            method=method,
            frees=not recompute or getattr(recompute, "memory_budget", None) is not None,
            documents=spec.documents,
        )

    def apply(self, tree: ModuleTree, plan: SequencePlan) -> None:
        """Refused: it needs the mesh of the run."""
        raise NotImplementedError

    def apply_on(self, tree: ModuleTree, plan: SequencePlan, mesh: DeviceMesh) -> None:
        """Connects the model. Collective: yes, over the default group."""
        modules = dict(tree.modules())
        tensor = tensor_axis(mesh)
        divided = 1 if tensor is None else tensor.size()
        groups = dist.get_world_size() // plan.degree // divided
        # Ranks of a tensor group have the same positions, and are next to each other.
        sizes = (groups, plan.degree, divided)
        axes = init_device_mesh(mesh.device_type, sizes, mesh_dim_names=("data", "sp", "tp"))
        found = {name: modules[name] for name in plan.attention}
        group = SequenceGroup(
            modules[plan.model],
            found,
            axes["sp"].get_group(),
            plan.method,
            frees=plan.frees,
            entry=_entry_of(modules, plan.model),
            learned=_learned_positions(modules),
            heads=_heads(tree),
            rules=_mask_rules(modules, plan, torch.device(mesh.device_type)),
        )
        for module in found.values():
            # A compiled graph ends here: what is known of the sequence is that of each forward.
            _kind_of(module).connect(module, torch.compiler.disable(group.attend))
        tree.recalls.append(group.recalling)


def _mask_rules(
    modules: dict[str, nn.Module], plan: SequencePlan, device: torch.device
) -> MaskRules:
    first = plan.attention[0]
    kind = _kind_of(modules[first])
    if kind is hugging_face:
        rules = hugging_face.mask_rules(modules, first, device)
    elif kind is mpt:
        rules = mpt.mask_rules(modules[plan.model])
    else:
        rules = MaskRules(documents="always")
    if plan.documents == "as_model":
        return rules
    return dataclasses.replace(rules, documents="always", takes_sequence_id=True)


def _kind_of(module: nn.Module) -> Any:
    """The file that knows this kind of attention, `None` where none does."""
    if own.is_attention(module):
        return own
    if hugging_face.uses_interface(module):
        return hugging_face
    return mpt if mpt.is_attention(module) else None


def _model_in(modules: dict[str, nn.Module], degree: int) -> str:
    """The outermost model that takes positions, which wrappers of adapters hand on."""
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
    return next((name for name in models if not _hands_on(modules[name])), models[0])


def _entry_of(modules: dict[str, nn.Module], model: str) -> nn.Module:
    """The module that is called with batches: PEFT's wrapper, which calls the model's `forward`."""
    for name, module in modules.items():
        inside = model.startswith(f"{name}.") if name else model != ""
        if inside and attribute_of(module, "peft_config") and attribute_of(module, "base_model"):
            return module
    return modules[model]


def _takes_positions(module: nn.Module) -> bool:
    return "position_ids" in inspect.signature(type(module).forward).parameters


def _hands_on(module: nn.Module) -> bool:
    """Whether a module gives positions to the one inside without looking at them."""
    parameters = inspect.signature(type(module).forward).parameters
    names_all = all(p.kind is not p.VAR_KEYWORD for p in parameters.values())
    return not names_all and "position_ids" not in parameters


def _heads(tree: ModuleTree) -> dict[str, nn.Module]:
    wanted = {id(head) for head in output_heads(tree)}
    return {name: module for name, module in tree.modules() if id(module) in wanted}


def _learned_positions(modules: dict[str, nn.Module]) -> tuple[str, int] | None:
    """An embedding of positions and how many it has, `None` where they are computed."""
    for name, module in modules.items():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _POSITIONS:
            return name, module.num_embeddings - (attribute_of(module, "offset") or 0)
    return None


_POSITIONS = {"wpe", "embed_positions", "position_embeddings", "position_embedding"}
"""names of embeddings of positions"""


def _attention(modules: dict[str, nn.Module], _name: str, found: tuple[str, ...]) -> str | None:
    if not found:
        return (
            "no module calls the attention interface of transformers or sequence_attention, nor is "
            "one of MPT"
        )
    for name in found:
        if (why := _kind_of(modules[name]).why_not(name, modules[name])) is not None:
            return why
    kinds = {type(modules[name]) for name in found}
    for name, module in modules.items():
        if type(module) not in kinds and _PROJECTIONS & set(module._modules):
            return f"'{name}' ({type(module).__name__}) is an attention of another kind"
    return None


_PROJECTIONS = {"q_proj", "query_key_value", "c_attn", "Wqkv", "Wq", "qkv_proj", "q_a_proj"}
"""names of layers in an attention"""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)
_MIXING = (nn.RNNBase, *_CONVOLUTIONS, nn.MultiheadAttention, nn.BatchNorm1d)
_MIXING_NAMES = re.compile(
    "mamba|conv1d|rwkv|retention|recurrent|lightningattention", re.IGNORECASE
)
_STATE_SPACE = re.compile("SSM|^ssm|_ssm|[a-z]Ssm")  # not GptOssModel


def _mixing(modules: dict[str, nn.Module], _name: str, _attention: Any) -> str | None:
    for name, module in modules.items():
        kind = type(module)
        is_linear = kind.__name__ == "Conv1D"  # transformers' linear layer of GPT-2
        named = _MIXING_NAMES.search(kind.__name__) or _STATE_SPACE.search(kind.__name__)
        if isinstance(module, _MIXING) or (named and not is_linear):
            return f"'{name}' ({kind.__name__}) mixes positions, of which a rank has a part"
    return None


def _positions(modules: dict[str, nn.Module], name: str, _attention: Any) -> str | None:
    for module in modules.values():
        if (why := mpt.why_not_model(module)) is not None:
            return why
    if not _takes_positions(modules[name]):
        kind = type(modules[name]).__name__
        return f"{kind} takes no position_ids, so it would count from each rank's first"
    return None


def _loss(modules: dict[str, nn.Module], name: str, attention: tuple[str, ...]) -> str | None:
    if mpt.is_attention(modules[attention[0]]):
        return None
    if not hugging_face.calls_loss_function(modules[name]):
        return f"{type(modules[name]).__name__} computes its loss by itself"
    loss: Any = attribute_of(modules[name], "loss_function")
    code = getattr(loss, "__code__", None)
    if code is None or "shift_labels" not in code.co_varnames:
        return f"the loss of {type(modules[name]).__name__} is not that of a causal language model"
    return None


def _router(modules: dict[str, nn.Module], name: str, _attention: Any) -> str | None:
    config: Any = attribute_of(modules[name], "config")
    if getattr(config, "output_router_logits", False):
        return "output_router_logits is on: the balance of experts is not a mean over tokens"
    return None


def _method(spec: Any, modules: list[Any], names: tuple[str, ...], tensor: int) -> str:
    """Which exchange; `auto` takes the one that sends fewer bytes, if heads allow it.

    Of the heads that tensor parallelism leaves a rank.
    """
    if spec.method == "gather_kv":
        return spec.method
    methods = set[str]()
    for name, module in zip(names, modules, strict=True):
        heads, kv_heads = (count // tensor for count in _kind_of(module).heads_of(module))
        if (own := _of_heads(module, heads)) is not None:
            if spec.method == "ulysses":
                raise ConfigError(
                    f"sequence_parallel.method is ulysses, and '{name}' has a weight of each head "
                    f"('{own}'). Ulysses gives each rank some of the heads, and every weight. "
                    "Write method: gather_kv."
                )
            return "gather_kv"
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


def _of_heads(module: nn.Module, heads: int) -> str | None:
    """The name of a parameter that an attention holds for each head, as attention sinks are."""
    params = module._parameters.items()
    return next((n for n, param in params if param is not None and heads in param.shape), None)


def _divisors(number: int) -> Iterator[int]:
    return (n for n in range(1, number + 1) if number % n == 0)
