"""From a checkpoint to a folder that `from_pretrained` loads, one tensor at a time.

Composer keeps the Hugging Face config and the tokenizer's files in the checkpoint, under
`state.integrations.huggingface`, as the values that were in the JSON files.

[Note: tied weights] `from_pretrained` ties word embeddings again if the config says so, and
nothing else. So of equal word embeddings the first is written, and of everything else every name:
a name too many costs bytes, a name too few leaves a weight at random values.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from composer_fsdp2.checkpoint.adapters import adapter_names, write_adapters
from composer_fsdp2.checkpoint.convert import Advance, nest, prove_whole
from composer_fsdp2.checkpoint.describe import MODEL, find_ties
from composer_fsdp2.checkpoint.source import Checkpoint, TensorEntry
from composer_fsdp2.checkpoint.staging import staged
from composer_fsdp2.errors import CheckpointError

__all__ = ["write_huggingface"]

_STORED = ("state", "integrations", "huggingface")
_PREFIX = "model."
"""of the HuggingFaceModel around the model"""
_SMALL_FILES = (".jinja", ".json", ".model", ".txt")
_EXPORTED = {"attn_impl": "torch", "init_device": "cpu"}
_BLOCK = 1 << 24
"""elements written at once"""
_DTYPES = {
    torch.bool: "BOOL",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.uint8: "U8",
}


@dataclass(slots=True)
class _Pretrained:
    """Files beside the weights."""

    config: dict[str, Any]
    model_class: str = ""
    files: dict[str, bytes] = field(default_factory=dict)


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

    Memory: one tensor, where it is in several pieces; all adapters.

    Args:
        source: an open checkpoint of a HuggingFaceModel.
        destination: a path where nothing is yet, or an empty folder.
        max_file_bytes: a new file begins where this would be exceeded.
        advance: told how far it is.
        dtype: of all floating point weights; None keeps each as it is.
        config: a `config.json`, or a folder with one and perhaps the tokenizer's files, instead of
            what the checkpoint holds.

    Returns:
        What its user should know, one sentence each.

    Raises:
        CheckpointError: the checkpoint holds no config, or no Hugging Face model, or is damaged;
            or the destination cannot be written.
    """
    values = _integration(source)
    if "peft_config" in values.get("model", {}):
        return _write_peft(source, destination, advance, values, dtype, config)
    found = _given(config) if config is not None else _stored(source, values)
    names = _names(source, _second_names(source, found.config))
    entries = {name: _as_written(source.tensors[key], dtype) for name, key in names.items()}
    files = _divide(entries, max_file_bytes)
    with staged(destination, folder=True) as folder:
        prove_whole(source)
        total = max(1, sum(source.tensors[key].size_bytes for key in names.values()))
        done = 0
        for file_name, inside in files.items():
            with (folder / file_name).open("wb") as file:
                _write_header(file, {name: entries[name] for name in inside})
                for name in inside:
                    _write_values(file, source.tensor(names[name]), entries[name].dtype)
                    done += source.tensors[names[name]].size_bytes
                    advance(done, total)
        if len(files) > 1:
            _write_index(folder, files, entries)
        found.config.update(_about_weights(found, entries))
        (folder / "config.json").write_text(_json(found.config))
        _write_beside(folder, found.files)
    return _remarks(found)


# --- Config and tokenizer. ---


def _integration(source: Checkpoint) -> dict[str, Any]:
    keys = source.under(*_STORED)
    return nest((way, _value(source, key)) for key, way in keys.items())


def _stored(source: Checkpoint, values: Mapping[str, Any]) -> _Pretrained:
    if "config" not in values.get("model", {}):
        raise CheckpointError(
            f"'{source.path}' holds no Hugging Face config, because its model was no "
            "HuggingFaceModel or the save left it out. Without it nobody knows which class the "
            "weights belong to. Give --config with a config.json, or with a folder that has one."
        )
    stored = values["model"]["config"]
    return _Pretrained(
        _as_saved(stored["content"]),
        _own_class(str(stored.get("class", ""))),
        dict(_tokenizer_files(values.get("tokenizer", {}), source.path)),
    )


