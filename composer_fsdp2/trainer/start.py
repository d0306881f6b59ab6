"""Reads and checks the arguments of a Trainer with FSDP2, and shards its model.

The functions here replace methods of Composer's Trainer and State; see `patches.trainer`.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from composer import Trainer
from composer.core import State
from composer.utils import ensure_tuple

from composer_fsdp2.config.schema import FSDP2Config
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.optim.lion_state import save_lions_as_text
from composer_fsdp2.shard.torch_private.tensors import is_compiled
from composer_fsdp2.trainer.algorithms import move_averages
from composer_fsdp2.trainer.autoresume import settle_autoresume
from composer_fsdp2.trainer.config import asks_for_fsdp2, concerns_fsdp2
from composer_fsdp2.trainer.extensions import check_extensions, items_of
from composer_fsdp2.trainer.load_steps import set_node_rank
from composer_fsdp2.trainer.override_attribute import override_attribute
from composer_fsdp2.trainer.prepare import TRANSFORMATIONS
from composer_fsdp2.trainer.save import check_saved_adapters, note_start

__all__ = [
    "ARGUMENTS",
    "apply_fsdp",
    "check_arguments",
    "init",
    "warn_of_shared_store",
    "wrap_model",
]

ARGUMENTS = "_fsdp2_arguments"
"""attribute of a Trainer that is being built: what it was given, by name"""


def init(original: Callable[..., None], trainer: Trainer, *args: Any, **kwargs: Any) -> None:
    """Replaces `Trainer.__init__`: knows what its arguments say before it is known what they mean.

    `device_train_microbatch_size: auto` is taken on a CPU too, where memory does not run out in a
    way that could be caught: a run can be tried there as it is.

    Raises:
        ConfigError: `auto` and a profiler.
    """
    try:
        given = inspect.signature(original).bind(trainer, *args, **kwargs)
    except TypeError:
        given = None  # Python says it about the original
    if given is None or not concerns_fsdp2(given.arguments.get("parallelism_config")):
        original(trainer, *args, **kwargs)
        return
    given.apply_defaults()
    asked = given.arguments
    set_node_rank()
    warn_of_shared_store()
    with override_attribute(trainer, ARGUMENTS, dict(asked)):
        auto = asked["device_train_microbatch_size"] == "auto"
        auto = auto and asks_for_fsdp2(asked["parallelism_config"])
        if auto:
            if asked["profiler"] is not None:
                raise ConfigError(
                    "device_train_microbatch_size is 'auto' and there is a profiler. It would "
                    "record attempts that are thrown away. Find the size in a short run, and write "
                    "it here."
                )
            # Composer refuses `auto` beside fsdp2, and starts with the batch of a rank either way.
            asked["device_train_microbatch_size"] = None
        original(*given.args, **given.kwargs)
        if auto:
            trainer.state.auto_microbatching = True


def warn_of_shared_store() -> None:
    """Tells what keeps ranks that torchrun starts again from meeting. Collective: no.

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
    for step in TRANSFORMATIONS:
        step.check_items(settings, items, arguments.get("device_train_microbatch_size"))
    whole = "the model is compiled already" if is_compiled(arguments.get("model")) else None
    if arguments.get("compile_config") is not None:
        whole = "compile_config is set"
    if settings.compile and whole is not None:
        raise ConfigError(
            f"parallelism_config.fsdp2.compile is set, and {whole}. Blocks would be compiled "
            "inside a graph that contains them. Take one of them out: blocks compile faster, and "
            "FSDP2's gathers break the graph of the whole model between them anyway."
        )


def wrap_model(
    original: Callable[..., None], trainer: Trainer, model: Any, optimizers: Any
) -> None:
    """Replaces `Trainer._wrap_model_for_distributed`, the last step before autoresume.

    Collective: yes.
    """
    if trainer.state.fsdp_config_version != 2:
        original(trainer, model, optimizers)
        return
    note_start(trainer.state)
    save_lions_as_text(ensure_tuple(optimizers))
    check_saved_adapters(trainer.state)
    original(trainer, model, optimizers)
    settle_autoresume(trainer.state, getattr(trainer, ARGUMENTS, {}))


def apply_fsdp(original: Callable[[State], None], state: State) -> None:
    """Replaces `State._apply_fsdp`. Collective: yes."""
    original(state)
    if state.fsdp_config_version == 2:
        move_averages(state)
