"""Attention over a sequence that several ranks hold: the exchange, and blocks of queries."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.utils.checkpoint import checkpoint

from composer_fsdp2.parallel.sequence.exchange import (
    gather_sequence,
    heads_to_sequence,
    sequence_to_heads,
)
from composer_fsdp2.parallel.sequence.masks import (
    BLOCK,
    AttentionCall,
    SharedSequence,
    mask_of,
    order_of_block,
)

__all__ = ["attend", "fused_attention"]


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
    """Attends over the whole sequence, see [Note: masks]. Collective: yes, over the group.

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
    times = heads // key.shape[1]
    # The bias first: it is a tensor whose shape is not that of its mask, and torch 2.7 refuses to
    # tell any.
    shares = mask is None or isinstance(mask, CausalBias) or mask.shape[0] == 1
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
    alike = (query, key, value) if value.shape[-1] == key.shape[-1] else (query, key)
    parts = [tensor.unflatten(1, (ranks, -1)) for tensor in alike]
    got = sequence_to_heads(torch.cat(parts, 2).flatten(1, 2), shared.group)
    sizes = [heads // ranks, kv_heads, kv_heads][: len(alike)]
    query, key, *rest = got.split(sizes, 1)
    value = rest[0] if rest else sequence_to_heads(value, shared.group)
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
    sizes = key.shape[-1], value.shape[-1]
    by = 1 if sizes[0] == sizes[1] else 3  # one gather for both
    both = gather_sequence(torch.cat([key, value], by), shared.group)
    both = shared.division.put_together(both, 2)
    key, value = both.split(key.shape[1] if by == 1 else sizes, by)
    found, at = [], 0
    for begin, end in shared.division.spans_of(shared.rank):
        own = query.narrow(2, at, end - begin)
        at += end - begin
        last = key.shape[2] if shared.sees_later else end
        keys, values = key[:, :, :last], value[:, :, :last]
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
    """Attends with the queries of a span and all keys that they see; see [Note: masks]."""
    (begin, end), last = span, key.shape[2]
    window = call.window if shared.rules.window is None else shared.rules.window
    if call.needs_mask:
        mask = mask_of(shared, call, window, span, (0, last), query)
        return call.compute(query, key, value, mask)
    has_order_alone = (shared.documents, shared.is_real, shared.mask) == (None, None, None)
    if has_order_alone and (window is None or window >= end):
        if begin == 0:
            return call.compute(query, key, value, None)
        # Kernels of GPUs know this order; others need a mask.
        if query.device.type == "cuda":
            return call.compute(query, key, value, causal_lower_right(end - begin, end))
    found = []
    for at in range(begin, end, BLOCK):
        stop = min(at + BLOCK, end)
        first = 0 if window is None or shared.sees_later else max(0, at - window + 1)
        to = last if shared.sees_later else stop
        if has_order_alone:
            mask = order_of_block(shared, window, end, query)[:, :, at - stop :, first - stop :]
        else:
            mask = mask_of(shared, call, window, (at, stop), (first, to), query)
        own = query[:, :, at - begin : stop - begin]
        found.append(call.compute(own, key[:, :, first:to], value[:, :, first:to], mask))
    return torch.cat(found, 1)
