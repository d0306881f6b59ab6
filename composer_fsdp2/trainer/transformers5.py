"""Gives LLM Foundry 0.22, written for transformers 4, what transformers 5 no longer does.

The functions here replace those of transformers and LLM Foundry, also where a run has no FSDP2; see
`patches.transformers5`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers.generation.utils import GenerationMixin
from transformers.models.llama import LlamaConfig

from composer_fsdp2.errors import ConfigError

__all__ = [
    "TupleGenerationMixin",
    "add_generation",
    "build_mpt",
    "build_mpt_config",
    "build_on_device",
    "build_rope_config",
    "load_pretrained",
    "prepare_mpt_inputs",
    "rotate",
    "tie_mpt",
]


def load_pretrained(
    original: Callable[..., Any],
    cls: type[Any],
    *args: Any,
    use_auth_token: bool | str | None = None,
    load_in_8bit: bool = False,
    **kwargs: Any,
) -> Any:
    """Replaces `from_pretrained`: translates two arguments, and reads text parts, as version 4 did.

    Raises:
        ConfigError: nothing in the folder is a weight of the class.
    """
    if use_auth_token is not None:
        kwargs["token"] = use_auth_token
    if load_in_8bit:
        from transformers.utils.quantization_config import BitsAndBytesConfig

        kwargs["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    tells = kwargs.pop("output_loading_info", False)
    loaded = original(cls, *args, output_loading_info=True, **kwargs)
    if _lacks_all_weights(*loaded):
        # transformers 5 knows the names of the whole model for some text parts alone:
        # https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/conversion_mapping.py#L1341
        loaded = original(
            cls, *args, output_loading_info=True, **{"key_mapping": _OF_TEXT_PART, **kwargs}
        )
    if _lacks_all_weights(*loaded):
        raise ConfigError(
            f"No weight that {cls.__name__} reads from {args[0]!r} has a name of this class, and "
            "transformers would draw all of its weights at random. The folder holds another model. "
            "Write another folder as pretrained_model_name_or_path, or `pretrained: false`."
        )
    return loaded if tells else loaded[0]


_OF_TEXT_PART = {r"^(model\.)?language_model\.(model\.)?": "model."}
"""how names of weights begin in a model of text and images, and in the text part alone"""


def _lacks_all_weights(model: torch.nn.Module, info: dict[str, Any]) -> bool:
    return {name for name, _ in model.named_parameters()} <= {*info["missing_keys"]}


def build_on_device(_original: Any, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
    """Replaces `init_on_device`, a copy of Accelerate's, by Accelerate's own of today."""
    from accelerate import init_on_device

    return init_on_device(*args, **kwargs)


def build_mpt_config(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces `MPTConfig.__init__`: token ids that are not given are None."""
    original(self, *args, **kwargs)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        if not hasattr(self, name):
            setattr(self, name, None)


def build_rope_config(_original: Any, *args: Any, **settings: Any) -> LlamaConfig:
    """Replaces `PartialLlamaConfig`, which refuses keys that transformers 4 did not read."""
    return LlamaConfig(*args, **settings)


def rotate(
    original: Callable[..., Any], *args: Any, position_ids: Any = None, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces `apply_rotary_pos_emb`: leaves out positions, which LLM Foundry passes as None."""
    return original(*args, **kwargs)


def build_mpt(original: Callable[..., None], self: Any, config: Any) -> None:
    """Replaces `MPTForCausalLM.__init__`: the model has no weight under two names.

    Its `lm_head` is None where the embedding is used instead.
    """
    original(self, config)
    self._tied_weights_keys = {}
    self.all_tied_weights_keys = {}


def tie_mpt(original: Callable[..., None], self: Any, *_args: Any, **_kwargs: Any) -> None:
    """Replaces `MPTForCausalLM.tie_weights`, which is told what `from_pretrained` did not find."""
    original(self)


class TupleGenerationMixin(GenerationMixin):
    """Generates with a model whose keys and values are tuples, not a `Cache`."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return False


def add_generation(original: tuple[type[Any], ...]) -> tuple[type[Any], ...]:
    """Returns base classes with `generate` and the methods it calls."""
    return (*original, TupleGenerationMixin)


def prepare_mpt_inputs(
    original: Callable[..., dict[str, Any]],
    self: Any,
    input_ids: torch.Tensor,
    past_key_values: Any = None,
    inputs_embeds: torch.Tensor | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Replaces `MPTForCausalLM.prepare_inputs_for_generation`.

    transformers 5 calls `past_key_values` `cache`, and leaves out a mask that hides nothing.
    """
    past_key_values = kwargs.pop("cache", past_key_values)
    if kwargs.get("attention_mask") is None:
        prompt = 0 if inputs_embeds is None else inputs_embeds.shape[1]
        count, length = input_ids.shape
        kwargs["attention_mask"] = input_ids.new_ones(count, prompt + length)
    return original(self, input_ids, past_key_values, inputs_embeds, **kwargs)
