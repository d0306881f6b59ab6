"""Finds and connects the kinds of attention modules that can see a divided sequence."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from composer_fsdp2.errors import PlanError
from composer_fsdp2.parallel.sequence.attention import ATTEND, HEADS, Attend, fused_attention
from composer_fsdp2.parallel.sequence.masks import AttentionCall, MaskRules
from composer_fsdp2.plan.module_tree import attribute_of

__all__ = [
    "MPT",
    "AttentionKind",
    "calls_loss_function",
    "connect_composer_model",
    "kind_of",
    "next_word_loss",
    "own_loss",
]


_FUSED = ("sdpa", "flash_attention_2")
"""implementations of transformers that torch's own attention replaces"""
_NAME = "fsdp2_sequence"
"""name of the implementation that divides sequences"""
_IMPLEMENTATION = "_attn_implementation"
"""attribute of a configuration of transformers"""
_MAKES_MASKS = "_update_causal_mask"
"""method of a model that makes its masks, where transformers has no module for them"""
_FINDS_DOCUMENTS = "find_packed_sequence_indices"
"""function of newer transformers, which looks for positions that begin again"""
_MAKES_WINDOW = "create_sliding_window_causal_mask"
"""function of newer transformers, which makes masks with a window"""


class AttentionKind(ABC):
    """One kind of attention modules."""

    @abstractmethod
    def knows(self, module: nn.Module) -> bool:
        """Says whether a module is an attention of this kind."""

    @abstractmethod
    def heads_of(self, module: Any) -> tuple[int, int]:
        """Returns the heads of queries, and of keys and values."""

    @abstractmethod
    def why_not(self, name: str, module: Any) -> str | None:
        """Returns why an attention cannot see a divided sequence, `None` where it can."""

    @abstractmethod
    def connect(self, module: Any, attend: Attend) -> None:
        """Has a module compute its attention over the full sequence. Collective: no."""

    def mask_rules(
        self, model: nn.Module, modules: Mapping[str, Any], attention: str, device: torch.device
    ) -> MaskRules:
        """Returns effects of a model's masks beside the arguments of its attention.

        Args:
            model: takes batches and has the configuration.
            modules: all modules of the run, by name.
            attention: the name of an attention module.
            device: where batches are; models take masks otherwise on some devices.
        """
        return MaskRules(documents="always")


def kind_of(module: nn.Module) -> AttentionKind | None:
    """Returns the kind of an attention module, `None` of another module."""
    return next((kind for kind in _KINDS if kind.knows(module)), None)


class _UserAttention(AttentionKind):
    """A module of the user's, which calls `sequence_attention`."""

    def knows(self, module: nn.Module) -> bool:
        return attribute_of(module, HEADS) is not None

    def heads_of(self, module: Any) -> tuple[int, int]:
        return getattr(module, HEADS)

    def why_not(self, name: str, module: Any) -> str | None:
        match getattr(module, HEADS):
            case (int(heads), int(kv_heads)) if heads > 0 < kv_heads and heads % kv_heads == 0:
                return None
            case other:
                return (
                    f"{HEADS} of '{name}' is {other!r} (write a pair: heads of queries, and of "
                    "keys and values, which divide them)"
                )

    def connect(self, module: Any, attend: Attend) -> None:
        setattr(module, ATTEND, attend)


# --- Models that call the attention interface of transformers ---


def _names_in_forward(module: nn.Module) -> tuple[str, ...]:
    # A class may be decorated; names in a function's code are those of globals and attributes.
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names


