"""Tells what is at a path, and what the metadata of a folder of shards promises; reads no value."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from composer_fsdp2.checkpoint.metadata import (
    METADATA,
    StoredPieces,
    check_counts,
    covers_exactly,
    is_inside,
    read_metadata,
    senseless_metadata,
)
from composer_fsdp2.checkpoint.staging import sync
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.text import listed

__all__ = [
    "CHECKSUMS",
    "FolderContents",
    "Kind",
    "TensorEntry",
    "deepspeed_folder",
    "detect_kind",
    "files_of",
    "read_contents",
    "tensor_entries",
    "write_checksums",
]

Kind = Literal["sharded", "full"]

CHECKSUMS = "checksums.json"
"""Written by our saves beside `.metadata`: the size of every file, and a digest of `.metadata`.
The values are covered by the checksums inside the files, see [Note: checksums] in `pickles`."""

# The rank of something, or a layer, and then which state.
_DEEPSPEED_FILE = re.compile(r"^(\w*_rank|layer|expert)_.*[_-](model|optim)_states\.pt$")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Facts about a tensor that need no reading of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Returns the size of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FolderContents:
    """Holds what is known of a folder without looking at its other files.

    Attributes:
        metadata: keys, shapes and pieces, with `StoredPieces`.
        files: name -> bytes that the file has at least.
        gaps: key -> what is missing of its value.
    """

    metadata: Metadata
    files: dict[str, int]
    gaps: dict[str, str]


def detect_kind(path: Path) -> Kind:
    """Tells the two kinds apart by what is there, not by what a setting says.

    Raises:
        CheckpointError: there is nothing, or something that is neither.
    """
    if (path / METADATA).is_file():
        return "sharded"
    if deepspeed_folder(path) is not None:
        raise CheckpointError(
            f"'{path}' is a checkpoint of DeepSpeed. A run loads those of Composer, which cut "
            "weights in another way. Convert it, `composer-fsdp2 checkpoint convert "
            f"{shlex.quote(str(path))} DST --to sharded`, and load DST, with load_weights_only: "
            "true."
        )
    names = [item.name for item in path.iterdir()] if path.is_dir() else [path.name]
    if path.exists() and any(name.endswith(".safetensors") for name in names):
        raise CheckpointError(
            f"'{path}' holds weights as Hugging Face's libraries write them (safetensors), and "
            "this reads the checkpoints of a training run. Start a run from such a folder with "
            "pretrained_weights of parallelism_config.fsdp2, or read it with from_pretrained."
        )
    if path.is_dir():
        shown = listed(sorted(item.name for item in path.iterdir()), quote="") or "nothing"
        raise CheckpointError(
            f"'{path}' is no checkpoint: the folder has no '{METADATA}' (it holds {shown}). A save "
            "that was interrupted leaves such a folder, and the folder above checkpoints looks "
            "like this too. Give the folder of one complete checkpoint, or a file."
        )
    if path.is_file():
        return "full"
    if re.match(r"\w+:/", str(path)):
        address = str(path).replace(":/", "://", 1)  # as it was, before it became a path
        raise CheckpointError(
            f"'{address}' is in an object store, and this reads files on a disk. Copy the folder "
            "or file first (for S3, aws s3 cp --recursive), and give the path of the copy. A run "
            "loads from the store itself, with load_path."
        )
    raise CheckpointError(
        f"There is no checkpoint at '{path}'. Nothing can be loaded from there. Give the path of a "
        "folder that a sharded save wrote, or of the file of a full save."
    )


def deepspeed_folder(path: Path) -> Path | None:
    """Returns the folder with the files of a DeepSpeed checkpoint that a path leads to, or None.

    A path may be that folder, a file in it, or the folder above, with a file that names the tag.
    """
    if path.is_file() and _DEEPSPEED_FILE.search(path.name):
        return path.parent
    if not path.is_dir():
        return None
    if any(_DEEPSPEED_FILE.search(item.name) for item in path.iterdir()):
        return path
    for item in (path / "latest", path / "latest_universal"):
        if item.is_file():
            tag = item.read_text(errors="replace").strip()
            if is_inside(tag) and tag.isprintable():
                return path / tag
    return None


def files_of(path: Path) -> dict[str, int]:
    """Returns name -> bytes of the files of a checkpoint; empty if there is none."""
    path = deepspeed_folder(path) or path
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {item.name: item.stat().st_size for item in files if item.is_file()}


def read_contents(path: Path) -> FolderContents:
    """Reads and checks the metadata of a folder of shards, and looks at no other file.

    Collective: no.

    Raises:
        CheckpointError: it is missing, damaged, makes no sense, or could execute code.
    """
    checksums = _read_checksums(path)
    # Before it is unpickled: metadata that is not what was written may ask for much.
    expected = checksums.get("metadata_sha256")
    readable = os.access(path / METADATA, os.R_OK)
    if expected is not None and readable and _digest_of(path / METADATA) != expected:
        raise CheckpointError(
            f"'{path / METADATA}' is damaged: it is not what was written beside it in "
            f"'{CHECKSUMS}'. Values would be looked for in wrong places. Take another "
            "checkpoint."
        )
    metadata = read_metadata(path)
    try:
        key_paths = metadata.planner_data or {}
        if not all(isinstance(tuple(key_path)[:1][0], str) for key_path in key_paths.values()):
            raise TypeError("a value has no name")
        files: dict[str, int] = dict(checksums.get("files", {}))
        for name, end in metadata.storage_data.ends().items():
            files[name] = max(files.get(name, 0), end)
        return FolderContents(metadata, files, dict(_find_gaps(metadata)))
    except (AttributeError, TypeError, LookupError) as error:
        raise senseless_metadata(path, error) from error


def tensor_entries(metadata: Metadata) -> dict[str, TensorEntry]:
    """Returns key -> shape and dtype of the tensors that metadata lists."""
    return {
        key: TensorEntry(tuple(entry.size), entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _find_gaps(metadata: Metadata) -> Iterator[tuple[str, str]]:
    """Yields values that no piece covers: a load would leave garbage there."""
    stored: StoredPieces = metadata.storage_data
    tensors = tensor_entries(metadata)
    layouts: dict[tuple[Any, ...], tuple[int, bool, bool]] = {}
    for key in metadata.state_dict_metadata:
        entry: Any = metadata.state_dict_metadata[key]
        starts = stored.starts(key)
        if key not in tensors:
            if not starts:
                yield key, f"'{key}' is in no file"
            continue
        shape, size_bytes = tensors[key].shape, tensors[key].size_bytes
        layout = shape, id(entry.chunks), id(starts)  # shared by tensors that are cut alike
        if layout not in layouts:
            sizes = {chunk.offsets: chunk.sizes for chunk in entry.chunks}
            boxes = [(start or (), sizes[start]) for start in starts if start in sizes]
            covered = sum(math.prod(part) for _, part in boxes)
            fits = covered == math.prod(shape) and len(boxes) == len(starts)
            layouts[layout] = covered, fits, fits and covers_exactly(shape, boxes)
        covered, fits, covers = layouts[layout]
        stored_bytes = stored.stored_bytes(key)
        if not fits:
            yield key, f"pieces of '{key}' hold {covered} of {math.prod(shape)} elements"
        elif not covers:
            yield key, f"pieces of '{key}' overlap, and leave gaps between them"
        elif size_bytes > stored_bytes:
            yield key, f"'{key}' has {stored_bytes} of {size_bytes} bytes"


def write_checksums(folder: Path) -> None:
    """Records what is in a folder; the values in it carry their own checksums."""
    files = {name: size for name, size in files_of(folder).items() if name != CHECKSUMS}
    checksums: dict[str, Any] = {"files": files}
    if METADATA in files:
        checksums["metadata_sha256"] = _digest_of(folder / METADATA)
    # Another node of a shared disk may be writing its own, which will be the same.
    (folder / CHECKSUMS).write_text(json.dumps(checksums, indent=1))
    sync(folder / CHECKSUMS)
    sync(folder)


def _read_checksums(folder: Path) -> Mapping[str, Any]:
    try:
        checksums = json.loads((folder / CHECKSUMS).read_text())
        files, digest = checksums["files"], checksums["metadata_sha256"]
        if not isinstance(files, dict) or not isinstance(digest, str):
            raise TypeError("no table of files, or no digest")
        if not all(is_inside(name) for name in files):
            raise ValueError("a file outside of the folder")
        check_counts(CHECKSUMS, files.values())
    except FileNotFoundError:
        return {}  # written by somebody else
    except (OSError, ValueError, LookupError, TypeError):
        raise CheckpointError(
            f"'{folder / CHECKSUMS}' is damaged. It cannot be told whether the checkpoint is "
            "whole. Take another checkpoint, or remove that file to load without this check."
        ) from None
    return checksums


def _digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
