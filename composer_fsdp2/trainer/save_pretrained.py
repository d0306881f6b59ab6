"""`save_pretrained` of a Hugging Face model, or of PEFT's around one, whose weights are sharded."""

from __future__ import annotations

import contextlib
import datetime
import inspect
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from composer.utils import dist
from torch import nn
from torch.distributed.distributed_c10d import Store
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_fsdp2.checkpoint.staging import reason_at, write_failure
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.ranks import raise_on_all_ranks
from composer_fsdp2.shard.summon import holds_shards, is_summoned, summon_full_params
from composer_fsdp2.shard.torch_private.tensors import default_store
from composer_fsdp2.trainer.uneven_batches import override_attribute

__all__ = ["own_class", "save_pretrained"]

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
    if not args or not holds_shards(args[0]):
        return original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs)
    given.apply_defaults()
    model, is_main_process = given.args[0], given.arguments["is_main_process"]

    def save(main: bool) -> Any:
        given.arguments["is_main_process"] = main
        with _told_plainly(given.arguments["save_directory"]), _as_its_own_class(model):
            return original(*given.args, **given.kwargs)

    # PEFT takes it as one of the arguments it does not name.
    if given.kwargs.get("state_dict", given.arguments.get("state_dict")) is not None:
        return save(is_main_process)
    if is_summoned(model):
        # The ranks that were not shown full parameters have nothing to write.
        shown = not any(isinstance(param, DTensor) for param in model.parameters())
        return save(is_main_process) if shown else None
    _await_everyone()
    mains = [facts["~main"] for facts in raise_on_all_ranks({"~main": is_main_process})]
    writer = mains.index(True) if any(mains) else 0
    error = None
    first = writer == 0
    # `rank0_only` means global rank 0. For another writer, every rank gets full parameters.
    shown = summon_full_params(model, writeback=False, rank0_only=first, offload_to_cpu=first)
    with shown:
        if dist.get_global_rank() == writer:
            try:
                with _wherever_it_is(model):
                    save(is_main_process)
            except Exception as caught:  # the other ranks must hear of it
                told = isinstance(caught, CheckpointError)
                error = caught if told else _unwritten(given.arguments["save_directory"], caught)
    raise_on_all_ranks({}, error)
    return None


@contextlib.contextmanager
def _told_plainly(folder: Any) -> Generator[None]:
    """Says what the system refused, in place of the library that wrote."""
    try:
        yield
    except Exception as error:
        refused = write_failure(error)
        if refused is None:
            raise
        raise _unwritten(folder, reason_at(Path(folder), refused)) from error


def _unwritten(folder: Any, reason: object) -> CheckpointError:
    return CheckpointError(
        f"save_pretrained could not write '{folder}': {reason}. What is there is incomplete. Give "
        "a place with room that can be written to."
    )


def own_class(module: nn.Module) -> type[Any]:
    """Returns the class that a module had before FSDP2 gave it another one, `FSDP...`."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


@contextlib.contextmanager
def _as_its_own_class(model: nn.Module) -> Generator[None]:
    """Keeps the class of FSDP2 out of `config.json`."""
    sharded = type(model)
    model.__class__ = own_class(model)
    try:
        yield
    finally:
        model.__class__ = sharded


def _wherever_it_is(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Lets any rank write: transformers 5 writes on rank 0, or nothing where another is main."""
    decides = "should_save_on_this_rank"
    if not hasattr(model, decides):
        return contextlib.nullcontext()
    return override_attribute(model, decides, bool)


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
    """The first to decide does so for all, and opens the next turn."""
    if store.add(f"{key}/deciders", 1) == 1:
        store.add(f"{_KEY}/turn", 1)
        store.set(f"{key}/decided", decision)
