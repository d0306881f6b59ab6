"""Reads the metadata of a sharded checkpoint: checked, and in today's form."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from composer_fsdp2.checkpoint.pickles import damaged, newer_torch, unpickle, unreadable
from composer_fsdp2.errors import CheckpointError

__all__ = [
    "MESH",
    "METADATA",
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

Box = tuple[Sequence[int], Sequence[int]]
"""where a piece begins, and its sizes"""


def read_metadata(folder: Path) -> Metadata:
    """Reads the `.metadata` of a folder, executing nothing, and moves a root optimizer to `state`.

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
        for key, tensor_entry in metadata.state_dict_metadata.items():
            key.encode()  # what cannot be written cannot be the name of anything
            if isinstance(tensor_entry, TensorStorageMetadata):
                parts = [
                    part for chunk in tensor_entry.chunks for part in (chunk.offsets, chunk.sizes)
                ]
                check_counts(key, itertools.chain(tensor_entry.size, *parts))
        for index, info in metadata.storage_data.items():
            info.relative_path.encode()
            check_counts(index.fqn, (info.offset, info.length))
        check_places(metadata, folder)
        return _as_today(metadata)
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise senseless_metadata(folder, error) from error


def _as_today(metadata: Metadata) -> Metadata:
    paths = metadata.planner_data or {}
    # Composer's loader tells the old layout by this key, too:
    # https://github.com/mosaicml/composer/blob/v0.32.1/composer/utils/checkpoint.py#L662
    legacy = {key for key, path in paths.items() if tuple(path)[:1] == ("optimizers",)}
    if not legacy:
        return metadata
    today: dict[Any, str] = {key: f"state.{key}" for key in legacy}
    return replace(
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
            MetadataIndex(today.get(index.fqn) or index.fqn, index.offset, index.index): info
            for index, info in metadata.storage_data.items()
        },
    )


def senseless_metadata(folder: Path, error: Exception) -> CheckpointError:
    """Returns the error for metadata that describes no checkpoint."""
    return CheckpointError(
        f"'{folder / METADATA}' is damaged: it does not describe a checkpoint ({error}). "
        "Nothing can be found without it. Take another checkpoint."
    )


def check_counts(key: str, numbers: Iterable[Any]) -> None:
    """Refuses offsets and sizes that are no counts, with a ValueError."""
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{key!a} has a place or a size that is no number")


def check_places(metadata: Metadata, folder: Path) -> None:
    """Refuses metadata that looks for values outside of its folder, or that changed their form.

    Collective: no.

    Raises:
        CheckpointError: naming the value.
    """
    for index, info in metadata.storage_data.items():
        if not is_inside(info.relative_path):
            raise CheckpointError(
                f"'{folder / METADATA}' looks for '{index.fqn}' in '{info.relative_path}', outside "
                "of its own folder. No save writes such a path, and following it could read any "
                "file. Do not use this checkpoint."
            )
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"'{index.fqn}' in '{folder}' is stored in a transformed form "
                f"({', '.join(info.transform_descriptors)}), which cannot be read here. Its values "
                "would be garbage. Save it again without extensions."
            )


def is_inside(name: str) -> bool:
    """Returns whether a relative path stays below the folder it is in."""
    place = PurePosixPath(name)
    return bool(place.parts) and not place.is_absolute() and ".." not in place.parts


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
