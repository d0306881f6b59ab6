"""A local folder in Hugging Face's safetensors layout as a source of weights, read slice by slice.

[Note: names] A model and a folder may name one tensor differently, as `from_pretrained` allows: the
model sits inside a wrapper (`model.` in front of everything), or one of the two is the base model
without its head and lacks `base_model_prefix`. Both are one prefix for all names, so of the few
possible prefixes the one that finds most names is taken.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.plan.module_tree import ModuleTree, canonical_param_ids
from composer_fsdp2.shard.torch_private.tensors import non_persistent_buffers

__all__ = [
    "ModelTensors",
    "PretrainedFolder",
    "PretrainedPlan",
    "PretrainedWeights",
    "StoredTensor",
    "open_pretrained",
    "plan_pretrained",
]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt")

_FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_INTEGERS = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPES = _FLOATS | _INTEGERS

_MOST = 20
"""names listed in one error"""

_SLICE_BYTES = 32 * 2**20
"""Upper bound of one slice that is cast or copied to a device."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Description of one tensor in a header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """safetensors' name of it: `F32`, `BF16`"""
    begin: int
    """of its bytes in the file"""


@dataclass(frozen=True, slots=True)
class PretrainedFolder:
    """The tensors of a folder, known from the headers of its files alone."""

    path: Path
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def read(cls, path: str | Path) -> PretrainedFolder:
        """Reads the index and the header of every file it lists. Collective: no.

        Raises:
            CheckpointError: when there is no such folder, it holds no safetensors, the index names
                files outside it or tensors its files have not, or a file is cut off or corrupt.
        """
        folder = Path(path).expanduser()
        if (folder / _SINGLE).is_file():
            return cls(folder, _read_header(folder / _SINGLE))
        if (folder / _INDEX).is_file():
            return cls(folder, _read_indexed(folder))
        raise CheckpointError(_no_safetensors(folder))


def _read_header(file: Path) -> dict[str, StoredTensor]:
    _opened(file)  # checks the header, so that it can be taken at its word here
    with file.open("rb") as opened:
        # A file is the length of the header, the header, and the data. Offsets count from the data.
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    return {
        key: StoredTensor(
            file, tuple(entry["shape"]), entry["dtype"], 8 + length + entry["data_offsets"][0]
        )
        for key, entry in header.items()
        if key != "__metadata__"
    }


def _opened(file: Path) -> Any:
    """An open file; opening checks that the header is sound and the data as long as it says."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"'{file}' is no complete safetensors file ({error}). Its weights cannot be trusted. "
            "Download or copy it again, and compare its size with the original's."
        ) from error


def _read_indexed(folder: Path) -> dict[str, StoredTensor]:
    weight_map = _weight_map(folder / _INDEX)
    headers = {name: _read_header(folder / name) for name in dict.fromkeys(weight_map.values())}
    absent = [key for key, name in weight_map.items() if key not in headers[name]]
    if absent:
        raise CheckpointError(
            f"The files of '{folder}' lack {_listed(absent)}, which {_INDEX} says are in them. The "
            "folder is a mixture of two downloads or saves. Download or save it again."
        )
    return {key: headers[name][key] for key, name in weight_map.items()}


def _weight_map(index: Path) -> dict[str, str]:
    """Key -> file name from an index, each name checked to lie inside the folder."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(_bad_index(index, f"{type(error).__name__}: {error}")) from error
    if not isinstance(weight_map, dict):
        raise CheckpointError(_bad_index(index, "'weight_map' is no mapping"))
    for key, name in weight_map.items():
        if not isinstance(name, str) or not _is_inside(name):
            raise CheckpointError(_bad_index(index, f"{key!r} is in {name!r}, outside the folder"))
    return weight_map


def _is_inside(name: str) -> bool:
    """By the name alone: the cache of downloads is made of links to files elsewhere."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "\\" not in name


def _bad_index(index: Path, what: str) -> str:
    return (
        f"'{index}' is no index of safetensors files ({what}). The weights cannot be found by it. "
        "Download or save the folder again; `weight_map` names one file of the folder per tensor."
    )


def _no_safetensors(folder: Path) -> str:
    if not folder.is_dir():
        return (
            f"'{folder}' is no folder on this machine. The run would have no weights to start "
            "from. Give the path of a local folder with safetensors files, present on every node."
        )
    pickles = sorted({file.name for pattern in _PICKLES for file in folder.glob(pattern)})
    if pickles:
        return (
            f"'{folder}' holds {_listed(pickles)} and no safetensors. Those files are pickles: "
            "reading one executes code, and cannot read a slice. Convert them once, with "
            "`AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder)`."
        )
    return (
        f"'{folder}' holds neither {_SINGLE} nor {_INDEX}. The run would have no weights to start "
        "from. Give the folder that `save_pretrained` wrote."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensors:
    """Tensors that a model needs from a folder, by name."""

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    """shape and dtype of every parameter and persistent buffer"""
    tied: Sequence[tuple[str, ...]] = ()
    """names of one parameter; one of them in the folder is enough"""
    recomputed: frozenset[str] = frozenset()
    """non-persistent buffers, which old folders may hold"""
    base_model_prefix: str = ""
    """what a model with a head calls its base model"""
    ignorable: tuple[str, ...] = ()
    """regular expressions of keys the model's class expects not to use"""

    @classmethod
    def of(cls, tree: ModuleTree) -> ModelTensors:
        """Reads names, shapes and ties; values may be on meta. Collective: no."""
        tensors = {ref.name: (tuple(ref.param.shape), ref.param.dtype) for ref in tree.params}
        recomputed: set[str] = set()
        for entry in tree.paths:
            module, prefix = entry.module, f"{entry.path}." if entry.path else ""
            for name, buffer in module._buffers.items():
                if name in non_persistent_buffers(module):
                    recomputed.add(prefix + name)
                elif buffer is not None:
                    tensors[prefix + name] = (tuple(buffer.shape), buffer.dtype)
        prefix, ignorable = _conventions(tree)
        return cls(
            tensors=tensors,
            tied=_tied(tree),
            recomputed=frozenset(recomputed),
            base_model_prefix=prefix,
            ignorable=ignorable,
        )


