"""Converts a checkpoint to the other kind, offline and piece by piece.

One process, no process group. torch.distributed.checkpoint's own writer keeps every tensor until
the end; here memory does not depend on the size of the checkpoint.
"""

from __future__ import annotations

import gc
import itertools
import math
import mmap
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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
from composer_fsdp2.checkpoint.contents import TensorEntry, write_checksums
from composer_fsdp2.checkpoint.describe import find_ties
from composer_fsdp2.checkpoint.metadata import METADATA
from composer_fsdp2.checkpoint.source import Checkpoint, FolderCheckpoint, KeyPath
from composer_fsdp2.checkpoint.staging import staged
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.torch_private.members import check_private_members
from composer_fsdp2.torch_private.tensors import storage_info

__all__ = ["Advance", "convert_to_sharded", "map_copies", "nest", "prove_whole", "write_full"]

Advance = Callable[[int, int], object]
"""Told after each part: its bytes, and the bytes of all parts."""

_PIECE_BYTES = 1 << 28
"""A rank that needs a slice reads whole pieces."""
_ALIGN = 64


def prove_whole(source: Checkpoint) -> None:
    """Compares files with their checksums; a folder does so with each piece that is read.

    Raises:
        CheckpointError: it is damaged, or loading it could execute code.
    """
    vet_algorithms_of(source)
    if not isinstance(source, FolderCheckpoint):
        source.check()


# --- To a folder of shards. ---


def convert_to_sharded(
    source: Checkpoint, destination: Path, max_file_bytes: int, advance: Advance
) -> None:
    """Writes a folder as torch.distributed.checkpoint does, with our checksums beside it.

    Every key gets a tensor of its own, in pieces of whole rows. An optimizer at the root is then
    where it is today.

    Args:
        source: an open checkpoint.
        destination: a path where nothing is yet, or an empty folder.
        max_file_bytes: a new file begins where this would be exceeded.
        advance: called after each part with its bytes and those of all parts.

    Raises:
        CheckpointError: the source is damaged, or the destination cannot be written.
    """
    check_private_members(["checkpoints"])
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage_data: dict[MetadataIndex, Any] = {}
    name, numbers, file, files = "", itertools.count(), None, ExitStack()
    with staged(destination, folder=True) as folder, files:
        prove_whole(source)
        total = sum(entry.size_bytes for entry in source.tensors.values())
        for key in source.paths:
            if key in source.tensors:
                entries[key], values = _pieces(key, source.tensor(key))
            else:
                entries[key] = BytesStorageMetadata()
                values = iter([(MetadataIndex(key), source.object(key))])
            for index, value in values:
                # The bytes around a tensor count for the next file.
                size_bytes = value.nbytes if isinstance(value, torch.Tensor) else 0
                if file is None or (file.tell() and file.tell() + size_bytes > max_file_bytes):
                    files.close()
                    # torch's form of a name, `__<rank>_<number>`; readers look into `.metadata`.
                    name = f"__{next(numbers)}_0.distcp"
                    file = files.enter_context((folder / name).open("wb"))
                start = file.tell()
                torch.save(value, file)
                # It leaves a cycle that keeps the piece, a class of its own for each call:
                # https://github.com/pytorch/pytorch/blob/v2.7.0/torch/serialization.py#L1206
                gc.collect(1)
                storage_data[index] = storage_info(name, start, file.tell() - start)
            advance(source.tensors[key].size_bytes if key in source.tensors else 0, total)
        files.close()
        with (folder / METADATA).open("wb") as opened:
            pickle.dump(Metadata(entries, dict(source.paths), storage_data, StorageMeta()), opened)
        write_checksums(folder)


