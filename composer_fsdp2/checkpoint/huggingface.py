"""Converts a checkpoint to a folder that `from_pretrained` loads, one file at a time.

Composer keeps the Hugging Face config and the tokenizer's files in the checkpoint, under
`state.integrations.huggingface`, as the values that were in the JSON files.

[Note: tied weights] `from_pretrained` ties word embeddings again if the config says so, and
nothing else. So of equal word embeddings the first is written, and of everything else every name:
a name too many costs bytes, a name too few leaves a weight at random values. Each part of a model
of two ties its own.

[Note: adapters] A checkpoint with LoRA adapters keeps the names of the model's parameters and
PEFT's configuration. The folder that PEFT loads has the names without that of the adapter, which is
chosen anew by whoever loads it. Source: `get_peft_model_state_dict` of peft 0.16, for LoRA.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save, save_file

from composer_fsdp2.checkpoint.convert import Advance, map_copies, nest, prove_whole
from composer_fsdp2.checkpoint.describe import MODEL, find_ties
from composer_fsdp2.checkpoint.source import Checkpoint
from composer_fsdp2.checkpoint.staging import staged
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.text import listed

__all__ = ["write_huggingface"]

_STORED = ("state", "integrations", "huggingface")
_PREFIX = "model."
"""of the HuggingFaceModel around the model"""
_SMALL_FILES = (".jinja", ".json", ".model", ".txt")
_EXPORTED = {"attn_impl": "torch", "init_device": "cpu"}
_ADAPTER = "default"
"""the only one of a HuggingFaceModel"""
_WHOLE = f".modules_to_save.{_ADAPTER}."
_MAGNITUDE = f"lora_magnitude_vector.{_ADAPTER}.weight"
_EMBEDDINGS = ("embed_tokens", "lm_head")
_HEADS = {"classifier", "score"}
"""both names that PEFT lists for a classifier, of which a model has one"""
# A folder of shards has no keys for empty dictionaries.
_EMPTY = ("alpha_pattern", "loftq_config", "rank_pattern")

_Beside = tuple[dict[str, Any], str, dict[str, bytes]]
"""config of the model, its class, and files of the tokenizer: what stands beside the weights"""


def write_huggingface(
    source: Checkpoint,
    destination: Path,
    max_file_bytes: int,
    advance: Advance,
    *,
    dtype: torch.dtype | None = None,
    config: Path | None = None,
) -> list[str]:
    """Writes safetensors, their index, `config.json` and the tokenizer's files.

    Of a checkpoint with adapters of PEFT these alone, as PEFT does, and its `adapter_config.json`.

    Memory: one tensor; the weights of one file are in a file without a name beside `destination`.

    Args:
        source: an open checkpoint of a HuggingFaceModel.
        destination: a path where nothing is yet, or an empty folder.
        max_file_bytes: a new file begins where this would be exceeded.
        advance: called after each part with its bytes and those of all parts.
        dtype: of all floating point weights; None keeps each as it is.
        config: a `config.json`, or a folder with one and perhaps the tokenizer's files, instead of
            those that the checkpoint holds.

    Returns:
        Sentences for the user.

    Raises:
        CheckpointError: the checkpoint holds no config, or no Hugging Face model, or is damaged;
            or the destination cannot be written.
    """
    config = source.config if config is None else config
    values = nest(
        (key_path, source.tensor(key) if key in source.tensors else source.object(key))
        for key, key_path in source.under(*_STORED).items()
        if key_path
    )
    if "peft_config" in values.get("model", {}):
        return _write_adapters(source, destination, advance, values, dtype, config)
    settings, model_class, files = _stored(source, values) if config is None else _given(config)
    names = _names(source, _second_names(source, settings))
    adapter = next((name for name in names if ".lora_" in name), None)
    if adapter is not None:
        raise CheckpointError(
            f"'{source.path}' has adapters, such as '{adapter}', and no configuration of PEFT. "
            "`from_pretrained` would find no weight under these names. Take the adapters that the "
            "trainer wrote beside it, or write --to full."
        )
    _check_dtypes(source, names)
    # Tensors on meta, to divide them into files before any is read.
    entries: dict[str, torch.Tensor] = {}
    for name, key in names.items():
        entry = source.tensors[key]
        cast = dtype if entry.dtype.is_floating_point and dtype is not None else entry.dtype
        entries[name] = torch.empty(entry.shape, dtype=cast, device="meta")
    # The pattern gives the names that transformers uses.
    split = split_torch_state_dict_into_shards(
        entries, filename_pattern="model{suffix}.safetensors", max_shard_size=max_file_bytes
    )
    with staged(destination, folder=True) as folder:
        prove_whole(source)
        total = sum(source.tensors[key].size_bytes for key in names.values())
        for file_name, inside in split.filename_to_tensors.items():
            keys = {name: names[name] for name in inside}
            tensors = map_copies(source, keys, destination.parent, advance, total, dtype)
            _write_weights(tensors, folder / file_name)
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (folder / "model.safetensors.index.json").write_text(_json(index))
        # What `save_pretrained` of a model would have added.
        dtypes = {entry.dtype for entry in entries.values() if entry.dtype.is_floating_point}
        if len(dtypes) == 1:
            # Transformers 5 writes `dtype`, and where both are there reads that alone.
            key = "dtype" if "dtype" in settings else "torch_dtype"
            settings.pop("torch_dtype", None)
            settings[key] = str(dtypes.pop()).removeprefix("torch.")
        if model_class and not settings.get("architectures"):
            settings["architectures"] = [model_class.rpartition(".")[2]]
        (folder / "config.json").write_text(_json(settings))
        _write_files(folder, files)
    return _remarks(model_class, files)


def _write_adapters(
    source: Checkpoint,
    destination: Path,
    advance: Advance,
    values: Mapping[str, Any],
    dtype: torch.dtype | None,
    config: Path | None,
) -> list[str]:
    """Writes `adapter_model.safetensors` and `adapter_config.json`, as `save_pretrained` does."""
    if config is not None:
        raise CheckpointError(
            f"'{source.path}' holds adapters of PEFT, and --config is given. Their folder has no "
            "config.json: the base model has it, and is loaded from where it is. Remove --config."
        )
    settings = values["model"]["peft_config"]["content"]
    keys = _names(source, set())
    # Matrices with a row for each token.
    size = values["model"].get("config", {}).get("content", {}).get("vocab_size")
    shapes = {name: source.tensors[key].shape for name, key in keys.items()}
    embeddings = [n for n, shape in shapes.items() if len(shape) == 2 and shape[0] == size]
    base = settings.get("base_model_name_or_path")
    base_size = None
    with suppress(OSError, ValueError):  # it is no folder on this machine
        if base:
            text = (Path(base) / "config.json").read_text(encoding="utf-8")
            base_size = json.loads(text).get("vocab_size")
    resized = base_size is not None and size not in (None, base_size)
    names = _adapter_names(settings, list(keys), source.path, embeddings, resized=resized)
    _check_dtypes(source, {name: keys[inside] for name, inside in names.items()})
    files = dict(_tokenizer_files(values.get("tokenizer", {}), source.path))
    with staged(destination, folder=True) as folder:
        prove_whole(source)
        chosen = {name: keys[inside] for name, inside in names.items()}
        total = sum(source.tensors[key].size_bytes for key in chosen.values())
        tensors = map_copies(source, chosen, destination.parent, advance, total, dtype)
        _write_weights(tensors, folder / "adapter_model.safetensors")
        written = {**{key: {} for key in _EMPTY}, **settings, "inference_mode": True}
        text = json.dumps(written, indent=2, sort_keys=True)
        (folder / "adapter_config.json").write_text(text)
        _write_files(folder, files)
    base = base or "the base model"
    remarks = [f"These are adapters: load {base} first, then them with PeftModel."]
    if embeddings and base_size is None:
        remarks.append(
            f"{base} is no folder on this machine: it is taken to have as many tokens. If the "
            "vocabulary was resized, the embeddings are missing here."
        )
    return [*_remarks("", files), *remarks]


def _adapter_names(
    config: Mapping[str, Any],
    names: list[str],
    path: Path,
    embeddings: Collection[str],
    *,
    resized: bool,
) -> dict[str, str]:
    """Returns name for PEFT -> name in the model, see [Note: adapters].

    Args:
        config: PEFT's, from the checkpoint.
        names: of all weights of the Hugging Face model that the checkpoint has.
        path: of the checkpoint; in error messages.
        embeddings: those of them with a row for each token.
        resized: whether the model has another number of tokens than its base, which PEFT answers
            by writing the embeddings whole.

    Raises:
        CheckpointError: they are no adapters that this is written for.
    """
    kind, bias = config.get("peft_type"), config.get("bias", "none")
    if kind != "LORA" or bias not in ("none", "all", "lora_only"):
        raise CheckpointError(
            f"'{path}' holds adapters with peft_type {kind!r} and bias {bias!r}. Which weights "
            "belong to them is known for LoRA only, and some could be left out. Load it with the "
            "Trainer and call save_pretrained of the model."
        )
    if config.get("trainable_token_indices"):
        raise CheckpointError(
            f"'{path}' holds trained rows of an embedding (trainable_token_indices). They are not "
            "written yet, and without them the adapters are not what was trained. Load it with the "
            "Trainer and call save_pretrained of the model."
        )
    adapted = [name for name in names if "lora_" in name and _ADAPTER in name]
    layers = {name.partition("lora_")[0] for name in adapted}
    beside = {layer + bias for layer in layers for bias in ("bias", "base_layer.bias")}
    biases = {
        "none": [],
        "all": [name for name in names if "bias" in name],
        "lora_only": [name for name in names if name in beside],
    }
    names_by_peft = {_for_peft(name): name for name in (*adapted, *biases[bias])}
    names_by_peft |= {
        _for_peft(name.replace(_WHOLE, ".")): name for name in names if _WHOLE in name
    }
    # PEFT writes an embedding whole beside its adapter.
    targets = [each for each in _EMBEDDINGS if each in (config.get("target_modules") or ())]
    modules = tuple(f"{each}.base_layer." for each in targets)
    names_by_peft |= {name: name for name in names if any(module in name for module in modules)}
    _check_saved_modules(config, names, path)
    if resized and not targets:
        if not embeddings:
            raise CheckpointError(
                f"'{path}' holds adapters of a model with another number of tokens than its base, "
                "and not the embeddings. What was computed for the other tokens could not be found "
                "again. Train with should_save_peft_only: false, or load it with the Trainer and "
                "call save_pretrained."
            )
        module_prefixes = tuple(name.removesuffix("weight") for name in embeddings)
        names_by_peft |= {name: name for name in names if name.startswith(module_prefixes)}
    if not names_by_peft:
        raise CheckpointError(
            f"'{path}' has the configuration of adapters, and no weights of them. There is nothing "
            "to convert. Give a checkpoint of the run that trained them."
        )
    return names_by_peft


def _check_saved_modules(config: Mapping[str, Any], names: list[str], path: Path) -> None:
    """Refuses adapters without the modules that were trained beside them.

    Raises:
        CheckpointError: a module of `modules_to_save` has no weight in the checkpoint.
    """
    saved = {name.partition(_WHOLE)[0] for name in names if _WHOLE in name}
    endings = map(str, config.get("modules_to_save") or ())  # as PEFT chooses modules
    missing = {end for end in endings if not any(name.endswith(end) for name in saved)}
    if missing - (_HEADS if saved else set()):
        raise CheckpointError(
            f"'{path}' holds adapters, and not what was trained beside them: "
            f"{listed(sorted(missing))} of modules_to_save. Without them the adapters are not what "
            "was trained, and Composer saves them only where should_save_peft_only is false. Train "
            "with that, or load it with the Trainer and call save_pretrained of the model."
        )


def _for_peft(name: str) -> str:
    # DoRA's magnitude was a parameter before PEFT made it a layer with a `weight`. In files PEFT
    # keeps the old name.
    if name.endswith(_MAGNITUDE):
        name = name.removesuffix(".weight")
    return name.replace(f".{_ADAPTER}", "")


# --- Config and tokenizer. ---


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        if (folder / name).exists():
            raise CheckpointError(
                f"The checkpoint calls a file of its tokenizer '{name}', as one of the model "
                "is called. It would take its place. Do not use this checkpoint."
            )
        (folder / name).write_bytes(data)


def _remarks(model_class: str, files: Collection[str]) -> list[str]:
    remarks: list[str] = []
    # Without a dot it is unknown, or FSDP2 has hidden where it is.
    if "." in model_class and not model_class.startswith("transformers."):
        remarks.append(
            f"The model's class is {model_class}, not one of transformers: load it with "
            "from_pretrained of that class. The code of the class is not in the checkpoint."
        )
    if not any(name.startswith("token") or name.endswith(".model") for name in files):
        remarks.append("The checkpoint holds no tokenizer: save one beside the weights.")
    return remarks


def _stored(source: Checkpoint, values: Mapping[str, Any]) -> _Beside:
    """Returns the files that the checkpoint holds."""
    if "config" not in values.get("model", {}):
        raise CheckpointError(
            f"'{source.path}' holds no Hugging Face config, because its model was no "
            "HuggingFaceModel or the save left it out. Without it nobody knows which class the "
            "weights belong to. Give --config with a config.json, or with a folder that has one."
        )
    stored = values["model"]["config"]
    model_class = str(stored.get("class", ""))
    # FSDP2 makes a class of its own, in whose name Composer saved no module of the model's.
    if model_class.startswith("torch.distributed."):
        model_class = model_class.rpartition(".")[2].removeprefix("FSDP")
    files = dict(_tokenizer_files(values.get("tokenizer", {}), source.path))
    return _as_exported(stored["content"]), model_class, files


def _as_exported(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config as the export of a model writes it; Composer saves the running model's.

    Source: `PreTrainedModel.save_pretrained`, without whose first change attention is the slowest
    kind; LLM Foundry's `HuggingFaceCheckpointer` for the others, which are settings of MPT.
    """
    settings = {
        key: _as_exported(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key != "_attn_implementation_autoset"
    }
    return settings | {key: value for key, value in _EXPORTED.items() if key in settings}


def _tokenizer_files(stored: Mapping[str, Any], path: Path) -> Iterator[tuple[str, bytes]]:
    for name, entry in stored.items():
        suffix, content = entry["file_extension"], entry["content"]
        file_name = name if name.endswith(suffix) else name + suffix
        plain = file_name.isprintable() and Path(file_name).name == file_name
        if file_name in {"", ".", ".."} or not plain:
            raise CheckpointError(
                f"'{path}' calls a file of its tokenizer {file_name!r}, which is no file name. It "
                "could be written anywhere. Do not use this checkpoint."
            )
        if suffix == ".json":
            content = _json(_with_templates(content))
        elif isinstance(content, list | tuple):
            content = "\n".join(content)
        yield file_name, content if isinstance(content, bytes) else content.encode()


def _with_templates(content: Any) -> Any:
    """Returns a tokenizer's values with the special tokens of a template that has none.

    A sharded checkpoint keeps no empty mapping, and tokenizers refuses a template without it:
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/checkpoint/_traverse.py#L55
    """
    if isinstance(content, list | tuple):
        return [_with_templates(item) for item in content]
    if not isinstance(content, Mapping):
        return content
    completed = {key: _with_templates(item) for key, item in content.items()}
    if completed.get("type") == "TemplateProcessing":
        completed.setdefault("special_tokens", {})
    return completed


def _given(path: Path) -> _Beside:
    """Returns the files of --config."""
    folder = path if path.is_dir() else None
    file = path / "config.json" if folder else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise TypeError(f"it holds a {type(config).__name__}")
        files = {
            item.name: item.read_bytes()
            for item in (sorted(folder.iterdir()) if folder else ())
            if item.suffix in _SMALL_FILES
            and item.name != "config.json"
            and not item.name.endswith(".index.json")
        }
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"--config cannot be read from '{file}': {error}. Without it nobody knows which class "
            "the weights belong to. Give a config.json, or a folder that has one."
        ) from None
    return config, "", files


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


