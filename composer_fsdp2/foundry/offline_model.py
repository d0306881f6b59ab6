"""The `model` block of a run that is only planned, on a machine without all that the run needs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.foundry.model_configs import CONFIGS

__all__ = ["fuse_attention", "offline_config", "without_flash"]

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "moe_intermediate_size",
    "num_experts",
    "num_local_experts",
)
"""sizes under the names that most configurations of transformers use"""

_TUNING = re.compile("-(Instruct|Base|it|pt)$|(?<=/)Meta-")
"""parts of names in which models of one shape differ"""


def offline_config(name: str, overrides: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the configuration of a model that is not on this machine, and where it comes from.

    Args:
        name: on the hub.
        overrides: `model.config_overrides` of the run. With `model_type` and all sizes they are a
            configuration of their own.

    Raises:
        ConfigError: the model is in no table here, and the overrides lack sizes; or transformers
            is too old for it.
    """
    configs = {_TUNING.sub("", other): config for other, config in CONFIGS.items()}
    family = _TUNING.sub("", name)
    kind = overrides.get("model_type")
    if family in configs and kind is None:
        if (needed := configs[family]["model_type"]) not in CONFIG_MAPPING:
            raise ConfigError(
                f"'{name}' is a model of type {needed}, which came with transformers 5, and "
                f"{transformers.__version__} is installed. It cannot be built here. Install the "
                "versions that `python -m composer_fsdp2.pins newest` prints."
            )
        return configs[family], "those that this package knows"
    missing = [f"model_type and the sizes ({', '.join(_SIZES[:6])})"]
    if kind in CONFIG_MAPPING:
        default = CONFIG_MAPPING[kind]()
        # GPT-2, for one, has other names for the same sizes.
        names = {size: default.attribute_map.get(size, size) for size in _SIZES}
        missing = [
            names[size]
            for size in _SIZES
            if getattr(default, size, None) is not None
            and not {size, names[size]} & overrides.keys()
        ]
    if missing:
        raise ConfigError(
            f"The sizes of '{name}' are not known: its configuration is not on this machine, and "
            "the hub is not asked. Without them there is no plan. Write "
            f"{', '.join(missing)} under model.config_overrides, or a folder with config.json as "
            "model.pretrained_model_name_or_path."
        )
    return dict(overrides), "those of model.config_overrides"


def without_flash(block: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Returns a `model` block without kernels of flash-attn, and whether it had any.

    The kernels need a GPU, and read values that no trace has.
    """
    changed, attention = dict(block), block.get("attn_config") or {}
    if block.get("use_flash_attention_2") or (
        block.get("attn_implementation") == "flash_attention_2"
    ):
        changed |= {"use_flash_attention_2": False, "attn_implementation": "sdpa"}
    if block.get("name") == "mpt_causal_lm":  # whose defaults are flash and fused_crossentropy
        if attention.get("attn_impl", "flash") == "flash":
            changed["attn_config"] = {**attention, "attn_impl": "torch"}
        if block.get("loss_fn", "fused_crossentropy") == "fused_crossentropy":
            changed["loss_fn"] = "torch_crossentropy"
    return changed, changed != block


def fuse_attention(model: nn.Module) -> None:
    """Has layers of an MPT attend by torch's fused kernel, which keeps the tensors of flash-attn.

    Source: https://github.com/mosaicml/llm-foundry/blob/v0.22.0/llmfoundry/models/layers/attention.py#L271
    """
    for module in model.modules():
        if hasattr(module, "attn_fn"):
            module.attn_fn = _fused_attention  # pyright: ignore[reportArgumentType]


def _fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    n_heads: int,
    kv_n_heads: int,
    *,
    is_causal: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, None, None]:
    del others  # biases and masks, for which flash-attn needs no larger tensors
    queries, keys, values = (
        tensor.unflatten(-1, (number, -1)).transpose(1, 2).repeat_interleave(n_heads // number, 1)
        if number < n_heads
        else tensor.unflatten(-1, (number, -1)).transpose(1, 2)
        for tensor, number in ((query, n_heads), (key, kv_n_heads), (value, kv_n_heads))
    )
    made = F.scaled_dot_product_attention(queries, keys, values, is_causal=is_causal)
    return made.transpose(1, 2).flatten(2), None, None
