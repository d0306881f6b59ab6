"""Opening a checkpoint of any kind under one interface: names, shapes and values by key.

Keys are those of torch.distributed.checkpoint: the way to a value through nested dictionaries and
lists, joined by dots, such as `state.model.lm_head.weight`. They are the same for a folder of
shards and for one file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from composer_fsdp2.checkpoint.archive import Archive, map_file
from composer_fsdp2.checkpoint.cover import covers_exactly
from composer_fsdp2.checkpoint.metadata import (
    METADATA,
    as_today,
    check_counts,
    is_inside,
    senseless_metadata,
)
from composer_fsdp2.checkpoint.pickles import load_file, load_object, read_metadata, trusts
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.shard.torch_private.members import check_private_members
from composer_fsdp2.shard.torch_private.tensors import flatten_state_dict

__all__ = [
    "CHECKSUMS",
    "Checkpoint",
    "FileCheckpoint",
    "FolderCheckpoint",
    "Kind",
    "TensorEntry",
    "Way",
    "detect_kind",
    "digest_of",
    "flatten",
    "open_checkpoint",
]

Kind = Literal["sharded", "full"]
Way = tuple[str | int, ...]
"""the way to a value, before its parts are joined by dots"""

CHECKSUMS = "checksums.json"
"""Written by our saves beside `.metadata`: the size of every file, and a digest of `.metadata`.
The values are covered by the checksums inside the files, see `archive`."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Facts about a tensor that need no reading of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class Checkpoint:
    """Common interface of a folder and a file; see the subclasses.

    Attributes:
        path: the folder or file.
        tensors: key -> shape and dtype, in the order of the file.
        objects: keys of everything that is no tensor.
        paths: key -> the way to it.
        problems: file or key -> what is known to be wrong with it; empty unless opened although
            `incomplete`.
    """

    kind: Kind
    path: Path
    problems: Mapping[str, str] = MappingProxyType({})
    tensors: Mapping[str, TensorEntry]
    objects: Collection[str]
    paths: Mapping[str, Way]

    def tensor(self, key: str) -> torch.Tensor:
        """The whole tensor on the CPU; where possible a view of the file, never to be written to.

        Raises:
            CheckpointError: its bytes are missing or damaged.
        """
        raise NotImplementedError

    def object(self, key: str) -> Any:
        """A value that is no tensor.

        Raises:
            CheckpointError: its bytes are missing, damaged, or could execute code.
        """
        raise NotImplementedError

    def check(self, share: tuple[int, int] = (0, 1)) -> Iterator[int]:
        """Reads everything and compares it with its checksums.

        Args:
            share: (i, n) looks at every n-th part from the i-th, so that ranks divide the work.

        Yields:
            the bytes of each part, when it has been read.

        Raises:
            CheckpointError: a file is missing, cut off, of another checkpoint, or damaged.
        """
        raise NotImplementedError

    @functools.cached_property
    def size_bytes(self) -> int:
        """Of all its files."""
        raise NotImplementedError

    def under(self, *start: str | int) -> dict[str, Way]:
        """Keys whose way begins with `start`, and the rest of their way."""
        n = len(start)
        return {key: way[n:] for key, way in self.paths.items() if way[:n] == start}


def detect_kind(path: Path) -> Kind:
    """Tells the two kinds apart by what is there, not by what a setting says.

    Raises:
        CheckpointError: there is nothing, or something that is neither.
    """
    if path.is_dir():
        if (path / METADATA).is_file():
            return "sharded"
        inside = sorted(item.name for item in path.iterdir())
        shown = ", ".join(inside[:5]) + (", ..." if len(inside) > 5 else "") or "nothing"
        raise CheckpointError(
            f"'{path}' is no checkpoint: the folder has no '{METADATA}' (it holds {shown}). A save "
            "that was interrupted leaves such a folder, and the folder above checkpoints looks "
            "like this too. Give the folder of one complete checkpoint, or a file."
        )
    if path.is_file():
        return "full"
    raise CheckpointError(
        f"There is no checkpoint at '{path}'. Nothing can be loaded from there. Give the path of a "
        "folder that a sharded save wrote, or of the file of a full save."
    )


