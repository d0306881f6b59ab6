"""Opens a checkpoint of any kind under one interface: names, shapes and values by key.

Keys are those of torch.distributed.checkpoint: the path to a value through nested dictionaries and
lists, joined by dots, such as `state.model.lm_head.weight`. They are the same for a folder of
shards and for one file.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import stat
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
)

from composer_fsdp2.checkpoint.contents import (
    FolderContents,
    TensorEntry,
    detect_kind,
    read_contents,
    tensor_entries,
)
from composer_fsdp2.checkpoint.metadata import (
    StoredPieces,
)
from composer_fsdp2.checkpoint.pickles import (
    check_member,
    damaged_bytes,
    load_object,
    open_archive,
    trusts,
    unreadable,
)
from composer_fsdp2.checkpoint.ranges import (
    FileWindow,
    PieceRange,
    View,
    gather_suspects,
    plan_ranges,
    read_ranges,
)
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.ranks import of_rank0, on_all_ranks
from composer_fsdp2.text import listed
from composer_fsdp2.torch_private.members import check_private_members
from composer_fsdp2.torch_private.tensors import flatten_state_dict

__all__ = [
    "Checkpoint",
    "FileCheckpoint",
    "FolderCheckpoint",
    "KeyPath",
    "flatten",
    "open_checkpoint",
    "open_on_all_ranks",
]

KeyPath = tuple[str | int, ...]
"""keys that lead to a value through nested dictionaries and lists, from the outside in"""


class Checkpoint(ABC):
    """Common interface of a folder and a file; see the subclasses.

    Attributes:
        path: the folder or file.
        tensors: key -> shape and dtype, in the order of the file.
        objects: keys of all other values.
        paths: key -> the key path of its value.
        problems: file or key -> its damage, as far as it is known without reading values; empty
            unless opened although `incomplete`.
        config: a folder with a `config.json` and a tokenizer, where they are not in the checkpoint.
        remarks: sentences for the user about what is not read.
    """

    kind: str
    path: Path
    config: Path | None = None
    remarks: tuple[str, ...] = ()
    problems: Mapping[str, str] = MappingProxyType({})
    tensors: Mapping[str, TensorEntry]
    objects: Collection[str]
    paths: Mapping[str, KeyPath]

    @abstractmethod
    def tensor(self, key: str) -> torch.Tensor:
        """Returns the whole tensor on the CPU, never to be written to.

        Raises:
            CheckpointError: its bytes are missing or damaged.
        """

    @abstractmethod
    def object(self, key: str) -> Any:
        """Returns a value that is no tensor.

        Raises:
            CheckpointError: its bytes are missing, damaged, or could execute code.
        """

    @abstractmethod
    def parts(self) -> Sequence[Any]:
        """Returns what `check_part` takes, without the parts that `problems` names."""

    @abstractmethod
    def check_part(self, part: Any) -> int:
        """Reads one part as a load does, and compares it with its checksums; returns its bytes.

        Raises:
            CheckpointError: it is missing, damaged, or of another checkpoint.
        """

    def check(self, share: tuple[int, int] = (0, 1)) -> None:
        """Checks everything.

        Args:
            share: (i, n) checks every n-th part from the i-th, so that ranks divide the work.

        Raises:
            CheckpointError: a file is missing, cut off, of another checkpoint, or damaged.
        """
        first, step = share
        for part in self.parts()[first::step]:
            self.check_part(part)

    def under(self, *start: str | int) -> dict[str, KeyPath]:
        """Returns keys whose key path begins with `start`, and the rest of it."""
        n = len(start)
        return {key: key_path[n:] for key, key_path in self.paths.items() if key_path[:n] == start}


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


# --- A folder of shards. ---


class FolderCheckpoint(Checkpoint):
    """A folder of shards with a `.metadata`, as torch.distributed.checkpoint writes it.

    In the layout of old Composer versions the optimizer is at the root; here it is where it is
    today, under `state`. No file is changed for that.

    Args:
        path: of the folder with `.metadata`.
        incomplete: opens it although files are missing, or are still to come.
        contents: what `read_contents` returns for the folder, which it is asked for by default.
        share: (i, n) looks at every n-th file from the i-th, so that ranks divide the work.

    Attributes:
        files: name -> bytes that the file has at least.
    """

    kind = "sharded"

    def __init__(
        self,
        path: Path,
        *,
        incomplete: bool = False,
        contents: FolderContents | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self.path = path
        contents = read_contents(path) if contents is None else contents
        self.tabulate(contents.metadata)
        self.files = contents.files
        problems: dict[str, str] = {}
        first, step = share
        for name, size in list(self.files.items())[first::step]:
            try:
                status = (path / name).stat()
            except (OSError, ValueError):
                status = None
            if status is None or not stat.S_ISREG(status.st_mode):
                problems[name] = f"'{name}' is missing"
            elif status.st_size < size:
                problems[name] = f"'{name}' has {status.st_size} of {size} bytes"
        self.problems = {**problems, **contents.gaps}
        if self.problems and not incomplete:
            raise self._incomplete()

    def tabulate(self, metadata: Metadata) -> None:
        """Takes keys, shapes and pieces from metadata."""
        if not isinstance(metadata.storage_data, StoredPieces):
            metadata = replace(metadata, storage_data=StoredPieces(metadata.storage_data))
        self.metadata = metadata
        entries = metadata.state_dict_metadata
        self.tensors = tensor_entries(metadata)
        self.objects = {key: None for key in entries if key not in self.tensors}.keys()
        # Only a planner that flattens writes the key paths of its values.
        key_paths = metadata.planner_data or {}
        self.paths = {key: tuple(key_paths.get(key, (key,))) for key in entries}
        self._sizes: dict[int, dict[Any, torch.Size]] = {}
        self._ranges: dict[MetadataIndex, list[PieceRange]] = {}

    def sizes(self, index: MetadataIndex) -> torch.Size:
        """Returns the sizes of a piece of a tensor."""
        entry: Any = self.metadata.state_dict_metadata[index.fqn]
        # By their offsets: torch's plan keeps their place in `chunks` as a hint only. Many tensors
        # have the same list.
        if id(entry.chunks) not in self._sizes:
            self._sizes[id(entry.chunks)] = {c.offsets: c.sizes for c in entry.chunks}
        return self._sizes[id(entry.chunks)][index.offset]

    def indices(self, key: str) -> list[MetadataIndex]:
        """Returns where the pieces of a value are; an object has one.

        Raises:
            CheckpointError: pieces are missing.
        """
        if key in self.problems:
            raise self._incomplete()
        return self.metadata.storage_data.indices(key)

    def where(self, index: MetadataIndex) -> str:
        """Returns the name of a piece or object in errors."""
        return f"'{index.fqn}' in '{self.path / self.metadata.storage_data[index].relative_path}'"

    @contextlib.contextmanager
    def _opened(self, index: MetadataIndex) -> Generator[FileWindow]:
        """Opens the archive of one piece or object.

        Raises:
            CheckpointError: it is missing, or cannot be read.
        """
        info = self.metadata.storage_data[index]
        path = self.path / info.relative_path
        try:
            with path.open("rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size < info.offset + info.length:
                    raise EOFError(f"it ends before '{index.fqn}' does")
                yield FileWindow(file.fileno(), info.offset, info.length)
        except CheckpointError:
            raise
        except (OSError, EOFError, ValueError) as error:
            raise unreadable(path, error) from error

    def read(self, index: MetadataIndex, most: int | None = None) -> io.BytesIO:
        """Returns the bytes of one piece or object, at `most` so many from its end.

        Raises:
            CheckpointError: they are missing.
        """
        length = self.metadata.storage_data[index].length
        with self._opened(index) as file:
            file.seek(0 if most is None else max(length - most, 0))
            return io.BytesIO(file.read(length))

    def checked(self, index: MetadataIndex) -> io.BytesIO:
        """Returns the bytes of one piece or object, its checksums compared.

        Raises:
            CheckpointError: they are missing or damaged.
        """
        file = self.read(index)
        with open_archive(file, self.where(index)) as archive:
            for member in archive.infolist():
                check_member(archive, member, self.where(index))
        file.seek(0)
        return file

    def piece(
        self, index: MetadataIndex, file: io.BytesIO | None = None, views: Sequence[View] = ()
    ) -> Any:
        """Returns an object, or one piece of a tensor as it was saved, its checksum compared.

        Args:
            index: FQN and offsets of the piece.
            file: its bytes, where `checked` has returned them already.
            views: take the parts of a tensor that are wanted. Other values may be left out, and
                `compare_ranges` has to be called then.

        Raises:
            CheckpointError: it is missing, damaged, could execute code, or is a piece of another
                checkpoint.
        """
        if index.fqn in self.problems:
            raise self._incomplete()
        value, spans = None, None
        if views:
            info, sizes = self.metadata.storage_data[index], self.sizes(index)
            itemsize = self.tensors[index.fqn].dtype.itemsize
            spans = plan_ranges(sizes, itemsize, views, info.length)
        if spans is not None:
            with self._opened(index) as opened:
                part = read_ranges(opened, self.where(index), spans, trusted=trusts(self.path))
            if part is not None:
                value, ranges = part
                self._ranges.setdefault(index, []).extend(ranges)
        if value is None:  # all have to be read
            file = self.checked(index) if file is None else file
            value = load_object(file, self.where(index), trusted=trusts(self.path))
        if index.fqn in self.tensors:
            shape = tuple(self.sizes(index))
            promised = f"a {self.tensors[index.fqn].dtype} of shape {shape}"
            actual = f"a {type(value).__name__}"
            if isinstance(value, torch.Tensor):
                actual = f"a {value.dtype} of shape {tuple(value.shape)}"
            if actual != promised:
                raise CheckpointError(
                    f"{self.where(index)} is {actual}, where the metadata promises {promised}. Its "
                    "file belongs to another checkpoint. Take another copy."
                )
        return value

    def compare_ranges(self) -> None:
        """Compares what ranks have read of pieces with the checksums of these pieces.

        Collective: yes, over the default group. See [Note: checksums of ranges].

        Raises:
            CheckpointError: a piece is damaged; on every rank.
        """
        read, self._ranges = self._ranges, {}
        infos = {index: self.metadata.storage_data[index] for index in read}
        numbers = {name: number for number, name in enumerate(self.files)}
        locations = {i: (numbers[info.relative_path], info.offset) for i, info in infos.items()}
        ranges = [(*locations[index], part) for index, parts in read.items() for part in parts]
        suspects = gather_suspects(ranges)
        if not suspects:
            return

        def read_whole() -> None:
            for index in (index for index in read if locations[index] in suspects):
                values = self.piece(index)
                for part in read[index]:
                    if not part.is_of(values):
                        raise damaged_bytes(self.where(index), "a range")

        on_all_ranks(read_whole)

    def tensor(self, key: str) -> torch.Tensor:
        """Returns the whole tensor."""
        entry = self.tensors[key]
        # A rank without rows of a tensor saves an empty piece, which begins at the tensor's end.
        pieces = [index for index in self.indices(key) if math.prod(self.sizes(index))]
        if len(pieces) == 1:
            return self.piece(pieces[0])
        full = torch.empty(entry.shape, dtype=entry.dtype)
        for index in pieces:
            box = zip(index.offset or (), self.sizes(index), strict=True)
            box_slices = tuple(slice(start, start + size) for start, size in box)
            full[box_slices].copy_(self.piece(index))
        return full

    def object(self, key: str) -> Any:
        """Returns a value that is no tensor, its checksum compared."""
        return self.piece(self.indices(key)[0])

    def parts(self) -> Sequence[MetadataIndex]:
        """Returns pieces and objects."""
        return [
            index
            for index, info in self.metadata.storage_data.items()
            if info.relative_path not in self.problems and index.fqn not in self.problems
        ]

    def check_part(self, part: MetadataIndex) -> int:
        """Reads one piece or object without keeping it; returns its bytes."""
        self.piece(part)
        return self.metadata.storage_data[part].length

    def _incomplete(self) -> CheckpointError:
        shown = listed(list(self.problems.values()), 20, "")
        return CheckpointError(
            f"The checkpoint '{self.path}' is incomplete: {shown}. Some weights are not "
            "there. Restore the files, or take another checkpoint."
        )


def open_on_all_ranks(
    path: Path, explain: Callable[[BaseException], BaseException], *, incomplete: bool = False
) -> FolderCheckpoint:
    """Opens a folder of shards: rank 0 reads its metadata, and each rank looks at some files.

    Collective: yes, over the default group.

    Args:
        path: the folder, which may be another one on each node.
        explain: returns the error to raise for another one.
        incomplete: opens it although files are missing, or are still to come.

    Raises:
        CheckpointError: as that of `FolderCheckpoint`, on every rank.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    contents = of_rank0(on_all_ranks(lambda: read_contents(path) if rank == 0 else None, explain))
    return on_all_ranks(
        lambda: FolderCheckpoint(
            path, incomplete=incomplete, contents=contents, share=(rank, ranks)
        ),
        explain,
    )