# --- Weights. ---


def _write_weights(tensors: dict[str, torch.Tensor], path: Path) -> None:
    path.touch()
    mode = path.stat().st_mode
    # `from_pretrained` raises when there is no `format` that it knows.
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)  # safetensors gives its file to nobody else, whatever the umask


def _check_dtypes(source: Checkpoint, names: Mapping[str, str]) -> None:
    """Refuses weights that no file of safetensors can hold."""
    dtypes = {name: source.tensors[key].dtype for name, key in names.items()}
    try:
        save({str(dtype): torch.empty(0, dtype=dtype) for dtype in set(dtypes.values())})
    except KeyError as error:  # safetensors' table has no such dtype
        dtype = error.args[0]
        name = next((name for name, kind in dtypes.items() if kind == dtype), "a weight")
        raise CheckpointError(
            f"'{source.path}' holds '{name}' in {str(dtype).removeprefix('torch.')}, which "
            "safetensors cannot hold. A Hugging Face folder would lack it. Write --to full, and "
            "give the weights another dtype yourself."
        ) from error


def _names(source: Checkpoint, again: set[str]) -> dict[str, str]:
    """Returns name for Hugging Face -> key, in the order of the model, without the keys `again`."""
    names: dict[str, str] = {}
    for key, key_path in source.under(*MODEL).items():
        name = ".".join(map(str, key_path))
        if key not in source.tensors or key in again:
            continue
        if not name.startswith(_PREFIX):
            raise CheckpointError(
                f"'{source.path}' holds the weight '{name}', which is outside of a "
                "HuggingFaceModel: the names of those begin with 'model.'. `from_pretrained` would "
                "not find it. Convert with --to full, and rename the weights yourself."
            )
        names[name.removeprefix(_PREFIX)] = key
    if not names:
        raise CheckpointError(
            f"'{source.path}' holds no weights. There is nothing to convert. Give a checkpoint of "
            "a whole training run."
        )
    return names


def _second_names(source: Checkpoint, config: Mapping[str, Any]) -> set[str]:
    """Returns keys to leave out, see [Note: tied weights]."""
    sizes = [size for size in _settings(config, "vocab_size") if isinstance(size, int)]
    if False in _settings(config, "tie_word_embeddings") or len(sizes) > 1:
        return set()
    vocabularies = {*sizes}
    again: set[str] = set()
    for first, *others in find_ties(source):
        shape = source.tensors[first].shape
        if len(shape) == 2 and shape[0] in vocabularies:
            tensor = source.tensor(first)
            again.update(key for key in others if torch.equal(tensor, source.tensor(key)))
    return again


def _settings(config: Mapping[str, Any], name: str) -> Iterator[Any]:
    """Yields every value of a setting: models of several parts have a config for each."""
    for key, value in config.items():
        if key == name:
            yield value
        elif isinstance(value, Mapping):
            yield from _settings(value, name)
