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
from tests.dist.test_sequence_images import IGNORED, MODELS, batch, part
from tests.support.models import HybridLM
from tests.support.parity import OPTIMIZERS, TOLERANCE
from tests.support.training import largest_difference

VOCAB, STEPS, SIZE, LENGTH = 31, 5, 8, 7
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
RECURRENT = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2}
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


def _mamba() -> nn.Module:
    config = transformers.MambaConfig(**RECURRENT, state_size=4, time_step_rank=2)
    return transformers.MambaForCausalLM(config)


def _falcon_mamba() -> nn.Module:
    config = transformers.FalconMambaConfig(**RECURRENT, state_size=4, time_step_rank=2)
    return transformers.FalconMambaForCausalLM(config)


def _jamba() -> nn.Module:
    """Attention in every second layer, and experts in every second layer."""
    config = transformers.JambaConfig(
        **{**SIZES, "num_hidden_layers": 4},
        intermediate_size=24,
        num_key_value_heads=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=3,
        num_experts_per_tok=2,
        mamba_d_state=4,
        mamba_dt_rank=2,
        use_mamba_kernels=False,
        use_cache=False,
    )
    return transformers.JambaForCausalLM(config)


FAMILIES: dict[str, tuple[Callable[[], Any], int]] = {
    "Llama, tied": (_llama_tied, 3),
    "GPT-2": (_gpt2, 3),
    "BERT": (_bert, 3),
    "T5": (_t5, 5),
    "Mixtral": (_mixtral, 3),
    "Mamba": (_mamba, 3),
    "FalconMamba": (_falcon_mamba, 3),
    "Jamba": (_jamba, 5),
    "Hymba's kind": (lambda: HybridLM(VOCAB), 5),
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
    assert largest_difference(model, oracle) <= TOLERANCE
    assert [names for names in _names_of_parameters(model) if len(names) > 1] == tied


@pytest.mark.table("Qwen2.5-VL")
@pytest.mark.filterwarnings(*IGNORED)
@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", MODELS)
def test_images_on_one_rank_only(name: str):
    """One rank has a row without an image, the other a row with one; the third batch has none."""
    torch.manual_seed(0)
    oracle = MODELS[name]().train()
    model, start = copy.deepcopy(oracle), copy.deepcopy(oracle)
    pair = [OPTIMIZERS["sgd"](m.parameters()) for m in (oracle, model)]
    prepare_fully_shard(model, pair[1], {})
    ranks = dist.get_world_size()
    for step in range(STEPS):
        given = batch(name, step)
        for rank in range(ranks):
            row = (rank + step) % ranks
            own = part(given, range(row, row + 1), name)
            if not own.get("pixel_values", torch.ones(1)).numel():
                own = {k: v for k, v in own.items() if k not in ("pixel_values", "image_grid_thw")}
            (oracle(**own).loss / ranks).backward()
            if rank == dist.get_rank():
                model(**own).loss.backward()
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
    assert largest_difference(model, oracle) <= TOLERANCE
    tower = [n for n, _ in start.named_parameters() if "vis" in n and "patch_embed" in n]
    assert all(not torch.equal(*(m.get_parameter(n) for m in (start, oracle))) for n in tower)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _names_of_parameters(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return list(names.values())
