"""Names in a run that LLM Foundry does not know: found before anything is built.

LLM Foundry looks each name up when it builds the part, which is after the model's weights for an
optimizer, and after the data for a callback.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from composer_fsdp2.config.messages import ascii_repr, nearest
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.foundry.run_arguments import file_of, unknown_arguments
from composer_fsdp2.foundry.run_keys import words_of

__all__ = ["NAME", "checking_names", "unknown_name"]

NAME = "composer_fsdp2_names"
_SHOWN_NAMES = 40


def unknown_name(where: str, name: Any, names: Iterable[str], place: str) -> tuple[str, str] | None:
    """Returns what is wrong with a name, and what to write; `None` if it is one of `names`."""
    names = sorted(names)
    if isinstance(name, str) and name in names:
        return None
    hint = nearest(name, names) if isinstance(name, str) else ""
    shown = ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")
    return (
        f"{where}: {ascii_repr(name)} is in no registry of {place}.{hint}",
        f"Write one of {shown}; or register yours in a file of code_paths.",
    )


def checking_names(transforms: Iterable[str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns a config transform that refuses unknown names, of parts and of their arguments.

    Args:
        transforms: names of those that change no name. Where a file of `code_paths` has registered
            others, which may come later, a block that its code names is left to LLM Foundry.
    """
    harmless = {NAME, *transforms}

    def check(cfg: dict[str, Any]) -> dict[str, Any]:
        from llmfoundry import registry

        known = registry.config_transforms.get_all()
        words = words_of(file_of(known[name]) for name in known if name not in harmless)
        if words is not None:
            arguments = ((found.what, found.advice) for found in unknown_arguments(cfg))
            found = [*map(_unknown, _named(cfg)), *arguments]
            wrong = [one for one in found if one is not None and _block_of(one[0]) not in words]
            if wrong:
                raise ConfigError("\n".join(f"{what} {advice}" for what, advice in wrong))
        return cfg

    return check


def _block_of(what: str) -> str:
    """The key of the run under which something is wrong."""
    return re.split(r"[.:\[]", what, maxsplit=1)[0]


def _unknown(asked: tuple[str, Any, Iterable[str], str]) -> tuple[str, str] | None:
    return unknown_name(*asked)


def _named(cfg: Mapping[str, Any]) -> Iterator[tuple[str, Any, Iterable[str], str]]:
    """Each name of a run: its place, the name, and what is registered there."""
    from llmfoundry import registry

    loaders = registry.dataloaders.get_all()
    one_name = {
        "model": (registry.models.get_all(), "models"),
        "optimizer": (registry.optimizers.get_all(), "optimizers"),
        "scheduler": (registry.schedulers.get_all(), "schedulers"),
        "train_loader": (loaders, "data loaders"),
        "eval_loader": (loaders, "data loaders"),
    }
    for key, (names, place) in one_name.items():
        block = cfg.get(key)
        if isinstance(block, Mapping) and "name" in block:
            yield f"{key}.name", block["name"], names, place
    callbacks = [*registry.callbacks.get_all(), *registry.callbacks_with_config.get_all()]
    many_names = {
        "callbacks": callbacks,
        "loggers": registry.loggers.get_all(),
        "algorithms": registry.algorithms.get_all(),
    }
    for key, names in many_names.items():
        blocks = cfg.get(key)
        for name in blocks if isinstance(blocks, Mapping) else ():
            yield key, name, names, key
