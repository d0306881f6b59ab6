"""Converts a checkpoint to the other kind, offline and piece by piece.

One process, no process group. torch.distributed.checkpoint's own writer keeps every tensor until
the end; here memory does not depend on the size of the checkpoint.
"""

from __future__ import annotations

import math
import mmap
import pickle
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from composer_fsdp2.checkpoint.algorithms import take_trained_weights, vet_algorithms_of
from composer_fsdp2.checkpoint.describe import find_ties
from composer_fsdp2.checkpoint.metadata import METADATA
from composer_fsdp2.checkpoint.source import (
    Checkpoint,
    FileCheckpoint,
    TensorEntry,
    Way,
    write_checksums,
)
from composer_fsdp2.checkpoint.staging import staged
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.shard.torch_private.members import check_private_members
from composer_fsdp2.shard.torch_private.tensors import storage_info

__all__ = ["Advance", "counter", "map_copies", "nest", "prove_whole", "write_full", "write_sharded"]

Advance = Callable[[int, int], object]
"""Told after each part: bytes done so far, bytes in all."""

_PIECE_BYTES = 1 << 28
"""A rank that needs a slice reads whole pieces."""
_ALIGN = 64


def counter(advance: Advance, total: int) -> Callable[[int], None]:
    """Returns a function that adds bytes, and tells how far it is."""
    done = 0

    def add(size_bytes: int) -> None:
        nonlocal done
        done += size_bytes
        advance(done, max(1, total))

    return add


def prove_whole(source: Checkpoint) -> None:
    """Compares a file with its checksums; a folder does so with each piece that is read.

    Raises:
        CheckpointError: it is damaged, or loading it could execute code.
    """
    vet_algorithms_of(source)
    if isinstance(source, FileCheckpoint):
        source.check()


# --- To a folder of shards. ---


def write_sharded(
    source: Checkpoint, destination: Path, max_file_bytes: int, advance: Advance
) -> None:
    """Writes a folder as torch.distributed.checkpoint does, with our checksums beside it.

    Every key gets a tensor of its own, in pieces of whole rows. An optimizer at the root is then
    where it is today.

    Args:
        source: an open checkpoint.
        destination: a path where nothing is yet, or an empty folder.
        max_file_bytes: a new file begins where this would be exceeded.
        advance: told how far it is.

    Raises:
        CheckpointError: the source is damaged, or the destination cannot be written.
    """
    with staged(destination, folder=True) as folder, _Shards(folder, max_file_bytes) as shards:
        prove_whole(source)
        read = counter(advance, sum(entry.size_bytes for entry in source.tensors.values()))
        for key in source.paths:
            if key in source.tensors:
                _write_pieces(key, source.tensor(key), shards)
                read(source.tensors[key].size_bytes)
            else:
                shards.entries[key] = BytesStorageMetadata()
                shards.add(MetadataIndex(key), source.object(key))
        shards.finish(source.paths)


class _Shards(AbstractContextManager["_Shards"]):
    """Writes the files of a sharded checkpoint."""

    def __init__(self, folder: Path, max_file_bytes: int) -> None:
        check_private_members(["checkpoints"])
        self.entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._folder = folder
        self._limit = max_file_bytes
        self._places: dict[MetadataIndex, Any] = {}
        self._files: list[str] = []
        self._stack = ExitStack()
        self._file: BinaryIO | None = None

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, index: MetadataIndex, value: Any) -> None:
        """Appends a value; the bytes around a tensor count for the next file."""
        file, size_bytes = self._file, value.nbytes if isinstance(value, torch.Tensor) else 0
        if file is None or (file.tell() and file.tell() + size_bytes > self._limit):
            self._stack.close()
            # torch's form of a name, `__<rank>_<number>`. Readers take the names from `.metadata`.
            self._files.append(f"__{len(self._files)}_0.distcp")
            path = self._folder / self._files[-1]
            file = self._file = self._stack.enter_context(path.open("wb"))
        start = file.tell()
        torch.save(value, file)
        self._places[index] = storage_info(self._files[-1], start, file.tell() - start)

    def finish(self, paths: Mapping[str, Way]) -> None:
        """Writes what finds the values, and what proves them whole."""
        self._stack.close()
        metadata = Metadata(self.entries, dict(paths), self._places, StorageMeta())
        (self._folder / METADATA).write_bytes(pickle.dumps(metadata))
        write_checksums(self._folder)


