"""Finds keys, names and arguments of a run that nobody reads, before anything is built.

[Note: arguments left out] LLM Foundry looks a name up when it builds the part, and Python refuses
an unknown argument there, which for an optimizer is after the model's weights. Some parts refuse
nothing, and the run trains with the default: a model gives its `**kwargs` to a configuration that
keeps every name, a data set picks the keys it knows, a tokenizer reads some of its `**kwargs`, an
optimizer keeps all keys of a group of parameters, and a callback of Composer deletes them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from types import ModuleType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch

from composer_fsdp2.config.messages import ascii_repr, invalid_value, nearest, raise_errors
from composer_fsdp2.text import listed

__all__ = [
    "NAME",
    "check_eval_keys",
    "refuse_unknown",
    "unknown_parts",
    "unknown_run_keys",
    "wrong_kinds",
]

NAME = "composer_fsdp2_names"
"""in LLM Foundry's registry of config transforms"""
_OUR_KEY = "parallelism_config"
_SHOWN_NAMES = 40
_ONE = {
    "model": "models",
    "optimizer": "optimizers",
    "scheduler": "schedulers",
    "train_loader": "dataloaders",
    "eval_loader": "dataloaders",
}
"""keys of blocks with a `name`, and the registry where LLM Foundry looks it up"""
_MANY = {
    "callbacks": ("callbacks", "callbacks_with_config"),
    "loggers": ("loggers",),
    "algorithms": ("algorithms",),
}
"""keys of mappings from names to arguments, and their registries"""
_READ_BEFORE = {
    "model": ("master_weights_dtype",),
    "optimizer": ("disable_grad", "param_groups"),
    "eval_loader": ("label",),
}
"""arguments that LLM Foundry takes out of a block"""
_GIVEN = ("self", "params", "train_config", "tokenizer", "device_batch_size")
"""arguments that no configuration writes"""
_UNDER_MODELS = ("model", "tokenizer", "model_name", "load_path")
"""keys that LLM Foundry's evaluation takes at the top of a run as well"""
_NO_TEXT = (type(None), torch.Tensor)
"""types that an argument annotated as a number may take"""
_DELETED = re.compile(r"\bdel\b[^\n]*\bkwargs\b")
_HANDED_UP = re.compile(r"super\(\)\.__init__\([^()]*\*\*kwargs[\s,]*\)")


def refuse_unknown(cfg: dict[str, Any]) -> dict[str, Any]:
    """Refuses names that nobody reads; the last config transform, since others may change names.

    A file of `code_paths` may register others after it. What they leave, doctor finds.

    Collective: no. It depends on `cfg` alone, so all ranks raise the same error or none does.

    Raises:
        ConfigError: naming each of them.
    """
    from llmfoundry.registry import config_transforms
    from llmfoundry.utils.config_utils import TRAIN_CONFIG_KEYS

    if list(config_transforms.get_all())[-1] == NAME:
        raise_errors([*unknown_run_keys(cfg, TRAIN_CONFIG_KEYS), *unknown_parts(cfg)])
    return cfg


def check_eval_keys(cfg: Mapping[Any, Any]) -> None:
    """Checks the keys of an evaluation, which no config transform may take out.

    Raises:
        ConfigError: LLM Foundry would refuse keys of it.
    """
    from llmfoundry.utils.config_utils import EVAL_CONFIG_KEYS

    valid = (*EVAL_CONFIG_KEYS, *_UNDER_MODELS)
    raise_errors([*unknown_run_keys(cfg, valid, "evaluation")])


def unknown_run_keys(
    cfg: Mapping[Any, Any], valid: Iterable[str], work: str = "training"
) -> Iterator[str]:
    """Yields sentences about the top-level keys that neither LLM Foundry nor this package reads."""
    valid = (*valid, _OUR_KEY)
    for key in cfg:
        if key in valid:
            continue
        problem = f"{ascii_repr(key)} is not a key of LLM Foundry's {work}."
        if key == "fsdp2":
            problem += f" FSDP2's settings belong one level deeper: {_OUR_KEY}: {{fsdp2: ...}}."
        else:
            problem += f" It would stop the run.{nearest(str(key), valid)}"
        yield f"{problem} Correct it, or put values of your own under `variables`."


