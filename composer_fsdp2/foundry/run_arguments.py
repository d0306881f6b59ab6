"""Arguments in a run that no part takes: found before anything is built.

[Note: arguments left out] Python refuses an unknown argument when the part is built, which is late:
for an optimizer, after the model's weights. Some parts refuse nothing, and the run trains with the
default: a model gives its `**kwargs` to a configuration that keeps every name, a data set picks the
keys it knows, a tokenizer reads some of its `**kwargs`, and a callback of Composer deletes them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_fsdp2.config.messages import ascii_repr, nearest
from composer_fsdp2.foundry.run_keys import words_in, words_of

__all__ = ["UnknownArgument", "file_of", "unknown_arguments"]

_GIVEN = ("self", "params", "train_config", "tokenizer", "device_batch_size")
"""arguments that no configuration writes"""
_KWARGS = re.compile(r"\bkwargs\b")
_DELETED = re.compile(r"\bdel\b[^\n]*\bkwargs\b")
_HANDED_UP = re.compile(r"super\(\)\.__init__\([^()]*\*\*kwargs[\s,]*\)")


@dataclass(frozen=True, slots=True)
class UnknownArgument:
    """An argument in a run that the part it is for does not take."""

    block: dict[Any, Any]
    """the block of the run that holds it"""
    key: Any
    what: str
    advice: str


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a run, and the arguments that it takes."""

    where: str
    title: str
    names: list[str]
    """as signatures have them"""
    block: Any
    read_before: tuple[str, ...] = ()
    """keys that LLM Foundry takes out of the block"""
    read_too: Collection[str] | None = None
    """others that the part reads; `None` if it refuses an unknown one itself, when it is built"""


def unknown_arguments(cfg: Mapping[str, Any]) -> Iterator[UnknownArgument]:
    """Yields the arguments that no part takes; see [Note: arguments left out].

    A part that may hand arguments on to code that is not known here is passed over.

    Args:
        cfg: the whole training config, plain values, as config transforms leave it.
    """
    for part in _parts(cfg):
        for key in part.block:
            if key not in (*part.names, *part.read_before, *(part.read_too or ())):
                yield _unknown(part, key)


def _unknown(part: _Part, key: Any) -> UnknownArgument:
    hint = left_out = ""
    if isinstance(key, str):
        more = (name for name in part.read_too or () if "_" in name)
        hint = nearest(key, part.names) or nearest(key, more)
    if part.read_too is not None:
        left_out = " The run would train as if it were not there."
    shown = ", ".join(part.names)
    return UnknownArgument(
        part.block,
        key,
        f"{part.where}: {part.title} has no argument {ascii_repr(key)}.{left_out}{hint}",
        f"Write one of {shown}." if shown else "Take it out: there are no arguments.",
    )


# --- What a function takes. ---


def _arguments_of(called: Any) -> list[str] | None:
    """Returns the arguments that a configuration may write; `None` where it may take any."""
    names: list[str] = []
    for function in _initialisers(called) if _takes_any(called) else [called]:
        names += _named(function)
        if not _takes_any(function):
            return names
        source = _source_of(function)
        if len(_KWARGS.findall(source)) != 2:  # the parameter, and one use of it
            return None
        if _DELETED.search(source):
            return names
        if not _HANDED_UP.search(source):
            return None
    return names


def _takes_any(called: Any) -> bool:
    return any(one.kind is one.VAR_KEYWORD for one in _parameters(called))


def _named(called: Any) -> list[str]:
    many = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    found = (one.name for one in _parameters(called) if one.kind not in many)
    return [name for name in found if name not in _GIVEN]


def _parameters(called: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):  # some extension types do not tell
        return [inspect.Parameter("unknown", inspect.Parameter.VAR_KEYWORD)]


def _initialisers(called: Any) -> list[Any]:
    """Returns the initialisers of a class and its bases, each of which may call the next."""
    if not isinstance(called, type):
        return [called]
    return [vars(base)["__init__"] for base in called.__mro__ if "__init__" in vars(base)]


