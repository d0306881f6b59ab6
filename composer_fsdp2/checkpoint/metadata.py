"""Reads the metadata of a sharded checkpoint: checked, and in today's form."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from composer_fsdp2.checkpoint.pickles import damaged, newer_torch, unpickle, unreadable
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.shard.units import collector_paused

__all__ = [
    "MESH",
    "METADATA",
    "PieceLocation",
    "StoredPieces",
    "check_counts",
    "check_places",
    "covers_exactly",
    "is_inside",
    "read_metadata",
    "senseless_metadata",
]

METADATA = ".metadata"
MESH = "fsdp2_mesh"
"""name of the run's axes in `state.metadata`"""

_MOST = 1 << 62
"""no file and no dimension is as large"""

Box = tuple[Sequence[int], Sequence[int]]
"""where a piece begins, and its sizes"""


@collector_paused()  # millions of objects, all in use
def read_metadata(folder: Path) -> Metadata:
    """Reads the `.metadata` of a folder, executing nothing, and moves a root optimizer to `state`.

    Collective: no. Its `storage_data` are `StoredPieces`.

    Raises:
        CheckpointError: it is missing, damaged, or asks for something that could execute code.
    """
    path = folder / METADATA
    try:
        metadata = unpickle(path)
    except CheckpointError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    except Exception as error:  # a damaged pickle raises anything at all
        # Newer torch adds properties of tensors at the end, and older torch cannot unpack them.
        newer = isinstance(error, ValueError) and "too many values to unpack" in str(error)
        raise (newer_torch(path, error) if newer else damaged(str(path), error)) from None
    if not isinstance(metadata, Metadata):
        raise CheckpointError(
            f"'{path}' holds a {type(metadata).__name__}, not the metadata of a checkpoint. "
            "Nothing can be found without it. Give the folder that torch.distributed.checkpoint "
            "wrote."
        )
    try:
        check_places(metadata, folder)
        paths = metadata.planner_data or {}
        # Composer's loader tells the old layout by this key, too:
        # https://github.com/mosaicml/composer/blob/v0.32.1/composer/utils/checkpoint.py#L662
        legacy = {key for key, path in paths.items() if tuple(path)[:1] == ("optimizers",)}
        if legacy:
            today: dict[Any, str] = {key: f"state.{key}" for key in legacy}
            metadata = replace(
                metadata,
                state_dict_metadata={
                    today.get(key, key): value_entry
                    for key, value_entry in metadata.state_dict_metadata.items()
                },
                planner_data={
                    today.get(key, key): ("state", *path) if key in legacy else path
                    for key, path in paths.items()
                },
                storage_data={
                    MetadataIndex(
                        today.get(index.fqn) or index.fqn, index.offset, index.index
                    ): info
                    for index, info in metadata.storage_data.items()
                },
            )
        _share_chunks(metadata)
        return replace(metadata, storage_data=StoredPieces(metadata.storage_data))
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise senseless_metadata(folder, error) from error


