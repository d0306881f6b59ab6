"""Names in a run that LLM Foundry does not know: found before anything is built.

LLM Foundry looks each name up when it builds the part, which is after the model's weights for an
optimizer, and after the data for a callback. So it does with the names of a part's arguments.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from composer_fsdp2.config.messages import ascii_repr, nearest
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.foundry.run_keys import words_of

__all__ = ["NAME", "arguments_of", "checking_names", "unknown_name"]

NAME = "composer_fsdp2_names"
_SHOWN_NAMES = 40
_GIVEN = ("self", "params", "train_config")
"""arguments that no configuration writes"""
_TAKEN_OUT = {"optimizer": ("disable_grad", "param_groups")}
"""what LLM Foundry reads itself out of a block"""


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


def arguments_of(called: Any) -> list[str] | None:
    """The arguments that a configuration may write for it; `None` where it takes any."""
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):  # some extension types do not tell
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters if parameter.name not in _GIVEN]


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
        words = words_of(_file_of(known[name]) for name in known if name not in harmless)
        if words is not None:
            found = [*map(_unknown, _named(cfg)), *_unknown_arguments(cfg)]
            wrong = [one for one in found if one is not None and _block_of(one[0]) not in words]
            if wrong:
                raise ConfigError("\n".join(f"{what} {advice}" for what, advice in wrong))
        return cfg

    return check


def _file_of(transform: Any) -> Path:
    """Where a transform is written; for one that does not tell, a place that is no file."""
    code = getattr(transform, "__code__", None)
    return Path(code.co_filename) if code is not None else Path()


def _block_of(what: str) -> str:
    """The key of the run under which something is wrong."""
    return re.split(r"[.:]", what, maxsplit=1)[0]


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


def _unknown_arguments(cfg: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for where, part, block in _parts(cfg):
        known = arguments_of(part)
        if known is None:
            continue
        for key in block:
            if key not in (*known, *_TAKEN_OUT.get(where, ())):
                hint = nearest(key, known) if isinstance(key, str) else ""
                shown = ", ".join(known) or "none: it has no arguments"
                yield (
                    f"{where}: {part.__name__} has no argument {ascii_repr(key)}.{hint}",
                    f"Write one of {shown}.",
                )


def _parts(cfg: Mapping[str, Any]) -> Iterator[tuple[str, Any, Mapping[Any, Any]]]:
    """Each part that is built of its block alone: its place, its class and its arguments."""
    from llmfoundry import registry

    one: dict[str, Any] = {"optimizer": registry.optimizers, "scheduler": registry.schedulers}
    for key, known in one.items():
        block = cfg.get(key)
        if isinstance(block, Mapping) and block.get("name") in known:
            yield key, known.get(block["name"]), {k: v for k, v in block.items() if k != "name"}
    many: dict[str, tuple[Any, ...]] = {
        "callbacks": (registry.callbacks_with_config, registry.callbacks),
        "loggers": (registry.loggers,),
        "algorithms": (registry.algorithms,),
    }
    for key, registries in many.items():
        blocks = cfg.get(key)
        for name, block in blocks.items() if isinstance(blocks, Mapping) else ():
            known = next((known for known in registries if name in known), None)
            if known is not None and isinstance(block, Mapping):
                yield f"{key}.{name}", known.get(name), block