# --- One file. ---


class FileCheckpoint(Checkpoint):
    """One file that `torch.save` wrote: nested dictionaries with whole tensors.

    Tensors stay in the file until they are read. Two keys may hold the same tensor; then the file
    holds it once, and so does `values`.

    Attributes:
        values: everything, nested as in the file.
    """

    kind = "full"

    def __init__(self, path: Path) -> None:
        self.path = path
        # Older files are no archives and have no checksums.
        self._archive = open_archive(path, str(path)) if zipfile.is_zipfile(path) else None
        self.values = load_object(path, str(path), trusted=trusts(path))
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
        """Returns the whole tensor, a view of the file."""
        return self._flat[key]

    def object(self, key: str) -> Any:
        """Returns a value that is no tensor."""
        return self._flat[key]

    @property
    def has_checksums(self) -> bool:
        """Whether every member can be compared; `torch.save` may have been told to leave them out.

        Older versions of it wrote files that are no archives.
        """
        return bool(self.parts()) and all(part.CRC for part in self.parts() if part.file_size)

    def parts(self) -> Sequence[zipfile.ZipInfo]:
        """Returns the members of the archive."""
        return [] if self._archive is None else self._archive.infolist()

    def check_part(self, part: zipfile.ZipInfo) -> int:
        """Compares one member with its checksum; returns its bytes."""
        archive = self._archive
        return 0 if archive is None else check_member(archive, part, str(self.path))


def flatten(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """Returns values and key paths by the keys that torch.distributed.checkpoint gives them.

    Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/checkpoint/_nested_dict.py#L27
    """
    check_private_members(["checkpoints"])
    try:
        flat, key_paths = flatten_state_dict(dict(values))
    except ValueError as error:
        raise CheckpointError(
            f"Two values have the same key: {error}. Only one of them could be kept. Rename one in "
            "the state that was saved."
        ) from None
    return flat, {key: tuple(key_path) for key, key_path in key_paths.items()}