def _share_chunks(metadata: Metadata) -> None:
    """Checks sizes and chunks, and lets tensors that are cut in the same way share one list."""
    shared: dict[Any, list[Any]] = {}
    of_list: dict[int, list[Any]] = {}
    lists: list[Any] = []  # kept, so that no other one gets the number of one of them
    for key, entry in metadata.state_dict_metadata.items():
        key.encode()  # what cannot be written cannot be the name of anything
        if not isinstance(entry, TensorStorageMetadata):
            continue
        check_counts(key, entry.size)
        if id(entry.chunks) not in of_list:
            lists.append(entry.chunks)
            boxes = [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
            check_counts(key, itertools.chain.from_iterable(itertools.chain.from_iterable(boxes)))
            boxes = tuple((tuple(offsets), tuple(sizes)) for offsets, sizes in boxes)
            of_list[id(entry.chunks)] = shared.setdefault(boxes, entry.chunks)
        entry.chunks = of_list[id(entry.chunks)]


@dataclass(frozen=True, slots=True)
class PieceLocation:
    """Where a piece is: names of `torch.distributed.checkpoint`."""

    relative_path: str
    offset: int
    length: int


class StoredPieces(Mapping[MetadataIndex, PieceLocation]):
    """Locations of the pieces of all values, in few bytes for each.

    torch has two objects for each piece. Ranks times values are millions of them, which take longer
    to make than to send.

    Args:
        locations: location by index, as torch has them.

    Raises:
        ValueError: a number is no count.
    """

    def __init__(self, locations: Mapping[MetadataIndex, Any]) -> None:
        rows: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)
        for index, info in locations.items():
            rows[index.fqn].append((index.offset, info.relative_path, info.offset, info.length))
        numbers: dict[str, int] = {}
        same: dict[Any, Any] = {}

        def shared(value: Any) -> Any:
            key = value.tobytes() if isinstance(value, np.ndarray) else value
            return same.setdefault((type(value), key), value)

        self._values: dict[str, tuple[tuple[Any, ...], Any, Any, Any]] = {}
        for fqn, pieces in rows.items():
            starts, paths, offsets, lengths = zip(*pieces, strict=True)
            check_counts(fqn, offsets + lengths)
            files = [numbers.setdefault(path, len(numbers)) for path in paths]
            columns = (np.array(column, dtype=np.int64) for column in (files, offsets, lengths))
            self._values[fqn] = (shared(starts), *map(shared, columns))
        self._files = list(numbers)
        for name in self._files:
            name.encode()
        self._rows: dict[int, dict[Any, int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what goes by ids: ranks send it to each other."""
        return {**vars(self), "_rows": {}}

    def __getitem__(self, index: MetadataIndex) -> PieceLocation:
        starts, files, offsets, lengths = self._values[index.fqn]
        # The tuples live as long as this object does.
        if id(starts) not in self._rows:
            self._rows[id(starts)] = {start: row for row, start in enumerate(starts)}
        row = self._rows[id(starts)][index.offset]
        return PieceLocation(self._files[files[row]], int(offsets[row]), int(lengths[row]))

    def __iter__(self) -> Iterator[MetadataIndex]:
        return itertools.chain.from_iterable(map(self.indices, self._values))

    def __len__(self) -> int:
        return sum(len(starts) for starts, *_ in self._values.values())

    def starts(self, fqn: str) -> tuple[Any, ...]:
        """Returns where the pieces of a value begin; the same tuple for values cut as one."""
        return self._values[fqn][0] if fqn in self._values else ()

    def indices(self, fqn: str) -> list[MetadataIndex]:
        """Returns the indices of the pieces of a value."""
        return [MetadataIndex(fqn, start) for start in self.starts(fqn)]

    def stored_bytes(self, fqn: str) -> int:
        """Returns the bytes of all pieces of a value."""
        return int(self._values[fqn][3].sum()) if fqn in self._values else 0

    def ends(self) -> dict[str, int]:
        """Returns the bytes that each file has at least."""
        least = np.zeros(len(self._files), dtype=np.int64)
        for _, files, offsets, lengths in self._values.values():
            np.maximum.at(least, files, offsets + lengths)
        return dict(zip(self._files, least.tolist(), strict=True))


def senseless_metadata(folder: Path, error: Exception) -> CheckpointError:
    """Returns the error for metadata that describes no checkpoint."""
    return CheckpointError(
        f"'{folder / METADATA}' is damaged: it does not describe a checkpoint ({error}). "
        "Nothing can be found without it. Take another checkpoint."
    )


def check_counts(key: str, numbers: Iterable[Any]) -> None:
    """Refuses offsets and sizes that are no counts, with a ValueError."""
    numbers = list(numbers)
    is_int = set(map(type, numbers)) <= {int}
    if not is_int or not 0 <= min(numbers, default=0) <= max(numbers, default=0) < _MOST:
        raise ValueError(f"{key!a} has a place or a size that is no number")


def check_places(metadata: Metadata, folder: Path) -> None:
    """Refuses metadata that looks for values outside of its folder, or that changed their form.

    Collective: no.

    Raises:
        CheckpointError: naming the value.
    """
    inside: set[str] = set()
    for index, info in metadata.storage_data.items():
        if info.relative_path not in inside and not is_inside(info.relative_path):
            raise CheckpointError(
                f"'{folder / METADATA}' looks for '{index.fqn}' in '{info.relative_path}', outside "
                "of its own folder. No save writes such a path, and following it could read any "
                "file. Do not use this checkpoint."
            )
        inside.add(info.relative_path)
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"'{index.fqn}' in '{folder}' is stored in a transformed form "
                f"({', '.join(info.transform_descriptors)}), which cannot be read here. Its values "
                "would be garbage. Save it again without extensions."
            )


def is_inside(name: str) -> bool:
    """Returns whether a relative path stays below the folder it is in."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def covers_exactly(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
    """Returns whether boxes fill a shape without a gap, an overlap, or anything outside.

    Collective: no. It takes as long for a thousand pieces as a thousand times one.

    [Note: signed corners] Let f(x) be the number of boxes that x is in. Its mixed difference over
    all dimensions is 0 but at corners of boxes, where it is +1 or -1 by the number of ends among
    the corner's coordinates. Summing that difference up gives f back, so f is that of the whole,
    1 inside and 0 outside, exactly if the signed corners of all boxes add up to those of the whole.
    """
    boxes = [(tuple(starts), tuple(sizes)) for starts, sizes in boxes]
    if any(len(starts) != len(shape) or len(sizes) != len(shape) for starts, sizes in boxes):
        return False
    if 0 in shape:
        return all(0 in sizes for _, sizes in boxes)
    # Dimensions that nobody cuts say nothing, and each of them would double the corners.
    cut = [
        dim
        for dim, size in enumerate(shape)
        if any((starts[dim], sizes[dim]) != (0, size) for starts, sizes in boxes)
    ]
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, (starts, sizes) in [(-1, ([0] * len(shape), shape)), *((1, box) for box in boxes)]:
        for ends in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(
                starts[dim] + end * sizes[dim] for dim, end in zip(cut, ends, strict=True)
            )
            corners[corner] += sign * (-1) ** sum(ends)
    return not any(corners.values())
