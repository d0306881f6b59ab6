"""Composer compiles the whole model, we compile its blocks: one of them at a time."""

from __future__ import annotations

from typing import Any

from composer import Trainer

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.shard.torch_private.tensors import is_compiled
from composer_fsdp2.trainer.config import TrainerFSDP2Config

__all__ = ["check_compiled_once", "note_compiled_whole"]

_WHOLE = "_fsdp2_compiled_whole"


def note_compiled_whole(trainer: Trainer, model: Any, compile_config: Any) -> None:
    """Remembers how the Trainer was asked to compile, until it is known what FSDP2 was asked."""
    how = "the model is compiled already" if is_compiled(model) else None
    setattr(trainer, _WHOLE, "compile_config is set" if compile_config is not None else how)


def check_compiled_once(trainer: Trainer, config: object) -> None:
    """Refuses to compile blocks of a model that is compiled as a whole.

    Collective: no. Every rank is given the same.

    Raises:
        ConfigError: saying which two.
    """
    whole = getattr(trainer, _WHOLE, None)
    if isinstance(config, TrainerFSDP2Config) and config.settings.compile and whole is not None:
        raise ConfigError(
            f"parallelism_config.fsdp2.compile is set, and {whole}. Blocks would be compiled "
            "inside a graph that contains them. Take one of them out: blocks compile faster, and "
            "FSDP2's gathers break the graph of the whole model between them anyway."
        )
