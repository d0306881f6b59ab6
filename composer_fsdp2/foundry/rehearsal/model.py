"""The model of a rehearsed run on meta, and its optimizer."""

from __future__ import annotations

import contextlib
import copy
import os
from dataclasses import dataclass
from typing import Any

import torch
from composer.models import ComposerModel
from torch import nn

from composer_fsdp2.config.messages import ascii_repr
from composer_fsdp2.foundry.rehearsal.data import settle_name
from composer_fsdp2.foundry.rehearsal.environment import replaced
from composer_fsdp2.foundry.rehearsal.notes import Notes
from composer_fsdp2.shard.apply import collector_paused

__all__ = ["Built", "build", "build_optimizer"]

# The first rank of a node reads weights, and fills a cache for the others.
_SECOND_RANK = {"RANK": "1", "LOCAL_RANK": "1"}
_INIT = ("cpu", "meta", "mixed")
_PRETRAINED = "pretrained_model_name_or_path"
_WEIGHTS = (".safetensors", ".bin", ".index.json")


@dataclass(slots=True)
class Built:
    """The model, if it could be built."""

    model: ComposerModel | None = None
    on_meta: bool | None = None
    """whether `init_device: meta` builds it"""


def build(notes: Notes, config: Any, tokenizer: Any) -> Built:
    """Builds the model without its weights; an error is noted."""
    from llmfoundry import registry

    block, built = config.model, Built()
    init = block.get("init_device", "cpu")
    if init not in _INIT:
        notes.add(
            f"model.init_device: {ascii_repr(init)} is none of {', '.join(_INIT)}, which is all "
            "that LLM Foundry takes.",
            "Write cpu, mixed or meta; the weights get to the GPU from there.",
        )
        return built
    if not notes.known("model.name", block.get("name"), registry.models.get_all(), "models"):
        return built
    if _PRETRAINED in block:
        if settle_name(notes, f"model.{_PRETRAINED}", block[_PRETRAINED]) != "here":
            return built
        _check_weights(notes, block)
    if not _vocabulary_fits(notes, block, tokenizer):
        return built
    # What cpu builds on every rank, and mixed on the first, is built here as on the second.
    instead = "mixed" if init == "cpu" else None
    notes.run_has_values = init == "cpu"
    with notes.step("model"):
        built.model = _build(config, tokenizer, instead)
    if init == "meta":
        built.on_meta = built.model is not None
    elif init == "mixed" and built.model is not None:
        quiet = Notes(notes.cluster)
        with quiet.step("model"):
            _build(config, tokenizer, "meta")
        built.on_meta = not quiet.mistakes
    return built


def _vocabulary_fits(notes: Notes, block: Any, tokenizer: Any) -> bool:
    """Whether the embedding has a row for each token, or can be given more when it is built."""
    size = block.get("vocab_size")
    if tokenizer is None or not isinstance(size, int) or size >= len(tokenizer):
        return True
    if block.get("init_device", "cpu") == "cpu":
        block["vocab_size"] = len(tokenizer)  # as LLM Foundry would, on weights that have values
        return True
    notes.add(
        f"model.vocab_size: {size} is less than the {len(tokenizer)} tokens of the tokenizer. LLM "
        "Foundry would add rows to the embedding, which it cannot without values (init_device: "
        f"{block['init_device']}).",
        f"Write vocab_size: {len(tokenizer)} or more, or init_device: cpu.",
    )
    return False


def _check_weights(notes: Notes, block: Any) -> None:
    """A folder without weights is one of a model that was never saved."""
    folder = block[_PRETRAINED]
    if not block.get("pretrained", True) or not os.path.isdir(folder):
        return
    if not any(name.endswith(_WEIGHTS) for name in os.listdir(folder)):
        notes.add(
            f"model.{_PRETRAINED}: the folder '{folder}' holds no weights, and pretrained is true.",
            "Write the folder of a saved model, or pretrained: false.",
        )


@collector_paused()
def _build(config: Any, tokenizer: Any, init_device: str | None) -> ComposerModel:
    from llmfoundry.utils.builders import build_composer_model
    from llmfoundry.utils.config_utils import process_init_device

    block = copy.deepcopy(config.model)
    if init_device is not None:
        block["init_device"] = init_device
    # Without FSDP `mixed` is refused, which `doctor` says itself.
    context = process_init_device(block, copy.deepcopy(config.fsdp_config or {}), None)
    name, dtype = block.pop("name"), block.pop("master_weights_dtype", None)
    with replaced(_SECOND_RANK), _values_left_out():
        try:
            return build_composer_model(
                name=name,
                cfg=block,
                tokenizer=tokenizer,
                init_context=context,
                master_weights_dtype=dtype,
            )
        except RuntimeError as error:
            raise _caught_before(error) from None


def _caught_before(error: RuntimeError) -> Exception:
    """LLM Foundry logs what went wrong, and raises that it is in the log of a rank."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    kept = trace.tb_frame.f_locals.get("error") if trace is not None else None
    return kept if isinstance(kept, Exception) else error


def _values_left_out() -> contextlib.AbstractContextManager[Any]:
    """Weights on meta have no values: Transformers need not set them."""
    from transformers import modeling_utils

    without = getattr(modeling_utils, "no_init_weights", contextlib.nullcontext)
    return without()


def build_optimizer(notes: Notes, config: Any, built: Built) -> torch.optim.Optimizer | None:
    """Builds the optimizer over the weights on meta."""
    from llmfoundry import registry
    from llmfoundry.utils.builders import build_optimizer as build_it

    settings = copy.deepcopy(config.optimizer)
    name = settings.pop("name", None)
    if not notes.known("optimizer.name", name, registry.optimizers.get_all(), "optimizers"):
        return None
    if config.model.get("init_device", "cpu") == "cpu":
        # On real weights it may; torch refuses it on meta.
        settings.pop("fused", None)
    model: nn.Module = built.model or nn.Linear(2, 2)
    with notes.step("optimizer"):
        return build_it(model, name, settings)
    return None
