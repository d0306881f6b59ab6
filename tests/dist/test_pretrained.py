"""Weights read from a Hugging Face folder straight into shards equal those of `from_pretrained`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.models import HuggingFaceModel
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from composer_fsdp2 import CheckpointError, PlanError, prepare_fully_shard
from tests.models import VOCAB, batches
from tests.parity import OPTIMIZERS, Recipe, full, gathered, train_together
from tests.training import samples_of, trainer_for

SAMPLE = torch.tensor([[1, 5, 3, 2], [0, 4, 4, 16]])


def llama_config(tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
    )


def gpt2_config() -> GPT2Config:
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2Config(
        vocab_size=VOCAB, n_positions=16, n_embd=12, n_layer=2, n_head=2, **quiet
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama, tied": functools.partial(llama_config, True),
    "llama, untied": functools.partial(llama_config, False),
    "gpt2": gpt2_config,
}
every_model = pytest.mark.parametrize("name", CONFIGS)


def saved(folder: Path, name: str = "llama, untied", dtype: torch.dtype = torch.float32) -> Path:
    """A folder of several files with random weights, norms and biases too; the same on any rank."""
    if dist.is_initialized() and dist.get_rank() > 0:
        dist.barrier()
        return folder / "pretrained"
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) / 10)
    model.save_pretrained(folder / "pretrained", max_shard_size=4_000)
    assert len(list((folder / "pretrained").glob("*.safetensors"))) > 1
    if dist.is_initialized():
        dist.barrier()
    return folder / "pretrained"


def built(name: str, device: str = "meta") -> PreTrainedModel:
    """The model without its weights: parameters on `device`, buffers real where GPT-2 needs it."""
    torch.manual_seed(dist.get_rank() + 10)
    with torch.device("cpu" if name == "gpt2" else device):
        model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    if name == "gpt2" and device == "meta":
        _put_parameters_on_meta(model)
    return model


def _put_parameters_on_meta(model: PreTrainedModel) -> None:
    """As LLM Foundry's `init_empty_weights`: its masks are made by constructors alone."""
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = nn.Parameter(param.to("meta"))
    model.tie_weights()


def from_folder(
    model: nn.Module, folder: Path, config: dict[str, Any] | None = None, optimizer: Any = None
) -> nn.Module:
    settings = {"pretrained_weights": str(folder), **(config or {})}
    prepare_fully_shard(model, optimizer, settings, precision="fp32")
    return model


def original(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder)


def assert_equals_original(model: nn.Module, expected: nn.Module) -> None:
    want, got = gathered(expected), gathered(model)
    assert want.keys() == got.keys()
    for key, tensor in want.items():
        assert torch.equal(tensor, got[key]), key
        assert tensor.dtype == got[key].dtype, key
    with torch.no_grad():
        assert torch.equal(expected(SAMPLE).logits, model(SAMPLE).logits)


def _check(name: str, tmp_path: str, config: dict[str, Any] | None = None) -> None:
    folder = saved(Path(tmp_path), name)
    model = from_folder(built(name), folder, config)
    assert any(isinstance(p, DTensor) for p in model.parameters())
    assert_equals_original(model, original(folder))


@pytest.mark.world_size(2)
@every_model
def test_equals_from_pretrained(name: str, tmp_path: Path):
    _check(name, str(tmp_path))