def _conventions(tree: ModuleTree) -> tuple[str, tuple[str, ...]]:
    """Returns the rules for names of the outermost Hugging Face model."""
    for _, module in tree.modules():
        prefix = getattr(module, "base_model_prefix", None)
        if isinstance(prefix, str):
            ignorable = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
            return prefix, tuple(ignorable)
    return "", ()


def _tied(tree: ModuleTree) -> list[tuple[str, ...]]:
    weight_of = canonical_param_ids(tree.params)
    names: dict[int, list[str]] = defaultdict(list)
    for ref in tree.params:
        names[weight_of[id(ref.param)]].append(ref.name)
    return [tuple(group) for group in names.values() if len(group) > 1]


@dataclass(frozen=True, slots=True)
class PretrainedPlan:
    """Which tensor of a folder each parameter and persistent buffer is read from."""

    keys: Mapping[str, str]
    """name in the model -> key in the folder"""
    skipped: tuple[str, ...] = ()
    """keys of a head this model has not"""

    def __str__(self) -> str:
        """One line per name, for the ranks to compare."""
        return "\n".join(f"{name} <- {key}" for name, key in self.keys.items())


def plan_pretrained(folder: PretrainedFolder, model: ModelTensors) -> PretrainedPlan:
    """Finds every name of the model in the folder; see [Note: names]. Collective: no.

    Raises:
        CheckpointError: with all names that are missing, left over, or of another shape or kind.
    """
    naming = max(_namings(model), key=lambda naming: _fitness(folder, model, naming))
    keys, missing = _find_keys(folder, model, naming)
    unexpected, skipped = _left_over(folder, model, naming)
    misfits = list(_misfits(folder, model, keys))
    if missing or unexpected or misfits:
        raise CheckpointError(_does_not_fit(folder.path, missing, unexpected, misfits))
    return PretrainedPlan(keys, tuple(skipped))


@dataclass(frozen=True, slots=True)
class _Naming:
    """One way to get from the model's names to the folder's: prefixes are dropped, one is added."""

    dropped: tuple[str, ...] = ()
    added: str = ""

    def key(self, name: str) -> str:
        for prefix in self.dropped:
            name = name.removeprefix(prefix)
        return self.added + name


def _namings(model: ModelTensors) -> list[_Naming]:
    """The possible ones, the plainest first: it wins when several find as many names."""
    wrappers: list[tuple[str, ...]] = [()]
    heads = {name.partition(".")[0] for name in model.tensors}
    if len(heads) == 1 and all("." in name for name in model.tensors):
        wrappers.append((f"{heads.pop()}.",))
    namings = [_Naming(wrapper) for wrapper in wrappers]
    if model.base_model_prefix:
        base = f"{model.base_model_prefix}."
        namings += [_Naming((*wrapper, base)) for wrapper in wrappers]
        namings += [_Naming(wrapper, base) for wrapper in wrappers]
    return namings


def _fitness(folder: PretrainedFolder, model: ModelTensors, naming: _Naming) -> tuple[int, int]:
    """Names found, then fewest keys left over."""
    found = sum(naming.key(name) in folder.tensors for name in model.tensors)
    return found, -len(_left_over(folder, model, naming)[0])


def _left_over(
    folder: PretrainedFolder, model: ModelTensors, naming: _Naming
) -> tuple[list[str], list[str]]:
    """Keys the model has no place for, and those of a head outside the base model it is."""
    used = {naming.key(name) for name in (*model.tensors, *model.recomputed)}
    left = [key for key in folder.tensors if key not in used and not _ignorable(key, model)]
    unexpected = [key for key in left if key.startswith(naming.added)]
    return unexpected, [key for key in left if not key.startswith(naming.added)]