def _pieces(
    key: str, tensor: torch.Tensor
) -> tuple[TensorStorageMetadata, Iterator[tuple[MetadataIndex, torch.Tensor]]]:
    """Divides a tensor into pieces of whole rows; they are copied one by one."""
    pieces, rows = (tensor,), 1
    if tensor.ndim and tensor.numel():
        rows = max(1, _PIECE_BYTES * len(tensor) // tensor.nbytes)
        pieces = tensor.split(rows)
    starts = [
        torch.Size([number * rows, *[0] * tensor.ndim][: tensor.ndim])
        for number in range(len(pieces))
    ]
    chunks = list(map(ChunkStorageMetadata, starts, (piece.shape for piece in pieces)))
    entry = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, chunks)
    # `torch.save` writes whole storages, of which a piece is a part, so each is copied. The number
    # is a hint for the search in `chunks`, and no part of the index's equality.
    return entry, (
        (
            MetadataIndex(key, starts[number], number),
            piece.detach().clone(memory_format=torch.contiguous_format),
        )
        for number, piece in enumerate(pieces)
    )


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
        advance: called after each part with its bytes and those of all parts.
        trained: takes the trained weights in place of EMA's averages.

    Raises:
        CheckpointError: the source is damaged, or the destination cannot be written; or there are
            no averages.
    """
    # Each tensor is read, and then written.
    size = sum(entry.size_bytes for entry in source.tensors.values())
    with staged(destination, folder=False) as path:
        prove_whole(source)
        keys = {key: key for key in source.tensors}
        mapped = map_copies(source, keys, destination.parent, advance, 2 * size)
        values: dict[str, Any] = {
            key: mapped[key] if key in mapped else source.object(key) for key in source.paths
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
        advance(size, 2 * size)


def map_copies(
    source: Checkpoint,
    keys: Mapping[str, str],
    folder: Path,
    advance: Advance,
    total: int,
    dtype: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """Puts tensors into a file without a name and maps it, so that they take no memory.

    Each tensor is the whole of its storage, which `torch.save` and safetensors want.

    Args:
        source: an open checkpoint.
        keys: name -> key of a tensor.
        folder: on a disk with room for the tensors.
        advance: told the bytes of each tensor, and `total`.
        total: bytes of all that is done.
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
            advance(source.tensors[key].size_bytes, total)
        file.flush()
        # The system refuses to map an empty file.
        empty = not any(entry.size_bytes for _, entry in entries.values())
        data = memoryview(b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    mapped: dict[str, torch.Tensor] = {}
    for name, (start, entry) in entries.items():
        part = data[start : start + entry.size_bytes]
        # `torch.frombuffer` refuses an empty buffer.
        flat = (
            torch.frombuffer(part, dtype=entry.dtype) if part else torch.empty(0, dtype=entry.dtype)
        )
        mapped[name] = flat.view(entry.shape)
    return mapped


def nest(items: Iterable[tuple[KeyPath, Any]]) -> Any:
    """Makes dictionaries and lists from values and their key paths.

    Where some ranks had nothing, as the progress bar that one rank of a node shows, `None` gives
    way to what the others had.

    Raises:
        CheckpointError: two key paths contradict each other, or a list has gaps.
    """
    below: dict[str | int, list[tuple[KeyPath, Any]]] = {}
    for key_path, value in items:
        below.setdefault(key_path[0], []).append((key_path[1:], value))
    values_by_part: dict[str | int, Any] = {}
    for part, inside in below.items():
        if any(rest for rest, _ in inside):
            inside = [(rest, value) for rest, value in inside if rest or value is not None]
        values = [value for rest, value in inside if not rest]
        if values and len(inside) > 1:
            raise _contradiction((part,))
        values_by_part[part] = values[0] if values else nest(inside)
    # torch makes text of the keys of dictionaries, so a number is always a place in a list.
    if not any(isinstance(part, int) for part in values_by_part):
        return values_by_part
    if values_by_part.keys() != set(range(len(values_by_part))):
        raise _contradiction(tuple(values_by_part))
    return [values_by_part[index] for index in range(len(values_by_part))]


def _contradiction(key_path: KeyPath) -> CheckpointError:
    return CheckpointError(
        f"The values at '{'.'.join(map(str, key_path))}' cannot be put into one dictionary or "
        "list. The names of this checkpoint contradict each other. Take another checkpoint."
    )