def _keywords_in_forward(module: nn.Module) -> list[tuple[Any, ...]]:
    """Returns the keywords of each call, and the keys of each dictionary, in a forward."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    consts = () if code is None else code.co_consts
    return [const for const in consts if isinstance(const, tuple)]


def calls_loss_function(model: nn.Module) -> bool:
    """Says whether a model computes its loss by its attribute `loss_function`."""
    return "loss_function" in _names_in_forward(model)


_LOSSES = {
    "Qwen2VLForConditionalGeneration": False,
    "Qwen2_5_VLForConditionalGeneration": False,
    "LlavaForConditionalGeneration": True,
}
"""classes of transformers 4.51 whose forward takes the cross entropy of shifted labels -> whether
labels under a mask of zero are left out"""


def next_word_loss(model: nn.Module) -> bool | None:
    """Returns whether a loss in the model's forward leaves padding out; `None` if it is not known.

    Source: https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/models/llava/modeling_llava.py#L450
    """
    kind = next(kind for kind in type(model).__mro__ if "forward" in vars(kind))
    return _LOSSES.get(kind.__name__) if kind.__module__.startswith("transformers.") else None


def _config_of(module: Any) -> Any:
    """Returns the configuration of an attention's layer, where layers have other heads."""
    if getattr(module.config, "is_heterogeneous", False):
        return module.config.per_layer_config[module.layer_idx]
    return module.config


class _HuggingFace(AttentionKind):
    def knows(self, module: nn.Module) -> bool:
        return "ALL_ATTENTION_FUNCTIONS" in _names_in_forward(module)

    def heads_of(self, module: Any) -> tuple[int, int]:
        config = _config_of(module)
        heads = config.num_attention_heads
        return heads, getattr(config, "num_key_value_heads", None) or heads

    def why_not(self, name: str, module: Any) -> str | None:
        implementation = getattr(module.config, _IMPLEMENTATION)
        if implementation not in (*_FUSED, "eager"):
            return f"'{name}' computes with {implementation} (write attn_implementation: sdpa)"
        if attribute_of(module, "is_causal") is False or attribute_of(module, "is_cross_attention"):
            return f"'{name}' sees later tokens, or another sequence"
        if (size := getattr(_config_of(module), "attention_chunk_size", None)) is not None:
            return f"'{name}' sees chunks of {size} tokens alone (attention_chunk_size)"
        if implementation in _FUSED and module._parameters.get("sinks") is not None:
            return (
                f"'{name}' has attention sinks, which torch's own attention does not compute "
                "(write attn_implementation: eager)"
            )
        return None

    def mask_rules(
        self, model: nn.Module, modules: Mapping[str, Any], attention: str, device: torch.device
    ) -> MaskRules:
        implementation = getattr(modules[attention].config, _IMPLEMENTATION)
        # Whether an embedding counts positions by the mask, as that of OPT.
        counts = any(
            isinstance(module, nn.Embedding)
            and "attention_mask" in inspect.signature(type(module).forward).parameters
            for module in modules.values()
        )
        skips: Any = "without positions" if counts else "never"
        if implementation == "flash_attention_2":
            # Takes padding out of the batch, and rows apart by `position_ids` where there is none:
            # https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/modeling_flash_attention_utils.py#L377
            return MaskRules(
                unseeing="zero",
                takes_masks=False,
                documents="without padding",
                skips_padding=skips,
            )
        for name, module in modules.items():
            make: Any = getattr(type(module), _MAKES_MASKS, None)
            # It depends on the device, the implementation and the model's own window:
            # https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/models/llama/modeling_llama.py#L601
            if make is not None and attention.startswith(f"{name}." if name else ""):
                return _tried_rules(functools.partial(make, module), module, device)
        is_eager = implementation == "eager"
        if importlib.util.find_spec("transformers.masking_utils") is not None:
            masks: Any = importlib.import_module("transformers.masking_utils")
            # Whether the model gives positions to the function that makes its masks:
            # https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/gpt_oss/modeling_gpt_oss.py
            around = (m for n, m in modules.items() if attention.startswith(f"{n}." if n else ""))
            keywords = [names for m in around for names in _keywords_in_forward(m)]
            calls = [names for names in keywords if {"config", "attention_mask"} <= {*names}]
            # A model that makes its masks in a method does not show it, and most models do.
            gives = not calls or any("position_ids" in names for names in calls)
            finds = hasattr(masks, _FINDS_DOCUMENTS) and gives
            return MaskRules(
                unseeing="average" if is_eager else "zero",
                adds_masks=is_eager,
                documents="without mask" if finds else "never",
                skips_padding=skips,
            )
        if is_eager:  # has an order of its own beside the mask
            return MaskRules(unseeing="unknown", takes_masks=False)
        return MaskRules(unseeing="average" if device.type == "cpu" else "all", takes_masks=False)

    def connect(self, module: Any, attend: Attend) -> None:
        implementation = getattr(module.config, _IMPLEMENTATION)
        namespace = vars(sys.modules[inspect.unwrap(type(module).forward).__module__])
        functions = namespace["ALL_ATTENTION_FUNCTIONS"]
        # For all models of the process: each attention has an `Attend` of its own. Public, see
        # https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/modeling_utils.py#L5819
        functions.register(_NAME, _call_attend)
        capped = implementation != "sdpa" and getattr(module.config, "attn_logit_softcapping", None)
        is_fused = implementation != "eager" and not capped
        original = functions[implementation] if is_fused else namespace["eager_attention_forward"]
        window = _window_in_mask(module)
        call = functools.partial(_attend_as_transformers, attend, original, is_fused, window)
        setattr(module, ATTEND, call)
        # Each forward of an attention looks its function up by its configuration:
        # https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/models/llama/modeling_llama.py#L265
        # The model's own configuration stays: its masks and its checkpoints depend on it.
        module.config = copy.copy(module.config)
        setattr(module.config, _IMPLEMENTATION, _NAME)
        module.config.use_cache = False