def open_checkpoint(path: str | os.PathLike[str], *, incomplete: bool = False) -> Checkpoint:
    """Opens what is at a path, reading no tensor.

    Collective: no.

    Args:
        path: a folder or a file.
        incomplete: opens it although parts are missing; its `problems` say which.

    Raises:
        CheckpointError: it is no checkpoint, incomplete, damaged, or could execute code.
    """
    path = Path(path)
    if detect_kind(path) == "full":
        return FileCheckpoint(path)
    return FolderCheckpoint(path, incomplete=incomplete)


class FolderCheckpoint(Checkpoint):
    """A folder of shards with a `.metadata`, as torch.distributed.checkpoint writes it.

    In the layout of old Composer versions the optimizer is at the root; here it is where it is
    today, under `state`. No file is changed for that.

    Args:
        path: the folder.
        incomplete: opens it although files are missing, or are still to come.
    """

    kind: Kind = "sharded"

    def __init__(self, path: Path, *, incomplete: bool = False) -> None:
        self.path = path
        _check_digest(path)  # before it is unpickled: what is not what was written may ask for much
        self.metadata = as_today(read_metadata(path / METADATA), path)
        self._mapped: dict[str, memoryview] = {}
        try:
            self._index()
            self.problems = dict([*self._find_short_files(), *self._find_gaps()])
        except (AttributeError, TypeError, LookupError) as error:
            raise senseless_metadata(path, error) from error
        if self.problems and not incomplete:
            raise self._incomplete()

    def _index(self) -> None:
        entries = self.metadata.state_dict_metadata
        self.tensors = {
            key: TensorEntry(tuple(entry.size), entry.properties.dtype)
            for key, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.objects = {key: None for key in entries if key not in self.tensors}.keys()
        # Only a planner that flattens writes the ways to its values.
        ways = self.metadata.planner_data or {}
        self.paths = {key: tuple(ways.get(key, (key,))) for key in entries}
        self._chunks: dict[str, list[MetadataIndex]] = {}
        for index in self.metadata.storage_data:
            self._chunks.setdefault(index.fqn, []).append(index)

    def chunks(self, key: str) -> list[ChunkStorageMetadata]:
        """How a tensor is cut: offsets and sizes of its pieces."""
        entry = self.metadata.state_dict_metadata[key]
        return entry.chunks if isinstance(entry, TensorStorageMetadata) else []

    def chunk(self, index: MetadataIndex) -> torch.Tensor:
        """One piece of a tensor as it is on disk, its checksum compared.

        Raises:
            CheckpointError: it is missing, damaged, or a piece of another checkpoint.
        """
        archive = self.archive(index)
        archive.check()
        found = archive.tensor()
        expected = TensorEntry(tuple(self._chunk_of(index).sizes), self.tensors[index.fqn].dtype)
        if (tuple(found.shape), found.dtype) != (expected.shape, expected.dtype):
            raise CheckpointError(
                f"{archive.where} is a {found.dtype} of shape {tuple(found.shape)}, where the "
                f"metadata promises a {expected.dtype} of shape {expected.shape}. Its file belongs "
                "to another checkpoint. Take another copy."
            )
        return found

    def raw(self, index: MetadataIndex) -> memoryview:
        """The bytes of one piece or object, unread."""
        info = self.metadata.storage_data[index]
        mapped = self._mapped.get(info.relative_path)
        if mapped is None:
            mapped = self._mapped[info.relative_path] = map_file(self.path / info.relative_path)
        return mapped[info.offset : info.offset + info.length]

    def archive(self, index: MetadataIndex) -> Archive:
        """The archive that holds one piece or object."""
        info = self.metadata.storage_data[index]
        return Archive(self.raw(index), f"'{index.fqn}' in '{self.path / info.relative_path}'")

    def indices(self, key: str) -> list[MetadataIndex]:
        """Where the pieces of a value are; an object has one."""
        return self._chunks.get(key, [])

    def tensor(self, key: str) -> torch.Tensor:
        """The whole tensor; a view of the file if it is in one piece."""
        if key in self.problems:
            raise self._incomplete()
        entry = self.tensors[key]
        # A rank without rows of a tensor saves an empty piece, which begins at the tensor's end.
        pieces = [i for i in self.indices(key) if math.prod(self._chunk_of(i).sizes)]
        if len(pieces) == 1 and tuple(self._chunk_of(pieces[0]).sizes) == entry.shape:
            return self.chunk(pieces[0])
        whole = torch.empty(entry.shape, dtype=entry.dtype)
        for index in pieces:
            target = whole
            for dim, start in enumerate(index.offset or ()):
                target = target.narrow(dim, start, self._chunk_of(index).sizes[dim])
            target.copy_(self.chunk(index))
        return whole

    def _chunk_of(self, index: MetadataIndex) -> ChunkStorageMetadata:
        chunks = self.chunks(index.fqn)
        # torch's plan keeps the place of a piece in `chunks` as a hint; the offset decides.
        hint = index.index
        if hint is not None and hint < len(chunks) and chunks[hint].offsets == index.offset:
            return chunks[hint]
        found = next((chunk for chunk in chunks if chunk.offsets == index.offset), None)
        if found is None:
            raise self._incomplete()  # `_find_gaps` has found it
        return found

    def object(self, key: str) -> Any:
        """A value that is no tensor, its checksum compared."""
        if key in self.problems:
            raise self._incomplete()
        return self._object_at(self.indices(key)[0])

    def _object_at(self, index: MetadataIndex) -> Any:
        archive = self.archive(index)
        archive.check()
        return load_object(archive.data, archive.where, trusted=trusts(self.path))

    def check(self, share: tuple[int, int] = (0, 1)) -> Iterator[int]:
        """Every n-th piece, read as a load reads it."""
        first, step = share
        for index in list(self.metadata.storage_data)[first::step]:
            yield self.check_piece(index)

    def check_piece(self, index: MetadataIndex) -> int:
        """Reads one piece or object as a load does, without keeping it; returns its bytes."""
        if index.fqn in self.tensors:
            self.chunk(index)
        else:
            self._object_at(index)
        return self.metadata.storage_data[index].length

    @functools.cached_property
    def size_bytes(self) -> int:
        """Of all its files."""
        return sum(item.stat().st_size for item in self.path.iterdir() if item.is_file())

    def _find_short_files(self) -> Iterator[tuple[str, str]]:
        """Every file is there, and long enough; costs one look at each."""
        needed: dict[str, int] = {}
        for info in self.metadata.storage_data.values():
            end = info.offset + info.length
            needed[info.relative_path] = max(needed.get(info.relative_path, 0), end)
        for name, size in _read_checksums(self.path).get("files", {}).items():
            needed[name] = max(needed.get(name, 0), size)
        for name, size in needed.items():
            file = self.path / name
            if not file.is_file():
                yield name, f"'{name}' is missing"
            elif file.stat().st_size < size:
                yield name, f"'{name}' has {file.stat().st_size} of {size} bytes"

    def _find_gaps(self) -> Iterator[tuple[str, str]]:
        """Every value is somewhere: what no piece covers would be read as garbage."""
        for key, entry in self.tensors.items():
            stored = {index.offset for index in self.indices(key)}
            pieces = [chunk for chunk in self.chunks(key) if chunk.offsets in stored]
            found, size = sum(math.prod(c.sizes) for c in pieces), math.prod(entry.shape)
            stored_bytes = sum(self.metadata.storage_data[i].length for i in self.indices(key))
            if found != size or len(pieces) != len(stored):
                yield key, f"pieces of '{key}' hold {found} of {size} elements"
            elif not covers_exactly(entry.shape, [(c.offsets, c.sizes) for c in pieces]):
                yield key, f"pieces of '{key}' overlap, and leave gaps between them"
            elif entry.size_bytes > stored_bytes:
                yield key, f"'{key}' has {stored_bytes} of {entry.size_bytes} bytes"
        for key in self.objects:
            if not self.indices(key):
                yield key, f"'{key}' is in no file"

    def _incomplete(self) -> CheckpointError:
        problems = list(self.problems.values())
        shown = ", ".join(problems[:20])
        more = f" and {len(problems) - 20} more" if len(problems) > 20 else ""
        return CheckpointError(
            f"The checkpoint '{self.path}' is incomplete: {shown}{more}. Some weights are not "
            "there. Restore the files, or take another checkpoint."
        )


def _check_digest(folder: Path) -> None:
    """Compares `.metadata`, which is small, with its digest where our save wrote one.

    Raises:
        CheckpointError: it is not what was written.
    """
    expected = _read_checksums(folder).get("metadata_sha256")
    metadata = folder / METADATA
    if expected is not None and os.access(metadata, os.R_OK) and digest_of(metadata) != expected:
        raise CheckpointError(
            f"'{metadata}' is damaged: it is not what was written beside it in '{CHECKSUMS}'. "
            "Values would be looked for in wrong places. Take another checkpoint."
        )


def digest_of(path: Path) -> str:
    """SHA-256 of a small file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read_checksums(folder: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((folder / CHECKSUMS).read_text())
        files, digest = found["files"], found["metadata_sha256"]
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
    return found


class FileCheckpoint(Checkpoint):
    """One file that `torch.save` wrote: nested dictionaries with whole tensors.

    Tensors stay in the file until they are read. Two keys may hold the same tensor; then the file
    holds it once, and so does `values`.

    Attributes:
        values: everything, nested as in the file.
    """

    kind: Kind = "full"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values = load_file(path)
        if not isinstance(self.values, dict):
            raise CheckpointError(
                f"'{path}' holds a {type(self.values).__name__}, not a dictionary. It is no "
                "checkpoint of a training run. Give the file that Composer wrote."
            )
        self.refresh()

    def refresh(self) -> None:
        """Looks at `values` again after a change."""
        self._flat, self.paths = flatten(self.values)
        self.tensors = {
            key: TensorEntry(tuple(value.shape), value.dtype)
            for key, value in self._flat.items()
            if isinstance(value, torch.Tensor)
        }
        self.objects = {key: None for key in self._flat if key not in self.tensors}.keys()

    def tensor(self, key: str) -> torch.Tensor:
        """The whole tensor, a view of the file."""
        return self._flat[key]

    def object(self, key: str) -> Any:
        """A value that is no tensor."""
        return self._flat[key]

    def stored_crc(self, key: str) -> int | None:
        """The checksum of a tensor's whole storage as the file has it; None if it has none."""
        return self._crcs.get(self._flat[key].untyped_storage().data_ptr())

    @functools.cached_property
    def _crcs(self) -> dict[int, int]:
        """By address: storages are mapped in one piece, so they lie as the archive's members do."""
        data = map_file(self.path)
        if bytes(data[:2]) != b"PK":
            return {}
        archive = Archive(data, f"'{self.path}'")
        members = [m for name, m in archive.members.items() if "/data/" in name and m.size]
        storages = (self._flat[key].untyped_storage() for key in self.tensors)
        mapped = {storage.data_ptr() for storage in storages if storage.nbytes()}
        if not members or not mapped:
            return {}
        base = min(mapped) - min(member.start for member in members)
        crcs = {base + member.start: member.crc for member in members}
        return crcs if mapped <= crcs.keys() else {}

    def check(self, share: tuple[int, int] = (0, 1)) -> Iterator[int]:
        """Every n-th member of the archive."""
        data = map_file(self.path)
        if bytes(data[:2]) == b"PK":  # older files have no checksums
            Archive(data, f"'{self.path}'").check(share)
        yield len(data)

    @functools.cached_property
    def size_bytes(self) -> int:
        """Of the file."""
        return self.path.stat().st_size


def flatten(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Way]]:
    """Values and ways by key, with the keys torch.distributed.checkpoint would give them.

    Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/checkpoint/_nested_dict.py#L27
    """
    check_private_members(["checkpoints"])
    try:
        flat, ways = flatten_state_dict(dict(values))
    except ValueError as error:
        raise CheckpointError(
            f"Two values have the same key: {error}. Only one of them could be kept. Rename one in "
            "the state that was saved."
        ) from None
    return flat, {key: tuple(way) for key, way in ways.items()}
