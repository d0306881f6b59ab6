"""The metadata of a sharded checkpoint: read as data, checked, and in today's form."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from composer_fsdp2.errors import CheckpointError

__all__ = [
    "METADATA",
    "as_today",
    "check_counts",
    "check_places",
    "is_inside",
    "senseless_metadata",
]

METADATA = ".metadata"

# Composer's loader tells the old layout by this key, too:
# https://github.com/mosaicml/composer/blob/v0.32.1/composer/utils/checkpoint.py#L662
_ROOT = "optimizers"


def as_today(metadata: Metadata, folder: Path) -> Metadata:
    """Checks what the file says and moves an optimizer at the root under `state`."""
    ways = metadata.planner_data or {}
    try:
        _check_numbers(metadata)
        check_places(metadata, folder)
        legacy = {key for key, way in ways.items() if next(iter(way)) == _ROOT}
        if not legacy:
            return metadata

        def today(key: str) -> str:
            return f"state.{key}" if key in legacy else key

        return replace(
            metadata,
            state_dict_metadata={today(k): v for k, v in metadata.state_dict_metadata.items()},
            planner_data={
                today(k): ("state", *way) if k in legacy else way for k, way in ways.items()
            },
            storage_data={
                MetadataIndex(today(index.fqn), index.offset, index.index): info
                for index, info in metadata.storage_data.items()
            },
        )
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise senseless_metadata(folder, error) from error


def senseless_metadata(folder: Path, error: Exception) -> CheckpointError:
    """Returns the error for metadata that describes no checkpoint."""
    return CheckpointError(
        f"'{folder / METADATA}' is damaged: it does not describe a checkpoint ({error}). "
        "Nothing can be found without it. Take another checkpoint."
    )


def _check_numbers(metadata: Metadata) -> None:
    for key, entry in metadata.state_dict_metadata.items():
        key.encode()  # what cannot be written cannot be the name of anything
        if isinstance(entry, TensorStorageMetadata):
            parts = [part for chunk in entry.chunks for part in (chunk.offsets, chunk.sizes)]
            check_counts(key, itertools.chain(entry.size, *parts))
    for index, info in metadata.storage_data.items():
        info.relative_path.encode()
        check_counts(index.fqn, (info.offset, info.length))


def check_counts(key: str, numbers: Iterable[Any]) -> None:
    """Refuses what is no offset and no size, with a ValueError."""
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
    """Whether a relative path stays below the folder it is in."""
    place = PurePosixPath(name)
    return bool(place.parts) and not place.is_absolute() and ".." not in place.parts
