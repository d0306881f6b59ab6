"""Reads weights slice by slice from a local folder in Hugging Face's safetensors layout.

[Note: names] A model and a folder may name one tensor differently, as `from_pretrained` allows: the
model sits inside a wrapper (`model.` in front of everything), or one of the two is the base model
without its head and lacks `base_model_prefix`. Both are one prefix for all names, so of the few
possible prefixes the one that finds most names is taken.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.plan.module_tree import ModuleTree, canonical_param_ids
from composer_fsdp2.shard.torch_private.tensors import non_persistent_buffers
from composer_fsdp2.text import listed

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

_FLOATS = ("F64", "F32", "F16", "BF16")
_INTEGERS = ("I64", "I32", "I16", "I8", "U8", "BOOL")

_MOST = 20
"""names listed in one error"""

_SLICE_BYTES = 32 * 2**20
"""Upper bound of one slice that is cast or copied to a device."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Place, shape and dtype of a tensor, from a header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """safetensors' name of it: `F32`, `BF16`"""


@dataclass(frozen=True, slots=True)
class PretrainedFolder:
    """Names, shapes and dtypes of the tensors of a folder, from the headers of its files alone."""

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


def _opened(file: Path) -> Any:
    """Returns an open file, its header sound and its data as long as the header says."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"'{file}' is no complete safetensors file ({error}). Its weights cannot be trusted. "
            "Download or copy it again, and compare its size with the original's."
        ) from error


def _read_header(file: Path) -> dict[str, StoredTensor]:
    with _opened(file) as opened:
        slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118 (no mapping)
        return {
            key: StoredTensor(file, tuple(stored.get_shape()), str(stored.get_dtype()))
            for key, stored in slices.items()
        }


def _read_indexed(folder: Path) -> dict[str, StoredTensor]:
    index = folder / _INDEX
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for key, name in weight_map.items():
            if not isinstance(name, str) or not _is_inside(name):
                raise ValueError(f"{key!r} is in {name!r}, outside the folder")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"'{index}' is no index of safetensors files ({type(error).__name__}: {error}). The "
            "weights cannot be found by it. Download or save the folder again; `weight_map` names "
            "one file of the folder per tensor."
        ) from error
    headers = {name: _read_header(folder / name) for name in dict.fromkeys(weight_map.values())}
    absent = [key for key, name in weight_map.items() if key not in headers[name]]
    if absent:
        raise CheckpointError(
            f"The files of '{folder}' lack {_counted(absent)}, which {_INDEX} says are in them. "
            "The folder is a mixture of two downloads or saves. Download or save it again."
        )
    return {key: headers[name][key] for key, name in weight_map.items()}


def _is_inside(name: str) -> bool:
    """Looks at the name alone: the cache of downloads is made of links to files elsewhere."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "\\" not in name


