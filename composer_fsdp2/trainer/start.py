"""Reads and checks the arguments of a Trainer with FSDP2, and shards its model.

The functions here replace methods of Composer's Trainer and State; see `patches.trainer`.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

from composer import Trainer
from composer.callbacks import CheckpointSaver
from composer.core import State
from composer.utils import dist, ensure_tuple

from composer_fsdp2.config.schema import FSDP2Config
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.optim.lion_state import save_lions_as_text
from composer_fsdp2.patches.engine import check_features
from composer_fsdp2.prepare.model import TRANSFORMATIONS
from composer_fsdp2.prepare.settings import resolve_settings
from composer_fsdp2.torch_private.tensors import is_compiled
from composer_fsdp2.trainer.checkpoint.autoresume import search_save_folder
from composer_fsdp2.trainer.checkpoint.save import (
    check_saved_adapters,
    check_saved_names,
    note_start,
)
from composer_fsdp2.trainer.checkpoint.save_folder import check_savers
from composer_fsdp2.trainer.config import concerns_fsdp2, parse_parallelism_config
from composer_fsdp2.trainer.extensions.table import (
    check_extensions,
    check_held_parameters,
    items_of,
)
from composer_fsdp2.trainer.override_attribute import override_attribute

__all__ = [
    "ARGUMENTS",
    "check_arguments",
    "fit_trainer",
    "init_trainer",
    "settle_parallelism",
    "warn_of_shared_store",
    "wrap_model",
]


ARGUMENTS = "_fsdp2_arguments"
"""attribute of a Trainer that is being built: its arguments by name"""
_resumed: WeakSet[State] = WeakSet()
"""runs that autoresume has moved to their last checkpoint, and that have not trained since"""


def init_trainer(
    original: Callable[..., None], trainer: Trainer, *args: Any, **kwargs: Any
) -> None:
    """Replaces `Trainer.__init__`: keeps the arguments, and resolves `auto` microbatches.

    `device_train_microbatch_size: auto` is taken on a CPU too, where memory does not run out in a
    way that could be caught: a run can be tried there as it is.

    Raises:
        ConfigError: `auto` and a profiler.
    """
    try:
        bound = inspect.signature(original).bind(trainer, *args, **kwargs)
    except TypeError:
        bound = None  # Python says it about the original
    if bound is None or not concerns_fsdp2(bound.arguments.get("parallelism_config")):
        original(trainer, *args, **kwargs)
        return
    bound.apply_defaults()
    arguments = bound.arguments
    warn_of_shared_store()
    with override_attribute(trainer, ARGUMENTS, dict(arguments)):
        auto = arguments["device_train_microbatch_size"] == "auto"
        if auto:
            parsed = parse_parallelism_config(arguments["parallelism_config"])
            auto = parsed is not None and parsed.fsdp2 is not None
        if auto:
            if arguments["profiler"] is not None:
                raise ConfigError(
                    "device_train_microbatch_size is 'auto' and there is a profiler. It would "
                    "record attempts that are thrown away. Find the size in a short run, and write "
                    "it here."
                )
            # Composer refuses `auto` beside fsdp2, and starts with the batch of a rank either way.
            arguments["device_train_microbatch_size"] = None
        original(*bound.args, **bound.kwargs)
        if auto:
            trainer.state.auto_microbatching = True
    # Composer keeps what it has loaded there; with autoresume `load_path` is for the first start.
    if arguments["autoresume"] and trainer.state.load_path not in (None, arguments["load_path"]):
        _resumed.add(trainer.state)


def fit_trainer(original: Callable[..., None], trainer: Trainer, **kwargs: Any) -> None:
    """Replaces `Trainer.fit`: a run that autoresume finds at its end is complete, and no mistake.

    Collective: as the original.
    """
    state, length = trainer.state, trainer.state.max_duration
    resumed = state in _resumed
    _resumed.discard(state)
    goes_on = length is None or state.timestamp.get(length.unit) < length
    if not resumed or goes_on or kwargs.get("duration") is not None or kwargs.get("reset_time"):
        original(trainer, **kwargs)
    elif dist.get_global_rank() == 0:
        print(
            f"The run is complete: '{state.load_path}' is at the end of its max_duration, "
            f"{length}. Nothing was trained. Write a longer max_duration to go on.",
            file=sys.stderr,
            flush=True,
        )


def settle_parallelism(
    original: Callable[..., Any], trainer: Trainer, parallelism_config: Any
) -> Any:
    """Replaces `Trainer._parse_parallelism_config`. Collective: no.

    Raises:
        ConfigError: for wrong settings, and arguments of the Trainer that do not go with them.
        PatchError: for a feature that is switched off.
    """
    if not concerns_fsdp2(parallelism_config):
        return original(trainer, parallelism_config)
    parsed = parse_parallelism_config(parallelism_config)
    if parsed is not None and parsed.fsdp2 is not None:
        arguments = getattr(trainer, ARGUMENTS, {})
        check_arguments(arguments, resolve_settings(parsed.fsdp2))
        size = arguments.get("device_train_microbatch_size")
        check_features(items_of(arguments), size, parsed.fsdp2)
    return parsed


def warn_of_shared_store() -> None:
    """Warns of a store in which ranks that torchrun restarts do not meet. Collective: no.

    Source: torch.distributed.elastic.rendezvous, whose handlers keep the store of the first attempt
    for all others; the ranks find the addresses of the dead in it (pytorch issue 135712).
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if shared and restarts != "0" and os.environ.get("RANK") == "0":
        warnings.warn(
            f"torchrun may start the ranks again {restarts} times, but lets all attempts share one "
            "store. Ranks then look for each other where those of the last attempt were, and hang "
            "or fail. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started, and "
            "start it with --rdzv-backend=c10d or --standalone: its default does not look at that.",
            stacklevel=2,
        )


def check_arguments(arguments: Mapping[str, Any], settings: FSDP2Config) -> None:
    """Refuses arguments of a Trainer that do not go with FSDP2. Collective: no.

    Raises:
        ConfigError: naming the first of them; the same on every rank.
    """
    items = items_of(arguments)
    check_extensions(items)
    check_held_parameters(arguments.get("model"), items)
    for step in TRANSFORMATIONS:
        step.check_items(settings, items, arguments.get("device_train_microbatch_size"))
    compiled = "the model is compiled already" if is_compiled(arguments.get("model")) else None
    if arguments.get("compile_config") is not None:
        compiled = "compile_config is set"
    if settings.compile and compiled is not None:
        raise ConfigError(
            f"parallelism_config.fsdp2.compile is set, and {compiled}. Blocks would be compiled "
            "inside a graph that contains them. Take one of them out: blocks compile faster, and "
            "FSDP2's gathers break the graph of the whole model between them anyway."
        )


def wrap_model(
    original: Callable[..., None], trainer: Trainer, model: Any, optimizers: Any
) -> None:
    """Replaces `Trainer._wrap_model_for_distributed`, the last step before autoresume.

    Collective: yes.

    Raises:
        CheckpointError: on every rank, when the folder to resume from cannot be searched.
    """
    state: State = trainer.state
    note_start(state)
    save_lions_as_text(ensure_tuple(optimizers))
    if any(isinstance(callback, CheckpointSaver) for callback in state.callbacks):
        check_saved_adapters(state)
        check_saved_names(state)
        check_savers(state)
    original(trainer, model, optimizers)
    search_save_folder(state, getattr(trainer, ARGUMENTS, {}))