def unknown_parts(cfg: Mapping[str, Any]) -> Iterator[str]:
    """Yields sentences about names that are in no registry, and arguments.

    See [Note: arguments left out].

    A part that may hand arguments on to code that is not known here is passed over.

    Args:
        cfg: the whole training config, plain values, as config transforms leave it.
    """
    for where, name, block, kind, registered in _named(cfg):
        if not (isinstance(name, str) and name in registered):
            key_path = where if kind in _MANY else f"{where}.name"
            hint = nearest(name, registered) if isinstance(name, str) else ""
            shown = listed(sorted(registered), _SHOWN_NAMES, "")
            yield (
                f"{key_path}: {ascii_repr(name)} is in no registry of {kind}.{hint} "
                f"Write one of {shown}; or register yours in a file of code_paths."
            )
        elif isinstance(block, dict):
            before = ("name", *_READ_BEFORE.get(where.partition("[")[0], ()))
            arguments = {key: value for key, value in block.items() if key not in before}
            yield from _of_part(where, name, registered[name], arguments)
            if where == "optimizer" and isinstance(groups := block.get("param_groups"), list):
                yield from _of_groups(registered[name], groups)
    if isinstance(tokenizer := cfg.get("tokenizer"), dict):
        yield from _of_tokenizer(tokenizer)


def wrong_kinds(where: str, called: Any, block: Mapping[Any, Any]) -> Iterator[str]:
    """Yields sentences about words and blocks in the place of numbers.

    Args:
        where: the beginning of the keys, with its dot.
        called: declares the arguments, with types.
        block: key -> value, as in the YAML.
    """
    declares = getattr(called, "__init__", called) if isinstance(called, type) else called
    try:
        hints = get_type_hints(called if is_dataclass(called) else declares)
    except (NameError, TypeError):  # of a name that is imported for type checkers alone
        return
    for key, value in block.items():
        hint = hints.get(key)
        origin = get_origin(hint)
        if isinstance(origin, type) and origin is not UnionType:
            continue  # a container, as `tuple[float, float]` is
        kinds = {*get_args(hint)} or {hint}
        numbers = kinds & {int, float, bool}
        if isinstance(value, str | list | dict) and numbers and kinds <= {*numbers, *_NO_TEXT}:
            expected = "true or false" if numbers == {bool} else "a number"
            yield invalid_value(f"{where}{key}", value, expected)


# --- Names. ---


def _named(
    cfg: Mapping[str, Any],
) -> Iterator[tuple[str, Any, Any, str, Mapping[str, Any]]]:
    """Yields place, name, block, kind and registered parts of each name in a run."""
    from llmfoundry import registry

    for key, kind in _ONE.items():
        blocks = {key: cfg.get(key)}
        # LLM Foundry has renamed a list.
        if key == "eval_loader" and isinstance(several := cfg.get("eval_loaders"), list):
            blocks |= {f"{key}[{number}]": block for number, block in enumerate(several)}
        registered = getattr(registry, kind).get_all()
        for where, block in blocks.items():
            if isinstance(block, dict):
                yield where, block.get("name"), block, kind, registered
    for key, kinds in _MANY.items():
        registered = {n: p for kind in kinds for n, p in getattr(registry, kind).get_all().items()}
        blocks = cfg.get(key)
        for name, block in blocks.items() if isinstance(blocks, dict) else ():
            yield f"{key}.{name}", name, block, key, registered


# --- Arguments. ---