def _no_safetensors(folder: Path) -> str:
    if not folder.is_dir():
        return (
            f"'{folder}' is no folder on this machine. The run would have no weights to start "
            "from. Give the path of a local folder with safetensors files, present on every node."
        )
    pickles = sorted({file.name for pattern in _PICKLES for file in folder.glob(pattern)})
    if pickles:
        return (
            f"'{folder}' holds {_counted(pickles)} and no safetensors. Those files are pickles: "
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
        # The rules for names are those of the outermost Hugging Face model.
        modules = (module for _, module in tree.modules())
        model = next((m for m in modules if isinstance(_prefix_of(m), str)), None)
        ignorable = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        weight_of = canonical_param_ids(tree.params)
        tied: dict[int, list[str]] = defaultdict(list)
        for ref in tree.params:
            tied[weight_of[id(ref.param)]].append(ref.name)
        return cls(
            tensors=tensors,
            tied=[tuple(names) for names in tied.values() if len(names) > 1],
            recomputed=frozenset(recomputed),
            base_model_prefix=_prefix_of(model) or "",
            ignorable=tuple(ignorable),
        )


def _prefix_of(module: nn.Module | None) -> Any:
    return getattr(module, "base_model_prefix", None)


@dataclass(frozen=True, slots=True)
class PretrainedPlan:
    """Which tensor of a folder each parameter and persistent buffer is read from."""

    keys: Mapping[str, str]
    """name in the model -> key in the folder"""
    skipped: tuple[str, ...] = ()
    """keys of a head that is not part of this model"""

    def __str__(self) -> str:
        """Returns a line for each name, for the ranks to compare."""
        return "\n".join(f"{name} <- {key}" for name, key in self.keys.items())


def plan_pretrained(folder: PretrainedFolder, model: ModelTensors) -> PretrainedPlan:
    """Finds every name of the model in the folder; see [Note: names]. Collective: no.

    Raises:
        CheckpointError: with all names that are missing, left over, or of another shape or kind.
    """
    passed_over = {
        key for key in folder.tensors if any(re.search(rule, key) for rule in model.ignorable)
    }

    def left_over(naming: _Naming) -> list[str]:
        used = {naming.key(name) for name in (*model.tensors, *model.recomputed)}
        return [key for key in folder.tensors if key not in used and key not in passed_over]

    def fitness(naming: _Naming) -> tuple[int, int]:
        """Counts names found, then fewest keys left over that are no head's."""
        found = sum(naming.key(name) in folder.tensors for name in model.tensors)
        return found, -sum(key.startswith(naming.added) for key in left_over(naming))

    naming = max(_namings(model), key=fitness)
    group_of = {name: group for group in model.tied for name in group}
    keys: dict[str, str] = {}
    missing: list[str] = []
    misfits: list[str] = []
    for name, (shape, dtype) in model.tensors.items():
        # Tied names share the first that is there.
        names = group_of.get(name, (name,))
        key = next((k for k in map(naming.key, names) if k in folder.tensors), None)
        if key is None:
            missing += [name] if name == names[0] else []
            continue
        keys[name], stored = key, folder.tensors[key]
        kinds = _FLOATS if dtype.is_floating_point else _INTEGERS
        if stored.shape != shape or stored.dtype not in kinds:
            there = f"{list(stored.shape)} {stored.dtype}"
            misfits.append(f"{name}: {there} in the folder, {list(shape)} {dtype} in the model")
    # Keys outside of the base model that the model is belong to a head.
    left = left_over(naming)
    unexpected = [key for key in left if key.startswith(naming.added)]
    problems = {
        "it lacks": missing,
        "the model has no place for": unexpected,
        "other shapes or kinds of number:": misfits,
    }
    said = [f"{text} {_counted(names)}" for text, names in problems.items() if names]
    if said:
        raise CheckpointError(
            f"'{folder.path}' does not fit the model: {'; '.join(said)}. The run would start from "
            "other weights than those of the folder. Build the model from the folder's own "
            "config.json, or leave out pretrained_weights and load the folder with "
            "`from_pretrained`."
        )
    return PretrainedPlan(keys, tuple(key for key in left if not key.startswith(naming.added)))


@dataclass(frozen=True, slots=True)
class _Naming:
    """A way from the model's names to the folder's: prefixes are dropped, one is added."""

    dropped: tuple[str, ...] = ()
    added: str = ""

    def key(self, name: str) -> str:
        for prefix in self.dropped:
            name = name.removeprefix(prefix)
        return self.added + name


def _namings(model: ModelTensors) -> list[_Naming]:
    """Returns the possible ones, the plainest first: it wins when several find as many names."""
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


def _counted(names: Sequence[str]) -> str:
    shown = listed(names, _MOST)
    return f"{len(names)} ({shown})" if len(names) > 1 else shown


@dataclass(slots=True, eq=False)
class PretrainedWeights:
    """A folder as a `WeightSource` for one model; files stay mapped while it lives."""

    folder: PretrainedFolder
    plan: PretrainedPlan
    _open: dict[Path, Any] = field(default_factory=dict[Path, Any])

    def __contains__(self, name: object) -> bool:
        """Returns whether a name of the model is read from the folder."""
        return name in self.plan.keys

    def read_into(self, target: torch.Tensor, name: str, offsets: Sequence[int]) -> None:
        """Fills `target` with the part of its shape that begins at `offsets`.

        Raises:
            CheckpointError: when the file went away or changed.
        """
        key = self.plan.keys[name]
        file = self.folder.tensors[key].file
        try:
            if file not in self._open:
                self._open[file] = _opened(file)
            stored = self._open[file].get_slice(key)
            if target.ndim == 0:
                target.copy_(stored[...])
            if target.ndim == 0 or target.numel() == 0:
                return
            # A few rows at a time, cast or copied to a device on the way.
            ends = [start + size for start, size in zip(offsets, target.shape, strict=True)]
            inner = tuple(map(slice, offsets[1:], ends[1:]))
            rows = max(1, _SLICE_BYTES * len(target) // (target.numel() * target.element_size()))
            for first in range(0, len(target), rows):
                part, start = target[first : first + rows], offsets[0] + first
                part.copy_(stored[(slice(start, start + len(part)), *inner)])
        except (SafetensorError, OSError, CheckpointError) as error:
            raise CheckpointError(
                f"'{key}' could not be read from '{file}' ({error}). The model is only partly "
                "filled. Start again once the file is there and nobody writes to it."
            ) from error


def open_pretrained(path: str, tree: ModuleTree) -> PretrainedWeights:
    """Opens a folder for a model. Collective: no; ranks have the plan to compare.

    Raises:
        CheckpointError: when the folder cannot be read, or does not fit the model.
    """
    folder = PretrainedFolder.read(path)
    return PretrainedWeights(folder, plan_pretrained(folder, ModelTensors.of(tree)))
