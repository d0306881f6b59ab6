"""Computes attention over a sequence that ranks share, by exchanges and blocks of queries.

[Note: exchanges] Ulysses turns "all heads of a part of the sequence" into "some heads of the full
sequence", and back: every rank sends each other rank one part, in one all-to-all. Gathered keys and
values leave queries where they are: an all-gather in forward, a reduce-scatter in backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.utils.checkpoint import checkpoint

from composer_fsdp2.errors import PlanError
from composer_fsdp2.parallel.exchange import exchange_tensor
from composer_fsdp2.parallel.sequence.masks import (
    BLOCK,
    AttentionCall,
    SharedSequence,
    in_order,
    mask_of,
    order_of_block,
)
from composer_fsdp2.ranks import all_gather_tensor

__all__ = [
    "ATTEND",
    "HEADS",
    "Attend",
    "attend",
    "fused_attention",
    "gather_sequence",
    "sequence_attention",
    "whole_loss",
]

Attend = Callable[[nn.Module, AttentionCall, Any, Any, Any], torch.Tensor | None]
"""computes a call over the full sequence; `None` where the sequence is not divided"""
ATTEND = "_fsdp2_attend"
"""attribute of an attention module: its `Attend`"""
HEADS = "fsdp2_attention_heads"
"""attribute of a user's attention module: its heads of queries, and of keys and values"""


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
    """Attends over the full sequence, see [Note: masks]. Collective: yes, over the group.

    Args:
        shared: mask and positions of the full sequence in this forward.
        method: `ulysses` or `gather_kv`.
        call: how the module computes.
        query: (batch, heads, local positions, size).
        key: (batch, key and value heads, local positions, size).
        value: in the shape of `key`, but for the size.
        frees: gathers keys and values again in backward, where nothing else runs the module again:
            each layer would keep those of the full sequence.

    Returns:
        (batch, local positions, heads, size).
    """
    if method != "ulysses":
        if not frees:
            return _gather_kv(shared, call, query, key, value)
        # Without reentrance, which would need inputs with gradients.
        out: Any = checkpoint(_gather_kv, shared, call, query, key, value, use_reentrant=False)
        return out
    ranks, heads, kv_heads = shared.parts.degree, query.shape[1], key.shape[1]
    if kv_heads % ranks:
        # Repeated until the ranks can share them.
        times = ranks // kv_heads if ranks % kv_heads == 0 else heads // kv_heads
        key, value = (kv.repeat_interleave(times, 1) for kv in (key, value))
    # One exchange: each rank's heads of all three lie next to each other.
    alike = (query, key, value) if value.shape[-1] == key.shape[-1] else (query, key)
    parts = [tensor.unflatten(1, (ranks, -1)) for tensor in alike]
    joined = torch.cat(parts, 2).flatten(1, 2)
    joined = _swapped_dims(joined, shared.group, split_dim=1, gather_dim=2)
    sizes = [tensor.shape[1] // ranks for tensor in alike]
    query, key, *rest = joined.split(sizes, 1)
    value = rest[0] if rest else _swapped_dims(value, shared.group, split_dim=1, gather_dim=2)
    out = _attend_span(shared, call, (0, shared.parts.padded), query, key, value)
    out = _swapped_dims(out.transpose(1, 2), shared.group, split_dim=2, gather_dim=1)
    return out.transpose(1, 2)


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
    both = shared.parts.put_together(both, 2)
    key, value = both.split(key.shape[1] if by == 1 else sizes, by)
    outputs, at = [], 0
    for begin, end in shared.parts.spans_of(shared.rank):
        queries = query.narrow(2, at, end - begin)
        at += end - begin
        # Keys after the last query of a span are masked for all of its queries.
        last = key.shape[2] if shared.sees_later else end
        keys, values = key[:, :, :last], value[:, :, :last]
        outputs.append(_attend_span(shared, call, (begin, end), queries, keys, values))
    return torch.cat(outputs, 1)


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
    # The model's own function computes all queries at once, as in one process.
    if call.needs_mask:
        mask = mask_of(shared, call, window, span, (0, last), query)
        return call.compute(query, key, value, mask)
    has_order_alone = (shared.documents, shared.is_real, shared.mask) == (None, None, None)
    if has_order_alone and (window is None or window >= end):
        if begin == 0:  # a query for each key: torch's `is_causal` is that order
            return call.compute(query, key, value, None)
        # Kernels of GPUs know this order; others need a mask.
        if query.device.type == "cuda":
            return call.compute(query, key, value, causal_lower_right(end - begin, end))
    outputs = []
    for at in range(begin, end, BLOCK):
        stop = min(at + BLOCK, end)
        first = 0 if window is None or shared.sees_later else max(0, at - window + 1)
        to = last if shared.sees_later else stop
        if has_order_alone:
            mask = order_of_block(shared, window, end, query)[:, :, at - stop :, first - stop :]
        else:
            mask = mask_of(shared, call, window, (at, stop), (first, to), query)
        queries = query[:, :, at - begin : stop - begin]
        outputs.append(call.compute(queries, key[:, :, first:to], value[:, :, first:to], mask))
    return torch.cat(outputs, 1)


# --- For users ---


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
        value: (batch, heads of keys and values, positions, size).
        mask: (batch or 1, 1, positions of queries, positions of keys), added or true where seen;
            `None` is causal order. Where the sequence is divided it is not read: order, window,
            documents (`position_ids`) and padding (`attention_mask`) come from what the model was
            given.
        window: keys that a query sees, itself among them; `None` is all.
        scale: factor of scores; 1 / sqrt(size) by default.
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
    connected: Attend | None = module.__dict__.get(ATTEND)
    if connected is not None:
        heads, kv_heads, named = query.shape[1], key.shape[1], getattr(module, HEADS)
        # Tensor parallelism leaves a rank a part of them.
        if named[0] * kv_heads != named[1] * heads or named[0] % heads:
            raise PlanError(
                f"sequence_attention of {type(module).__name__} was given {heads} heads of queries "
                f"and {kv_heads} of keys and values, and its {HEADS} is {named}. Ranks were chosen "
                f"to share those. Write {HEADS} = ({heads}, {kv_heads})."
            )
        call = AttentionCall(compute=compute, window=window)
        out = connected(module, call, query, key, value)
        if out is not None:
            return out.transpose(1, 2)
    if mask is None and (window is not None or query.shape[2] != key.shape[2]):
        # Queries are the last ones of the sequence.
        k = torch.arange(key.shape[2], device=query.device)
        q = k[key.shape[2] - query.shape[2] :].unsqueeze(1)
        mask = in_order(q, k, window)[None, None]
    return compute(query, key, value, mask).transpose(1, 2)


# --- Exchanges, forward and backward, on any backend ---


def _swapped_dims(
    tensor: torch.Tensor, group: dist.ProcessGroup, *, split_dim: int, gather_dim: int
) -> torch.Tensor:
    """Divides one dimension between ranks, and gathers all ranks' parts of another.

    Collective: yes, over the group.

    Args:
        tensor: (batch, heads, positions, size); the group's size divides `split_dim`.
        group: the ranks that share the sequence.
        split_dim: the dimension that is divided afterwards: heads or positions.
        gather_dim: the dimension that is full afterwards, in the order of the ranks.
    """
    # The i-th part goes to rank i. Gradients go back the same way.
    swap = functools.partial(_all_to_all, group)
    arrived = exchange_tensor(torch.stack(tensor.chunk(group.size(), split_dim)), swap, swap)
    return torch.cat(arrived.unbind(), gather_dim)


def _all_to_all(group: dist.ProcessGroup, sent: torch.Tensor) -> torch.Tensor:
    sent = sent.contiguous()  # one buffer, whose parts lie one after the other
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group)
    return got


