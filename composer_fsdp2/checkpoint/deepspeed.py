"""Reads the weights of a DeepSpeed checkpoint, without DeepSpeed, executing nothing.

The folder of a checkpoint (its "tag") has `mp_rank_00_model_states.pt`: the model in the dtype of
training, and names and shapes of what the optimizer steps. ZeRO keeps the fp32 weights in
`zero_pp_rank_<rank>_mp_rank_00_optim_states.pt`.

[Note: layout of ZeRO] Stages 1 and 2 put the parameters of a group one after the other into one
vector, which is cut into a part for each rank. Stage 3 cuts each parameter into equal shares, and
a rank puts its shares one after the other; model states are a file for each rank too. Ends are
padded. A universal checkpoint has a file for each parameter, `zero/<name>/fp32.pt`.

Source: https://github.com/deepspeedai/DeepSpeed/blob/v0.17.0/deepspeed/utils/zero_to_fp32.py
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from composer_fsdp2.checkpoint.contents import TensorEntry, deepspeed_folder
from composer_fsdp2.checkpoint.metadata import METADATA, is_inside
from composer_fsdp2.checkpoint.pickles import (
    check_member,
    damaged,
    load_object,
    open_archive,
    trusts,
)
from composer_fsdp2.checkpoint.source import Checkpoint, open_checkpoint
from composer_fsdp2.errors import CheckpointError, ConfigError
from composer_fsdp2.text import plain_name

__all__ = ["DeepSpeedCheckpoint", "open_any_checkpoint"]

_FILE = re.compile(r"(?:\w+16_)?(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(model|optim)_states\.pt")
_OF_HUGGING_FACE = "model."
"""begins the names of a HuggingFaceModel, which is around the model that DeepSpeed trains"""
_EXPERTS = ("ds_autoep_layers", "autoep_layers")


def open_any_checkpoint(
    path: str | os.PathLike[str], *, incomplete: bool = False, prefix: str | None = None
) -> Checkpoint:
    """Opens what `open_checkpoint` does, and a checkpoint of DeepSpeed.

    Collective: no.

    Args:
        path: a folder or a file.
        incomplete: opens it although parts are missing, if they can be listed.
        prefix: begins the names of the weights of a checkpoint of DeepSpeed. None: `model.`, unless
            all of them do so already.

    Raises:
        CheckpointError: it is no checkpoint, incomplete, damaged, or could execute code.
        ConfigError: it has a `prefix`, and is no checkpoint of DeepSpeed.
    """
    path = Path(path)
    folder = None if (path / METADATA).is_file() else deepspeed_folder(path)
    if folder is not None:
        return DeepSpeedCheckpoint(path, folder, prefix)
    if prefix is not None:
        raise ConfigError(
            f"--prefix is given with '{path}', which is no checkpoint of DeepSpeed. The weights of "
            "a Composer checkpoint have the names of their model already. Leave it out."
        )
    return open_checkpoint(path, incomplete=incomplete)


@dataclass(frozen=True, slots=True)
class _Weight:
    """A tensor in flat pieces, which stay in their files until they are read."""

    pieces: tuple[torch.Tensor, ...]
    entry: TensorEntry


class DeepSpeedCheckpoint(Checkpoint):
    """The weights of ZeRO 1, 2 and 3, of a universal checkpoint, and of training without ZeRO.

    Floating point values beside fp32 weights, such as buffers in bf16, are widened to fp32.

    Args:
        path: a folder of DeepSpeed, a file in it, or the folder above.
        folder: the folder of one checkpoint, with the files of all ranks.
        prefix: see `open_any_checkpoint`.

    Attributes:
        world_size: ranks between which the optimizer was divided; None without ZeRO.
        ties: groups of keys that are one tensor.
    """

    objects = ()

    def __init__(self, path: Path, folder: Path, prefix: str | None = None) -> None:
        self.path, self.folder = path, folder
        self.kind = "deepspeed"
        self.world_size: int | None = None
        self._files: list[Path] = []
        try:
            weights = self._read(*self._list())
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise damaged(str(folder), error) from error
        names = [plain_name(name) for name in weights]
        # `DistributedDataParallel`, and the engine around the model in old versions.
        around = "module." if all(name.startswith("module.") for name in names) else ""
        names = [name.removeprefix(around) for name in names]
        if prefix is None:
            wrapped = all(name.startswith(_OF_HUGGING_FACE) for name in names)
            prefix = "" if wrapped else _OF_HUGGING_FACE
        self._weights = {
            f"state.model.{prefix}{name}": weight
            for name, weight in zip(names, weights.values(), strict=True)
        }
        self.tensors = {key: weight.entry for key, weight in self._weights.items()}
        self.paths = {
            key: ("state", "model", key.removeprefix("state.model.")) for key in self._weights
        }
        same: dict[int, list[str]] = {}
        for key, weight in self._weights.items():
            same.setdefault(id(weight), []).append(key)
        self.ties = tuple(tuple(keys) for keys in same.values() if len(keys) > 1)
        self.remarks = (
            *self.remarks,
            "Weights alone are read. The state of the optimizer and the progress of the run are "
            "left out, so moments start new: a run loads with load_weights_only: true.",
        )
        if prefix:
            self.remarks += (
                f"In a Composer checkpoint the names begin with '{prefix}', as in a ComposerModel "
                "around the model that was trained. Say otherwise with --prefix.",
            )
        # Hugging Face's Trainer writes its files beside the folder of the checkpoint.
        beside = (folder, folder.parent)
        self.config = next((item for item in beside if (item / "config.json").is_file()), None)

    # --- Interface. ---

    def tensor(self, key: str) -> torch.Tensor:
        """Returns the whole tensor; a view of the file where it lies there in one piece."""
        weight = self._weights[key]
        flat = weight.pieces[0] if len(weight.pieces) == 1 else torch.cat(weight.pieces)
        shape = weight.entry.shape
        return flat[: math.prod(shape)].view(shape).to(weight.entry.dtype)

    def object(self, key: str) -> Any:
        """Raises a KeyError: there are weights only."""
        raise KeyError(key)

    def parts(self) -> Sequence[Path]:
        """Returns the files that weights are read from."""
        return self._files

    def check_part(self, part: Path) -> int:
        """Compares one file with its checksums; returns its bytes."""
        with open_archive(part, str(part)) as archive:
            return sum(check_member(archive, item, str(part)) for item in archive.infolist())

    # --- Files. ---

    def _list(self) -> tuple[dict[int, Path], dict[int, Path]]:
        """Returns rank -> file of the model states, and of the optimizer's.

        Raises:
            CheckpointError: the weights are divided in other ways than by ZeRO.
        """
        files: dict[str, dict[int, Path]] = {"model": {}, "optim": {}}
        for item in sorted(self.folder.glob("*_states.pt")):
            match = _FILE.fullmatch(item.name)
            if match is None or int(match[2]):
                raise self._other_parallelism(f"has '{item.name}'")
            other = files[match[3]].setdefault(int(match[1] or 0), item)
            if other != item:
                raise self._mixed(f"has '{other.name}' and '{item.name}'")
        if not files["model"]:
            raise self._missing("mp_rank_00_model_states.pt")
        return files["model"], files["optim"]

    def _load(self, file: Path) -> Any:
        if not file.is_file():
            raise self._missing(str(file.relative_to(self.folder)))
        self._files.append(file)
        return load_object(file, str(file), trusted=trusts(file), foreign="deepspeed")

    def _complete(self, files: Mapping[int, Path], count: int) -> list[Path]:
        """Returns the files of `count` ranks; refuses one too few and one too many."""
        for rank in range(count):
            if rank not in files:
                other = next(iter(files.values())).name
                raise self._missing(re.sub(r"zero_pp_rank_\d+", f"zero_pp_rank_{rank}", other))
        if len(files) > count:
            raise self._mixed(f"was written by {count} ranks and has '{files[max(files)].name}'")
        return [files[rank] for rank in range(count)]

    def _missing(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"'{self.folder}' is incomplete: '{name}' is missing. Weights are in there, or what "
            "says where they are. Copy the files of all ranks into that folder, or take another "
            "checkpoint."
        )

    def _mixed(self, contradiction: str) -> CheckpointError:
        return CheckpointError(
            f"'{self.folder}' {contradiction}. Files of two saves are mixed, and weights of "
            "either could be read. Remove those of the older save."
        )

    def _other_parallelism(self, sign: str) -> CheckpointError:
        return CheckpointError(
            f"'{self.folder}' {sign}: tensor or pipeline parallelism, or experts over ranks. Such "
            "weights are cut in ways that only their own model knows. Save full weights with the "
            "program that trained them, such as save_pretrained, and load those."
        )

    # --- Weights. ---

    def _read(self, models: dict[int, Path], optims: dict[int, Path]) -> dict[str, _Weight]:
        """Returns name -> weight, in the order of the model."""
        first = min(models)
        states = [self._load(models[first])]
        model, stage3 = states[0], models[first].name.startswith("zero_pp_rank_")
        if int(model.get("mp_world_size") or 1) > 1 or any(map(model.get, _EXPERTS)):
            raise self._other_parallelism("was not divided by ZeRO alone")
        shapes = model.get("param_shapes") or []
        shapes = [shapes] if isinstance(shapes, Mapping) else shapes
        trained: dict[str, _Weight] = {}
        if (self.folder / "zero").is_dir():
            self.kind = "deepspeed universal"
            trained = {name: self._universal(name, shape) for name, shape in _items(shapes)}
        elif shapes and (stage3 or optims):
            self.kind = "deepspeed ZeRO-3" if stage3 else "deepspeed ZeRO-1 or ZeRO-2"
            trained = dict(self._partitioned(shapes, optims, stage3))
        elif stage3:
            raise self._missing("zero_pp_rank_0_mp_rank_00_optim_states.pt")
        else:
            self.remarks = (
                "There are no partitions of fp32 weights, so the weights are those that the model "
                "computed with, in their dtype.",
            )
        if stage3:
            files = self._complete(models, self.world_size or 1 + max(models))
            if model.get("frozen_param_shapes"):
                states += [self._load(file) for file in files[1:]]
        return _combined(states, trained, stage3)

    def _universal(self, name: str, shape: Sequence[int]) -> _Weight:
        if not is_inside(name):
            raise CheckpointError(
                f"'{self.folder}' names a parameter '{name}', outside of its own folder. No save "
                "writes such a name, and following it could read any file. Do not use this "
                "checkpoint."
            )
        value = self._load(self.folder / "zero" / name / "fp32.pt")
        if isinstance(value, Mapping):
            # The padding of a vocabulary is cut off, which the shapes do not know.
            shape = value["param"].shape if value.get("vocab_tensor") else shape
            value = value["param"]
        return _weight([value.reshape(-1)], shape, value.dtype)

    def _partitioned(
        self, groups: Sequence[Mapping[str, Any]], files: Mapping[int, Path], stage3: bool
    ) -> Iterator[tuple[str, _Weight]]:
        """Yields the weights of the optimizer; see [Note: layout of ZeRO]."""
        if not files:
            raise self._missing("zero_pp_rank_0_mp_rank_00_optim_states.pt")
        state = self._load(files[min(files)])["optimizer_state_dict"]
        counts = state["partition_count"]
        counts = set(counts) if isinstance(counts, list | tuple) else {counts}
        if len(counts) != 1:
            raise self._other_parallelism("divides its parameters between different ranks")
        self.world_size = world = int(counts.pop())
        complete, self._files = self._complete(files, world), self._files[:-1]
        slot = "fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups"
        # What else is in there, such as moments, stays in its file.
        ranks = [self._load(file)["optimizer_state_dict"][slot] for file in complete]
        if stage3:
            start = 0
            for name, shape in _items(groups):
                share = math.ceil(math.prod(shape) / len(ranks))
                pieces = [piece for vectors in ranks for piece in _cut(vectors, start, share)]
                yield name, _weight(pieces, shape, ranks[0][0].dtype)
                start += share
            for vectors in ranks:
                _same_size(start, sum(vector.numel() for vector in vectors), 1)
            return
        # Newer versions have elements behind each parameter.
        paddings = state.get("param_alignment_paddings") or [()] * len(groups)
        for group, shapes, between in zip(range(len(groups)), groups, paddings, strict=True):
            start, parts = 0, [vectors[group] for vectors in ranks]
            for index, (name, shape) in enumerate(shapes.items()):
                size = math.prod(shape)
                yield name, _weight(_cut(parts, start, size), shape, parts[0].dtype)
                start += size + (between[index] if between else 0)
            _same_size(start, sum(part.numel() for part in parts), 2 * len(parts))


def _items(groups: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    for shapes in groups:
        yield from shapes.items()


def _cut(vectors: Iterable[torch.Tensor], start: int, size: int) -> Iterator[torch.Tensor]:
    """Yields elements from `start` on of what vectors are one after the other."""
    for vector in vectors:
        end, length = start + size, vector.numel()
        if start < length and end > 0:
            yield vector[max(start, 0) : end]
        start -= length


def _same_size(wanted: int, stored: int, align: int) -> None:
    if math.ceil(wanted / align) != math.ceil(stored / align):
        raise ValueError(f"parameters have {wanted} elements, and partitions {stored}")


def _weight(pieces: Iterable[torch.Tensor], shape: Sequence[int], dtype: torch.dtype) -> _Weight:
    pieces = tuple(pieces) or (torch.empty(0, dtype=dtype),)
    stored, shape = sum(piece.numel() for piece in pieces), tuple(shape)
    if stored < math.prod(shape):
        raise ValueError(f"a parameter of shape {shape} has {stored} elements")
    return _Weight(pieces, TensorEntry(shape, dtype))


def _combined(
    states: Sequence[Mapping[str, Any]], trained: Mapping[str, _Weight], stage3: bool
) -> dict[str, _Weight]:
    """Adds what the optimizer does not step: frozen parameters, buffers, names of tied ones.

    Args:
        states: model states; of all ranks if stage 3 has frozen parameters.
        trained: name -> weight of the optimizer.
        stage3: whether `module` has no values of parameters.
    """
    model, module = states[0], states[0].get("module") or {}
    first_weights: dict[Any, _Weight] = {}

    def whole(pieces: Sequence[torch.Tensor], shape: Sequence[int]) -> _Weight:
        dtype = pieces[0].dtype
        if trained and dtype in (torch.bfloat16, torch.float16):
            dtype = torch.float32
        weight = _weight([piece.reshape(-1) for piece in pieces], shape, dtype)
        # Without the optimizer, tied names are known by their storage alone.
        tensor = pieces[0]
        same = (tensor.data_ptr(), tensor.dtype, tensor.stride(), weight.entry.shape)
        return first_weights.setdefault(same, weight) if tensor.numel() else weight

    weights = {
        name: whole([tensor], tensor.shape)
        for name, tensor in module.items()
        if isinstance(tensor, torch.Tensor) and (not stage3 or name in model["buffer_names"])
    }
    for name, shape in (model.get("frozen_param_shapes") or {}).items():
        weights[name] = whole([state["frozen_param_fragments"][name] for state in states], shape)
    weights.update(trained)
    for name, owner in (model.get("shared_params") or {}).items():
        if owner in weights:
            weights[name] = weights[owner]
    tensors = [name for name, value in module.items() if isinstance(value, torch.Tensor)]
    absent = [name for name in tensors if name not in weights]
    if absent:
        raise ValueError(f"'{absent[0]}' is in no partition")
    return {name: weights[name] for name in dict.fromkeys((*module, *weights)) if name in weights}
