"""Reads the parts of a checkpoint that Composer reads, without executing anything in it."""

from __future__ import annotations

import ast
import contextlib
import io
import tarfile
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from composer import algorithms
from composer.utils import checkpoint as composers
from torch.distributed.checkpoint.planner import LoadItemType

from composer_fsdp2.checkpoint.algorithms import (
    descriptions,
    executes,
    is_plain_call,
    vet_algorithms,
)
from composer_fsdp2.checkpoint.load import read_items
from composer_fsdp2.checkpoint.metadata import METADATA, check_places
from composer_fsdp2.checkpoint.pickles import load_object, load_plainly, trusts, vet_pickle
from composer_fsdp2.checkpoint.source import FolderCheckpoint
from composer_fsdp2.errors import CheckpointError

__all__ = [
    "read_file",
    "read_folder_data",
    "read_folder_metadata",
    "unpacking_safely",
    "vet_algorithms",
    "vet_evaluated_algorithms",
]

_CHECKPOINT = "checkpoint"
"""attribute of a reader that a load under FSDP2 uses: the folder, opened"""


@contextlib.contextmanager
def unpacking_safely() -> Generator[None]:
    """Archives are unpacked inside their folder, and hold nothing but files and folders.

    Raises:
        CheckpointError: a member wants to go elsewhere.
    """
    unset = object()
    before = vars(tarfile.TarFile).get("extraction_filter", unset)
    # Composer calls `extractall` without a filter, and Python then takes this attribute.
    tarfile.TarFile.extraction_filter = staticmethod(tarfile.data_filter)
    try:
        yield
    except tarfile.FilterError as error:
        raise CheckpointError(
            f"The archive has a member that does not belong into a checkpoint: {error}. Unpacking "
            "it could overwrite any file. Do not use this archive."
        ) from None
    finally:
        if before is unset:
            del tarfile.TarFile.extraction_filter
        else:
            tarfile.TarFile.extraction_filter = before


def vet_evaluated_algorithms(
    state_dict: Mapping[str, Any],
    _logger: Any = None,
    exclude_algorithms: Iterable[str] | None = None,
    *_args: Any,
    **_kwargs: Any,
) -> None:
    """Refuses descriptions that Composer is about to evaluate, and no others.

    What Python cannot parse it cannot execute; Composer warns of it.

    Raises:
        CheckpointError: evaluating one could execute code.
    """
    excluded = () if exclude_algorithms is None else exclude_algorithms
    for name, text in descriptions(state_dict):
        known = getattr(algorithms, name, None)
        evaluated = known is not None and known.required_on_load() and name not in excluded
        if evaluated and not is_plain_call(name, text) and _can_be_parsed(f"algorithms.{text}"):
            raise executes(name, text)


def _can_be_parsed(text: str) -> bool:
    try:
        ast.parse(text, mode="eval")
    except (SyntaxError, ValueError):
        return False
    except (RecursionError, MemoryError):  # Composer's own attempt may get further
        return True
    return True


def read_file(path: str | Path, map_location: str) -> Any:
    """Replaces the function that unpickles a file: returns what Composer's does.

    Raises:
        CheckpointError: it could execute code. Other errors are those of Composer's.
    """
    return load_plainly(Path(composers._ensure_valid_checkpoint(path)), map_location)


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
    found = original(reader)
    check_places(found, folder)
    return found


def read_folder_data(
    original: Callable[[Any, Any, Any], Any], reader: Any, plan: Any, planner: Any
) -> Any:
    """Replaces `FileSystemReaderWithValidation.read_data`; see `read_folder_metadata`.

    Raises:
        CheckpointError: an entry could execute code; under FSDP2, it is damaged.
    """
    if not hasattr(reader, _CHECKPOINT):
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                _vet_entry(reader, item)
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


def _vet_entry(reader: Any, item: Any) -> None:
    """Looks at an entry that is no tensor, which planners of torch unpickle without a limit."""
    info = reader.storage_data[item.storage_index]
    path = Path(reader.path, info.relative_path)
    if path.is_file():  # else the original says so
        with path.open("rb") as file:
            file.seek(info.offset)
            data = file.read(info.length)
        where = f"'{item.storage_index.fqn}' in '{path}'"
        load_object(io.BytesIO(data), where, trusted=trusts(path))
