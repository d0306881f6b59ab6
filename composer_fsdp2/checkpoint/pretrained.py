"""Reads weights slice by slice from a local folder in Hugging Face's safetensors layout.

[Note: names] A model and a folder may name one tensor differently, as `from_pretrained` allows: the
model sits inside a wrapper (`model.` in front of everything), or one of the two is the base model
without its head and lacks `base_model_prefix`. Both are one prefix for all names, so of the few
possible prefixes the one that finds most names is taken.

[Note: merged experts] Folders have a matrix for each expert, and transformers 5 has all experts of
a layer in one tensor, in which the matrices of a gate lie before those it gates. `from_pretrained`
puts them together; here a slice of the tensor is read from the matrices it is made of.
Source: "mixtral" and "qwen2_moe" in
https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/conversion_mapping.py
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.plan.module_tree import ModuleTree, attribute_of, tied_groups
from composer_fsdp2.text import listed
from composer_fsdp2.torch_private.tensors import non_persistent_buffers

__all__ = [
    "BLOCKS",
    "PretrainedWeights",
    "StoredTensor",
    "expert_matrices",
    "find_keys",
    "merge_experts",
    "read_folder",
]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt")

_FLOATS = ("F64", "F32", "F16", "BF16")
_INTEGERS = ("I64", "I32", "I16", "I8", "U8", "BOOL")

_SLICE_BYTES = 32 * 2**20
"""Upper bound of one slice that is cast or copied to a device."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Place, shape and dtype of a tensor, from a header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """safetensors' name of it: `F32`, `BF16`"""
    key: str = ""
    """in the file"""
    experts: tuple[tuple[StoredTensor, ...], ...] = ()
    """matrices of each expert, whose rows follow each other; see [Note: merged experts]"""


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Reads the index and the header of every file it lists. Collective: no.

    Returns:
        Place, shape and dtype of each tensor of the folder, by its key.

    Raises:
        CheckpointError: when there is no such folder, it holds no safetensors, the index names
            files outside it or tensors its files have not, or a file is cut off or corrupt.
    """
    if (folder / _SINGLE).is_file():
        return _read_header(folder / _SINGLE)
    index = folder / _INDEX
    if not folder.is_dir():
        raise CheckpointError(
            f"pretrained_weights: '{folder}' is no folder on this machine. The run would have no "
            "weights to start from. Give the path of a local folder with safetensors files, which "
            "is on every node."
        )
    if not index.is_file():
        pickles = sorted({file.name for pattern in _PICKLES for file in folder.glob(pattern)})
        if pickles:
            raise CheckpointError(
                f"'{folder}' holds {_counted(pickles)} and no safetensors. Those files are "
                "pickles: reading one executes code, and cannot read a slice. Convert them once, "
                "with `AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder)`."
            )
        raise CheckpointError(
            f"'{folder}' holds neither {_SINGLE} nor {_INDEX}. The run would have no weights to "
            "start from. Give the folder that `save_pretrained` wrote."
        )
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for key, name in weight_map.items():
            # By the name alone: the cache of downloads is made of links to files elsewhere.
            outside = not isinstance(name, str) or "\\" in name or name[:1] in ("", "/")
            if outside or ".." in PurePosixPath(name).parts:
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
            key: StoredTensor(file, tuple(stored.get_shape()), str(stored.get_dtype()), key)
            for key, stored in slices.items()
        }


_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
_MERGED = (
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("down_proj", ("down_proj",)),
    ("gate_up_proj", ("w1", "w3")),
    ("down_proj", ("w2",)),
)
"""names of tensors with all experts, and of the matrices they are made of"""
BLOCKS = (".block_sparse_moe.", ".mlp.")
"""names of Mixtral's blocks with matrices for each expert, and with merged experts"""


def merge_experts(stored: Mapping[str, StoredTensor], tree: ModuleTree) -> dict[str, StoredTensor]:
    """Returns the tensors of a folder by the names of a model with merged experts.

    Collective: no. See [Note: merged experts]; for other models the tensors stay as they are.
    """
    if not any(
        attribute_of(module, "is_concatenated") is True
        and attribute_of(module, "is_transposed") is False
        for _, module in tree.modules()
    ):
        return dict(stored)
    joined = {key.replace(*BLOCKS): tensor for key, tensor in stored.items()}
    for name, keys in expert_matrices(joined).items():
        rows = tuple(tuple(joined[key] for key in row) for row in keys)
        shapes = [matrix.shape for matrix in rows[0]]
        equal = all([matrix.shape for matrix in row] == shapes for row in rows)
        if not equal or len({size[1:] for size in shapes}) > 1:
            continue  # `find_keys` says what is wrong with the folder
        shape = (len(rows), sum(size[0] for size in shapes), *shapes[0][1:])
        joined[name] = replace(rows[0][0], shape=shape, experts=rows)
        for key in itertools.chain.from_iterable(keys):
            del joined[key]
    return joined


