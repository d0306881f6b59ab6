"""Attention over a sequence that several ranks hold: the exchange, and what each query sees.

[Note: masks] A model builds its mask for the positions it sees, which are those of one rank. So the
mask is built here, from what is known about the whole sequence: order, sliding window, documents
and padding. A mask of four dimensions that the user gives is cut instead. Queries are computed in
blocks then, so that no mask of a whole sequence by itself is needed for the order and a window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from composer_fsdp2.parallel.sequence.exchange import (
    gather_sequence,
    heads_to_sequence,
    sequence_to_heads,
)
from composer_fsdp2.parallel.sequence.positions import Division

_BLOCK = 512
"""queries that are computed together where a mask is needed"""

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
    needs_mask: bool = False
    """whether it knows no order without a mask, and takes all queries at once"""


def attend(
    shared: SharedSequence,
    method: str,
    call: AttentionCall,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    frees: bool,
) -> torch.Tensor:
    """Attends over the whole sequence; see [Note: masks]. Collective: yes, over the group.

    Args:
        shared: of this forward.
        method: `ulysses` or `gather_kv`.
        call: of the module.
        query: (batch, heads, local positions, size).
        key: (batch, key and value heads, local positions, size).
        value: likewise.
        frees: gathers keys and values again in backward, where nothing else runs the module again:
            each layer would keep those of the whole sequence.

    Returns:
        (batch, local positions, heads, size).
    """
    if method == "ulysses":
        return _ulysses(shared, call, query, key, value)
    if not frees:
        return _gather_kv(shared, call, query, key, value)
    out: Any = checkpoint(_gather_kv, shared, call, query, key, value, use_reentrant=False)
    return out


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
    batch, heads, _, _ = query.shape
    times, shares = heads // key.shape[1], getattr(mask, "shape", (1,))[0] == 1
    if times > 1 and shares:
        # Heads that share keys become a batch of their own, and nothing is copied for them.
        query = query.reshape(-1, times, *query.shape[2:])
        key, value = (
            tensor.reshape(-1, 1, *tensor.shape[2:]).expand(-1, times, -1, -1)
            for tensor in (key, value)
        )
    elif times > 1:
        key, value = (tensor.repeat_interleave(times, 1) for tensor in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, is_causal=mask is None
    )
    return out.reshape(batch, heads, *out.shape[2:]).transpose(1, 2)


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
    out = _attend_span(shared, call, (0, shared.division.padded), query, key, value)
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
        # Later keys are seen by no query of this part.
        keys, values = key[:, :, :end], value[:, :, :end]
        found.append(_attend_span(shared, call, (begin, end), own, keys, values))
    return torch.cat(found, 1)


def _attend_span(
    shared: SharedSequence,
    call: AttentionCall,
    span: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """Attends with the queries of a span and all keys up to its end; see [Note: masks]."""
    begin, end = span
    if call.needs_mask:
        return call.compute(query, key, value, _mask(shared, call, span, 0, query))
    has_order_alone = (shared.documents, shared.is_real, shared.mask) == (None, None, None)
    if has_order_alone and (call.window is None or call.window >= end):
        if begin == 0:
            return call.compute(query, key, value, None)
        # Kernels of GPUs know this order; others need a mask.
        if query.device.type == "cuda":
            return call.compute(query, key, value, causal_lower_right(end - begin, end))
    found = []
    for at in range(begin, end, _BLOCK):
        stop = min(at + _BLOCK, end)
        first = 0 if call.window is None else max(0, at - call.window + 1)
        if has_order_alone:
            mask = _order(shared, call.window, end, query)[:, :, at - stop :, first - stop :]
        else:
            mask = _mask(shared, call, (at, stop), first, query)
        own = query[:, :, at - begin : stop - begin]
        found.append(call.compute(own, key[:, :, first:stop], value[:, :, first:stop], mask))
    return torch.cat(found, 1)


def _order(
    shared: SharedSequence, window: int | None, end: int, like: torch.Tensor
) -> torch.Tensor:
    """The mask of a block of queries: keys up to its own, the last ones in the last column."""
    wanted = ("order", window, like.dtype)
    width = max(_BLOCK, end if window is None else min(end, _BLOCK + window - 1))
    known = shared.masks.get(wanted)
    if known is None or known.shape[-1] < width:
        q = torch.arange(width - _BLOCK, width, device=like.device).unsqueeze(1)
        k = torch.arange(width, device=like.device).unsqueeze(0)
        seen = k <= q if window is None else (k <= q) & (k > q - window)
        known = _added(seen[None, None], like)
        shared.masks[wanted] = known
    return known


def _added(seen: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A mask as what is added to scores: kernels would make that of each mask, for each layer."""
    added = torch.zeros(seen.shape, dtype=like.dtype, device=like.device)
    return added.masked_fill_(~seen, torch.finfo(like.dtype).min)


def _mask(
    shared: SharedSequence,
    call: AttentionCall,
    span: tuple[int, int],
    first: int,
    like: torch.Tensor,
) -> torch.Tensor:
    """Which keys, from the first to the end of a span, its queries see: (batch or 1, 1, ...).

    Layers share their masks.
    """
    wanted = (span, first, call.window, like.dtype)
    if wanted not in shared.masks:
        mask = _seen(shared, call, span, first, like.device)
        is_added = mask.dtype != torch.bool
        shared.masks[wanted] = mask.to(like.dtype) if is_added else _added(mask, like)
    return shared.masks[wanted]


def _seen(
    shared: SharedSequence,
    call: AttentionCall,
    span: tuple[int, int],
    first: int,
    device: torch.device,
) -> torch.Tensor:
    begin, end = span
    if shared.mask is not None:
        return shared.mask[:, :, begin:end, first:end]
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
