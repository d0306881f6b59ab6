"""`generate` of a Hugging Face model whose weights are sharded.

[Note: generating in step] Every forward gathers weights, so ranks that are done early have to go on
calling it until all are. transformers does so by repeating the last step (`synced_gpus`), and fails
where that step does not fit any more: without a cache, or past the last position. Here every
forward is announced, and a rank that is done calls forward with a word of its own. An encoder runs
once on every rank, before all that. The ranks of a tensor group have the same prompts and draw the
same words, so they end together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from composer.utils import dist

from composer_fsdp2.parallel.tensor.transformation import draw_together
from composer_fsdp2.ranks import any_rank
from composer_fsdp2.shard.apply import reshard
from composer_fsdp2.shard.summon import holds_shards

__all__ = ["generate"]


def generate(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `GenerationMixin.generate`: ranks may have other prompts and other ends.

    Collective: yes, for a sharded model, unless `synced_gpus=False` says that all ranks call
    forward equally often; with tensor parallelism always. No unit is left gathered. An error of one
    rank, outside of forward, is raised when the others are done.

    Raises:
        PlanError: the ranks of a tensor group have different prompts.
    """
    if not holds_shards(model):
        return original(model, *args, **kwargs)
    draw_together(model, (args, kwargs))
    try:
        if dist.get_world_size() == 1 or kwargs.get("synced_gpus") is False:
            return original(model, *args, **kwargs)
        return _generate_in_step(original, model, args, kwargs)
    finally:
        reshard(model)


def _generate_in_step(
    original: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """See [Note: generating in step]. Collective: yes."""
    kwargs["synced_gpus"] = False
    word = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    encodes = model.config.is_encoder_decoder and kwargs.get("encoder_outputs") is None

    inside = False

    def encoded(*_: Any) -> None:
        nonlocal encodes
        encodes = False

    def before(*_: Any) -> None:
        nonlocal inside
        any_rank(True, word.device)
        inside = True

    def after(*_: Any) -> None:
        nonlocal inside
        inside = False

    hooks = (
        # Ahead of FSDP2's hook: the ranks agree on a forward before any of them gathers.
        model.register_forward_pre_hook(before, prepend=True),
        model.register_forward_hook(after),
    )
    if encodes:
        hooks += (model.get_encoder().register_forward_pre_hook(encoded),)
    try:
        return original(model, *args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
        # After an error inside a forward, nobody can join the gathers the others wait in.
        with torch.no_grad():
            if encodes:
                model._prepare_encoder_decoder_kwargs_for_generation(
                    word, {}, None, model.generation_config
                )
            while not inside and any_rank(False, word.device):
                model(**_step_of(model, word), use_cache=False)


def _step_of(model: Any, word: torch.Tensor) -> dict[str, Any]:
    """Returns the inputs of a forward for one word; with an encoder, those of the decoder alone."""
    if not model.config.is_encoder_decoder:
        return {"input_ids": word, "attention_mask": torch.ones_like(word)}
    nothing = torch.zeros((1, 1, model.config.hidden_size), dtype=model.dtype, device=word.device)
    return {"decoder_input_ids": word, "encoder_outputs": (nothing,)}