def expert_matrices(names: Iterable[str]) -> dict[str, list[list[str]]]:
    """Returns name of a tensor with merged experts -> names of the matrices of each expert.

    Only of those whose matrices are all among the names. See [Note: merged experts].
    """
    layers = defaultdict[str, dict[str, dict[int, str]]](lambda: defaultdict(dict))
    for name in names:
        if (match := _EXPERT.fullmatch(name)) is not None:
            layers[match[1]][match[3]][int(match[2])] = name
    matrices_of: dict[str, list[list[str]]] = {}
    for layer, matrices in layers.items():
        for name, parts in _MERGED:
            numbers = sorted(matrices[parts[0]])
            if numbers and all(
                sorted(matrices[part]) == list(range(len(numbers))) for part in parts
            ):
                rows = [[matrices[part][number] for part in parts] for number in numbers]
                matrices_of[f"{layer.replace(*BLOCKS)}.{name}"] = rows
    return matrices_of


def find_keys(
    path: str | Path, stored: Mapping[str, StoredTensor], tree: ModuleTree
) -> tuple[dict[str, str], list[str]]:
    """Finds every parameter and persistent buffer in a folder; see [Note: names].

    Collective: no. Values of the model may be on meta.

    Args:
        path: of the folder; in error messages.
        stored: its tensors.
        tree: the model to be filled.

    Returns:
        Name in the model -> key in the folder; keys of a head that is not part of this model.

    Raises:
        CheckpointError: with all names that are missing, left over, or of another shape or kind.
    """
    tensors, recomputed = _tensors_of(tree)
    # The rules for names are those of the outermost Hugging Face model.
    outermost = next((m for _, m in tree.modules() if hasattr(m, "base_model_prefix")), None)
    base = str(getattr(outermost, "base_model_prefix", ""))
    ignorable = getattr(outermost, "_keys_to_ignore_on_load_unexpected", None) or ()
    passed_over = {key for key in stored if any(re.search(rule, key) for rule in ignorable)}

    def fitness(naming: tuple[str, dict[str, str]]) -> tuple[int, int]:
        """Counts names found, then fewest keys left over that are no head's."""
        added, key_of = naming
        unused = stored.keys() - key_of.values() - passed_over
        matches = sum(key_of[name] in stored for name in tensors)
        return matches, -sum(key.startswith(added) for key in unused)

    added, key_of = max(_namings(tensors, recomputed, base), key=fitness)
    group_of = {name: names for names in tied_groups(tree) for name in names}
    keys: dict[str, str] = {}
    missing: list[str] = []
    misfits: list[str] = []
    for name, tensor in tensors.items():
        # Tied names share the first that is there.
        names = group_of.get(name, (name,))
        key = next((key_of[n] for n in names if key_of[n] in stored), None)
        if key is None:
            missing += [name] if name == names[0] else []
            continue
        keys[name], there, shape = key, stored[key], tuple(tensor.shape)
        kinds = _FLOATS if tensor.is_floating_point() else _INTEGERS
        if there.shape != shape or there.dtype not in kinds:
            misfits.append(
                f"{name}: {list(there.shape)} {there.dtype} in the folder, {list(shape)} "
                f"{tensor.dtype} in the model"
            )
    # Keys outside of the base model that the model is belong to a head.
    used = {*key_of.values(), *passed_over}
    unused = [key for key in stored if key not in used]
    problems = {
        "it lacks": missing,
        "the model has no place for": [key for key in unused if key.startswith(added)],
        "other shapes or kinds of number:": misfits,
    }
    said = [f"{text} {_counted(names)}" for text, names in problems.items() if names]
    if said:
        raise CheckpointError(
            f"'{path}' does not fit the model: {'; '.join(said)}. The run would start from "
            "other weights than those of the folder. Build the model from the folder's own "
            "config.json, or leave out pretrained_weights and load the folder with "
            "`from_pretrained`."
        )
    return keys, unused