def _unread(
    where: str,
    title: str,
    names: Collection[str],
    block: dict[Any, Any],
    read_too: Collection[str] | None = None,
) -> Iterator[str]:
    """Yields sentences about the arguments of a block that nobody reads.

    Args:
        where: the block's place in the run.
        title: noun for the thing that the block describes.
        names: of arguments, as signatures have them.
        block: a part of the run.
        read_too: others that are read; `None` if an unknown argument is refused when the part is
            built.
    """
    names = list(dict.fromkeys(names))  # a class and its base may name the same
    shown = ", ".join(names)
    left_out = "" if read_too is None else " The run would train as if it were not there."
    for key in block:
        if key in names or key in (read_too or ()):
            continue
        # Words of a source are no argument's name as a rule, those with an underscore may be.
        more = [name for name in read_too or () if "_" in name]
        hint = (nearest(key, names) or nearest(key, more)) if isinstance(key, str) else ""
        cure = f"Write one of {shown}." if shown else "Take it out: there are no arguments."
        yield f"{where}: {title} has no argument {ascii_repr(key)}.{left_out}{hint} {cure}"


def _of_part(where: str, name: str, called: Any, block: dict[Any, Any]) -> Iterator[str]:
    from llmfoundry import registry
    from streaming import StreamingDataset

    title = getattr(called, "__name__", str(called))
    yield from wrong_kinds(f"{where}.", called, block)
    names = _arguments_of(called)
    if names is not None:
        yield from _unread(where, title, names, block, () if _declared(called)[1] else None)
    elif where == "model":
        yield from _of_mpt(called, block)
    dataset = block.get("dataset")
    is_known = getattr(called, "__module__", "").startswith("llmfoundry.")
    if "_loader" in where and isinstance(dataset, dict) and is_known:
        # LLM Foundry's functions each read some keys of a data set.
        kinds = (registry.collators, registry.data_specs, registry.dataset_replication_validators)
        readers = [called, *(part for kind in kinds for part in kind.get_all().values())]
        words = {word for reader in readers for word in _words(inspect.getmodule(reader))}
        # Those words are there as well: the functions hand them to torch's loader.
        outside = ("name", *_declared(called)[0])
        for key in (key for key in dataset if key in outside):
            yield (
                f"{where}.dataset: '{key}' is an argument of the loader. The run would train as if "
                f"it were not there. Write it one level up, as {where}.{key}."
            )
        names = ["max_seq_len", *_declared(StreamingDataset)[0]]
        yield from _unread(f"{where}.dataset", name, names, dataset, {*words, *outside})


def _of_groups(optimizer: Any, groups: list[Any]) -> Iterator[str]:
    """Checks the groups of parameters that an optimizer is built with.

    An optimizer may read keys of a group that are no arguments, as Muon's `algorithm`.
    """
    names = _arguments_of(optimizer)
    if names is None:
        return
    title = getattr(optimizer, "__name__", str(optimizer))
    modules = {inspect.getmodule(base) for base in getattr(optimizer, "__mro__", (optimizer,))}
    sources = "".join(map(_source, modules))
    read_keys = re.findall(r"""group[^\n]*?["'](\w+)["']""", sources)
    for number, group in enumerate(groups):
        if isinstance(group, dict):
            where = f"optimizer.param_groups[{number}]"
            yield from wrong_kinds(f"{where}.", optimizer, group)
            yield from _unread(where, title, ["param_str_match", *names], group, read_keys)


