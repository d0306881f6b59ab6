"""Names, folders and data of a rehearsed run, without downloading anything."""

from __future__ import annotations

import copy
import glob
import inspect
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import DataLoader

from composer_fsdp2.config.messages import ascii_repr
from composer_fsdp2.foundry.rehearsal.notes import Notes, is_network_error

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

__all__ = [
    "NameState",
    "check_kwargs",
    "check_paths_of_run",
    "is_remote",
    "rehearse_loader",
    "rehearse_tokenizer",
    "settle_name",
]

NameState = Literal["here", "elsewhere", "unknown", "wrong"]

_WRITERS = ("json", "csv", "parquet", "text", "arrow", "pandas", "xml", "webdataset")
"""Hugging Face's names for local files of a format; the files are in `hf_kwargs`"""
_HUB_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json")
_SECONDS = 3.0
_OF_TORCH = (
    *("num_workers", "timeout", "drop_last"),
    *("prefetch_factor", "persistent_workers"),
)
"""what torch checks in arguments of a loader, whatever the data are"""
_CHECKPOINTS = (".metadata", "*.pt", "*.distcp")
_BEGINNINGS = (b"PK", b"\x80", b"\x1f\x8b")
"""of a file that torch wrote in its present or old format, and of an archive"""


def is_remote(path: Any) -> bool:
    """Whether a path is the address of another machine."""
    return isinstance(path, str) and "://" in path


def any_remote(block: Any) -> bool:
    """Whether an address is anywhere in a block."""
    if isinstance(block, Mapping):
        return any(map(any_remote, block.values()))
    return any(map(any_remote, block)) if isinstance(block, list) else is_remote(block)


# --- Names of the Hugging Face hub. ---


def settle_name(notes: Notes, where: str, name: Any) -> NameState:
    """Looks a model or tokenizer up: a folder, the local cache, the hub. Notes what is wrong."""
    if not isinstance(name, str) or not name:
        notes.add(f"{where}: {ascii_repr(name)} is no name.", "Write a folder, or a name of a hub.")
        return "wrong"
    if Path(name).is_dir() or _is_cached(name):
        return "here"
    if is_remote(name):
        return "elsewhere"
    return _ask_hub(notes, where, name)


def _is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return any(isinstance(try_to_load_from_cache(name, file), str) for file in _HUB_FILES)
    except HFValidationError:
        return False


def _ask_hub(notes: Notes, where: str, name: str) -> NameState:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    try:
        if name.startswith((".", "~")):
            raise HFValidationError(name)
        HfApi().model_info(name, timeout=_SECONDS)
    except HFValidationError:
        notes.add(
            f"{where}: there is no folder {ascii_repr(name)}, and it cannot be a name of the "
            "Hugging Face hub either.",
            f"Correct the path; it is read from {Path.cwd()}.",
        )
        return "wrong"
    except GatedRepoError:
        return "elsewhere"
    except RepositoryNotFoundError:
        notes.add(
            f"{where}: {ascii_repr(name)} is no folder here, in no registry of LLM Foundry, and "
            "the Hugging Face hub does not have it, or not for you.",
            "Correct the name, or log in to the hub.",
        )
        return "wrong"
    except Exception as error:
        if not is_network_error(error) and "offline" not in str(error).lower():
            raise
        _note_unknown(notes, where, name)
        return "unknown"
    return "elsewhere"


def _note_unknown(notes: Notes, where: str, name: str) -> None:
    text = f"{ascii_repr(name)} is no folder, in no registry and not in the local cache"
    if "/" in name:
        notes.unreachable(where, text)
        return
    notes.add(
        f"{where}: {text}; the Hugging Face hub could not be asked.",
        "Correct the name, or download it first.",
    )


def rehearse_tokenizer(notes: Notes, block: Any) -> PreTrainedTokenizerBase | None:
    """Builds the tokenizer where that needs no network; `None` where it does."""
    from llmfoundry import registry
    from llmfoundry.utils.builders import build_tokenizer

    where = "tokenizer"
    with notes.step(where, "Correct the block."):
        name = block["name"]
        kwargs = dict(block.get("kwargs") or {})
        registered = name in registry.tokenizers.get_all()
        if not registered:
            if settle_name(notes, f"{where}.name", name) != "here":
                return None
            kwargs["local_files_only"] = True
        return build_tokenizer(name, kwargs)
    return None


# --- Loaders. ---


