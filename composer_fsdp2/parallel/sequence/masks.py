"""Divides the positions of a sequence between ranks, and makes the masks of their queries.

[Note: masks] A model builds its mask for the positions it sees, which are those of one rank. So the
mask is built here, from facts about the full sequence: order, sliding window, documents and
padding. A mask of four dimensions that the user gives is cut instead. Queries are computed in
blocks then, so that no mask of a full sequence by itself is needed for the order and a window.

A query on padding before its sequence sees no key. The label of the first real token is predicted
there, so the result of such a query counts: `MaskRules.unseeing`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

BLOCK = 512
"""queries that are computed together where a mask is needed"""

__all__ = [
    "BLOCK",
    "AttentionCall",
    "MaskRules",
    "SequenceParts",
    "SharedSequence",
    "in_order",
    "mask_of",
    "order_of_block",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceParts:
    """A sequence, padded so that each rank has as many positions as the others.

    In order, rank `r` of `n` has the `r`-th part. Balanced, it has parts `r` and `2n - 1 - r` of
    `2n`, so that every rank has as many pairs of a query and an earlier key.
    """

    length: int
    """positions, without padding"""
    degree: int
    is_balanced: bool

    @property
    def count(self) -> int:
        """Parts of equal length."""
        return self.degree * (2 if self.is_balanced else 1)

    @property
    def padded(self) -> int:
        """Positions with padding."""
        return self.count * -(-self.length // self.count)

    def parts_of(self, rank: int) -> tuple[int, ...]:
        """Returns the numbers of a rank's parts, in their order on the rank."""
        return (rank, self.count - 1 - rank) if self.is_balanced else (rank,)

    def spans_of(self, rank: int) -> list[tuple[int, int]]:
        """Returns begin and end of each of a rank's parts."""
        size = self.padded // self.count
        return [(part * size, (part + 1) * size) for part in self.parts_of(rank)]

    def cut(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Returns a rank's positions of a tensor with all positions, padding included."""
        spans = [tensor[:, begin:end] for begin, end in self.spans_of(rank)]
        return spans[0] if len(spans) == 1 else torch.cat(spans, 1)

    def put_together(self, gathered: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns a gathered tensor in the order of positions.

        Args:
            gathered: along `dim` the parts of each rank, in the order of the ranks.
            dim: tensor dim of positions.
        """
        if not self.is_balanced:
            return gathered
        # Backward of this is a cut: nothing is sent.
        numbers = [part for rank in range(self.degree) for part in self.parts_of(rank)]
        pieces = gathered.split(self.padded // self.count, dim)
        return torch.cat([pieces[numbers.index(part)] for part in range(self.count)], dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskRules:
    """Effects of a model's masks in one process, where models differ."""

    window: int | None = None
    """keys that a query sees in every attention; `None` is the window of each attention"""
    takes_masks: bool = True
    """whether a mask of four dimensions is taken as it is given"""
    adds_masks: bool = False
    """whether true and false would be added to scores as 1 and 0"""
    narrows_masks: bool = False
    """whether an attention's window narrows a mask that the user gives"""
    unseeing: Literal["zero", "average", "all", "itself", "unknown"] = "itself"
    """keys of a query that may see none: nothing, every key with the same weight, every key, or
    itself"""

    documents: Literal["never", "without mask", "without padding", "always"] = "never"
    """when positions that begin again keep the documents of a row apart: where the model is given
    no mask, or one without padding"""
    takes_sequence_id: bool = True
    """whether documents that the batch numbers by itself are kept apart"""
    skips_padding: Literal["never", "without positions", "always"] = "never"
    """when positions count the tokens of the mask alone: where the batch gives no positions, or
    also by a correction of those that it gives"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSequence:
    """A batch of sequences that a group computes together."""

    parts: SequenceParts
    rank: int
    """group rank of this rank"""
    group: dist.ProcessGroup
    rules: MaskRules = field(default_factory=MaskRules)
    documents: torch.Tensor | None = None
    """(batch, positions): keys of other numbers are not seen; `None` is one document a row"""
    is_real: torch.Tensor | None = None
    """(batch, positions): false is padding; `None` is no padding"""
    mask: torch.Tensor | None = None
    """(batch or 1, 1, positions, positions): the user's own, added or true where seen"""
    sees_later: bool = False
    """whether some query sees keys after it"""
    last_position: torch.Tensor | None = None
    """largest of the positions that the model has in one process"""
    masks: dict[Any, Any] = field(default_factory=dict[Any, Any])
    """masks that layers of this forward have in common"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """How one attention module computes."""

    compute: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]
    """takes queries, keys, values (batch, heads, positions, size) and a mask; returns (batch,
    positions, heads, size)"""
    window: int | None = None
    """keys that a query sees, itself among them; `None` is all"""
    needs_mask: bool = False
    """whether the module knows no order without a mask, and takes all queries at once"""


def order_of_block(
    shared: SharedSequence, window: int | None, end: int, like: torch.Tensor
) -> torch.Tensor:
    """Returns the mask of a block of queries: each sees keys up to its position.

    The last columns are the keys of the block.
    """
    key = ("order", window, like.dtype)
    width = max(BLOCK, end if window is None else min(end, BLOCK + window - 1))
    # One mask for all blocks: each takes its last columns. Masks of all blocks would be half of
    # (positions x positions) together.
    mask = shared.masks.get(key)
    if mask is None or mask.shape[-1] < width:
        q = torch.arange(width - BLOCK, width, device=like.device).unsqueeze(1)
        k = torch.arange(width, device=like.device).unsqueeze(0)
        mask = _added(in_order(q, k, window)[None, None], like)
        shared.masks[key] = mask
    return mask


def mask_of(
    shared: SharedSequence,
    call: AttentionCall,
    window: int | None,
    queries: tuple[int, int],
    keys: tuple[int, int],
    like: torch.Tensor,
) -> torch.Tensor:
    """Returns a mask that is added to the scores of spans of queries and keys.

    Layers share their masks.

    Returns:
        (batch or 1, 1, queries, keys).
    """
    key = (queries, keys, window, like.dtype, call.needs_mask)
    if key not in shared.masks:
        mask = _new_mask(shared, window, queries, keys, like)
        if call.needs_mask:
            # Torch's kernels give zero to a query that sees no key; a softmax gives NaN.
            mask.masked_fill_((mask == -torch.inf).all(-1, keepdim=True), 0)
        shared.masks[key] = mask
    return shared.masks[key]


def _added(seen: torch.Tensor, like: torch.Tensor, unseen: float | None = None) -> torch.Tensor:
    """Returns a mask that is added to scores: kernels would make it of each mask, in each layer."""
    # As transformers does it: a row with nothing but the least number is an average of all keys,
    # where a row of -inf gives zero in torch's kernels and NaN in a softmax.
    added = torch.zeros(seen.shape, dtype=like.dtype, device=like.device)
    return added.masked_fill_(~seen, torch.finfo(like.dtype).min if unseen is None else unseen)


def in_order(q: torch.Tensor, k: torch.Tensor, window: int | None) -> torch.Tensor:
    """Returns whether queries see keys by their order and a window alone."""
    return (k <= q) if window is None else (k <= q) & (k > q - window)


def _new_mask(
    shared: SharedSequence,
    window: int | None,
    queries: tuple[int, int],
    keys: tuple[int, int],
    like: torch.Tensor,
) -> torch.Tensor:
    q = torch.arange(*queries, device=like.device).unsqueeze(1)
    k = torch.arange(*keys, device=like.device).unsqueeze(0)
    if shared.mask is not None:
        cut = shared.mask[:, :, slice(*queries), slice(*keys)]
        # Torch's kernels take true and false so: a query without any key gives zero.
        added = _added(cut, like, -torch.inf) if cut.dtype == torch.bool else cut.to(like.dtype)
        if window is not None and shared.rules.narrows_masks:
            added = added.masked_fill(k <= q - window, torch.finfo(like.dtype).min)
        return added.masked_fill(k >= shared.parts.length, -torch.inf)
    seen = in_order(q, k, window)[None, None]
    if shared.documents is not None:
        query_documents, key_documents = (
            shared.documents[:, slice(*span)] for span in (queries, keys)
        )
        seen = seen & (query_documents.unsqueeze(2) == key_documents.unsqueeze(1)).unsqueeze(1)
    if shared.is_real is None:
        return _added(seen, like)
    seen = seen & shared.is_real[:, None, None, slice(*keys)]
    unseeing = shared.rules.unseeing
    if unseeing == "itself":
        return _added(seen | (q == k)[None, None], like)
    added = _added(seen, like)
    if unseeing != "average":
        value = 0.0 if unseeing == "all" else -torch.inf
        added.masked_fill_(~seen.any(-1, keepdim=True), value)
    # No query sees keys that pad sequences to equal parts in one process.
    return added.masked_fill_(k >= shared.parts.length, -torch.inf)
