"""Attention is known by its class and its sizes, not by the name of its class alone."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from composer_fsdp2 import PlanError
from composer_fsdp2.parallel.tensor.known import known_layers
from tests.dist.test_tensor_parallel import llama
from tests.support import recent_models
from tests.unit.parallel.test_computed_weights import planned


class MultiheadAttention(nn.Module):
    """Has the name and the layers of MPT's attention."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        self.Wqkv, self.out_proj = nn.Linear(8, 24), nn.Linear(8, 8)
        vars(self).update(sizes)


SIZES: dict[str, Any] = {"d_model": 8, "n_heads": 2, "kv_n_heads": 2, "head_dim": 4}


def test_one_with_all_sizes_is_divided_by_heads():
    block = known_layers("attn", MultiheadAttention(**SIZES))
    assert block is not None
    assert block.cuts["Wqkv"].blocks == (8, 8, 8)
    assert block.heads == {"query heads": 2, "key and value heads": 2}


@pytest.mark.parametrize("missing", SIZES)
@pytest.mark.parametrize("value", [None, 2.0, "2"])
def test_another_one_of_this_name_is_refused(missing: str, value: Any):
    with pytest.raises(PlanError, match=f"'attn' cannot be divided .*'{missing}' is {value!r}"):
        known_layers("attn", MultiheadAttention(**{**SIZES, missing: value}))


@pytest.mark.parametrize("key", ["Wqkv", "out_proj"])
def test_one_with_another_layer_in_it_is_refused(key: str):
    module = MultiheadAttention(**SIZES)
    setattr(module, key, nn.Identity())
    with pytest.raises(PlanError, match=f"its {key} is a Identity"):
        known_layers("attn", module)


def test_one_with_more_rows_than_its_heads_have_is_refused():
    module = MultiheadAttention(**SIZES)
    module.Wqkv = nn.Linear(8, 32)
    with pytest.raises(PlanError, match=r"its Wqkv is 32 wide, not \(8, 8, 8\)"):
        known_layers("attn", module)


class Separate(nn.Module):
    """Eight heads of queries and two of keys, 32 wide in a model 16 wide."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        self.head_dim = 4
        self.q_proj, self.o_proj = nn.Linear(16, 32), nn.Linear(32, 16)
        self.k_proj, self.v_proj = nn.Linear(16, 8), nn.Linear(16, 8)
        vars(self).update(sizes)


@pytest.mark.parametrize("width", ["hidden_size", "embed_dim"])
def test_a_width_is_divided_where_it_is_that_of_all_heads(width: str):
    block = known_layers("attn", Separate(num_heads=8, **{width: 32}))
    assert block is not None
    assert block.counts == {"num_heads": 8, width: 32}
    other = known_layers("attn", Separate(num_heads=8, **{width: 16}))
    assert other is not None
    assert other.counts == {"num_heads": 8}


def test_a_tied_embedding_that_is_registered_twice_is_divided_with_the_head():
    """As T5's, which its encoder and decoder hold too."""
    model: Any = llama(tie_word_embeddings=True)
    model.again = model.model.embed_tokens
    cuts = planned(model).cuts
    assert {"model.embed_tokens", "lm_head"} < cuts.keys()
    assert "again" not in cuts


def test_an_mlp_that_looks_at_all_its_columns_is_refused():
    if why := recent_models.missing("Gemma 3n"):
        pytest.skip(why)
    model = recent_models.gemma3n(activation_sparsity_pattern=[0.9, 0.0, 0.0, 0.0])
    with pytest.raises(PlanError, match="activation_sparsity looks at all columns"):
        planned(model)
    plan = planned(model, **{"model.layers.0.mlp.*": "whole"})
    assert {name for name in plan.cuts if ".mlp." in name and ".0." in name} == set()
