"""Describes a checkpoint from its metadata and small values alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from composer_fsdp2.checkpoint.metadata import METADATA
from composer_fsdp2.checkpoint.source import (
    Checkpoint,
    FileCheckpoint,
    FolderCheckpoint,
    open_checkpoint,
)
from composer_fsdp2.errors import CheckpointError

__all__ = ["MESH", "Description", "ParamGroup", "describe_checkpoint", "find_ties"]

MODEL = ("state", "model")
OPTIMIZERS = ("state", "optimizers")
MESH = "fsdp2_mesh"
"""name of the run's axes in `state.metadata`"""
_SCALARS = {
    "world_size": ("state", "metadata", "world_size"),
    "torch_version": ("state", "metadata", "torch_version"),
    "composer_version": ("state", "metadata", "composer_env_info", "composer_version"),
    "run_name": ("state", "run_name"),
    "mesh": ("state", "metadata", MESH),
}
_TIMES = ("iteration", "epoch", "batch", "sample", "token")


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """One group of an optimizer."""

    hyperparameters: Mapping[str, Any]
    names: int
    """number of parameters"""


@dataclass(slots=True)
class Description:
    """See the fields; what is not in the checkpoint is None or empty."""

    path: str
    kind: str | None = None
    world_size: int | None = None
    mesh: str | None = None
    """axes of the run and their sizes, outermost first; files of others do not say"""
    pieces: dict[str, int] = field(default_factory=dict)
    """along which dimensions tensors lie in pieces, of a folder -> number of tensors"""
    run_name: str | None = None
    torch_version: str | None = None
    composer_version: str | None = None
    progress: dict[str, int] = field(default_factory=dict)
    """epoch, batch, ... at the save"""
    parameters: int = 0
    """elements of the model's tensors, tied ones once"""
    dtypes: dict[str, int] = field(default_factory=dict)
    """dtype -> elements of the model's tensors, tied ones as often as they are stored"""
    optimizers: dict[str, list[ParamGroup]] = field(default_factory=dict)
    """class -> groups"""
    ties: tuple[tuple[str, ...], ...] = ()
    """keys of equal weights that train as one, first name first"""
    tensors: int = 0
    objects: int = 0
    size_bytes: int = 0
    files: dict[str, int] = field(default_factory=dict)
    """name -> bytes"""
    problems: list[str] = field(default_factory=list)


def describe_checkpoint(path: Path) -> Description:
    """Describes what is at a path, as far as it can be read; reads no large tensor.

    Collective: no.

    Raises:
        CheckpointError: there is nothing.
    """
    found = Description(str(path), files=_sizes(path))
    found.size_bytes = sum(found.files.values())
    try:
        source = open_checkpoint(path, incomplete=True)
    except CheckpointError as error:
        if not path.exists():
            raise
        if path.is_file() or (path / METADATA).is_file():
            found.kind = "full" if path.is_file() else "sharded"
        found.problems.append(str(error))
        return found
    found.kind = source.kind
    found.problems.extend(source.problems.values())
    small = _Small(source, found.problems)
    _describe_state(small, found)
    _describe_model(source, found)
    _describe_pieces(source, found)
    found.optimizers = _describe_optimizers(small)
    return found


def _sizes(path: Path) -> dict[str, int]:
    if path.is_file():
        return {path.name: path.stat().st_size}
    if not path.is_dir():
        return {}
    files = sorted(item for item in path.iterdir() if item.is_file())
    return {item.name: item.stat().st_size for item in files}


class _Small:
    """Small values by the way to them; one that cannot be read becomes a problem."""

    def __init__(self, source: Checkpoint, problems: list[str]) -> None:
        self.source = source
        self._problems = problems
        self._keys = {way: key for key, way in source.paths.items()}

    def __getitem__(self, way: tuple[str | int, ...]) -> Any:
        key = self._keys.get(way)
        if key is None:
            return None
        try:
            if key not in self.source.tensors:
                return self.source.object(key)
            if self.source.tensors[key].shape:
                return None
            return self.source.tensor(key).item()
        except CheckpointError as error:
            # A file that is missing is a problem already, and not one for each of its values.
            if not self.source.problems:
                self._problems.append(str(error))
            return None


def _describe_state(small: _Small, found: Description) -> None:
    for name, way in _SCALARS.items():
        value = small[way]
        if value is not None:
            setattr(found, name, value if isinstance(value, int) else str(value))
    if found.world_size is None:
        ranks = {way[0] for way in small.source.under("rng").values()}
        found.world_size = len(ranks) or None
    for unit in _TIMES:
        # Composer keeps the state of an object under the name of its class.
        value = small["state", "timestamp", "Timestamp", unit]
        with suppress(TypeError, ValueError, OverflowError):  # of a damaged one, or not there
            found.progress[unit] = int(value)