def _of_mpt(model: Any, block: dict[Any, Any]) -> Iterator[str]:
    """Checks the blocks of a model whose `**kwargs` go to the configuration of an MPT."""
    from llmfoundry.layers_registry import attention_classes, param_init_fns
    from llmfoundry.models import mpt
    from llmfoundry.models.llm_embed import ContrastiveModel
    from llmfoundry.models.utils.config_defaults import attn_config_defaults, init_config_defaults

    embeds = model is ContrastiveModel and not block.get("pretrained_model_name_or_path")
    if model is not mpt.ComposerMPTCausalLM and not embeds:
        return
    names = list(dict.fromkeys((*_declared(model)[0], *_declared(mpt.MPTConfig)[0])))
    # The model asks its configuration for names that the configuration does not declare.
    read_names = {*dir(mpt.MPTConfig()), *_words(inspect.getmodule(mpt.ComposerMPTCausalLM))}
    yield from _unread("model", model.__name__, names, block, read_names)
    inner = (
        ("attn_config", "attn_type", attn_config_defaults, attention_classes),
        ("init_config", "name", init_config_defaults, param_init_fns),
    )
    for key, kind, defaults, registered in inner:
        settings = block.get(key)
        name = {**defaults, **settings}[kind] if isinstance(settings, dict) else None
        if isinstance(name, str) and isinstance(settings, dict) and name in registered:
            part = registered.get(name)
            arguments = (name for name in _declared(part)[0] if name not in (*names, "module"))
            too = ("seq_parallel_world_size",)  # LLM Foundry takes it out if it is null
            yield from _unread(
                f"model.{key}", part.__name__, [*defaults, *arguments], settings, too
            )


def _of_tokenizer(block: dict[Any, Any]) -> Iterator[str]:
    """Checks keys beside `kwargs`, and these for a class that is known without the network."""
    from llmfoundry import registry
    from transformers.models.auto import tokenization_auto
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    for key in (key for key in block if key not in ("name", "kwargs")):
        yield (
            f"tokenizer: {ascii_repr(key)} is neither 'name' nor 'kwargs'. The run would train as "
            f"if it were not there.{nearest(str(key), ('name', 'kwargs'))} Write arguments of the "
            "tokenizer under tokenizer.kwargs."
        )
    name, kwargs, saved = block.get("name"), block.get("kwargs"), {}
    if not isinstance(name, str) or not isinstance(kwargs, dict):
        return
    classes = [registry.tokenizers.get(name)] if name in registry.tokenizers else []
    if not classes:
        try:
            saved = tokenization_auto.get_tokenizer_config(name, local_files_only=True)
        except (OSError, ValueError):
            return
        told = f"{saved.get('tokenizer_class')}" if "auto_map" not in saved else ""
        classes = [tokenization_auto.tokenizer_class_from_name(told + end) for end in ("", "Fast")]
    tokenizers = [
        c for c in classes if isinstance(c, type) and issubclass(c, PreTrainedTokenizerBase)
    ]
    if tokenizers:
        modules = {inspect.getmodule(base) for cls in tokenizers for base in cls.__mro__}
        words = {word for module in (tokenization_auto, *modules) for word in _words(module)}
        names = ["model_max_length", *PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES]
        yield from _unread(
            "tokenizer.kwargs", tokenizers[0].__name__, names, kwargs, {*saved, *words}
        )


# --- Signatures and sources. ---


def _arguments_of(called: Any) -> list[str] | None:
    """Returns the arguments that a configuration may write; `None` where it may take any.

    A class that hands its `**kwargs` up takes those of its base; one that deletes them, no others.
    """
    functions = [called]
    if isinstance(called, type) and _declared(called)[1]:
        functions = [vars(base)["__init__"] for base in called.__mro__ if "__init__" in vars(base)]
    names: list[str] = []
    for function in functions:
        declared, takes_any = _declared(function)
        names += declared
        source = _source(function)
        if not takes_any:
            return names
        if len(re.findall(r"\bkwargs\b", source)) != 2:  # the parameter, and one use of it
            return None
        if _DELETED.search(source):
            return names
        if not _HANDED_UP.search(source):
            return None
    return names


def _declared(called: Any) -> tuple[list[str], bool]:
    """Returns the arguments that a signature names, and whether it takes any other."""
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):  # some extension types do not tell
        return [], True
    many = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    names = [
        parameter.name
        for parameter in parameters
        if parameter.kind not in many and parameter.name not in _GIVEN
    ]
    return names, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _words(module: ModuleType | None) -> set[str]:
    """Returns the words of a module's source."""
    return set(re.findall(r"\w+", _source(module)))


def _source(code: Any) -> str:
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return ""
