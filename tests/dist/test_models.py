"""Model families as they come from transformers, wrapped by their own list of blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2 import prepare_fully_shard
from tests.support.parity import OPTIMIZERS
from tests.support.training import largest_difference

VOCAB, STEPS, SIZE, LENGTH = 31, 5, 8, 7
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _llama_tied() -> nn.Module:
    config = transformers.LlamaConfig(**SIZES, intermediate_size=24, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config)


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        **SIZES, **NO_DROPOUT, intermediate_size=24, max_position_embeddings=LENGTH
    )
    return transformers.BertForMaskedLM(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def _mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        **SIZES,
        intermediate_size=24,
        num_key_value_heads=1,
        num_local_experts=3,
        num_experts_per_tok=3,  # an expert without tokens has no gradient on that rank
        output_router_logits=False,
    )
    return transformers.MixtralForCausalLM(config)


FAMILIES: dict[str, tuple[Callable[[], Any], int]] = {
    "Llama, tied": (_llama_tied, 3),
    "GPT-2": (_gpt2, 3),
    "BERT": (_bert, 3),
    "T5": (_t5, 5),
    "Mixtral": (_mixtral, 3),
}


# Newer torch warns of blocks that end in a view; nothing in these models changes it in place.
@pytest.mark.table("BERT", "T5")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_family_trains_like_one_process(family: str):
    make, units = FAMILIES[family]
    model = make()
    oracle = copy.deepcopy(model)
    tied = [names for names in _names_of_parameters(model) if len(names) > 1]
    sharded, alone = (OPTIMIZERS["sgd"](m.parameters()) for m in (model, oracle))
    prepare_fully_shard(model, sharded, {})
    assert sum(isinstance(module, FSDPModule) for module in model.modules()) == units
    per_rank = SIZE // dist.get_world_size()
    start = dist.get_rank() * per_rank
    for ids in torch.randint(2, VOCAB, (STEPS, SIZE, LENGTH)):
        _step(oracle, alone, ids)
        _step(model, sharded, ids[start : start + per_rank])
    assert largest_difference(model, oracle) <= 1e-5
    assert [names for names in _names_of_parameters(model) if len(names) > 1] == tied


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _names_of_parameters(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return list(names.values())
