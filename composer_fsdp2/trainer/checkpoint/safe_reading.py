"""Reads the parts of a checkpoint that Composer reads, without executing anything in it."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from composer.utils import checkpoint as composers
from torch.distributed.checkpoint.planner import LoadItemType

from composer_fsdp2.checkpoint.load import read_items
from composer_fsdp2.checkpoint.metadata import METADATA, check_places
from composer_fsdp2.checkpoint.pickles import load_object, load_plainly, trusts, vet_pickle
from composer_fsdp2.checkpoint.source import FolderCheckpoint
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.trainer.override_attribute import override_attribute

__all__ = [
    "download_checkpoint",
    "load_resumption",
    "read_file",
    "read_folder_data",
    "read_folder_metadata",
]

_CHECKPOINT = "checkpoint"
"""attribute of a reader that a load under FSDP2 uses: the folder, opened"""


def download_checkpoint(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces Composer's: archives unpack inside their folder, and hold but files and folders.

    Raises:
        CheckpointError: a member wants to go elsewhere.
    """
    # Composer calls `extractall` without a filter, and Python then takes this attribute.
    unpacks_inside = staticmethod(tarfile.data_filter)
    try:
        with override_attribute(tarfile.TarFile, "extraction_filter", unpacks_inside):
            return original(*args, **kwargs)
    except tarfile.FilterError as error:
        raise CheckpointError(
            f"The archive has a member that does not belong into a checkpoint: {error}. Unpacking "
            "it could overwrite any file. Do not use this archive."
        ) from None


def load_resumption(original: Callable[..., Any], state: Any, load_path: str) -> Any:
    """Replaces `load_resumption_checkpoint`.

    Raises:
        CheckpointError: the file could execute code.
    """
    vet_pickle(Path(load_path))
    return original(state, load_path)


def read_file(_original: Callable[..., Any], checkpoint_filepath: Any, map_location: str) -> Any:
    """Replaces the function that unpickles a file: returns what Composer's does.

    Raises:
        CheckpointError: it could execute code. Other errors are those of Composer's.
    """
    return load_plainly(Path(composers._ensure_valid_checkpoint(checkpoint_filepath)), map_location)


def read_folder_metadata(original: Callable[[Any], Any], reader: Any) -> Any:
    """Replaces `FileSystemReaderWithValidation.read_metadata`.

    A load under FSDP2 has opened the folder already; all others read what Composer reads.

    Raises:
        CheckpointError: it could execute code, or looks for files elsewhere.
    """
    folder = Path(reader.path)
    if hasattr(reader, _CHECKPOINT):
        composers._ensure_valid_checkpoint(folder / METADATA)
        return reader.checkpoint.metadata
    if (folder / METADATA).is_file():
        vet_pickle(folder / METADATA)
    metadata = original(reader)
    check_places(metadata, folder)
    return metadata


def read_folder_data(
    original: Callable[[Any, Any, Any], Any], reader: Any, plan: Any, planner: Any
) -> Any:
    """Replaces `FileSystemReaderWithValidation.read_data`; see `read_folder_metadata`.

    Raises:
        CheckpointError: an entry could execute code; under FSDP2, it is damaged.
    """
    if not hasattr(reader, _CHECKPOINT):
        # Planners of torch unpickle entries that are no tensors without a limit.
        for item in plan.items:
            info = reader.storage_data[item.storage_index]
            path = Path(reader.path, info.relative_path)
            if item.type != LoadItemType.BYTE_IO or not path.is_file():
                continue  # the original says that the file is missing
            with path.open("rb") as file:
                file.seek(info.offset)
                data = io.BytesIO(file.read(info.length))
            where = f"'{item.storage_index.fqn}' in '{path}'"
            load_object(data, where, trusted=trusts(path))
        return original(reader, plan, planner)
    folder: FolderCheckpoint = reader.checkpoint
    specs: dict[str, list[tuple[int, int]]] = {}
    for item in plan.items:
        info = folder.metadata.storage_data[item.storage_index]
        specs.setdefault(info.relative_path, []).append((info.offset, info.length))
    for name, spec in specs.items():
        composers._ensure_valid_checkpoint(folder.path / name, spec)
    read_items(folder, plan, planner)
    # torch waits for what a reader returns.
    done: torch.futures.Future[None] = torch.futures.Future()
    done.set_result(None)
    return done
