"""Sequence parallelism with FSDP2, against one process that sees whole sequences."""

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
from tests.support.parity import OPTIMIZERS, TOLERANCE, assert_close, assert_same_values, full

VOCAB, STEPS, SIZE, LENGTH = 32, 10, 4, 22
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}


def llama(**changes: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | changes)))


def gemma3() -> nn.Module:
    config = transformers.Gemma3TextConfig(**SIZES, sliding_window=4, query_pre_attn_scalar=4)
    return transformers.Gemma3ForCausalLM(config)


def phi3() -> nn.Module:
    config = transformers.Phi3Config(**SIZES, pad_token_id=0, sliding_window=6)
    return transformers.Phi3ForCausalLM(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=4, n_positions=LENGTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


FAMILIES: dict[str, Callable[[], Any]] = {
    "Llama": llama,
    "Llama, one key head": lambda: llama(num_key_value_heads=1),
    "Llama, all key heads": lambda: llama(num_key_value_heads=8),
    "Llama, eager": lambda: llama(attn_implementation="eager"),
    "Qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)),
    "Gemma 3": gemma3,
    "Phi-3": phi3,
    "Mixtral": mixtral,
    "GPT-2": gpt2,
}


def batches(kind: str, steps: int = STEPS) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(steps):
        ids = torch.randint(2, VOCAB - 1, (SIZE, LENGTH), generator=generator)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if kind == "padded":
            batch["attention_mask"] = torch.ones_like(ids)
            for row in range(SIZE):
                batch["attention_mask"][row, LENGTH - 3 * row - 1 :] = 0
            batch["labels"][batch["attention_mask"] == 0] = -100
        if kind == "packed":
            cuts = torch.randint(4, 8, (SIZE, 1), generator=generator)
            at = torch.arange(LENGTH)[None]
            batch["position_ids"] = torch.where(at < cuts, at, at - cuts)
            batch["labels"] = torch.where(at == cuts, -100, ids)
        found.append(batch)
    return found


def for_one_process(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the mask of documents that a model of one process needs to be given."""
    if (positions := batch.get("position_ids")) is None:
        return batch
    documents = (positions == 0).cumsum(1)
    same = documents[:, :, None] == documents[:, None, :]
    seen = same & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return {**batch, "attention_mask": added[:, None]}


def part(batch: dict[str, torch.Tensor], degree: int) -> dict[str, torch.Tensor]:
    groups = dist.get_world_size() // degree
    return {k: v.chunk(groups)[dist.get_rank() // degree] for k, v in batch.items()}


def mean(value: torch.Tensor) -> torch.Tensor:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
@pytest.mark.parametrize("method", ["ulysses", "gather_kv"])
@pytest.mark.parametrize("family", FAMILIES)
def test_trains_like_one_process(family: str, method: str, kind: str, degree: int):
    torch.manual_seed(0)
    model = FAMILIES[family]()
    if "Gemma" in family:
        model = model.double()
    oracle = copy.deepcopy(model)
    pair = [OPTIMIZERS["sgd"](m.parameters()) for m in (oracle, model)]
    settings = {
        "sequence_parallel": {"degree": degree, "method": method},
        "mixed_precision": "FULL",
    }
    prepare_fully_shard(model, pair[1], settings)
    for step, batch in enumerate(batches(kind)):
        whole = for_one_process(batch)
        # Every group's sequences weigh the same, as under FSDP2 alone.
        parts = [
            {k: v.chunk(4 // degree)[n] for k, v in whole.items()} for n in range(4 // degree)
        ]
        losses = [oracle(**p, use_cache=False).loss for p in parts]
        expected = torch.stack(losses).mean()
        got = model(**part(batch, degree), use_cache=False).loss
        expected.backward()
        got.backward()
        assert_close(f"loss of step {step}", expected.detach(), mean(got))
        if step == 0:
            for (name, alone), sharded in zip(
                oracle.named_parameters(), model.parameters(), strict=True
            ):
                if alone.grad is not None:
                    assert_close(f"gradient of {name}", alone.grad, full(sharded.grad))
        for one in pair:
            one.step()
            one.zero_grad()
    assert TOLERANCE == 1e-6
    assert_same_values(oracle, model)