def _tensors_of(tree: ModuleTree) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Returns what a model saves, by name, and names of buffers that old folders hold besides."""
    tensors: dict[str, torch.Tensor] = {ref.name: ref.param for ref in tree.params}
    recomputed: list[str] = []
    for module_path in tree.paths:
        module, prefix = module_path.module, f"{module_path.path}." if module_path.path else ""
        for name, buffer in module._buffers.items():
            if name in non_persistent_buffers(module):
                recomputed.append(prefix + name)
            elif buffer is not None:
                tensors[prefix + name] = buffer
    return tensors, recomputed


def _namings(
    names: Collection[str], recomputed: Collection[str], base: str
) -> list[tuple[str, dict[str, str]]]:
    """Returns the possible keys by name, with the prefix that only they have.

    The plainest come first, which win when several find as many names. A wrapper's prefix, and that
    of the base model, may be those of the model's names alone.
    """
    wrappers, heads = [""], {name.partition(".")[0] for name in names}
    if len(heads) == 1 and all("." in name for name in names):
        wrappers.append(f"{heads.pop()}.")
    bases = [("", ""), (f"{base}.", ""), ("", f"{base}.")] if base else [("", "")]
    named = (*names, *recomputed)
    return [
        (added, {n: added + n.removeprefix(wrapper).removeprefix(dropped) for n in named})
        for dropped, added in bases
        for wrapper in wrappers
    ]


def _counted(names: Sequence[str]) -> str:
    shown = listed(names, 20)
    return f"{len(names)} ({shown})" if len(names) > 1 else shown


class PretrainedWeights:
    """A folder as a `WeightSource` for one model; files stay mapped while it lives.

    Attributes:
        tensors: place, shape and dtype of the tensors of the folder.
        keys: name in the model -> key in the folder.
        skipped: keys of a head that is not part of this model.
    """

    def __init__(self, path: str, tree: ModuleTree) -> None:
        """Opens a folder for a model. Collective: no; ranks have `str` of it to compare.

        Raises:
            CheckpointError: when the folder cannot be read, or does not fit the model.
        """
        folder = Path(path).expanduser()
        self.tensors = merge_experts(read_folder(folder), tree)
        self.keys, self.skipped = find_keys(folder, self.tensors, tree)
        self._open: dict[Path, Any] = {}

    def __str__(self) -> str:
        """Returns a line for each name, for the ranks to compare."""
        return "\n".join(f"{name} <- {key}" for name, key in self.keys.items())

    def __contains__(self, name: object) -> bool:
        """Returns whether a name of the model is read from the folder."""
        return name in self.keys

    def read_into(self, target: torch.Tensor, name: str, offsets: Sequence[int]) -> None:
        """Fills `target` with the part of its shape that begins at `offsets`.

        Raises:
            CheckpointError: when the file went away or changed.
        """
        self._read(target, self.tensors[self.keys[name]], offsets)

    def _read(self, target: torch.Tensor, source: StoredTensor, offsets: Sequence[int]) -> None:
        if source.experts:
            local_experts = source.experts[offsets[0] :][: len(target)]
            for expert, matrices in zip(target, local_experts, strict=True):
                begin = 0
                for matrix in matrices:
                    end = begin + matrix.shape[0]
                    first, last = max(begin, offsets[1]), min(end, offsets[1] + len(expert))
                    if first < last:
                        part = expert[first - offsets[1] : last - offsets[1]]
                        self._read(part, matrix, (first - begin, *offsets[2:]))
                    begin = end
            return
        file = source.file
        try:
            if file not in self._open:
                self._open[file] = _opened(file)
            stored = self._open[file].get_slice(source.key)
            if target.ndim == 0:
                target.copy_(stored[...])
            elif target.numel() > 0:
                # A few rows at a time, cast or copied to a device on the way.
                ends = [start + size for start, size in zip(offsets, target.shape, strict=True)]
                inner = tuple(map(slice, offsets[1:], ends[1:]))
                rows = max(1, _SLICE_BYTES * len(target) // target.nbytes)
                for first in range(0, len(target), rows):
                    part, start = target[first : first + rows], offsets[0] + first
                    part.copy_(stored[(slice(start, start + len(part)), *inner)])
        except (SafetensorError, OSError, CheckpointError) as error:
            raise CheckpointError(
                f"'{source.key}' could not be read from '{file}' ({error}). The model is only "
                "partly filled. Start again once the file is there and nobody writes to it."
            ) from error
