"""The models that `yamls/` trains, built on meta by LLM Foundry without the network.

A run names its model on the Hugging Face hub, whose `config.json` is not at hand in a test. The
shapes are public; they are kept here in the words of the configuration classes of transformers, and
what a class's default already says is left out. `PARAMETERS` are the published sizes: they come
from another place than the shapes, so a wrong shape is found.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from composer.models import ComposerModel
from transformers import PreTrainedModel

from composer_fsdp2.shard.apply import collector_paused

_LLAMA_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

SHAPES: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA_ROPE,
        "tie_word_embeddings": False,
    },
    "meta-llama/Llama-3.3-70B-Instruct": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA_ROPE,
        "tie_word_embeddings": False,
    },
    "meta-llama/Llama-3.2-1B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {**_LLAMA_ROPE, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "microsoft/phi-4": {
        "model_type": "phi3",
        "vocab_size": 100352,
        "hidden_size": 5120,
        "intermediate_size": 17920,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "max_position_embeddings": 16384,
        "original_max_position_embeddings": 16384,
        "rope_theta": 250000.0,
        "bos_token_id": 100257,
        "eos_token_id": 100265,
        "pad_token_id": 100349,
        "tie_word_embeddings": False,
    },
    # Text and images; LLM Foundry trains the text part, `text_config`.
    "google/gemma-3-4b-pt": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "vocab_size": 262208,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 1024,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    },
    "Qwen/Qwen3-8B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "sliding_window": None,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-32B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "sliding_window": None,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "sliding_window": None,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    "mistralai/Mixtral-8x7B-v0.1": {
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    "allenai/OLMoE-1B-7B-0924": {
        "model_type": "olmoe",
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}

PARAMETERS = {
    "meta-llama/Llama-3.1-8B": 8.03e9,
    "meta-llama/Llama-3.2-1B": 1.24e9,
    "meta-llama/Llama-3.3-70B-Instruct": 70.6e9,
    "microsoft/phi-4": 14.7e9,
    "google/gemma-3-4b-pt": 3.88e9,  # the text part of 4.3e9
    "Qwen/Qwen3-8B": 8.19e9,
    "Qwen/Qwen3-30B-A3B": 30.5e9,
    "Qwen/Qwen3-32B": 32.8e9,
    "mistralai/Mixtral-8x7B-v0.1": 46.7e9,
    "allenai/OLMoE-1B-7B-0924": 6.92e9,
    "mpt-7b": 6.65e9,  # without the rows of its vocabulary that no token has
}
"""published numbers of parameters"""


def build_model(model: Mapping[str, Any]) -> ComposerModel:
    """Builds the `model` block of a YAML on meta, as LLM Foundry does on a rank above 0.

    One model is built once, however many runs train it: weights on meta take no settings of a run.
    """
    # Of a pretrained model the shape is enough.
    changes = {"pretrained": False} if model["name"] == "hf_causal_lm" else {}
    return _build(json.dumps({**model, **changes, "init_device": "meta"}, sort_keys=True))


@functools.cache
@collector_paused()
def _build(settings: str) -> ComposerModel:
    from llmfoundry.utils.builders import build_composer_model
    from llmfoundry.utils.config_utils import process_init_device
    from transformers.modeling_utils import no_init_weights  # transformers 5 has it elsewhere

    model = json.loads(settings)
    context = process_init_device(model, fsdp_config={})
    # Weights on meta have no values: neither torch nor Transformers need set them.
    unset = no_init_weights()
    # On the first rank of a node LLM Foundry builds a model twice, to fill a cache.
    second_rank = patch.dict(os.environ, LOCAL_RANK="1")
    with tempfile.TemporaryDirectory() as folder, second_rank, unset:
        if "pretrained_model_name_or_path" in model:
            shape = SHAPES[model["pretrained_model_name_or_path"]]
            Path(folder, "config.json").write_text(json.dumps(shape))
            model["pretrained_model_name_or_path"] = folder
        with warnings.catch_warnings():
            # LLM Foundry 0.22 hands every Hugging Face model an argument by its old name.
            warnings.filterwarnings("ignore", "The `use_auth_token` argument", FutureWarning)
            name = model.pop("name")
            built = build_composer_model(name, model, tokenizer=None, init_context=context)
    if isinstance(built.model, PreTrainedModel):
        built.model.tie_weights()  # which it does after it has set the values
    assert all(param.is_meta for param in built.parameters())
    return built
