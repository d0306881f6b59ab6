"""Attention and loss of LLM Foundry's MPT."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from composer_fsdp2.parallel.sequence.attention import fused_attention
from composer_fsdp2.parallel.sequence.hugging_face import Attend
from composer_fsdp2.parallel.sequence.masks import AttentionCall, MaskRules
from composer_fsdp2.plan.module_tree import attribute_of

__all__ = ["connect", "heads_of", "is_attention", "mask_rules", "why_not"]


def is_attention(module: nn.Module) -> bool:
    """Whether a module is an attention of MPT."""
    return any(
        kind.__name__ == "GroupedQueryAttention" and kind.__module__.startswith("llmfoundry.")
        for kind in type(module).__mro__
    )


def heads_of(module: Any) -> tuple[int, int]:
    """Returns the heads of queries, and of keys and values."""
    return module.n_heads, module.kv_n_heads


def why_not(name: str, module: Any) -> str | None:
    """Returns why an attention cannot see a divided sequence, `None` where it can."""
    if attribute_of(module, "attn_logit_softcapping") is not None:
        return f"'{name}' has attn_logit_softcapping, which has not been tried"
    tuning = attribute_of(module, "attn_temperature_tuning")
    if tuning and tuning["attn_scale"]:
        return f"'{name}' has attn_temperature_tuning, which counts positions by itself"
    for other in ("reuse_kv_layer_idx", "reuse_kv_x_layer_idx"):
        if attribute_of(module, other) is not None:
            return f"'{name}' has {other}, which has not been tried"
    return None


def why_not_model(model: Any) -> str | None:
    """Returns why positions of an MPT cannot be divided, `None` where they can."""
    if attribute_of(model, "alibi"):
        return "MPT adds ALiBi to scores of its own positions (write alibi: false and rope: true)"
    if attribute_of(model, "rope_impl") == "dail":
        return "rope_impl dail counts positions from the first of each rank (write rope_impl: hf)"
    return None


def mask_rules(model: nn.Module) -> MaskRules:
    """Returns what a model's masks do that its attention is not told. Collective: no."""
    config: Any = attribute_of(model, "config")
    reads = config.attn_config["attn_uses_sequence_id"]
    return MaskRules(takes_masks=False, takes_sequence_id=reads)


def connect(module: Any, attend: Attend) -> None:
    """Has a module compute its attention over the whole sequence. Collective: no."""
    module.attn_fn = functools.partial(_compute, attend, module, module.attn_fn)


def _compute(
    attend: Attend,
    module: Any,
    function: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any, Any]:
    dropout = kwargs["dropout_p"] if kwargs["training"] else 0.0
    size = kwargs["sliding_window_size"]
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
        return function(query, key, value, **kwargs)
    return out.flatten(2), None, None
