"""Attention in blocks of queries, on one process."""

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

from composer_fsdp2.parallel.sequence.attention import fused_attention
from tests.support.alive import Alive


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_the_last_queries_of_a_causal_order(key_heads):
    """GPUs are given the order itself and no mask. Heads that share keys need no copies of them."""
    query = torch.randn(2, 4, 3, 8)
    key, value = torch.randn(2, 2, key_heads, 5, 8).unbind()
    seen = torch.ones(1, 1, 3, 5, dtype=torch.bool).tril(2)
    expected = fused_attention(query, key, value, seen)
    order = causal_lower_right(3, 5)
    with Alive() as alive:
        found = fused_attention(query, key, value, order)
    assert (found - expected).abs().max() <= 1e-6
    assert not alive.ran["repeat_interleave"]
    assert not alive.ran["clone"]