def gather_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gives every rank the full sequence. Collective: yes, over the group.

    Args:
        tensor: (batch, heads, local positions, size).
        group: the ranks that share the sequence.

    Returns:
        (batch, heads, ranks x local positions, size), in the order of the ranks.
    """

    def there(local: torch.Tensor) -> torch.Tensor:
        local = local.contiguous()
        got = local.new_empty((group.size() * local.shape[0], *local.shape[1:]))
        all_gather_tensor(got, local, group)
        return got

    def back(grad: torch.Tensor) -> torch.Tensor:
        # As an all-to-all: gloo of older torch has no reduce-scatter of one tensor, and the sum is
        # in the order of the ranks everywhere.
        return _all_to_all(group, grad).view(group.size(), -1, *grad.shape[1:]).sum(0)

    return exchange_tensor(tensor.movedim(2, 0), there, back).movedim(0, 2)


def whole_loss(term: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns the sum of the ranks' terms of a loss, with a gradient for the local term alone.

    Collective: yes, over the group. The gradient is multiplied by the number of ranks in the group,
    because FSDP2 divides by all ranks while a sequence counts once.
    """

    def there(local_term: torch.Tensor) -> torch.Tensor:
        total = local_term.detach().clone()  # added up in place
        dist.all_reduce(total, group=group)
        return total

    return exchange_tensor(term, there, lambda grad: grad * group.size())
