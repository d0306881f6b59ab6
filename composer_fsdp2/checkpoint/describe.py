"""Describes a checkpoint from its metadata and small values, verifies its bytes, compares two."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from composer_fsdp2.checkpoint.algorithms import vet_algorithms_of
from composer_fsdp2.checkpoint.contents import deepspeed_folder, files_of
from composer_fsdp2.checkpoint.deepspeed import DeepSpeedCheckpoint, open_any_checkpoint
from composer_fsdp2.checkpoint.metadata import MESH, METADATA
from composer_fsdp2.checkpoint.pickles import open_archive
from composer_fsdp2.checkpoint.source import Checkpoint, FileCheckpoint, FolderCheckpoint, KeyPath
from composer_fsdp2.config.messages import shortened
from composer_fsdp2.errors import CheckpointError

__all__ = ["compare_checkpoints", "describe_checkpoint", "find_ties", "verify_checkpoint"]

MODEL = ("state", "model")
OPTIMIZERS = ("state", "optimizers")
_SCALARS = {
    "world_size": ("state", "metadata", "world_size"),
    "torch_version": ("state", "metadata", "torch_version"),
    "composer_version": ("state", "metadata", "composer_env_info", "composer_version"),
    "run_name": ("state", "run_name"),
    "mesh": ("state", "metadata", MESH),
}
# Composer keeps the state of an object under the name of its class.
_TIMESTAMP = ("state", "timestamp", "Timestamp")
_TIMES = ("iteration", "epoch", "batch", "sample", "token")
_BLOCK = 1 << 24
"""elements compared at once; each may need 16 bytes"""
_DIRECTORY_BYTES = 1 << 16
"""the directory of an archive is at its end"""
_SAMPLE = 64
"""elements of a matrix in a file that are compared before all of them"""


def describe_checkpoint(path: Path) -> dict[str, Any]:
    """Describes what is at a path, as far as it can be read; reads no large tensor.

    Collective: no.

    Returns:
        What `checkpoint inspect --json` prints; None or empty for what the checkpoint lacks.
        world_size, mesh: of the run that saved; axes and their sizes, outermost first. pieces:
        along which dimensions tensors lie in pieces, of a folder -> number of tensors. progress:
        epoch, batch, ... at the save. parameters: elements of the model's tensors, tied ones once.
        dtypes: dtype -> elements, tied ones as often as they are stored. optimizers: class ->
        hyperparameters and number of names of each group, None if that cannot be read. ties: keys
        of equal weights that train as one, first name first. files: name -> bytes. remarks:
        sentences about what is not read.

    Raises:
        CheckpointError: there is nothing.
    """
    files = files_of(path)
    description: dict[str, Any] = {
        "path": str(path),
        "kind": None,
        **dict.fromkeys(("world_size", "mesh")),
        "pieces": {},
        **dict.fromkeys(("run_name", "torch_version", "composer_version")),
        "progress": {},
        "parameters": 0,
        "dtypes": {},
        "optimizers": {},
        "ties": (),
        "tensors": 0,
        "objects": 0,
        "size_bytes": sum(files.values()),
        "files": files,
        "problems": [],
        "remarks": [],
    }
    try:
        source = open_any_checkpoint(path, incomplete=True)
    except CheckpointError as error:
        if not path.exists():
            raise
        if (path / METADATA).is_file():
            description["kind"] = "sharded"
        elif deepspeed_folder(path) is not None:
            description["kind"] = "deepspeed"
        elif path.is_file():
            description["kind"] = "full"
        description["problems"].append(str(error))
        return description
    description["kind"] = source.kind
    description["problems"] += source.problems.values()
    description["remarks"] += source.remarks
    _describe_state(source, description)
    if isinstance(source, DeepSpeedCheckpoint):
        description["world_size"] = source.world_size
    ties = find_ties(source)
    description |= {"tensors": len(source.tensors), "objects": len(source.objects), "ties": ties}
    again = {key for group in ties for key in group[1:]}
    model, dtypes, pieces = source.under(*MODEL), description["dtypes"], description["pieces"]
    for key, entry in source.tensors.items():
        if key in model:
            elements = entry.size_bytes // entry.dtype.itemsize
            name = str(entry.dtype).removeprefix("torch.")
            dtypes[name] = dtypes.get(name, 0) + elements
            description["parameters"] += 0 if key in again else elements
        if isinstance(source, FolderCheckpoint) and entry.shape and key not in source.problems:
            starts = [index.offset or () for index in source.indices(key)]
            dims = [n for n, at in enumerate(zip(*starts, strict=False)) if len({*at}) > 1]
            cut = f"dim {' and '.join(map(str, dims))}" if dims else "whole"
            pieces[cut] = pieces.get(cut, 0) + 1
    return description


def _is_of_group(key_path: KeyPath) -> bool:
    return key_path[:2] == OPTIMIZERS and key_path[3:4] == ("param_groups",) and len(key_path) == 6


def _small_values(source: Checkpoint, problems: list[str]) -> dict[KeyPath, Any]:
    """Reads the values that a description shows; one that cannot be read becomes a problem."""
    values: dict[KeyPath, Any] = {}
    for key, key_path in source.paths.items():
        if not (
            _is_of_group(key_path) or key_path[:3] == _TIMESTAMP or key_path in _SCALARS.values()
        ):
            continue
        try:
            if key in source.objects:
                values[key_path] = source.object(key)
            elif not source.tensors[key].shape:
                values[key_path] = source.tensor(key).item()
        except CheckpointError as error:
            # A file that is missing is a problem already, and not one for each of its values.
            problems += [] if source.problems else [str(error)]
    return values


def _describe_state(source: Checkpoint, description: dict[str, Any]) -> None:
    """Adds the run that saved, its progress, and the groups of its optimizers."""
    values = _small_values(source, description["problems"])
    for name, key_path in _SCALARS.items():
        if (value := values.get(key_path)) is not None:
            description[name] = value if isinstance(value, int) else str(value)
    if description["world_size"] is None:
        description["world_size"] = (
            len({key_path[0] for key_path in source.under("rng").values()}) or None
        )
    for unit in _TIMES:
        with suppress(LookupError, TypeError, ValueError, OverflowError):  # damaged, or not there
            description["progress"][unit] = int(values[(*_TIMESTAMP, unit)])
    description["optimizers"] = {
        str(key_path[0]): [] for key_path in source.under(*OPTIMIZERS).values() if key_path
    }
    groups: dict[tuple[str, int], dict[str, Any]] = {}
    # The metadata names groups whose values are in a file that is missing.
    for key_path in filter(_is_of_group, source.paths.values()):
        if str(key_path[4]).isdecimal():
            group = groups.setdefault((str(key_path[2]), int(key_path[4])), {})
            group |= {str(key_path[5]): values[key_path]} if key_path in values else {}
    for (optimizer, _), group in sorted(groups.items(), key=lambda item: item[0]):
        names = len(group.pop("params") or ()) if "params" in group else None
        description["optimizers"][optimizer].append({"hyperparameters": group, "names": names})


def find_ties(source: Checkpoint) -> tuple[tuple[str, ...], ...]:
    """Returns groups of keys of the model that are one parameter, in the order of the checkpoint.

    Two names of one storage are tied. A save may give each name a copy; such are the matrices of
    one shape with equal bytes, of which at most one has optimizer state. Without an optimizer,
    matrices that are equal by chance look the same.
    """
    if isinstance(source, DeepSpeedCheckpoint):  # whose files say it
        return source.ties
    model = {
        key: key_path for key, key_path in source.under(*MODEL).items() if key in source.tensors
    }
    key_paths = source.under(*OPTIMIZERS).values()
    names = {key_path[2] for key_path in key_paths if len(key_path) == 4 and key_path[1] == "state"}
    trained = {key for key, key_path in model.items() if key_path and key_path[0] in names}
    matrices = {key: source.tensors[key] for key in model if len(source.tensors[key].shape) >= 2}
    ties: list[tuple[str, ...]] = []
    for group in _grouped((key, entry) for key, entry in matrices.items() if entry.size_bytes):
        # A weight with state is no second name, so most shapes need no look into the files.
        if not trained.issuperset(group):
            ties += _grouped((key, _content(source, key)) for key in group)
    # Those of a file are mapped: they cost nothing until they are read.
    tensors: dict[str, torch.Tensor] = {}
    if isinstance(source, FileCheckpoint):  # `_content` has seen a sample
        tensors = {key: source.tensor(key) for key in model}
        ties = [
            (first, *(key for key in others if torch.equal(tensors[first], tensors[key])))
            for first, *others in ties
        ]
    ties = [tie for tie in ties if len(tie) > 1 and len(trained.intersection(tie)) <= 1]
    tied_keys = {key for tie in ties for key in tie}
    storage_of = {
        key: (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        for key, tensor in tensors.items()
        if tensor.numel()
    }
    ties += [tie for tie in _grouped(storage_of.items()) if not tied_keys.issuperset(tie)]
    order = list(model)
    return tuple(sorted(ties, key=lambda tie: order.index(tie[0])))


def _grouped(items: Iterable[tuple[str, Any]]) -> list[tuple[str, ...]]:
    groups: dict[Any, list[str]] = {}
    for key, same in items:
        if same is not None:
            groups.setdefault(same, []).append(key)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _content(source: Checkpoint, key: str) -> Any:
    """Returns a value that is equal for equal matrices; None if they cannot be compared.

    Of a folder these are checksums, of a file the first elements.
    """
    if not isinstance(source, FolderCheckpoint):
        row = source.tensor(key).detach()[0].reshape(-1)[:_SAMPLE]
        return bytes(row.contiguous().view(torch.uint8).numpy())
    checksums: list[Any] = []
    try:
        for index in source.indices(key):
            end = source.read(index, _DIRECTORY_BYTES)
            with open_archive(end, source.where(index)) as archive:
                crcs = [item.CRC for item in archive.infolist() if "/data/" in item.filename]
            checksums.append((index.offset, *crcs))
    except CheckpointError:
        return None  # its file is missing, which is reported elsewhere
    return tuple(sorted(checksums)) if any(any(crcs) for _, *crcs in checksums) else None


# --- Every byte. ---


def verify_checkpoint(path: Path, advance: Callable[[int, int], object]) -> dict[str, Any]:
    """Reads all of a checkpoint and compares it with its checksums, in spite of damage.

    Collective: no.

    Args:
        path: a folder or a file.
        advance: told the bytes of each part, and of all.

    Returns:
        What `checkpoint verify --json` prints. parts: number of tensors and objects; checksums:
        whether there are any to compare with.

    Raises:
        CheckpointError: there is nothing.
    """
    description = {"path": str(path), "kind": None, "size_bytes": 0, "parts": 0, "checksums": False}
    try:
        source = open_any_checkpoint(path, incomplete=True)
    except CheckpointError as error:
        if not path.exists():
            raise
        return {**description, "problems": [str(error)]}
    problems = list(source.problems.values())
    total = sum(files_of(path).values())
    checksums = source.has_checksums if isinstance(source, FileCheckpoint) else True
    description |= {"kind": source.kind, "size_bytes": total, "parts": len(source.paths)}
    description["checksums"] = checksums
    for part in source.parts():
        size_bytes = 0
        try:
            size_bytes = source.check_part(part)
        except CheckpointError as error:
            problems.append(str(error))
        advance(size_bytes, total)
    if not problems:  # what cannot be read has been told
        try:
            vet_algorithms_of(source)
        except CheckpointError as error:
            problems.append(str(error))
    return {**description, "problems": problems}


# --- Two checkpoints. ---


def compare_checkpoints(
    first: Checkpoint,
    second: Checkpoint,
    advance: Callable[[int, int], object],
    *,
    tolerance: float = 0.0,
    weights: bool = False,
) -> dict[str, Any]:
    """Compares by key; the kinds may differ.

    Args:
        first: an open checkpoint.
        second: another one.
        advance: told the bytes of each tensor that was compared, and of all.
        tolerance: elements a and b are equal if |a - b| <= tolerance + tolerance * |b|. With 0
            tensors are equal if their bytes are.
        weights: compares the model alone, without the rest of the training state.

    Returns:
        What `checkpoint diff --json` prints, by key; all empty if the checkpoints are equal.
        layouts: shape and dtype on either side, where they differ. values: largest absolute
        difference of tensors that are not equal; 'nan' if one side has one, for which JSON has no
        word. objects: text of other values, on either side.

    Raises:
        CheckpointError: a value cannot be read, or there are no weights to compare.
    """
    layouts: dict[str, tuple[str, str]] = {}
    values: dict[str, float | str] = {}
    objects: dict[str, tuple[str, str]] = {}
    keys = [side.under(*MODEL) if weights else side.paths for side in (first, second)]
    for side, inside in zip((first, second), keys, strict=True):
        if not inside:
            raise CheckpointError(
                f"'{side.path}' holds no weights. There is nothing to compare. Give a checkpoint "
                "of a training run, or leave --weights out."
            )
    both = [key for key in keys[0] if key in keys[1]]
    sizes = {key: first.tensors[key].size_bytes for key in both if key in first.tensors}
    total, tensors = sum(sizes.values()), 0
    for key in both:
        # Of a tensor its dtype and shape, of another value itself.
        a, b = (
            f"{str(entry.dtype).removeprefix('torch.')} {list(entry.shape)}"
            if (entry := side.tensors.get(key))
            else side.object(key)
            for side in (first, second)
        )
        if not (key in first.tensors and key in second.tensors):
            if not _same(a, b):
                objects[key] = (_text(a), _text(b))
        else:
            tensors += 1
            if a != b:
                layouts[key] = (a, b)
            else:
                apart = _largest_difference(first.tensor(key), second.tensor(key), tolerance)
                if apart is not None:
                    values[key] = apart if math.isfinite(apart) else str(apart)
        advance(sizes.get(key, 0), total)
    differences = {
        "only_in_first": [key for key in keys[0] if key not in keys[1]],
        "only_in_second": [key for key in keys[1] if key not in keys[0]],
        "layouts": layouts,
        "values": values,
        "objects": objects,
    }
    return {
        "equal": not any(differences.values()),
        **differences,
        "equal_tensors": tensors - len(layouts) - len(values),
        "equal_objects": len(both) - tensors - len(objects),
    }


def _text(value: Any) -> str:
    return shortened(" ".join(repr(value).split()), 80)


def _largest_difference(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> float | None:
    """Returns None if the tensors are equal; in blocks, because wider numbers are needed."""
    apart: list[float] = []
    equal = True
    blocks = (side.detach().reshape(-1).split(_BLOCK) for side in (a, b))
    for x, y in zip(*blocks, strict=True):
        if not torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
            wide = torch.complex128 if x.is_complex() else torch.float64
            x, y = x.to(wide), y.to(wide)
            close = torch.isclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)
            equal = equal and tolerance > 0 and bool(close.all())
            apart.append((x - y).abs().max().item())
    return None if equal else float(np.max(apart))


def _same(a: Any, b: Any) -> bool:
    """Compares inside containers too; `==` of arrays is an array."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray | torch.Tensor) and type(a) is type(b):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    return type(a) is type(b) and bool(a == b or (a != a and b != b))