def check_kwargs(function: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments with the function's defaults. Calls nothing.

    Raises:
        TypeError: the function does not take such arguments.
    """
    bound = inspect.signature(function).bind(**kwargs)
    bound.apply_defaults()
    return bound.arguments


def rehearse_loader(
    notes: Notes, where: str, block: Any, tokenizer: Any, batch_size: Any
) -> Any | None:
    """Checks a loader, and builds it where its data are on this machine and stay as they are."""
    from llmfoundry import registry

    if not isinstance(block, Mapping):
        notes.add(f"{where}: {ascii_repr(block)} is no mapping.", "Write name: and dataset:.")
        return None
    settings = copy.deepcopy(dict(block))
    name = settings.pop("name", None)
    before = len(notes.mistakes)
    if notes.known(f"{where}.name", name, registry.dataloaders.get_all(), "data loaders"):
        with notes.step(where):
            given = {**settings, "tokenizer": tokenizer, "device_batch_size": batch_size}
            bound = check_kwargs(registry.dataloaders.get(name), given)
            workers = {key: bound[key] for key in _OF_TORCH if key in bound}
            nothing: Any = [0]
            DataLoader(nothing, **workers)  # starts no process before it is iterated
    dataset = settings.get("dataset")
    if isinstance(dataset, Mapping):
        with notes.step(f"{where}.dataset"):
            for told, advice in _wrong_paths(dataset):
                notes.add(f"{where}.dataset.{told}", advice)
            if name == "finetuning":
                _check_finetuning(dataset)
    if tokenizer is None or len(notes.mistakes) > before or not _is_cheap(name, settings):
        return None
    with notes.step(where):
        build = registry.dataloaders.get(name)
        return build(**settings, tokenizer=tokenizer, device_batch_size=batch_size)
    return None


def _is_cheap(name: Any, settings: Mapping[str, Any]) -> bool:
    """Whether building it downloads nothing and does not tokenize the data first."""
    dataset = settings.get("dataset")
    if any_remote(settings) or not isinstance(dataset, Mapping):
        return False
    return "hf_name" not in dataset and (name != "finetuning" or "streams" in dataset)


def _wrong_paths(dataset: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Folders and files of a dataset that are not there."""
    streams = dataset.get("streams")
    if isinstance(streams, Mapping):
        for name, stream in streams.items():
            if isinstance(stream, Mapping):
                split = stream.get("split", dataset.get("split"))
                for told, advice in _wrong_stream(stream, split):
                    yield f"streams.{name}.{told}", advice
        return
    yield from _wrong_stream(dataset, dataset.get("split"))
    yield from _wrong_files(dataset)


def _wrong_stream(block: Mapping[str, Any], split: Any) -> Iterator[tuple[str, str]]:
    remote, local = block.get("remote"), block.get("local")
    key, place = ("remote", remote) if remote is not None else ("local", local)
    if not isinstance(place, str) or is_remote(place):
        return
    folder = Path(place, split) if isinstance(split, str) else Path(place)
    if not (folder / "index.json").is_file():
        missing = "no index.json in the folder" if folder.is_dir() else "no folder"
        yield (
            f"{key}: there is {missing} '{folder}', where the shards of the data would be.",
            f"Correct {key} or split; paths are read from {Path.cwd()}.",
        )


def _wrong_files(dataset: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    advice = f"Correct the path; it is read from {Path.cwd()}."
    name, kwargs = dataset.get("hf_name"), dataset.get("hf_kwargs") or {}
    if isinstance(name, str) and name.startswith((".", "/", "~")) and not os.path.exists(name):
        yield f"hf_name: there is no '{name}'.", advice
    folders = {"data_dir": dataset.get("data_dir"), "hf_kwargs.data_dir": None}
    if isinstance(kwargs, Mapping):
        folders["hf_kwargs.data_dir"] = kwargs.get("data_dir")
        for file in _files(kwargs.get("data_files")):
            path = Path(str(kwargs.get("data_dir") or ""), file)
            if name in _WRITERS and not is_remote(file) and not glob.glob(str(path)):
                yield f"hf_kwargs.data_files: there is no '{path}'.", advice
    if name not in _WRITERS:
        del folders["hf_kwargs.data_dir"]  # a folder of the hub's repository
    for key, folder in folders.items():
        if isinstance(folder, str) and not is_remote(folder) and not Path(folder).is_dir():
            yield f"{key}: there is no folder '{folder}'.", advice


def _files(given: Any) -> Iterator[str]:
    if isinstance(given, str):
        yield given
    elif isinstance(given, Mapping):
        for item in given.values():
            yield from _files(item)
    elif isinstance(given, list):
        for item in given:
            yield from _files(item)


def _check_finetuning(dataset: Mapping[str, Any]) -> None:
    from llmfoundry.data.finetuning.dataloader import _validate_config
    from llmfoundry.data.finetuning.tasks import dataset_constructor

    _validate_config(**copy.deepcopy(dict(dataset)))
    function = dataset.get("preprocessing_fn")
    if isinstance(function, str):
        dataset_constructor.get_preprocessing_fn_from_str(function)


# --- Folders of the run. ---


def check_paths_of_run(notes: Notes, config: Any, run_name: str) -> None:
    """Where it loads from, and where it saves to."""
    from composer.utils import format_name_with_dist

    path = config.load_path
    if isinstance(path, str) and not is_remote(path):
        with notes.step("load_path"):
            named = format_name_with_dist(path, run_name)
            if not os.path.exists(named):
                notes.add(
                    f"load_path: there is no '{named}'. The run would stop when it loads it.",
                    f"Correct the path; it is read from {Path.cwd()}.",
                )
            elif not _may_be_checkpoint(Path(named)):
                notes.add(
                    f"load_path: '{named}' holds no checkpoint. The run would stop at loading it.",
                    "Write a file, or a folder with `.metadata`, that a save has left.",
                )
    folder = config.save_folder
    if isinstance(folder, str) and not is_remote(folder):
        with notes.step("save_folder"):
            _check_writable(notes, Path(format_name_with_dist(folder, run_name)).absolute())


def _may_be_checkpoint(path: Path) -> bool:
    """Whether a path looks like a checkpoint, or like a folder or a link that leads to one."""
    if path.suffix == ".symlink":
        return True
    if path.is_dir():
        levels = ("", "*/", "*/*/")
        return any(next(path.glob(f"{a}{b}"), None) for a in levels for b in _CHECKPOINTS)
    with path.open("rb") as file:
        return file.read(2).startswith(_BEGINNINGS)


def _check_writable(notes: Notes, folder: Path) -> None:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        notes.add(f"save_folder: '{there}' is a file.", "Write another folder.")
        return
    try:
        # The rights do not tell it of a system that is read-only, or to the superuser.
        os.rmdir(tempfile.mkdtemp(dir=there))
    except OSError as error:
        notes.add(
            f"save_folder: '{there}' cannot be written: {error.strerror}. The first save would "
            "stop the run.",
            "Write another folder.",
        )