def _write_peft(
    source: Checkpoint,
    destination: Path,
    advance: Advance,
    values: Mapping[str, Any],
    dtype: torch.dtype | None,
    config: Path | None,
) -> list[str]:
    if config is not None:
        raise CheckpointError(
            f"'{source.path}' holds adapters of PEFT, and --config is given. Their folder has no "
            "config.json: the base model has it, and is loaded from where it is. Remove --config."
        )
    settings = values["model"]["peft_config"]["content"]
    keys = _names(source, set())
    stored = values["model"].get("config", {}).get("content", {})
    embeddings = _embeddings(source, keys, stored)
    base_size = _base_vocabulary(settings)
    resized = base_size is not None and stored.get("vocab_size") not in (None, base_size)
    names = adapter_names(settings, keys, source.path, embeddings=embeddings, resized=resized)
    found = _Pretrained({}, files=dict(_tokenizer_files(values.get("tokenizer", {}), source.path)))
    with staged(destination, folder=True) as folder:
        prove_whole(source)
        keys = {name: keys[inside] for name, inside in names.items()}
        write_adapters(source, folder, settings, keys, dtype)
        _write_beside(folder, found.files)
    advance(1, 1)
    base = settings.get("base_model_name_or_path") or "the base model"
    remarks = [f"These are adapters: load {base} first, then them with PeftModel."]
    if embeddings and base_size is None:
        remarks.append(
            f"{base} is no folder on this machine: it is taken to have as many tokens. If the "
            "vocabulary was resized, the embeddings are missing here."
        )
    return [*_remarks(found), *remarks]


def _embeddings(
    source: Checkpoint, keys: Mapping[str, str], config: Mapping[str, Any]
) -> list[str]:
    """Names of the matrices with a row for each token."""
    shapes = {name: source.tensors[key].shape for name, key in keys.items()}
    size = config.get("vocab_size")
    return [n for n, shape in shapes.items() if len(shape) == 2 and shape[0] == size]


def _base_vocabulary(settings: Mapping[str, Any]) -> int | None:
    """How many tokens the base model has, if it is a folder on this machine."""
    base = settings.get("base_model_name_or_path")
    if not base:
        return None
    file = Path(base) / "config.json"
    try:
        return json.loads(file.read_text(encoding="utf-8")).get("vocab_size")
    except (OSError, ValueError):
        return None


