"""Unpickling that executes nothing: checkpoints come from other people.

[Note: what may be unpickled] A pickle can name any function and call it. `.metadata` is read by an
unpickler that finds only the few classes such a file consists of; everything else goes through
torch's `weights_only` unpickler, with the types by which Composer stores random states and wall
clock times added by name. A file that asks for more is refused and the refusal says what it asked
for. `COMPOSER_FSDP2_TRUST` names the paths whose author the user trusts.
"""

from __future__ import annotations

import datetime
import io
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.torch_version import TorchVersion

from composer_fsdp2.errors import CheckpointError

__all__ = [
    "TRUST_VARIABLE",
    "check_pickle",
    "load_file",
    "load_object",
    "load_plainly",
    "read_metadata",
    "trusts",
    "vet_metadata",
]

TRUST_VARIABLE = "COMPOSER_FSDP2_TRUST"
"""Environment variable: paths of checkpoints that may execute code, separated as in `PATH`."""

_REBUILD, _RECONSTRUCT = "_rebuild_tensor_v2", "_reconstruct"
_DCP = "torch.distributed.checkpoint"
_METADATA_NAMES = frozenset(
    {
        ("collections", "OrderedDict"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        (f"{_DCP}.filesystem", "_StorageInfo"),
        (f"{_DCP}.metadata", "BytesStorageMetadata"),
        (f"{_DCP}.metadata", "ChunkStorageMetadata"),
        (f"{_DCP}.metadata", "Metadata"),
        (f"{_DCP}.metadata", "MetadataIndex"),
        (f"{_DCP}.metadata", "StorageMeta"),
        (f"{_DCP}.metadata", "TensorProperties"),
        (f"{_DCP}.metadata", "TensorStorageMetadata"),
        (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    }
)


# What LLM Foundry's callbacks keep: classes of plain fields that run nothing when they are made.
# Where it is not imported, nothing could use them.
_FOUNDRY_STATES = (
    ("llmfoundry.callbacks.curriculum_learning_callback", "CurriculumLearningState"),
    ("llmfoundry.callbacks.dataset_swap_callback", "DatasetSwapStateDict"),
    ("composer.core.time", "Time"),
    ("composer.core.time", "TimeUnit"),
)


def trusts(path: Path) -> bool:
    """Whether the user has named this checkpoint, or a folder it is in, as trusted."""
    given = os.environ.get(TRUST_VARIABLE, "")
    trusted = [Path(item).resolve() for item in given.split(os.pathsep) if item]
    resolved = path.resolve()
    return any(resolved == item or item in resolved.parents for item in trusted)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _METADATA_NAMES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise _Forbidden(f"{module}.{name}")


class _Forbidden(Exception):
    """Not an UnpicklingError: it has to be told apart from a damaged file."""


def read_metadata(path: Path) -> Metadata:
    """Reads the `.metadata` of a sharded checkpoint.

    Args:
        path: the file itself.

    Raises:
        CheckpointError: it is missing, damaged, or asks for something that could execute code.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        found = _unpickle_metadata(path, data)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises anything at all
        raise damaged(str(path), error) from error
    if not isinstance(found, Metadata):
        raise CheckpointError(
            f"'{path}' holds a {type(found).__name__}, not the metadata of a checkpoint. Nothing "
            "can be found without it. Give the folder that torch.distributed.checkpoint wrote."
        )
    return found


def vet_metadata(path: Path) -> None:
    """Unpickles a `.metadata` without executing anything, for someone who will do so freely.

    Raises:
        CheckpointError: it asks for something that could execute code.
        Exception: whatever unpickling freely would raise too.
    """
    _unpickle_metadata(path, path.read_bytes())


def _unpickle_metadata(path: Path, data: bytes) -> Any:
    unpickler = pickle.Unpickler if trusts(path) else _MetadataUnpickler
    try:
        return unpickler(io.BytesIO(data)).load()
    except _Forbidden as error:
        raise _refusal(str(path), str(error)) from None


class _DataUnpickler(pickle.Unpickler):
    """For plain pickles that hold tensors, arrays and times besides Python's own values."""

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where
        self._types = {
            (kind.__module__, kind.__qualname__): kind
            for kind in _safe_types()
            if isinstance(kind, type)
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("collections", "OrderedDict"), ("torch._utils", _REBUILD)):
            return super().find_class(module, name)
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: load_object(data, self._where)  # pyright: ignore[reportUnknownLambdaType]
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == _RECONSTRUCT:
            return super().find_class(module, name)
        if (module, name) in self._types:
            return self._types[module, name]
        raise _Forbidden(f"{module}.{name}")


def check_pickle(path: Path) -> None:
    """Reads a plain pickle, such as Composer's `resumption.pkl`, without executing anything.

    Raises:
        CheckpointError: it asks for something that could execute code.
        Exception: whatever unpickling it freely would raise too.
    """
    if trusts(path):
        return
    try:
        _DataUnpickler(path.read_bytes(), str(path)).load()
    except _Forbidden as error:
        raise _refusal(str(path), str(error)) from None


def load_object(data: bytes | memoryview, where: str, *, trusted: bool = False) -> Any:
    """Loads what `torch.save` wrote, from memory, without executing anything.

    Args:
        data: the whole of it.
        where: file and key, for the error.
        trusted: whether the user said that it may execute code.

    Raises:
        CheckpointError: it is damaged, or asks for something that could execute code.
    """
    return _load(lambda **kwargs: torch.load(io.BytesIO(data), **kwargs), where, trusted)  # pyright: ignore[reportUnknownLambdaType]


def load_file(path: Path) -> Any:
    """Loads a file that `torch.save` wrote, without executing anything.

    Tensors are on the CPU and, where the format allows it, mapped: they cost no memory until they
    are read, and writing to them does not change the file.

    Raises:
        CheckpointError: it cannot be read, is damaged, or could execute code.
    """
    if not path.is_file():
        raise unreadable(path, FileNotFoundError("there is no such file"))
    with path.open("rb") as file:
        mapped = file.read(4) == b"PK\x03\x04"  # older files are not zip archives
    return _load(lambda **kwargs: torch.load(path, mmap=mapped, **kwargs), str(path), trusts(path))  # pyright: ignore[reportUnknownLambdaType]


def load_plainly(path: Path, map_location: str) -> Any:
    """Returns what `torch.load(path, map_location)` does, without executing anything.

    Raises:
        CheckpointError: it could execute code, or is no pickle.
        Exception: whatever `torch.load` raises.
    """
    try:
        with torch.serialization.safe_globals(_safe_types()):
            return torch.load(path, map_location=map_location, weights_only=not trusts(path))
    except pickle.UnpicklingError as error:
        unsafe = _asked_for(error)
        raise (_refusal(str(path), unsafe) if unsafe else damaged(str(path), error)) from None


def _load(load: Callable[..., Any], where: str, trusted: bool) -> Any:
    try:
        with torch.serialization.safe_globals(_safe_types()):
            return load(map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:
        unsafe = _asked_for(error)
        raise (_refusal(where, unsafe) if unsafe else damaged(where, error)) from None
    except Exception as error:  # a damaged archive raises anything at all
        raise damaged(where, error) from error


def _asked_for(error: Exception) -> str:
    """What torch's unpickler refused, or nothing if the pickle is damaged."""
    text = " ".join(str(error).split())
    for mark in ("Unsupported global: GLOBAL ", "Unsupported class ", "Trying to call reduce for "):
        if mark in text:
            return text.partition(mark)[2].split()[0].rstrip(".,")
    return ""


def _safe_types() -> list[Any]:
    reconstruct = np.zeros(1).__reduce__()[0]
    dtypes = {type(np.dtype(code)) for code in np.typecodes["All"]}
    foundry = [getattr(sys.modules[m], name) for m, name in _FOUNDRY_STATES if m in sys.modules]
    return [
        *foundry,
        datetime.timedelta,
        np.dtype,
        np.ndarray,
        TorchVersion,
        # numpy 1 and numpy 2 call it by different names.
        (reconstruct, "numpy.core.multiarray._reconstruct"),
        (reconstruct, "numpy._core.multiarray._reconstruct"),
        *dtypes,
    ]


def _refusal(where: str, asked: str) -> CheckpointError:
    return CheckpointError(
        f"{where} asks to load '{asked}', which is not data. Loading it could execute code that "
        f"came with the file, so nothing was loaded. If you trust whoever wrote it, set "
        f"{TRUST_VARIABLE} to its path."
    )


def damaged(where: str, error: BaseException) -> CheckpointError:
    """The error for a file whose content makes no sense."""
    return CheckpointError(
        f"{where} is damaged: {type(error).__name__}: {_one_line(error)}. What it holds cannot be "
        "trusted. Take another checkpoint; `composer-fsdp2 checkpoint verify` tells whether one "
        "is whole."
    )


def unreadable(path: Path, error: BaseException) -> CheckpointError:
    """The error for a file the system does not hand out."""
    return CheckpointError(
        f"'{path}' cannot be read: {_one_line(error)}. The checkpoint is incomplete without it. "
        "Give the path of a complete checkpoint: a folder with a '.metadata', or a file."
    )


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return text if len(text) <= 200 else text[:200] + "..."
