"""The models that `yamls/` trains, built on meta by LLM Foundry without the network.

A run names its model on the Hugging Face hub, whose `config.json` is not at hand in a test: it is
taken from `CONFIGS`. `PARAMETERS` are the published sizes: they come from another place than the
shapes, so a wrong shape is found.
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

try:
    from transformers.initialization import no_init_weights
except ImportError:  # transformers 4
    from transformers.modeling_utils import no_init_weights

from composer_fsdp2.foundry.model_configs import CONFIGS
from composer_fsdp2.patches import install_for_foundry
from composer_fsdp2.shard.units import collector_paused

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
    "openai/gpt-oss-20b": 20.9e9,
    "Qwen/Qwen3.5-9B": 8.95e9,
    "google/gemma-4-E4B": 7.46e9,  # the text part of 8e9
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

    install_for_foundry()
    model = json.loads(settings)
    context = process_init_device(model, fsdp_config={})
    # Weights on meta have no values: neither torch nor Transformers need set them.
    unset = no_init_weights()
    # On the first rank of a node LLM Foundry builds a model twice, to fill a cache.
    second_rank = patch.dict(os.environ, LOCAL_RANK="1")
    with tempfile.TemporaryDirectory() as folder, second_rank, unset:
        if "pretrained_model_name_or_path" in model:
            shape = CONFIGS[model["pretrained_model_name_or_path"]]
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
