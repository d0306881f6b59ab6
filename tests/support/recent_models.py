"""Small models of families that transformers 4 does not have: each where transformers here has it.

Sizes are the smallest with which every kind of layer occurs: attention over a window and over all
tokens, linear attention, experts, and layers that read keys and values of an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import transformers
from torch import nn

VOCAB = 32
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_LIBRARY: Any = transformers
_TURNS = ["sliding_attention", "full_attention"]
_EXPERTS = {"num_experts": 4, "moe_intermediate_size": 12}


def _perturbed(model: nn.Module) -> nn.Module:
    """Moves what begins at 0 or 1, such as sinks and scales, so that each has a gradient."""
    for param in model.parameters():
        if param.ndim < 2:
            nn.init.normal_(param, mean=float(param.detach().mean()), std=0.05)
    return model


def gpt_oss(**changes: Any) -> nn.Module:
    sizes = {**SIZES, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = _LIBRARY.GptOssConfig(**sizes | {"sliding_window": 4} | changes)
    config._attn_implementation = "eager"
    return _perturbed(_LIBRARY.GptOssForCausalLM(config))


_LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def qwen35(**changes: Any) -> nn.Module:
    config = _LIBRARY.Qwen3_5TextConfig(**SIZES | _LINEAR | changes)
    return _perturbed(_LIBRARY.Qwen3_5ForCausalLM(config))


def qwen35_moe(**changes: Any) -> nn.Module:
    experts = {**_EXPERTS, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 12}
    config = _LIBRARY.Qwen3_5MoeTextConfig(**SIZES | _LINEAR | experts | changes)
    return _perturbed(_LIBRARY.Qwen3_5MoeForCausalLM(config))


def gemma3n(**changes: Any) -> nn.Module:
    own = {
        "num_hidden_layers": 4,
        "layer_types": _TURNS * 2,
        "sliding_window": 4,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 4,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
    }
    config = _LIBRARY.Gemma3nTextConfig(**SIZES | own | changes)
    return _perturbed(_LIBRARY.Gemma3nForCausalLM(config))


def gemma4(**changes: Any) -> nn.Module:
    own = {
        "num_hidden_layers": 4,
        "layer_types": _TURNS * 2,
        "sliding_window": 4,
        "global_head_dim": 12,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 4,
    }
    config = _LIBRARY.Gemma4TextConfig(**SIZES | own | changes)
    return _perturbed(_LIBRARY.Gemma4ForCausalLM(config))


def gemma4_moe(**changes: Any) -> nn.Module:
    own = {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "top_k_experts": 2,
    }
    return gemma4(**own | _EXPERTS | changes)


IMAGE = VOCAB - 1
"""token in whose place a part of an image is put"""


def qwen3_vl(**changes: Any) -> nn.Module:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 4,
        "temporal_patch_size": 1,
        "out_hidden_size": SIZES["hidden_size"],
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    config = _LIBRARY.Qwen3VLConfig(
        text_config={**SIZES, "num_hidden_layers": 2, "rope_parameters": rope} | changes,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VOCAB - 2,
        vision_start_token_id=VOCAB - 3,
        vision_end_token_id=VOCAB - 4,
    )
    return _perturbed(_LIBRARY.Qwen3VLForConditionalGeneration(config))


FAMILIES: dict[str, tuple[str, Callable[..., nn.Module]]] = {
    "GPT-OSS": ("GptOssForCausalLM", gpt_oss),
    "Qwen3.5": ("Qwen3_5ForCausalLM", qwen35),
    "Qwen3.5, experts": ("Qwen3_5MoeForCausalLM", qwen35_moe),
    "Gemma 3n": ("Gemma3nForCausalLM", gemma3n),
    "Gemma 4": ("Gemma4ForCausalLM", gemma4),
    "Gemma 4, experts": ("Gemma4ForCausalLM", gemma4_moe),
    "Qwen3-VL": ("Qwen3VLForConditionalGeneration", qwen3_vl),
}
"""their class in transformers, and what makes a small one"""


_WHOLE_EXPERTS = "have ranks hold whole experts between them: write ep: {degree: 2} beside tp"
_NO_EXPERTS = "the model has no list of experts"
_SINKS = "'model.layers.0.self_attn.sinks' lies in"
_ATTENTION_WHOLE = {"degree": 2, "layer_plan": {"*.self_attn.*": "whole"}}
_RECURRENT = "'model.layers.0.linear_attn.conv1d' (Conv1d) mixes positions"
_TOWER = "'model.visual' may be left out by a rank (a tower)"

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP": {"tensor_parallel": 2},
    "TP, attention whole": {"tensor_parallel": _ATTENTION_WHOLE},
    "TP and EP": {"tensor_parallel": 2, "expert_parallel": 2},
    "TP, attention whole, and EP": {"tensor_parallel": _ATTENTION_WHOLE, "expert_parallel": 2},
    "gather_kv": {"sequence_parallel": {"degree": 2, "method": "gather_kv"}},
    "ulysses": {"sequence_parallel": {"degree": 2, "method": "ulysses"}},
    "EP": {"expert_parallel": 2},
}
TABLE: dict[tuple[str, str], str] = {
    ("GPT-OSS", "TP"): _SINKS,
    ("GPT-OSS", "TP and EP"): _SINKS,
    ("GPT-OSS", "TP, attention whole, and EP"): "",
    ("GPT-OSS", "gather_kv"): "",
    ("GPT-OSS", "ulysses"): "has a weight of each head ('sinks')",
    ("GPT-OSS", "EP"): "",
    ("Qwen3.5", "TP"): "",
    ("Qwen3.5", "gather_kv"): _RECURRENT,
    ("Qwen3.5", "ulysses"): _RECURRENT,
    ("Qwen3.5", "EP"): _NO_EXPERTS,
    ("Qwen3.5, experts", "TP"): _WHOLE_EXPERTS,
    ("Qwen3.5, experts", "TP and EP"): "",
    ("Qwen3.5, experts", "gather_kv"): _RECURRENT,
    ("Qwen3.5, experts", "ulysses"): _RECURRENT,
    ("Qwen3.5, experts", "EP"): "",
    ("Gemma 3n", "TP"): "",
    ("Gemma 3n", "gather_kv"): "",
    ("Gemma 3n", "ulysses"): "",
    ("Gemma 3n", "EP"): _NO_EXPERTS,
    ("Gemma 4", "TP"): "",
    ("Gemma 4", "TP, attention whole"): "",
    ("Gemma 4", "gather_kv"): "",
    ("Gemma 4", "ulysses"): "",
    ("Gemma 4", "EP"): _NO_EXPERTS,
    ("Gemma 4, experts", "TP"): _WHOLE_EXPERTS,
    ("Gemma 4, experts", "TP and EP"): "has 1 key and value heads, which 2 ranks cannot share",
    ("Gemma 4, experts", "TP, attention whole, and EP"): "",
    ("Gemma 4, experts", "gather_kv"): "",
    ("Gemma 4, experts", "ulysses"): "",
    ("Gemma 4, experts", "EP"): "",
    ("Qwen3-VL", "TP"): _TOWER,
    ("Qwen3-VL", "gather_kv"): "",
    ("Qwen3-VL", "ulysses"): "",
    ("Qwen3-VL", "EP"): _NO_EXPERTS,
}
"""family and layout -> words of the refusal, empty where it trains"""


def missing(family: str) -> str:
    """Returns why tests of a family are skipped, empty where transformers has it."""
    name, _ = FAMILIES[family]
    return "" if hasattr(transformers, name) else f"transformers has no {name}"
