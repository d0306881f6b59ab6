"""Attention over a sequence that several ranks hold, for modules that call transformers' interface.

[Note: masks] A model builds its mask for the positions it sees, which are those of one rank. So the
mask is built here, from what is known about the whole sequence: order, sliding window, documents
and padding. A mask of four dimensions that the user gives is cut instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composer_fsdp2.parallel.sequence.exchange import (
    gather_sequence,
    heads_to_sequence,
    sequence_to_heads,
)
from composer_fsdp2.parallel.sequence.positions import Division

__all__ = ["IMPLEMENTATION", "SharedSequence", "attend", "uses_interface"]

IMPLEMENTATION = "fsdp2_sequence"
"""name in transformers' attention interface"""


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
    masks: dict[Any, torch.Tensor | None] = field(default_factory=dict[Any, Any])
    """those that layers of this forward have in common"""


@dataclass(frozen=True, slots=True)
class _Call:
    """The original attention function and what it was called with."""

    function: Callable[..., Any]
    module: nn.Module
    adds_masks: bool
    """whether it needs a mask, and one of numbers"""
    kwargs: dict[str, Any]

    @property
    def window(self) -> int | None:
        """Keys that a query sees, itself among them; `None` is all."""
        return self.kwargs.get("sliding_window")


class _WithGroups:
    """A module as another one would see it that repeats heads less often."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module = module
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def uses_interface(module: nn.Module) -> bool:
    """Whether a module is an attention that calls what transformers' interface names."""
    code = getattr(_plain_forward(module), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _plain_forward(module: nn.Module) -> Any:
    forward: Any = type(module).forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return forward


def original_function(module: nn.Module, implementation: str) -> Callable[..., Any]:
    """Returns what a module of transformers would call for an implementation."""
    namespace = vars(sys.modules[_plain_forward(module).__module__])
    if implementation == "eager":
        return namespace["eager_attention_forward"]
    return namespace["ALL_ATTENTION_FUNCTIONS"][implementation]


def attend(
    shared: SharedSequence,
    method: str,
    function: Callable[..., Any],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    adds_masks: bool,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attends over the whole sequence; see [Note: masks]. Collective: yes, over the group.

    Args:
        shared: of this forward.
        method: `ulysses` or `gather_kv`.
        function: the module's own attention.
        module: the attention, as `function` takes it.
        query: (batch, heads, local positions, size).
        key: (batch, key and value heads, local positions, size).
        value: likewise.
        adds_masks: whether `function` adds a mask to scores, and knows no order without one.
        kwargs: for `function`, with `sliding_window` where the module has one.

    Returns:
        (batch, local positions, heads, size), and no weights.
    """
    call = _Call(function, module, adds_masks, kwargs)
    way = _ulysses if method == "ulysses" else _gather_kv
    return way(shared, call, query, key, value), None


def _ulysses(
    shared: SharedSequence,
    call: _Call,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    ranks, heads = shared.division.degree, query.shape[1]
    key, value = (_enough_heads(kv, heads, ranks) for kv in (key, value))
    kv_heads = key.shape[1] // ranks
    # One exchange: each rank's heads of all three lie next to each other.
    parts = [t.unflatten(1, (ranks, -1)) for t in (query, key, value)]
    sent = torch.cat(parts, 2).flatten(1, 2)
    got = sequence_to_heads(sent, shared.group)
    query, key, value = got.split([heads // ranks, kv_heads, kv_heads], 1)
    mask = _mask(shared, call, (0, shared.division.padded), query)
    out = _compute(call, query, key, value, mask)
    return heads_to_sequence(out.transpose(1, 2), shared.group).transpose(1, 2)


def _enough_heads(tensor: torch.Tensor, heads: int, ranks: int) -> torch.Tensor:
    """Repeats key and value heads until the ranks can share them."""
    have = tensor.shape[1]
    if have % ranks == 0:
        return tensor
    times = ranks // have if ranks % have == 0 else heads // have
    return tensor.repeat_interleave(times, 1)


def _gather_kv(
    shared: SharedSequence,
    call: _Call,
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
        mask = _mask(shared, call, (begin, end), query)
        found.append(_compute(call, own, keys, values, mask))
    return torch.cat(found, 1)


def _mask(
    shared: SharedSequence, call: _Call, span: tuple[int, int], like: torch.Tensor
) -> torch.Tensor | None:
    """Which keys up to the end of a span its queries see: (batch or 1, 1, queries, keys).

    `None` is the order alone, for queries from the first on. Layers share their masks.
    """
    wanted = (span, call.window, call.adds_masks, like.dtype)
    if wanted not in shared.masks:
        mask = _seen(shared, call, span, like.device)
        if mask is not None and call.adds_masks and mask.dtype == torch.bool:
            added = torch.zeros(mask.shape, dtype=like.dtype, device=like.device)
            mask = added.masked_fill_(~mask, torch.finfo(like.dtype).min)
        elif mask is not None and mask.dtype != torch.bool:
            mask = mask.to(like.dtype)
        shared.masks[wanted] = mask
    return shared.masks[wanted]


def _seen(
    shared: SharedSequence, call: _Call, span: tuple[int, int], device: torch.device
) -> torch.Tensor | None:
    begin, end = span
    window = call.window
    if shared.mask is not None:
        return shared.mask[:, :, begin:end, :end]
    is_plain = shared.documents is None and shared.is_real is None
    if is_plain and begin == 0 and (window is None or window >= end) and not call.adds_masks:
        return None
    q = torch.arange(begin, end, device=device).unsqueeze(1)
    k = torch.arange(end, device=device).unsqueeze(0)
    seen = k <= q
    if window is not None:
        seen = seen & (k > q - window)
    seen = seen[None, None]
    if shared.documents is not None:
        own, others = shared.documents[:, begin:end], shared.documents[:, :end]
        seen = seen & (own.unsqueeze(2) == others.unsqueeze(1)).unsqueeze(1)
    if shared.is_real is not None:
        seen = seen & shared.is_real[:, None, None, :end]
        # A padded query sees itself: a row without any key would be NaN.
        seen = seen | (q == k)[None, None]
    return seen


def _compute(
    call: _Call,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    module: Any = call.module
    groups = query.shape[1] // key.shape[1]
    if getattr(module, "num_key_value_groups", groups) != groups:
        module = _WithGroups(module, groups)
    kwargs = {**call.kwargs, "is_causal": None} if "is_causal" in call.kwargs else call.kwargs
    out, _ = call.function(module, query, key, value, mask, **kwargs)
    return out