def _write_pieces(key: str, tensor: torch.Tensor, shards: _Shards) -> None:
    """Writes a tensor in pieces of whole rows."""
    pieces, rows = (tensor,), 1
    if tensor.ndim and tensor.numel():
        rows = max(1, _PIECE_BYTES * len(tensor) // tensor.nbytes)
        pieces = tensor.split(rows)
    chunks: list[ChunkStorageMetadata] = []
    for number, piece in enumerate(pieces):
        start = torch.Size([number * rows, *[0] * tensor.ndim][: tensor.ndim])
        chunks.append(ChunkStorageMetadata(start, piece.shape))
        # `torch.save` writes whole storages, of which the piece is a part.
        own = piece.detach().clone(memory_format=torch.contiguous_format)
        # The number is a hint for the search in `chunks`, and no part of the index's equality.
        shards.add(MetadataIndex(key, start, number), own)
    properties = TensorProperties(dtype=tensor.dtype)
    shards.entries[key] = TensorStorageMetadata(properties, tensor.shape, chunks)


# --- To one file. ---


def write_full(
    source: Checkpoint, destination: Path, advance: Advance, *, trained: bool = False
) -> None:
    """Writes one file as Composer's full save does: nested dictionaries with whole tensors.

    Tied weights share one tensor. Tensors of an optimizer share none, or each step would count
    once for every parameter that shares it.

    Args:
        source: an open checkpoint.
        destination: a path where nothing is yet. Tensors are put together in a file without a name
            beside it, not in memory.
        advance: told how far it is.
        trained: takes the trained weights in place of EMA's averages.

    Raises:
        CheckpointError: the source is damaged, or the destination cannot be written; or there are
            no averages.
    """
    # Each tensor is read, and then written.
    total = 2 * sum(entry.size_bytes for entry in source.tensors.values())
    with staged(destination, folder=False) as path:
        prove_whole(source)
        keys = {key: key for key in source.tensors}
        copies = map_copies(source, keys, destination.parent, counter(advance, total))
        values: dict[str, Any] = {
            key: copies[key] if key in copies else source.object(key) for key in source.paths
        }
        for first, *others in find_ties(source):
            for other in others:
                # A checksum says that they are probably equal; this makes it certain.
                if torch.equal(values[first], values[other]):
                    values[other] = values[first]
        nested = nest((source.paths[key], value) for key, value in values.items())
        for optimizer in nested.get("state", {}).get("optimizers", {}).values():
            # A key of its own in a file; a folder has none for an empty dictionary.
            optimizer.setdefault("state", {})
        if trained:
            take_trained_weights(nested)
        with path.open("wb") as file:
            torch.save(nested, file)
        advance(max(1, total), max(1, total))


def map_copies(
    source: Checkpoint,
    keys: Mapping[str, str],
    folder: Path,
    read: Callable[[int], object],
    dtype: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """Puts tensors into a file without a name and maps it, so that they take no memory.

    Each tensor is the whole of its storage, which `torch.save` and safetensors want.

    Args:
        source: an open checkpoint.
        keys: name -> key of a tensor.
        folder: has room for them.
        read: told the bytes of each tensor.
        dtype: of floating point tensors; None keeps each as it is.
    """
    entries: dict[str, tuple[int, TensorEntry]] = {}
    with tempfile.TemporaryFile(dir=folder) as file:
        for name, key in keys.items():
            tensor = source.tensor(key).detach()
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(dtype)
            file.seek(math.ceil(file.tell() / _ALIGN) * _ALIGN)
            entries[name] = (file.tell(), TensorEntry(tuple(tensor.shape), tensor.dtype))
            # As bytes, because numpy has no bfloat16 and no float8. Written and not mapped: a full
            # disk is an error here, and would be a crash there.
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            read(source.tensors[key].size_bytes)
        file.flush()
        # The system refuses to map an empty file.
        empty = not any(entry.size_bytes for _, entry in entries.values())
        data = memoryview(b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    copies: dict[str, torch.Tensor] = {}
    for name, (start, entry) in entries.items():
        part = data[start : start + entry.size_bytes]
        # `torch.frombuffer` refuses an empty buffer.
        flat = (
            torch.frombuffer(part, dtype=entry.dtype) if part else torch.empty(0, dtype=entry.dtype)
        )
        copies[name] = flat.view(entry.shape)
    return copies


def nest(items: Iterable[tuple[Way, Any]]) -> Any:
    """Makes dictionaries and lists from values and the ways to them.

    Raises:
        CheckpointError: two ways contradict each other, or a list has gaps.
    """
    below: dict[str | int, list[tuple[Way, Any]]] = {}
    for way, value in items:
        below.setdefault(way[0], []).append((way[1:], value))
    found: dict[str | int, Any] = {}
    for part, inside in below.items():
        values = [value for rest, value in inside if not rest]
        if values and len(inside) > 1:
            raise _contradiction((part,))
        found[part] = values[0] if values else nest(inside)
    # torch makes text of the keys of dictionaries, so a number is always a place in a list.
    if not any(isinstance(part, int) for part in found):
        return found
    if found.keys() != set(range(len(found))):
        raise _contradiction(tuple(found))
    return [found[place] for place in range(len(found))]


def _contradiction(way: Way) -> CheckpointError:
    return CheckpointError(
        f"The values at '{'.'.join(map(str, way))}' cannot be put into one dictionary or list. The "
        "names of this checkpoint contradict each other. Take another checkpoint."
    )