def _window_in_mask(module: Any) -> int | None:
    """Returns the window of the model's masks where the attention does not get it as an argument.

    Source: https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/qwen2_moe/modeling_qwen2_moe.py
    """
    config = _config_of(module)
    namespace = vars(sys.modules[inspect.unwrap(type(module).forward).__module__])
    names = {*_names_in_forward(module)}.union(*_keywords_in_forward(module))
    is_masked = (
        getattr(config, _IMPLEMENTATION) != "flash_attention_2" and _MAKES_WINDOW in namespace
    )
    if not is_masked or "sliding_window" in names:
        return None
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[module.layer_idx] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None) or None


_ROTATES = "apply_multimodal_rotary_pos_emb"
"""function of Qwen-VL's modules, for positions of time, height and width"""


class _OldQwenVL(_HuggingFace):
    """Attention of Qwen2-VL and Qwen2.5-VL before transformers 4.52, which calls no interface.

    Source: https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/models/qwen2_vl/modeling_qwen2_vl.py#L709
    """

    def knows(self, module: nn.Module) -> bool:
        return _ROTATES in _names_in_forward(module) and not super().knows(module)

    def connect(self, module: Any, attend: Attend) -> None:
        rotate = vars(sys.modules[type(module).__module__])[_ROTATES]
        module.forward = functools.partial(_forward_of_qwen, attend, module, module.forward, rotate)


