"""Tensor parallelism with FSDP2, against one process that sees the same global batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import distributed as dist
from torch import nn

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2.parallel.row_order import order_of
from tests.support.parity import (
    OPTIMIZERS,
    STATE_TOLERANCE,
    TOLERANCE,
    assert_close,
    assert_same_values,
    full,
)

VOCAB, STEPS, SIZE, LENGTH, DEGREE = 32, 20, 8, 7, 2
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": LENGTH,
}


def llama(**changes: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | changes)))


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, attention_bias=True))


def gemma3() -> nn.Module:
    config = transformers.Gemma3TextConfig(**SIZES, sliding_window=4, query_pre_attn_scalar=4)
    return transformers.Gemma3ForCausalLM(config)


def phi3() -> nn.Module:
    config = transformers.Phi3Config(**SIZES, pad_token_id=0, tie_word_embeddings=False)
    return transformers.Phi3ForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB - 1,
        n_embd=16,
        n_layer=2,
        n_head=4,
        n_positions=LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


def mpt(**attention: Any) -> nn.Module:
    pytest.importorskip("llmfoundry")
    from llmfoundry.models.mpt import MPTConfig, MPTForCausalLM

    config = MPTConfig(
        d_model=16,
        n_heads=4,
        n_layers=2,
        expansion_ratio=2,
        max_seq_len=LENGTH,
        vocab_size=VOCAB,
        attn_config={"attn_impl": "torch", **attention},
        ffn_config={"ffn_type": "mptglu" if attention else "mptmlp"},
    )
    return MPTForCausalLM(config)


FAMILIES: dict[str, Callable[[], Any]] = {
    "Llama": llama,
    "Llama, tied": lambda: llama(tie_word_embeddings=True),
    "Qwen3": qwen3,
    "Gemma 3": gemma3,
    "Phi-3": phi3,
    "GPT-2": gpt2,
    "MPT": mpt,
    "MPT, grouped": lambda: mpt(attn_type="grouped_query_attention", kv_n_heads=2, qk_gn=True),
}

IN_DOUBLE = {
    # Rounding of one process grows tenfold here, whatever divides the model.
    ("Gemma 3", "sgd"),
    ("Gemma 3", "adamw"),
    # The bias of keys has a gradient that is zero but for rounding, which AdamW makes a full step.
    ("MPT", "adamw"),
    ("MPT, grouped", "adamw"),
}


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def global_batches(steps: int = STEPS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(2, VOCAB - 1, (steps, SIZE, LENGTH), generator=generator)


def of_this_group(ids: torch.Tensor, degree: int = DEGREE) -> torch.Tensor:
    """The part of a batch that all ranks of this tensor group read."""
    return ids.chunk(dist.get_world_size() // degree)[dist.get_rank() // degree]


def mean(value: torch.Tensor) -> torch.Tensor:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def usual_gradient(param: torch.Tensor) -> torch.Tensor:
    assert param.grad is not None
    order = order_of(param)
    whole = full(param.grad)
    return whole if order is None else order.to_model(whole)


def assert_same_gradients(oracle: nn.Module, model: nn.Module) -> None:
    for (name, alone), sharded in zip(oracle.named_parameters(), model.parameters(), strict=True):
        assert alone.grad is not None
        assert_close(f"gradient of {name}", alone.grad, usual_gradient(sharded))


def assert_same_state(expected: torch.optim.Optimizer, got: torch.optim.Optimizer) -> None:
    ours = got.state_dict()["state"]
    for number, state in expected.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found = full(ours[number][key])
                difference = (found - value).abs().max().item()
                size = max(1.0, value.abs().max().item())
                assert difference <= STATE_TOLERANCE * size, (number, key)


def prepared(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, **settings: Any
) -> nn.Module:
    prepare_fully_shard(model, optimizer, {"tensor_parallel": DEGREE, **settings})
    return model


# Newer torch warns of blocks that end in a view; nothing in these models changes it in place.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_trains_like_one_process(family: str, optimizer: str):
    torch.manual_seed(dist.get_rank())  # rank 0's weights count
    model = FAMILIES[family]()
    model = model.double() if (family, optimizer) in IN_DOUBLE else model
    holder = [model.state_dict()]
    dist.broadcast_object_list(holder)
    oracle = copy.deepcopy(model)
    oracle.load_state_dict(holder[0])
    pair = [OPTIMIZERS[optimizer](m.parameters()) for m in (oracle, model)]
    prepared(model, pair[1], mixed_precision="FULL")
    for step, ids in enumerate(global_batches()):
        expected, got = loss_of(oracle, ids), loss_of(model, of_this_group(ids))
        expected.backward()
        got.backward()
        assert_close(f"loss of step {step}", expected.detach(), mean(got))
        if step == 0:
            assert_same_gradients(oracle, model)
        for one in pair:
            one.step()
            one.zero_grad()
    assert TOLERANCE == 1e-6
    assert_same_values(oracle, model)
    assert_same_state(*pair)