def _describe_model(source: Checkpoint, found: Description) -> None:
    found.tensors, found.objects = len(source.tensors), len(source.objects)
    found.ties = find_ties(source)
    again = {key for group in found.ties for key in group[1:]}
    for key in source.under(*MODEL):
        if key not in source.tensors:
            continue
        entry = source.tensors[key]
        elements = entry.size_bytes // entry.dtype.itemsize
        name = str(entry.dtype).removeprefix("torch.")
        found.dtypes[name] = found.dtypes.get(name, 0) + elements
        found.parameters += 0 if key in again else elements


def _describe_pieces(source: Checkpoint, found: Description) -> None:
    if not isinstance(source, FolderCheckpoint):
        return
    for key, entry in source.tensors.items():
        if entry.shape:
            starts = [index.offset or () for index in source.indices(key)]
            dims = [n for n, at in enumerate(zip(*starts, strict=False)) if len({*at}) > 1]
            what = f"dim {' and '.join(map(str, dims))}" if dims else "whole"
            found.pieces[what] = found.pieces.get(what, 0) + 1


def _describe_optimizers(small: _Small) -> dict[str, list[ParamGroup]]:
    groups: dict[str, dict[int, dict[str, Any]]] = {}
    for way in small.source.under(*OPTIMIZERS).values():
        values = groups.setdefault(str(way[0]), {})
        if len(way) == 4 and way[1] == "param_groups" and str(way[2]).isdecimal():
            values.setdefault(int(way[2]), {})[str(way[3])] = small[(*OPTIMIZERS, *way)]
    return {
        optimizer: [_group(by_number[i]) for i in sorted(by_number)]
        for optimizer, by_number in groups.items()
    }


def _group(values: dict[str, Any]) -> ParamGroup:
    names = values.pop("params", None) or ()
    return ParamGroup(values, len(names))


# --- Ties. ---


def find_ties(source: Checkpoint) -> tuple[tuple[str, ...], ...]:
    """Groups of keys of the model that are one parameter, in the order of the checkpoint.

    Two names of one storage are tied. A save may give each name a copy; such are the matrices of
    one shape with equal checksums, of which at most one has optimizer state. Without an optimizer,
    matrices that are equal by chance look the same.
    """
    keys = [key for key in source.under(*MODEL) if key in source.tensors]
    ties = _ties_by_checksum(source, keys)
    if isinstance(source, FileCheckpoint):
        known = {key for tie in ties for key in tie}
        shared = _grouped((key, _place(source.tensor(key))) for key in keys)
        ties += [tie for tie in shared if not known.issuperset(tie)]
    return tuple(sorted(ties, key=lambda tie: keys.index(tie[0])))


def _grouped(items: Iterable[tuple[str, Any]]) -> list[tuple[str, ...]]:
    groups: dict[Any, list[str]] = {}
    for key, same in items:
        if same is not None:
            groups.setdefault(same, []).append(key)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _place(tensor: torch.Tensor) -> Any:
    if not tensor.numel():
        return None
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _ties_by_checksum(source: Checkpoint, keys: list[str]) -> list[tuple[str, ...]]:
    trained = _trained(source)
    shapes: dict[Any, list[str]] = {}
    for key in keys:
        entry = source.tensors[key]
        if len(entry.shape) >= 2 and entry.size_bytes:
            shapes.setdefault((entry.shape, entry.dtype), []).append(key)
    found: list[tuple[str, ...]] = []
    for group in shapes.values():
        # Whatever has state is no second name, so most shapes need no look into the files.
        if len(group) > 1 and not all(key in trained for key in group):
            found += _grouped((key, _checksum(source, key)) for key in group)
    return [tie for tie in found if sum(key in trained for key in tie) <= 1]


def _trained(source: Checkpoint) -> set[str]:
    """Keys of weights that have optimizer state."""
    ways = source.under(*OPTIMIZERS).values()
    names = {way[2] for way in ways if len(way) == 4 and way[1] == "state"}
    return {key for key, way in source.under(*MODEL).items() if way and way[0] in names}


def _checksum(source: Checkpoint, key: str) -> Any:
    """Equal for equal tensors; None if there are none to compare."""
    if isinstance(source, FileCheckpoint):
        tensor, crc = source.tensor(key), source.stored_crc(key)
        return (crc, tensor.storage_offset(), tensor.stride()) if crc else None
    assert isinstance(source, FolderCheckpoint)
    try:
        found = [(i.offset, source.archive(i).data_crcs()) for i in source.indices(key)]
    except CheckpointError:
        return None  # its file is missing, which is reported elsewhere
    return tuple(sorted(found)) if any(any(crcs) for _, crcs in found) else None