def _forward_of_qwen(
    attend: Attend,
    module: Any,
    original: Callable[..., Any],
    rotate: Callable[..., Any],
    hidden_states: torch.Tensor,
    **kwargs: Any,
) -> Any:
    query, key, value = (
        project(hidden_states).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    angles = kwargs["position_embeddings"]
    query, key = rotate(query, key, *angles, module.rope_scaling["mrope_section"])
    dropout = module.attention_dropout if module.training else 0.0
    call = AttentionCall(compute=functools.partial(fused_attention, dropout=dropout, scale=None))
    out = attend(module, call, query, key, value)
    if out is None:
        return original(hidden_states, **kwargs)
    return module.o_proj(out.flatten(2)), None, None


def _tried_rules(make: Callable[..., Any], model: Any, device: torch.device) -> MaskRules:
    """Returns the rules that a model's masks show, for sequences whose first token is padding."""

    def seen_by(query: int, length: int) -> torch.Tensor:
        is_real = torch.ones(1, length, dtype=torch.long, device=device)
        is_real[:, 0] = 0
        like = torch.zeros(1, 1, 1, device=device)
        at = torch.tensor([query], device=device)
        return make(is_real, like, at, None, False)[0, 0, 0] == 0

    window, size = None, getattr(model.config, "sliding_window", None)
    if size is not None:
        length = size + 8
        count = int(seen_by(length - 1, length).sum())
        window = count if count < length - 1 else None
    return MaskRules(
        window=window,
        adds_masks=getattr(model.config, _IMPLEMENTATION) == "eager",
        narrows_masks=window is None,
        unseeing="all" if bool(seen_by(0, 3).all()) else "average",
    )


def _call_attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return getattr(module, ATTEND)(module, *args, **kwargs)


def _attend_as_transformers(
    attend: Attend,
    original: Callable[..., Any],
    is_fused: bool,
    window: int | None,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    dropout, scale = kwargs.get("dropout", 0.0), kwargs.get("scaling")
    compute = functools.partial(fused_attention, dropout=dropout, scale=scale)
    if not is_fused:
        compute = functools.partial(_eager, original, module, kwargs)
    window = kwargs.get("sliding_window", window)
    call = AttentionCall(compute=compute, window=window, needs_mask=not is_fused)
    out = attend(module, call, query, key, value)
    if out is None:
        return original(module, query, key, value, attention_mask, **kwargs)
    return out, None


def _eager(
    original: Callable[..., Any],
    module: Any,
    kwargs: dict[str, Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
) -> torch.Tensor:
    # Ulysses has repeated key heads that its ranks could not share.
    groups = query.shape[1] // key.shape[1]
    if getattr(module, "num_key_value_groups", groups) != groups:
        module = _WithGroups(module, groups)
    return original(module, query, key, value, mask, **kwargs)[0]


class _WithGroups:
    """Shows an attention with another number of groups to the function of transformers.

    A copy would not do: copying a unit of FSDP2 calls its constructor, https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fully_shard.py#L252
    """

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module = module
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


# --- LLM Foundry's MPT ---


class _MPT(AttentionKind):
    def knows(self, module: nn.Module) -> bool:
        return any(
            kind.__name__ == "GroupedQueryAttention" and kind.__module__.startswith("llmfoundry.")
            for kind in type(module).__mro__
        )

    def heads_of(self, module: Any) -> tuple[int, int]:
        return module.n_heads, module.kv_n_heads

    def why_not(self, name: str, module: Any) -> str | None:
        if attribute_of(module, "attn_logit_softcapping") is not None:
            return f"'{name}' has attn_logit_softcapping, which has not been tried"
        tuning = attribute_of(module, "attn_temperature_tuning")
        if tuning and tuning["attn_scale"]:
            return f"'{name}' has attn_temperature_tuning, which counts positions by itself"
        for other in ("reuse_kv_layer_idx", "reuse_kv_x_layer_idx"):
            if attribute_of(module, other) is not None:
                return f"'{name}' has {other}, which has not been tried"
        return None

    def mask_rules(
        self, model: nn.Module, modules: Mapping[str, Any], attention: str, device: torch.device
    ) -> MaskRules:
        config: Any = attribute_of(model, "config")
        reads = config.attn_config["attn_uses_sequence_id"]
        return MaskRules(takes_masks=False, takes_sequence_id=reads, skips_padding="always")

    def why_not_model(self, model: Any) -> str | None:
        """Returns why positions of an MPT cannot be divided, `None` where they can."""
        if attribute_of(model, "alibi"):
            return (
                "MPT adds ALiBi to scores of its own positions (write alibi: false and rope: true)"
            )
        if attribute_of(model, "rope_impl") == "dail":
            return (
                "rope_impl dail counts positions from the first of each rank (write rope_impl: hf)"
            )
        return None

    def connect(self, module: Any, attend: Attend) -> None:
        module.attn_fn = functools.partial(_attend_as_mpt, attend, module, module.attn_fn)


def _attend_as_mpt(
    attend: Attend,
    module: Any,
    original: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any, Any]:
    # Arguments of https://github.com/mosaicml/llm-foundry/blob/v0.22.0/llmfoundry/models/layers/attention.py#L673
    dropout = kwargs["dropout_p"] if kwargs["training"] else 0.0
    size = kwargs["sliding_window_size"]  # keys before the query's own
    call = AttentionCall(
        compute=functools.partial(fused_attention, dropout=dropout, scale=kwargs["softmax_scale"]),
        window=None if size == -1 else size + 1,
    )
    heads, kv_heads = kwargs["n_heads"], kwargs["kv_n_heads"]
    by_head = [
        tensor.unflatten(-1, (count, -1)).transpose(1, 2)
        for tensor, count in ((query, heads), (key, kv_heads), (value, kv_heads))
    ]
    out = attend(module, call, *by_head)
    if out is None:
        return original(query, key, value, **kwargs)
    return out.flatten(2), None, None


MPT = _MPT()
_KINDS = (_UserAttention(), _HuggingFace(), _OldQwenVL(), MPT)


# --- Loss and metrics of Composer's models where ranks have parts of each sequence. ---
#
# [Note: parts of logits] In training a rank has the logits of its positions, and batches have the
# labels of whole sequences. The loss of a Hugging Face model is computed inside of the model.
# MPT's loss is not, nor are metrics: both get the labels of the rank's positions. A metric adds
# up over ranks. Classes are known by their names, so that nothing is imported for them.


def _is_a(model: nn.Module, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(model).__mro__)


def own_loss(model: Any) -> str | None:
    """Returns the class of a Composer model whose loss reads logits; `None` for other models."""
    if not _is_a(model, "ComposerModel") or _is_a(model, "ComposerMPTCausalLM"):
        return None
    code = getattr(type(model).loss, "__code__", None)
    if code is not None:
        words = {*code.co_names, *(const for const in code.co_consts if isinstance(const, str))}
        if "loss" in words and "logits" not in words:
            return None  # this method returns the loss that the model inside has computed
    return type(model).__name__


def connect_composer_model(
    model: Any, own_labels: Callable[..., torch.Tensor], loss_of_mean: Callable[..., torch.Tensor]
) -> None:
    """Gives loss and metrics of training the labels they need; see [Note: parts of logits].

    Collective: no.

    Args:
        model: the root, of Composer's or another class.
        own_labels: `SequenceGroup.own_labels`.
        loss_of_mean: `SequenceGroup.loss_of_mean`.
    """
    if _is_a(model, "HuggingFaceModel"):
        model.eval_forward = functools.partial(_eval_forward, own_labels, model, model.eval_forward)
        if _is_a(model, "ComposerMPTCausalLM"):
            model.loss = functools.partial(_loss_of_mpt, loss_of_mean, model, model.loss)


def _eval_forward(
    own_labels: Callable[..., torch.Tensor],
    model: Any,
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    logits = original(*args, **kwargs)
    labels = model.labels
    if isinstance(logits, torch.Tensor) and isinstance(labels, torch.Tensor) and labels.ndim == 2:
        local_labels = own_labels(labels)  # `HuggingFaceModel` has shifted them
        if logits.shape[:2] == local_labels.shape != labels.shape:
            model.labels = local_labels
    return logits


def _loss_of_mpt(
    loss_of_mean: Callable[..., torch.Tensor],
    model: Any,
    original: Callable[..., Any],
    outputs: Any,
    batch: Any,
) -> torch.Tensor:
    labels = batch["labels"]
    if outputs.logits.shape[:2] == labels.shape:
        return original(outputs, batch)  # evaluation has the logits of the full sequence

    def mean(local_labels: torch.Tensor) -> torch.Tensor:
        # The labels are shifted already, as those of the full sequences were.
        shifts, model.shift_labels = model.shift_labels, False
        try:
            loss = original(outputs, {**batch, "labels": local_labels})
        finally:
            model.shift_labels = shifts
        if isinstance(loss, Mapping):
            raise PlanError(
                "The model adds a loss of its experts, and sequence_parallel is asked for. Their "
                "balance is no mean over tokens. Leave one of them out."
            )
        return loss

    return loss_of_mean(mean, labels)