def _source_of(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def file_of(function: Any) -> Path:
    """Returns where a function is written; for one that does not tell, a place that is no file."""
    code = getattr(function, "__code__", None)
    return Path(code.co_filename) if code is not None else Path()


# --- The parts of a run. ---


def _parts(cfg: Mapping[str, Any]) -> Iterator[_Part]:
    yield from _built_of_their_block(cfg)
    model, tokenizer = cfg.get("model"), cfg.get("tokenizer")
    if isinstance(model, Mapping):
        yield from _model(model)
    loaders = {key: cfg.get(key) for key in ("train_loader", "eval_loader")}
    # LLM Foundry has renamed a list.
    if isinstance(several := cfg.get("eval_loaders"), list):
        loaders |= {f"eval_loader[{number}]": block for number, block in enumerate(several)}
    for where, block in loaders.items():
        if isinstance(block, Mapping):
            yield from _loader(where, block)
    if isinstance(tokenizer, Mapping):
        yield from _tokenizer(tokenizer)


def _built_of_their_block(cfg: Mapping[str, Any]) -> Iterator[_Part]:
    from llmfoundry import registry

    one: dict[str, Any] = {"optimizer": registry.optimizers, "scheduler": registry.schedulers}
    for key, known in one.items():
        block = cfg.get(key)
        if not isinstance(block, Mapping):
            continue
        part = _found(known, block.get("name"))
        if part is not None:
            before = ("name", "disable_grad", "param_groups") if key == "optimizer" else ("name",)
            yield from _part(key, part, block, before)
    many: dict[str, tuple[Any, ...]] = {
        "callbacks": (registry.callbacks_with_config, registry.callbacks),
        "loggers": (registry.loggers,),
        "algorithms": (registry.algorithms,),
    }
    for key, registries in many.items():
        blocks = cfg.get(key)
        for name, block in blocks.items() if isinstance(blocks, Mapping) else ():
            part = next(filter(None, (_found(known, name) for known in registries)), None)
            if part is not None and isinstance(block, Mapping):
                yield from _part(f"{key}.{name}", part, block)


def _found(registry: Any, name: Any) -> Any:
    """Returns what is registered; `None` for a name that is not, which is an error of its own."""
    return registry.get(name) if isinstance(name, str) and name in registry else None


def _part(
    where: str, called: Any, block: Mapping[Any, Any], before: tuple[str, ...] = ()
) -> Iterator[_Part]:
    names = _arguments_of(called)
    if names is not None:
        too = () if _takes_any(called) else None
        yield _Part(where, getattr(called, "__name__", str(called)), names, block, before, too)


def _model(block: Mapping[Any, Any]) -> Iterator[_Part]:
    from llmfoundry import registry

    model, before = _found(registry.models, block.get("name")), ("name", "master_weights_dtype")
    if model is None:
        return
    if not _is_mpt(model, block):
        yield from _part("model", model, block, before)
        return
    from llmfoundry.layers_registry import attention_classes, param_init_fns
    from llmfoundry.models.mpt import ComposerMPTCausalLM, MPTConfig
    from llmfoundry.models.utils.config_defaults import attn_config_defaults, init_config_defaults

    names_of_mpt = list(dict.fromkeys((*_named(model), *_named(MPTConfig))))
    # The model asks its configuration for names that the configuration does not declare.
    known = {*dir(MPTConfig()), *words_in({Path(inspect.getfile(ComposerMPTCausalLM))})}
    yield _Part("model", model.__name__, names_of_mpt, block, before, known)
    inner = (
        ("attn_config", "attn_type", attn_config_defaults, attention_classes),
        ("init_config", "name", init_config_defaults, param_init_fns),
    )
    for key, kind, defaults, registered in inner:
        given = block.get(key)
        if not isinstance(given, Mapping):
            continue
        part = _found(registered, {**defaults, **given}[kind])
        if part is not None:
            own = (name for name in _named(part) if name not in (*names_of_mpt, "module"))
            names = list(dict.fromkeys((*defaults, *own)))
            too = () if _takes_any(part) else None
            # LLM Foundry takes the second out if it is null.
            before = ("name", "seq_parallel_world_size")
            yield _Part(f"model.{key}", part.__name__, names, given, before, too)


def _is_mpt(model: Any, block: Mapping[Any, Any]) -> bool:
    """Whether a model's `**kwargs` go to the configuration of an MPT, and nowhere else."""
    from llmfoundry.models.llm_embed import ContrastiveModel
    from llmfoundry.models.mpt import ComposerMPTCausalLM

    if model is ContrastiveModel:
        return not block.get("pretrained_model_name_or_path")
    own = ("__init__", "config_class", "model_class")
    return isinstance(model, type) and all(
        getattr(model, name, None) is getattr(ComposerMPTCausalLM, name) for name in own
    )


def _loader(where: str, block: Mapping[Any, Any]) -> Iterator[_Part]:
    from llmfoundry import registry
    from streaming import StreamingDataset

    builder = _found(registry.dataloaders, block.get("name"))
    if builder is None:
        return
    yield from _part(where, builder, block, ("name", "label"))
    read = (registry.collators, registry.data_specs, registry.dataset_replication_validators)
    readers = [builder, *(known.get(name) for known in read for name in known.get_all())]
    words = words_of({file_of(reader) for reader in readers})
    if isinstance(block.get("dataset"), Mapping) and words is not None:
        names = ["max_seq_len", *_named(StreamingDataset)]
        yield _Part(f"{where}.dataset", block["name"], names, block["dataset"], (), words)


def _tokenizer(block: Mapping[Any, Any]) -> Iterator[_Part]:
    from llmfoundry import registry
    from transformers.models.auto import tokenization_auto
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    name, kwargs, saved = block.get("name"), block.get("kwargs"), {}
    if not isinstance(name, str) or not isinstance(kwargs, Mapping):
        return
    found = [_found(registry.tokenizers, name)]
    if found == [None]:
        try:
            saved = tokenization_auto.get_tokenizer_config(name, local_files_only=True)
        except (OSError, ValueError):
            return
        told = saved.get("tokenizer_class")
        both = (f"{told}", f"{told}Fast") if "auto_map" not in saved else ()
        found = [tokenization_auto.tokenizer_class_from_name(one) for one in both]
    classes = [one for one in found if isinstance(one, type)]
    classes = [one for one in classes if issubclass(one, PreTrainedTokenizerBase)]
    if not classes:
        return
    bases = {base for one in classes for base in one.__mro__ if base.__module__ != "builtins"}
    files = {Path(inspect.getfile(one)) for one in (tokenization_auto, *bases)}
    words = {*saved, *words_in(files)}
    names = ["model_max_length", *PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES]
    yield _Part("tokenizer.kwargs", classes[0].__name__, names, kwargs, (), words)
