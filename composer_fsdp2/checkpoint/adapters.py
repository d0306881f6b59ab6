"""Names LoRA adapters of a checkpoint as PEFT does in the folder that it loads.

A checkpoint keeps the names of the model's parameters and PEFT's configuration. The folder has the
names without that of the adapter, which is chosen anew by whoever loads it.

Source: `get_peft_model_state_dict` of peft 0.16, for LoRA.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from composer_fsdp2.errors import CheckpointError

__all__ = ["adapter_names", "configuration_of_adapters"]

_ADAPTER = "default"
"""the only one of a HuggingFaceModel"""
_WHOLE = f".modules_to_save.{_ADAPTER}."
_MAGNITUDE = f"lora_magnitude_vector.{_ADAPTER}.weight"
_EMBEDDINGS = ("embed_tokens", "lm_head")
# A folder of shards has no keys for empty dictionaries.
_EMPTY = ("alpha_pattern", "loftq_config", "rank_pattern")


def configuration_of_adapters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns PEFT's configuration as its `save_pretrained` writes it."""
    return {**{key: {} for key in _EMPTY}, **config, "inference_mode": True}


def adapter_names(
    config: Mapping[str, Any],
    names: Iterable[str],
    path: Path,
    *,
    embeddings: Collection[str] = (),
    resized: bool = False,
) -> dict[str, str]:
    """Returns name for PEFT -> name in the model.

    Args:
        config: PEFT's, from the checkpoint.
        names: of all weights of the Hugging Face model that the checkpoint has.
        path: the checkpoint, for the errors.
        embeddings: those of them with a row for each token.
        resized: whether the model has another number of tokens than its base, which PEFT answers
            by writing the embeddings whole.

    Raises:
        CheckpointError: they are no adapters that this is written for.
    """
    kind, bias = config.get("peft_type"), config.get("bias", "none")
    if kind != "LORA" or bias not in ("none", "all", "lora_only"):
        raise CheckpointError(
            f"'{path}' holds adapters with peft_type {kind!r} and bias {bias!r}. Which weights "
            "belong to them is known for LoRA only, and some could be left out. Load it with the "
            "Trainer and call save_pretrained of the model."
        )
    if config.get("trainable_token_indices"):
        raise CheckpointError(
            f"'{path}' holds trained rows of an embedding (trainable_token_indices). They are not "
            "written yet, and without them the adapters are not what was trained. Load it with the "
            "Trainer and call save_pretrained of the model."
        )
    names = list(names)
    adapted = [name for name in names if "lora_" in name and _ADAPTER in name]
    chosen = list(adapted)
    if bias == "all":
        chosen += [name for name in names if "bias" in name]
    elif bias == "lora_only":
        beside = {name.partition("lora_")[0] + "bias" for name in adapted}
        chosen += [name for name in names if name in beside]
    found = {_for_peft(name): name for name in chosen}
    found |= {_for_peft(name.replace(_WHOLE, ".")): name for name in names if _WHOLE in name}
    # PEFT writes an embedding whole beside its adapter.
    targets = [each for each in _EMBEDDINGS if each in (config.get("target_modules") or ())]
    modules = tuple(f"{each}.base_layer." for each in targets)
    found |= {name: name for name in names if any(module in name for module in modules)}
    if resized and not targets:
        if not embeddings:
            raise CheckpointError(
                f"'{path}' holds adapters of a model with another number of tokens than its base, "
                "and not the embeddings. What was computed for the other tokens could not be found "
                "again. Train with should_save_peft_only: false, or load it with the Trainer and "
                "call save_pretrained."
            )
        whole = tuple(name.removesuffix("weight") for name in embeddings)
        found |= {name: name for name in names if name.startswith(whole)}
    if not found:
        raise CheckpointError(
            f"'{path}' has the configuration of adapters, and no weights of them. There is nothing "
            "to convert. Give a checkpoint of the run that trained them."
        )
    return found


def _for_peft(name: str) -> str:
    # DoRA's magnitude was a parameter before PEFT made it a layer with a `weight`. In files PEFT
    # keeps the old name.
    if name.endswith(_MAGNITUDE):
        name = name.removesuffix(".weight")
    return name.replace(f".{_ADAPTER}", "")