def _as_saved(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as the export of a model writes it; Composer saves the one of the running model.

    Source: `PreTrainedModel.save_pretrained`, without whose first change attention is the slowest
    kind; LLM Foundry's `HuggingFaceCheckpointer` for the others, which are settings of MPT.
    """
    settings = {
        key: _as_saved(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key != "_attn_implementation_autoset"
    }
    return settings | {key: value for key, value in _EXPORTED.items() if key in settings}


def _value(source: Checkpoint, key: str) -> Any:
    return source.tensor(key) if key in source.tensors else source.object(key)


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
            yield file_name, _json(content).encode()
        elif isinstance(content, bytes):
            yield file_name, content
        else:
            text = content if isinstance(content, str) else "\n".join(content)
            yield file_name, text.encode()


def _write_beside(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        if (folder / name).exists():
            raise CheckpointError(
                f"The checkpoint calls a file of its tokenizer '{name}', as one of the model is "
                "called. It would take its place. Do not use this checkpoint."
            )
        (folder / name).write_bytes(data)


def _given(path: Path) -> _Pretrained:
    folder = path if path.is_dir() else None
    file = path / "config.json" if folder else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        small = sorted(folder.iterdir()) if folder else []
        files = {
            item.name: item.read_bytes()
            for item in small
            if item.suffix in _SMALL_FILES
            and item.name != "config.json"
            and not item.name.endswith(".index.json")
        }
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"--config cannot be read from '{file}': {error}. Without it nobody knows which class "
            "the weights belong to. Give a config.json, or a folder that has one."
        ) from None
    if not isinstance(config, dict):
        raise CheckpointError(
            f"'{file}' is no config: it holds a {type(config).__name__}. Without one nobody knows "
            "which class the weights belong to. Give a config.json, or a folder that has one."
        )
    return _Pretrained(config, files=files)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _own_class(saved: str) -> str:
    """Returns the name of a model's class; FSDP2 hides its module where Composer saved it."""
    module, _, name = saved.rpartition(".")
    return name.removeprefix("FSDP") if module.startswith("torch.distributed.") else saved


def _about_weights(found: _Pretrained, entries: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Settings of the config that `save_pretrained` of a model would have added."""
    settings: dict[str, Any] = {}
    dtypes = {entry.dtype for entry in entries.values() if entry.dtype.is_floating_point}
    if len(dtypes) == 1:
        settings["torch_dtype"] = str(dtypes.pop()).removeprefix("torch.")
    if found.model_class and not found.config.get("architectures"):
        settings["architectures"] = [found.model_class.rpartition(".")[2]]
    return settings


def _remarks(found: _Pretrained) -> list[str]:
    remarks: list[str] = []
    # Without a dot it is unknown, or FSDP2 has hidden where it is.
    if "." in found.model_class and not found.model_class.startswith("transformers."):
        remarks.append(
            f"The model's class is {found.model_class}, not one of transformers: load it with "
            "from_pretrained of that class. The code of the class is not in the checkpoint."
        )
    if not any(name.startswith("token") or name.endswith(".model") for name in found.files):
        remarks.append("The checkpoint holds no tokenizer: save one beside the weights.")
    return remarks


# --- Weights. ---


def _names(source: Checkpoint, again: set[str]) -> dict[str, str]:
    """Name for Hugging Face -> key, in the order of the model, without the keys `again`."""
    names: dict[str, str] = {}
    for key, way in source.under(*MODEL).items():
        name = ".".join(map(str, way))
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
    """Keys to leave out, see [Note: tied weights]."""
    if False in _settings(config, "tie_word_embeddings"):
        return set()
    vocabularies = {size for size in _settings(config, "vocab_size") if isinstance(size, int)}
    again: set[str] = set()
    for first, *others in find_ties(source):
        shape = source.tensors[first].shape
        if len(shape) == 2 and shape[0] in vocabularies:
            again.update(key for key in others if _equal(source, first, key))
    return again


def _settings(config: Mapping[str, Any], name: str) -> Iterator[Any]:
    """Every value of a setting: models of several parts have a config for each."""
    for key, value in config.items():
        if key == name:
            yield value
        elif isinstance(value, Mapping):
            yield from _settings(value, name)


def _equal(source: Checkpoint, first: str, second: str) -> bool:
    return torch.equal(source.tensor(first), source.tensor(second))


def _as_written(entry: TensorEntry, dtype: torch.dtype | None) -> TensorEntry:
    cast = dtype is not None and entry.dtype.is_floating_point
    written = TensorEntry(entry.shape, dtype if cast and dtype is not None else entry.dtype)
    if written.dtype not in _DTYPES:
        raise CheckpointError(
            f"A weight has the dtype {written.dtype}, which safetensors does not know. It cannot "
            "be written. Convert with --to full."
        )
    return written


def _divide(entries: Mapping[str, TensorEntry], max_bytes: int) -> dict[str, list[str]]:
    """File -> names, with the file names that transformers uses."""
    groups: list[list[str]] = []
    size = math.inf
    for name, entry in entries.items():
        if size + entry.size_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += entry.size_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    n = len(groups)
    return {f"model-{i:05d}-of-{n:05d}.safetensors": names for i, names in enumerate(groups, 1)}


def _write_header(file: BinaryIO, entries: Mapping[str, TensorEntry]) -> None:
    """Source: github.com/huggingface/safetensors, README, "Format"."""
    # `from_pretrained` raises when there is metadata without a `format` that it knows.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, entry in entries.items():
        end = start + entry.size_bytes
        header[name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
        start = end
    data = json.dumps(header, separators=(",", ":")).encode()
    # Spaces at the end are JSON, and the data then begins at a multiple of 8 bytes.
    data += b" " * (-len(data) % 8)
    file.write(struct.pack("<Q", len(data)) + data)


def _write_values(file: BinaryIO, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    flat = tensor.detach().reshape(-1)
    for start in range(0, len(flat), _BLOCK):
        block = flat[start : start + _BLOCK].to(dtype)
        # As bytes, because numpy has no bfloat16 and no float8.
        file.write(block.view(torch.uint8).numpy().data)


def _write_index(
    folder: Path, files: Mapping[str, Iterable[str]], entries: Mapping[str, TensorEntry]
) -> None:
    index = {
        "metadata": {"total_size": sum(entry.size_bytes for entry in entries.values())},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    (folder / "model.safetensors.index.json").write_text(_json(index))