def _find_keys(
    folder: PretrainedFolder, model: ModelTensors, naming: _Naming
) -> tuple[dict[str, str], list[str]]:
    """Key of every name, and the names without; tied names share the first that is there."""
    group_of = {name: group for group in model.tied for name in group}
    keys: dict[str, str] = {}
    missing: list[str] = []
    for name in model.tensors:
        candidates = (naming.key(other) for other in group_of.get(name, (name,)))
        found = next((key for key in candidates if key in folder.tensors), None)
        if found is not None:
            keys[name] = found
        elif name == group_of.get(name, (name,))[0]:
            missing.append(name)
    return keys, missing


def _ignorable(key: str, model: ModelTensors) -> bool:
    return any(re.search(pattern, key) for pattern in model.ignorable)


def _misfits(
    folder: PretrainedFolder, model: ModelTensors, keys: Mapping[str, str]
) -> Iterator[str]:
    for name, key in keys.items():
        (shape, dtype), stored = model.tensors[name], folder.tensors[key]
        kinds = _FLOATS if dtype.is_floating_point else _INTEGERS
        if stored.shape != shape or stored.dtype not in kinds:
            there = f"{list(stored.shape)} {stored.dtype}"
            yield f"{name}: {there} in the folder, {list(shape)} {dtype} in the model"


def _does_not_fit(
    folder: Path, missing: list[str], unexpected: list[str], misfits: list[str]
) -> str:
    parts: list[str] = []
    if missing:
        parts.append(f"it lacks {_listed(missing)}")
    if unexpected:
        parts.append(f"the model has no place for {_listed(unexpected)}")
    if misfits:
        parts.append(f"other shapes or kinds of number: {_listed(misfits)}")
    return (
        f"'{folder}' does not fit the model: {'; '.join(parts)}. The run would start from other "
        "weights than those of the folder. Build the model from the folder's own config.json, or "
        "leave out pretrained_weights and load the folder with `from_pretrained`."
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_MOST])
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f"{len(names)} ({shown}{more})" if len(names) > 1 else shown


@dataclass(slots=True, eq=False)
class PretrainedWeights:
    """A folder as a `WeightSource` for one model; files stay mapped while it lives."""

    folder: PretrainedFolder
    plan: PretrainedPlan
    _open: dict[Path, Any] = field(default_factory=dict[Path, Any])

    def __contains__(self, name: object) -> bool:
        """Whether a name of the model is read from the folder."""
        return name in self.plan.keys

    def read_into(self, target: torch.Tensor, name: str, offsets: Sequence[int]) -> None:
        """Fills `target` with the part of its shape that begins at `offsets`.

        Raises:
            CheckpointError: when the file went away or changed.
        """
        key = self.plan.keys[name]
        stored = self.folder.tensors[key]
        if target.numel() == 0:
            return
        try:
            if _is_same_memory(target, stored):
                _read_rows(target, stored, offsets)
            else:
                self._cast_slices(target, key, offsets)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"'{key}' could not be read from '{stored.file}' ({error}). The model is only "
                "partly filled. Start again once the file is there and nobody writes to it."
            ) from error

    def _cast_slices(self, target: torch.Tensor, key: str, offsets: Sequence[int]) -> None:
        """Copies through the mapped file, a few rows at a time."""
        file = self.folder.tensors[key].file
        if file not in self._open:
            self._open[file] = _opened(file)
        stored = self._open[file].get_slice(key)
        if target.ndim == 0:
            target.copy_(stored[...])
            return
        ends = [start + size for start, size in zip(offsets, target.shape, strict=True)]
        inner = tuple(map(slice, offsets[1:], ends[1:]))
        rows = max(1, _SLICE_BYTES * len(target) // (target.numel() * target.element_size()))
        for first in range(0, len(target), rows):
            part, start = target[first : first + rows], offsets[0] + first
            part.copy_(stored[(slice(start, start + len(part)), *inner)])


def _is_same_memory(target: torch.Tensor, stored: StoredTensor) -> bool:
    """Whether the target's bytes are one run of the file's: whole rows, nothing to cast."""
    return (
        _DTYPES.get(stored.dtype) is target.dtype
        and target.device.type == "cpu"
        and target.is_contiguous()
        and tuple(target.shape[1:]) == stored.shape[1:]
        and sys.byteorder == "little"
    )


def _read_rows(target: torch.Tensor, stored: StoredTensor, offsets: Sequence[int]) -> None:
    """Reads into the target's own memory: half the work of mapping the file and copying."""
    view = target.detach().view(-1).view(torch.uint8).numpy().data
    row_bytes = len(view) // len(target) if target.ndim else 0
    begin = stored.begin + (offsets[0] * row_bytes if target.ndim else 0)
    with stored.file.open("rb", buffering=0) as file:
        while view:
            # One call reads at most 2 GiB on Linux.
            count = os.preadv(file.fileno(), [view], begin)
            if count == 0:
                raise OSError("the file ends before the tensor does")
            view, begin = view[count:], begin + count


def open_pretrained(path: str, tree: ModuleTree) -> PretrainedWeights:
    """Opens a folder for a model. Collective: no; ranks have the plan to compare.

    Raises:
        CheckpointError: when the folder cannot be read, or does not fit the model.
    """
    folder = PretrainedFolder.read(path)
    return PretrainedWeights(folder, plan_pretrained(folder, ModelTensors.of(tree)))
