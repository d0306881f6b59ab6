"""LoRA adapters of a checkpoint as the folder that PEFT loads.

A checkpoint keeps the names of the model's parameters and PEFT's configuration. The folder has the
names without that of the adapter, which is chosen anew by whoever loads it.

Source: `get_peft_model_state_dict` of peft 0.16, for LoRA.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from composer_fsdp2.checkpoint.source import Checkpoint
from composer_fsdp2.errors import CheckpointError

__all__ = ["adapter_names", "write_adapters"]

_ADAPTER = "default"
"""the only one of a HuggingFaceModel"""
_WHOLE = f".modules_to_save.{_ADAPTER}."
_MAGNITUDE = f"lora_magnitude_vector.{_ADAPTER}.weight"
_EMBEDDINGS = ("embed_tokens", "lm_head")
# A folder of shards has no keys for empty dictionaries.
_EMPTY = ("alpha_pattern", "loftq_config", "rank_pattern")


def adapter_names(
    config: Mapping[str, Any],
    names: Iterable[str],
    path: Path,
    *,
    embeddings: Collection[str] = (),
    resized: bool = False,
) -> dict[str, str]:
    """Name for PEFT -> name in the model.

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
    found = {_for_peft(name): name for name in _of_lora(names, bias)}
    found |= {_for_peft(name.replace(_WHOLE, ".")): name for name in names if _WHOLE in name}
    found |= {name: name for name in names if _is_adapted_embedding(name, config)}
    if resized and not _adapts_embeddings(config):
        if not embeddings:
            raise CheckpointError(_missing_rows(path))
        modules = tuple(name.removesuffix("weight") for name in embeddings)
        found |= {name: name for name in names if name.startswith(modules)}
    if not found:
        raise CheckpointError(
            f"'{path}' has the configuration of adapters, and no weights of them. There is nothing "
            "to convert. Give a checkpoint of the run that trained them."
        )
    return found


def _of_lora(names: list[str], bias: str) -> Iterator[str]:
    adapted = [name for name in names if "lora_" in name and _ADAPTER in name]
    yield from adapted
    if bias == "all":
        yield from (name for name in names if "bias" in name)
    elif bias == "lora_only":
        beside = {name.partition("lora_")[0] + "bias" for name in adapted}
        yield from (name for name in names if name in beside)


def _adapts_embeddings(config: Mapping[str, Any]) -> list[str]:
    targets = config.get("target_modules") or ()
    return [each for each in _EMBEDDINGS if each in targets]


def _is_adapted_embedding(name: str, config: Mapping[str, Any]) -> bool:
    """PEFT writes an embedding whole beside its adapter."""
    return any(f"{each}.base_layer." in name for each in _adapts_embeddings(config))


def _missing_rows(path: Path) -> str:
    return (
        f"'{path}' holds adapters of a model with another number of tokens than its base, and not "
        "the embeddings. What was computed for the other tokens could not be found again. Train "
        "with should_save_peft_only: false, or load it with the Trainer and call save_pretrained."
    )


def _for_peft(name: str) -> str:
    # DoRA's magnitude was a parameter before PEFT made it a layer with a `weight`. In files PEFT
    # keeps the old name.
    if name.endswith(_MAGNITUDE):
        name = name.removesuffix(".weight")
    return name.replace(f".{_ADAPTER}", "")


def write_adapters(
    source: Checkpoint,
    folder: Path,
    config: Mapping[str, Any],
    keys: Mapping[str, str],
    dtype: torch.dtype | None,
) -> None:
    """Writes `adapter_model.safetensors` and `adapter_config.json`, as `save_pretrained` does.

    Args:
        source: an open checkpoint.
        folder: that exists.
        config: PEFT's, from the checkpoint.
        keys: name for PEFT -> key in the checkpoint.
        dtype: of all floating point weights; None keeps each as it is.
    """
    tensors = {name: _cast(source.tensor(key), dtype) for name, key in keys.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    written = {**{key: {} for key in _EMPTY}, **config, "inference_mode": True}
    text = json.dumps(written, indent=2, sort_keys=True)
    (folder / "adapter_config.json").write_text(text)


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A copy in memory of its own, as safetensors wants it."""
    floats = dtype is not None and tensor.is_floating_point()
    return tensor.detach().to(dtype if floats else tensor.dtype, copy=True).contiguous()
