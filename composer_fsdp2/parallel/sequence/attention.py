"""Attention over a sequence that several ranks hold: the exchange, and what each query sees.

[Note: masks] A model builds its mask for the positions it sees, which are those of one rank. So the
mask is built here, from what is known about the whole sequence: order, sliding window, documents
and padding. A mask of four dimensions that the user gives is cut instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention.bias import CausalBias, causal_lower_right

from composer_fsdp2.parallel.sequence.exchange import (
    gather_sequence,
    heads_to_sequence,
    sequence_to_heads,
)
from composer_fsdp2.parallel.sequence.positions import Division

__all__ = ["AttentionCall", "SharedSequence", "attend", "fused_attention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSequence:
    """A batch of sequences that a group computes together, as attention has to know it."""

    division: Division
    rank: int
    """in the group"""
    group: dist.ProcessGroup
    documents: torch.Tensor | None = None
    """(batch, positions): keys of other numbers are not seen; `None` is one document each"""
    is_real: torch.Tensor | None = None
    """(batch, positions): false is padding; `None` is none"""
    mask: torch.Tensor | None = None
    """(batch or 1, 1, positions, positions): the user's own, added or true where seen"""
    masks: dict[Any, Any] = field(default_factory=dict[Any, Any])
    """those that layers of this forward have in common"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """How one attention module computes."""

    compute: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]
    """of queries, keys, values (batch, heads, positions, size) and a mask; gives (batch, positions,
    heads, size)"""
    window: int | None = None
    """keys that a query sees, itself among them; `None` is all"""
    adds_masks: bool = False
    """whether it needs a mask, of numbers that it adds to scores"""


def attend(
    shared: SharedSequence,
    method: str,
    call: AttentionCall,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """Attends over the whole sequence; see [Note: masks]. Collective: yes, over the group.

    Args:
        shared: of this forward.
        method: `ulysses` or `gather_kv`.
        call: of the module.
        query: (batch, heads, local positions, size).
        key: (batch, key and value heads, local positions, size).
        value: likewise.

    Returns:
        (batch, local positions, heads, size).
    """
    way = _ulysses if method == "ulysses" else _gather_kv
    return way(shared, call, query, key, value)


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    """Computes torch's attention, as `AttentionCall.compute`; without a mask in causal order."""
    times = query.shape[1] // key.shape[1]
    if times > 1:
        key, value = (tensor.repeat_interleave(times, 1) for tensor in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        attn_mask=mask,
        dropout_p=dropout,
        scale=scale,
        is_causal=mask is None,
    )
    return out.transpose(1, 2)


def _ulysses(
    shared: SharedSequence,
    call: AttentionCall,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    ranks, heads = shared.division.degree, query.shape[1]
    key, value = (_enough_heads(kv, heads, ranks) for kv in (key, value))
    kv_heads = key.shape[1] // ranks
    # One exchange: each rank's heads of all three lie next to each other.
    parts = [t.unflatten(1, (ranks, -1)) for t in (query, key, value)]
    got = sequence_to_heads(torch.cat(parts, 2).flatten(1, 2), shared.group)
    query, key, value = got.split([heads // ranks, kv_heads, kv_heads], 1)
    mask = _mask(shared, call, (0, shared.division.padded), query)
    out = call.compute(query, key, value, mask)
    return heads_to_sequence(out.transpose(1, 2), shared.group).transpose(1, 2)


def _enough_heads(tensor: torch.Tensor, heads: int, ranks: int) -> torch.Tensor:
    """Repeats key and value heads until the ranks can share them."""
    have = tensor.shape[1]
    if have % ranks == 0:
        return tensor
    return tensor.repeat_interleave(ranks // have if ranks % have == 0 else heads // have, 1)


def _gather_kv(
    shared: SharedSequence,
    call: AttentionCall,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    both = gather_sequence(torch.cat([key, value], 1), shared.group)
    both = shared.division.put_together(both, 2)
    key, value = both.split(key.shape[1], 1)
    found, at = [], 0
    for begin, end in shared.division.spans_of(shared.rank):
        own = query.narrow(2, at, end - begin)
        at += end - begin
        # Later keys are seen by no query of this part, nor are those before its window.
        first = 0 if call.window is None else max(0, begin - call.window + 1)
        keys, values = key[:, :, first:end], value[:, :, first:end]
        mask = _mask(shared, call, (begin, end), query, first)
        found.append(call.compute(own, keys, values, mask))
    return torch.cat(found, 1)


def _mask(
    shared: SharedSequence,
    call: AttentionCall,
    span: tuple[int, int],
    like: torch.Tensor,
    first: int = 0,
) -> Any:
    """Which keys, from the first to the end of a span, its queries see: (batch or 1, 1, ...).

    `None` is the order alone. Layers share their masks.
    """
    wanted = (span, first, call.window, call.adds_masks, like.dtype)
    if wanted not in shared.masks:
        mask = _seen(shared, call, span, first, like.device)
        is_order = mask is None or isinstance(mask, CausalBias)
        shared.masks[wanted] = mask if is_order else _as_added(mask, call, like)
    return shared.masks[wanted]


def _as_added(mask: torch.Tensor, call: AttentionCall, like: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    if not call.adds_masks:
        return mask
    added = torch.zeros(mask.shape, dtype=like.dtype, device=like.device)
    return added.masked_fill_(~mask, torch.finfo(like.dtype).min)


def _seen(
    shared: SharedSequence,
    call: AttentionCall,
    span: tuple[int, int],
    first: int,
    device: torch.device,
) -> Any:
    begin, end = span
    if shared.mask is not None:
        return shared.mask[:, :, begin:end, first:end]
    is_plain = shared.documents is None and shared.is_real is None and not call.adds_masks
    if is_plain and (call.window is None or call.window >= end):
        return None if begin == 0 else causal_lower_right(end - begin, end)
    q = torch.arange(begin, end, device=device).unsqueeze(1)
    k = torch.arange(first, end, device=device).unsqueeze(0)
    seen = k <= q
    if call.window is not None:
        seen = seen & (k > q - call.window)
    seen = seen[None, None]
    if shared.documents is not None:
        own, others = shared.documents[:, begin:end], shared.documents[:, first:end]
        seen = seen & (own.unsqueeze(2) == others.unsqueeze(1)).unsqueeze(1)
    if shared.is_real is not None:
        seen = seen & shared.is_real[:, None, None, first:end]
        # A padded query sees itself: a row without any key would be NaN.
        seen = seen | (q == k)[None, None]
    return seen
