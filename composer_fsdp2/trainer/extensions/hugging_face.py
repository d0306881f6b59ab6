"""Generates, saves and summons with Hugging Face models, or PEFT's around them, that are sharded.

[Note: generating in step] Every forward gathers weights, so ranks that are done early have to go on
calling it until all are. transformers does so by repeating the last step (`synced_gpus`), and fails
where that step does not fit any more: without a cache, or past the last position. Here every
forward is announced, and a rank that is done calls forward with a word of its own. An encoder runs
once on every rank, before all that. The ranks of a tensor group have the same prompts and draw the
same words, so they end together.
"""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.tensor import DTensor

from composer_fsdp2.checkpoint.staging import reason_at, write_failure
from composer_fsdp2.errors import CheckpointError, PlanError
from composer_fsdp2.parallel.parallelism import whole_sequences
from composer_fsdp2.parallel.tensor.transformation import draw_together
from composer_fsdp2.plan.module_tree import without_wrappers
from composer_fsdp2.prepare.conventions import ENCODING
from composer_fsdp2.ranks import any_rank, on_all_ranks, raise_on_all_ranks
from composer_fsdp2.shard.summon import is_summoned, summon_full_params
from composer_fsdp2.shard.units import reshard
from composer_fsdp2.torch_private.tensors import default_store
from composer_fsdp2.trainer.checkpoint.save import own_class
from composer_fsdp2.trainer.override_attribute import override_attribute

__all__ = ["generate", "resize_token_embeddings", "save_pretrained", "summon_shards"]

_KEY = "composer_fsdp2/save_pretrained"
_WAIT_SECONDS = 120.0
"""Ranks may arrive late from work of their own; collectives wait longer, and say less."""


def save_pretrained(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces `save_pretrained`: writes what an unsharded model writes.

    Collective: yes, for a sharded model, unless its full parameters are summoned or `state_dict`
    is given; it returns when the folder is complete. One rank writes: the first of those that say
    they are the main process.

    Raises:
        CheckpointError: it could not be written, or not all ranks called; on every rank that did.
    """
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    model, folder = bound.args[0], bound.arguments["save_directory"]

    def save() -> Any:
        sharded = type(model)
        model.__class__ = own_class(model)  # its name is written into `config.json`
        try:
            # PEFT looks for adapters by the names of modules, and saves none where they differ.
            with without_wrappers(model):
                return original(*bound.args, **bound.kwargs)
        except Exception as error:
            refused = write_failure(error)
            if refused is None:
                raise
            raise _unwritten(folder, reason_at(Path(folder), refused)) from error
        finally:
            model.__class__ = sharded

    # PEFT takes it as one of the arguments it does not name.
    if bound.kwargs.get("state_dict", bound.arguments.get("state_dict")) is not None:
        return save()
    if is_summoned(model):
        # The ranks that were not shown full parameters have nothing to write.
        shown = not any(isinstance(param, DTensor) for param in model.parameters())
        return save() if shown else None
    _await_everyone()
    mains = [
        facts["~main"]
        for facts in raise_on_all_ranks({"~main": bound.arguments["is_main_process"]})
    ]
    writer = mains.index(True) if any(mains) else 0
    first = writer == 0
    # `rank0_only` means global rank 0. For another writer, every rank gets full parameters.
    shown = summon_full_params(model, writeback=False, rank0_only=first, offload_to_cpu=first)

    def write() -> None:
        # transformers 5 asks the model, and writes on rank 0 alone.
        with override_attribute(model, "should_save_on_this_rank", bool):
            if dist.get_global_rank() == writer:
                save()

    def explain(error: BaseException) -> BaseException:
        return error if isinstance(error, CheckpointError) else _unwritten(folder, error)

    with shown:
        on_all_ranks(write, explain)
    return None


def _unwritten(folder: Any, reason: object) -> CheckpointError:
    return CheckpointError(
        f"save_pretrained could not write '{folder}': {reason}. What is there is incomplete. Give "
        "a place with room that can be written to."
    )


def _await_everyone() -> None:
    """Waits for all ranks, and gives up on every rank when some do not come.

    Raises:
        CheckpointError: on the ranks that are here.
    """
    store, ranks = default_store(), dist.get_world_size()
    key = f"{_KEY}/{store.add(f'{_KEY}/turn', 0)}"
    here = f"{key}/here"
    if store.add(here, 1) == ranks:
        _decide(store, key, "go")
    try:
        store.wait([f"{key}/decided"], datetime.timedelta(seconds=_WAIT_SECONDS))
    # torch raises `DistStoreError`, a RuntimeError, when the time is over.
    except RuntimeError:
        _decide(store, key, f"{store.add(here, 0)} of {ranks}")
    decided = store.get(f"{key}/decided").decode()
    if decided != "go":
        raise CheckpointError(
            f"save_pretrained was called on {decided} ranks. The weights are sharded, and "
            "no rank can gather them alone. Call it on every rank (one of them writes), or on "
            "rank 0 inside `with summon_full_params(model, writeback=False, rank0_only=True):`, "
            "which every rank enters."
        )


def _decide(store: Store, key: str, decision: str) -> None:
    """Decides for all ranks where no rank has yet, and opens the next turn."""
    if store.add(f"{key}/deciders", 1) == 1:
        store.add(f"{_KEY}/turn", 1)
        store.set(f"{key}/decided", decision)


def resize_token_embeddings(_original: Callable[..., Any], *_: Any, **__: Any) -> Any:
    """Replaces `resize_token_embeddings` of a sharded model. Collective: no.

    Raises:
        PlanError: always.
    """
    raise PlanError(
        "resize_token_embeddings was called on a sharded model. The new embedding would be no part "
        "of any unit, so nobody would gather it or average its gradient, and the optimizer would "
        "step the old one. Resize before the model is prepared, or before the Trainer is made."
    )


# --- Generating, and summoning by the name that FSDP1 has for it. ---


def summon_shards(_original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `FullyShardedDataParallel.summon_full_params`. Collective: yes."""
    return summon_full_params(module, *args, **kwargs)


def generate(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `GenerationMixin.generate`: ranks may have other prompts and other ends.

    Collective: yes, for a sharded model, unless `synced_gpus=False` says that all ranks call
    forward equally often; with tensor parallelism always. No unit is left gathered. An error of one
    rank, outside of forward, is raised when the others are done.

    Raises:
        PlanError: the ranks of a tensor group have different prompts.
    """
    draw_together(model, (args, kwargs))
    try:
        with whole_sequences():
            if dist.get_world_size() == 1 or kwargs.get("synced_gpus") is False:
                return original(model, *args, **kwargs)
            return _generate_in_step(original, model, args, kwargs)
    finally:
        reshard(model)


def _generate_in_step(
    original: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Generates until all ranks have ended; see [Note: generating in step]. Collective: yes."""
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
                encode = next(name for name in ENCODING if hasattr(model, name))
                getattr(model, encode)(word, {}, None, model.generation_config)
            while not inside and any_rank(False, word.device):
                if model.config.is_encoder_decoder:  # a step of the decoder alone
                    shape, dtype = (1, 1, model.config.hidden_size), model.dtype
                    nothing = torch.zeros(shape, dtype=dtype, device=word.device)
                    model(decoder_input_ids=word, encoder_outputs=(nothing,), use_cache=False)
                else:
                    mask = torch.ones_like(word)
                    model(input_ids=word, attention_mask=mask, use_cache=False)
