"""Connects blocks of transformers that have their experts in a list, by how each routes tokens.

Source: https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/models/mixtral/modeling_mixtral.py#L115
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from composer_fsdp2.fingerprint import fingerprint
from composer_fsdp2.parallel.expert.experts import Experts

__all__ = ["BLOCKS", "Block", "code_of", "known_router"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A class of blocks."""

    method: str
    """the method that goes through all experts"""
    code: str
    """fingerprint of that method, as it was read"""
    connect: Callable[[Any, Experts], None]
    """has a block send its tokens to experts"""
    calls_all: bool
    """whether the method calls an expert without a token"""


def known_router(block: nn.Module) -> Block | None:
    """Returns the entry of a block's class in `BLOCKS`. Collective: no.

    `None` for a class without an entry, and for code with another fingerprint.
    """
    router = BLOCKS.get(type(block).__name__)
    if router is None:
        return None
    function = getattr(type(block), router.method, None)
    if getattr(getattr(block, router.method, None), "__func__", None) is not function:
        return None  # somebody else has replaced it on this block
    return router if code_of(function) == router.code else None


def code_of(function: Any) -> str:
    """Returns the fingerprint of a function; empty if its source cannot be found."""
    try:
        return fingerprint(function)
    except (OSError, TypeError):
        return ""


def _route_by_softmax(block: Any, experts: Experts) -> None:
    """Routes as Mixtral, Qwen3-MoE and OLMoE: `top_k` of a softmax, normalised in Mixtral."""
    normalises = getattr(block, "norm_topk_prob", True)
    noise = getattr(block, "jitter_noise", 0.0)

    def forward(block: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if block.training and noise > 0:
            drawn = torch.empty_like(hidden_states).uniform_(1.0 - noise, 1.0 + noise)
            hidden_states = hidden_states * drawn
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        logits = block.gate(tokens)
        shares = torch.softmax(logits, dim=1, dtype=torch.float)
        chosen = experts.recall(torch.topk(shares.detach(), block.top_k, dim=-1).indices)
        weights = shares.gather(1, chosen)
        if normalises:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights.to(tokens.dtype)
        made = experts.compute(tokens, chosen, weights, tokens.dtype)
        return made.view(hidden_states.shape), logits

    block.forward = MethodType(forward, block)


def _route_by_groups(block: Any, experts: Experts) -> None:
    """Routes as DeepSeek-V3, whose router is a module, beside experts that all tokens share."""

    def moe(
        _block: Any, hidden_states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        made = experts.compute(hidden_states, chosen, weights, weights.dtype)
        return made.type(hidden_states.dtype)

    choose = block.gate.get_topk_indices

    def choose_again(scores: torch.Tensor) -> torch.Tensor:
        return experts.recall(choose(scores))

    block.gate.get_topk_indices = choose_again
    block.moe = MethodType(moe, block)


BLOCKS: dict[str, Block] = {
    "MixtralSparseMoeBlock": Block(
        method="forward",
        code="e5c3c2e2c2f7c3ad",
        connect=_route_by_softmax,
        calls_all=True,
    ),
    "Qwen3MoeSparseMoeBlock": Block(
        method="forward",
        code="78e0f141832c1f74",
        connect=_route_by_softmax,
        calls_all=True,
    ),
    "OlmoeSparseMoeBlock": Block(
        method="forward",
        code="78e0f141832c1f74",
        connect=_route_by_softmax,
        calls_all=True,
    ),
    "DeepseekV3MoE": Block(
        method="moe",
        code="dd141367c437c48d",
        connect=_route_by_groups,
        calls_all=False,
    ),
}
"""blocks by the name of their class"""
