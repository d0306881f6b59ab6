"""Attention in blocks of queries, on one process."""

from typing import Any, cast

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

from composer_fsdp2.parallel.sequence.attention import fused_attention
from composer_fsdp2.parallel.sequence.masks import (
    AttentionCall,
    MaskRules,
    SequenceParts,
    SharedSequence,
    mask_of,
)
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


@pytest.mark.parametrize(
    ("unseeing", "weights"),
    [("zero", [0.0, 0.0]), ("average", [0.5, 0.5]), ("all", [1 / 3, 2 / 3])],
)
def test_a_query_that_sees_no_key(unseeing: Any, weights: list[float]):
    """The first position is padding, and the only one that its query could see."""
    shared = SharedSequence(
        parts=SequenceParts(length=2, degree=1, is_balanced=False),
        rank=0,
        group=cast("Any", None),
        rules=MaskRules(unseeing=unseeing),
        is_real=torch.tensor([[False, True]]),
    )
    scores = torch.tensor([1.0, 2.0]).log()
    mask = mask_of(shared, AttentionCall(compute=cast("Any", None)), None, (0, 2), (0, 2), scores)
    first, second = (scores + mask[0, 0]).softmax(-1).nan_to_num()
    assert first.tolist() == pytest.approx(weights)
    assert second.tolist() == [0, 1]
