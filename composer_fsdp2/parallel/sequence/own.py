"""Attention of a module of the user's, which calls `sequence_attention`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from composer_fsdp2.errors import PlanError
from composer_fsdp2.parallel.sequence.attention import fused_attention
from composer_fsdp2.parallel.sequence.hugging_face import Attend
from composer_fsdp2.parallel.sequence.masks import AttentionCall
from composer_fsdp2.plan.module_tree import attribute_of

__all__ = ["connect", "heads_of", "is_attention", "sequence_attention", "why_not"]

_HEADS = "fsdp2_attention_heads"
"""attribute of such a module: its heads of queries, and of keys and values"""

_ATTEND = "_fsdp2_attend"


def is_attention(module: nn.Module) -> bool:
    """Whether a module says that it calls `sequence_attention`."""
    return attribute_of(module, _HEADS) is not None


def heads_of(module: Any) -> tuple[int, int]:
    """Returns the heads of queries, and of keys and values."""
    heads, kv_heads = getattr(module, _HEADS)
    return heads, kv_heads


def why_not(name: str, module: Any) -> str | None:
    """Returns why the heads of a module cannot be read, `None` where they can."""
    match getattr(module, _HEADS):
        case (int(heads), int(kv_heads)) if heads > 0 < kv_heads and heads % kv_heads == 0:
            return None
        case other:
            return (
                f"{_HEADS} of '{name}' is {other!r} (write a pair: heads of queries, and of keys "
                "and values, which divide them)"
            )


def connect(module: Any, attend: Attend) -> None:
    """Has a module compute its attention over the whole sequence. Collective: no."""
    setattr(module, _ATTEND, attend)


def sequence_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attends to this and earlier tokens, also where ranks have parts of each sequence.

    For an attention module of your own, in place of `scaled_dot_product_attention`. The module's
    class or object has `fsdp2_attention_heads = (heads of queries, heads of keys and values)`, by
    which `sequence_parallel` finds it; without that setting this is torch's attention.

    Collective: yes, over the group that shares the sequence, where there is one; every rank of it
    calls this equally often.

    Args:
        module: the attention module that calls this.
        query: (batch, heads, positions, size), of this rank's positions.
        key: (batch, heads of keys and values, positions, size); they divide those of queries.
        value: as `key`.
        mask: (batch or 1, 1, positions of queries, positions of keys), added or true where seen;
            `None` is causal order. Where the sequence is divided it is not read: order, window,
            documents (`position_ids`) and padding (`attention_mask`) come from what the model was
            given.
        window: keys that a query sees, itself among them; `None` is all.
        scale: of scores; 1 / sqrt(size) by default.
        dropout: probability; 0 in evaluation is the caller's.

    Returns:
        (batch, heads, positions, size).

    Raises:
        PlanError: when the sequence is divided and the heads are not those that the module names.

    Example:
        >>> import torch
        >>> from composer_fsdp2 import sequence_attention
        >>> module = torch.nn.Module()
        >>> module.fsdp2_attention_heads = (4, 2)
        >>> query, key, value = (torch.ones(1, heads, 6, 8) for heads in (4, 2, 2))
        >>> sequence_attention(module, query, key, value).shape
        torch.Size([1, 4, 6, 8])
    """
    compute = functools.partial(fused_attention, dropout=dropout, scale=scale)
    attend = module.__dict__.get(_ATTEND)
    if attend is not None:
        _check_heads(module, query.shape[1], key.shape[1])
        call = AttentionCall(compute=compute, window=window)
        out = attend(module, call, query, key, value)
        if out is not None:
            return out.transpose(1, 2)
    if mask is None and (window is not None or query.shape[2] != key.shape[2]):
        mask = _order(query, key, window)
    return compute(query, key, value, mask).transpose(1, 2)


def _check_heads(module: nn.Module, heads: int, kv_heads: int) -> None:
    """Of this rank: tensor parallelism leaves it a part of them."""
    named = heads_of(module)
    if named[0] * kv_heads != named[1] * heads or named[0] % heads:
        raise PlanError(
            f"sequence_attention of {type(module).__name__} was given {heads} heads of queries and "
            f"{kv_heads} of keys and values, and its {_HEADS} is {named}. Ranks were chosen to "
            f"share those. Write {_HEADS} = ({heads}, {kv_heads})."
        )


def _order(query: torch.Tensor, key: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which keys are seen by queries that are the last ones of the sequence."""
    keys = key.shape[2]
    k = torch.arange(keys, device=query.device)
    q = k[keys - query.shape[2] :].unsqueeze(1)
    seen = (k <= q) if window is None else (k <= q) & (k > q - window)
    return seen[None, None]
