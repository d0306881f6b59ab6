"""Unpickling that executes nothing: checkpoints come from other people.

[Note: what may be unpickled] A pickle can name any function and call it. `.metadata` is read by an
unpickler that finds only the few classes such a file consists of; everything else goes through
torch's `weights_only` unpickler, with the types by which Composer stores random states and wall
clock times added by name. A file that asks for more is refused and the refusal says what it asked
for. `COMPOSER_FSDP2_TRUST` names the paths whose author the user trusts.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import io
import os
import pickle
import pickletools
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties
from torch.torch_version import TorchVersion

from composer_fsdp2.errors import CheckpointError

__all__ = [
    "TRUST_VARIABLE",
    "check_pickle",
    "is_refusal",
    "load_file",
    "load_object",
    "load_plainly",
    "read_metadata",
    "trusts",
    "vet_metadata",
]

TRUST_VARIABLE = "COMPOSER_FSDP2_TRUST"
"""Environment variable: paths of checkpoints that may execute code, separated as in `PATH`."""

_NEWER = "was written by a newer torch"
_REBUILD, _RECONSTRUCT = "_rebuild_tensor_v2", "_reconstruct"
_DCP = "torch.distributed.checkpoint"
_METADATA_NAMES = frozenset(
    {
        ("collections", "OrderedDict"),
        # `StorageMeta` holds the folder as it was given: text, or a path.
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("torch", "Size"),
        # `TensorProperties` pickles its layout with this function.
        ("torch.serialization", "_get_layout"),
        (f"{_DCP}.filesystem", "_StorageInfo"),
        (f"{_DCP}.metadata", "BytesStorageMetadata"),
        (f"{_DCP}.metadata", "ChunkStorageMetadata"),
        (f"{_DCP}.metadata", "Metadata"),
        (f"{_DCP}.metadata", "MetadataIndex"),
        (f"{_DCP}.metadata", "StorageMeta"),
        (f"{_DCP}.metadata", "TensorProperties"),
        (f"{_DCP}.metadata", "TensorStorageMetadata"),
        # A `torch.memory_format` cannot be pickled, so `TensorProperties` writes this instead.
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


_MARKS = (
    "Unsupported global: GLOBAL ",
    "Trying to load unsupported GLOBAL ",
    "Unsupported class ",
    "Trying to call reduce for ",
)
"""what torch's errors say before the name they refuse; read off
https://github.com/pytorch/pytorch/blob/v2.7.0/torch/_weights_only_unpickler.py#L305
"""
_AS_WRITTEN = {"__builtin__": "builtins", "commands": "subprocess", "nt": "os", "posix": "os"}
"""names of modules that pickles have in place of those their authors wrote"""
_FOUND = "WeightsUnpickler error: "
_LONGEST_PICKLE = 1 << 26
_RUN_CODE = frozenset(
    {
        *("builtins", "__builtin__", "code", "ctypes", "eval", "exec", "getattr", "importlib"),
        *("io", "open", "os", "pdb", "platform", "pty", "runpy", "shutil", "socket"),
        *("subprocess", "sys", "timeit", "types", "webbrowser"),
    }
)
"""modules and names that are for running code, or for touching files"""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (f"{_DCP}.metadata", "TensorProperties"):
            return _Properties
        if (module, name) in _METADATA_NAMES:
            return super().find_class(module, name)
        # A dtype is pickled as its name in the module torch.
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise _Forbidden(f"{module}.{name}")


class _TrustingUnpickler(pickle.Unpickler):
    """Executes what it is asked for."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return _Properties if found is TensorProperties else found


class _Properties(TensorProperties):
    """Is torch's own class as soon as it has been read."""

    def __setstate__(self, state: Any) -> None:
        # Newer torch adds values at the end, and older torch cannot unpack them.
        known = len(TensorProperties().__getstate__())
        if isinstance(state, tuple) and len(state) > known:
            raise _NewerError(len(state), known)
        super().__setstate__(state)
        object.__setattr__(self, "__class__", TensorProperties)


class _NewerError(Exception):
    """How many properties of a tensor there are, and how many this torch knows."""


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
    unpickler = _TrustingUnpickler if trusts(path) else _MetadataUnpickler
    try:
        return unpickler(io.BytesIO(data)).load()
    except _NewerError as error:
        found, known = error.args
        raise CheckpointError(
            f"'{path}' {_NEWER} than {torch.__version__}: its tensors have {found} properties, and "
            f"this torch knows {known}. It is not damaged, but cannot be read here. Load it with "
            "the torch that wrote it, or convert it there for any torch: `composer-fsdp2 "
            "checkpoint convert SRC DST --to full`."
        ) from None
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
        # A tensor in a plain pickle holds what `torch.save` wrote of its storage, and torch's own
        # function loads that with `weights_only=False`.
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
    file = io.BytesIO(data)
    return _load(lambda **kwargs: torch.load(file, **kwargs), where, trusted, file)  # pyright: ignore[reportUnknownLambdaType]


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
        if mapped:
            _check_stored(file, path)
        # torch maps a path only, not an open file.
        load: Callable[..., Any] = functools.partial(torch.load, path, mmap=mapped)
        return _load(load, str(path), trusts(path), file)


def _check_stored(file: BinaryIO, path: Path) -> None:
    """Refuses an archive that torch would inflate in memory, whatever size that turns out to be."""
    try:
        members = zipfile.ZipFile(file).infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise damaged(str(path), error) from None
    packed = [member for member in members if member.compress_type != zipfile.ZIP_STORED]
    if packed:
        size, kept = sum(m.file_size for m in packed), sum(m.compress_size for m in packed)
        raise CheckpointError(
            f"'{path}' is compressed: its members say that {kept:,} bytes become {size:,}. Values "
            "could not be read where they lie, and inflating all of them could take any amount of "
            "memory. torch.save compresses nothing; pack the members again without compression, "
            "for example with `unzip` and `zip -0 -r`."
        )


def load_plainly(path: Path, map_location: str) -> Any:
    """Returns what `torch.load(path, map_location)` does, without executing anything.

    Raises:
        CheckpointError: it could execute code, or is no pickle.
        Exception: whatever `torch.load` raises.
    """
    try:
        with torch.serialization.safe_globals(_safe_types()), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            return torch.load(path, map_location=map_location, weights_only=not trusts(path))
    except (pickle.UnpicklingError, EOFError) as error:
        with path.open("rb") as file:
            unsafe = _asked_for(error, file)
        if unsafe:
            raise _refusal(str(path), unsafe) from None
        _raise_as_pickle(path)
        raise damaged(str(path), error) from None


def _raise_as_pickle(path: Path) -> None:
    """Raises what Python's own unpickler says of a file that is no archive; it finds no name."""
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            file.seek(0)
            with contextlib.suppress(_Forbidden):
                _NamelessUnpickler(file).load()


class _NamelessUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise _Forbidden(f"{module}.{name}")


def _load(load: Callable[..., Any], where: str, trusted: bool, file: BinaryIO) -> Any:
    try:
        with torch.serialization.safe_globals(_safe_types()), warnings.catch_warnings():
            # It stands before the error that follows, and advises to switch the check off.
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            return load(map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:
        unsafe = _asked_for(error, file)
        raise (_refusal(where, unsafe) if unsafe else damaged(where, error)) from None
    except Exception as error:  # a damaged archive raises anything at all
        raise damaged(where, error) from error


def _asked_for(error: BaseException, file: BinaryIO) -> str:
    """Returns what torch's unpickler refused, or nothing if the pickle is damaged.

    torch names it in most cases; where it does not know the protocol, the pickle is looked through.
    """
    text = " ".join(str(error).split())
    for mark in _MARKS:
        if mark in text:
            return text.partition(mark)[2].split()[0].rstrip(".,")
    if "Unsupported operand" not in text and "protocol" not in text:
        return ""
    with contextlib.suppress(Exception):  # it is damaged as well
        return next(_names_in(_pickle_of(file)), "")
    return ""


def _pickle_of(file: BinaryIO) -> bytes:
    """The pickle inside of what `torch.save` wrote; what is not an archive is one itself."""
    file.seek(0)
    if not zipfile.is_zipfile(file):
        file.seek(0)
        return file.read(_LONGEST_PICKLE)
    archive = zipfile.ZipFile(file)
    name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
    return archive.open(name).read(_LONGEST_PICKLE)


def _names_in(data: bytes) -> Iterator[str]:
    """Yields the names that a pickle looks up and that are not data, without executing it."""
    known = {
        f"{kind.__module__}.{kind.__qualname__}" for kind in _safe_types() if type(kind) is type
    }
    texts: list[str] = []
    for operation, value, _ in _operations(io.BytesIO(data)):
        name = ""
        if operation.name in ("GLOBAL", "INST"):
            name = str(value).replace(" ", ".")
        elif operation.name == "STACK_GLOBAL" and len(texts) > 1:
            name = ".".join(texts[-2:])
        elif isinstance(value, str):
            texts.append(value)
        if name and name not in known and not name.startswith(("torch.", "collections.")):
            yield name


def _operations(file: BinaryIO) -> Iterator[tuple[Any, Any, Any]]:
    """Those of all pickles of a file: older files have four, one after the other."""
    while True:
        yield from pickletools.genops(file)


def _safe_types() -> list[Any]:
    reconstruct = np.zeros(1).__reduce__()[0]
    # torch sets the state of an object only if its class is allowed, and each numpy dtype has a
    # class of its own.
    dtypes = {type(np.dtype(code)) for code in np.typecodes["All"]}
    foundry = [getattr(sys.modules[m], name) for m, name in _FOUNDRY_STATES if m in sys.modules]
    return [
        *foundry,
        datetime.timedelta,
        np.dtype,
        np.ndarray,
        # The class of `torch.__version__`, which Composer saves.
        TorchVersion,
        # numpy 1 and numpy 2 call it by different names.
        (reconstruct, "numpy.core.multiarray._reconstruct"),
        (reconstruct, "numpy._core.multiarray._reconstruct"),
        *dtypes,
    ]


def _refusal(where: str, asked: str) -> CheckpointError:
    module, _, name = asked.rpartition(".")
    asked = f"{_AS_WRITTEN.get(module, module)}.{name}".removeprefix(".")
    runs = asked.partition(".")[0] in _RUN_CODE or asked in _RUN_CODE
    what = f"asks to run code: {asked}" if runs else f"asks to load '{asked}', which is not data"
    return CheckpointError(
        f"{where} {what}. Loading it could execute code that came with the file, so nothing was "
        f"loaded. If you trust whoever wrote it, set {TRUST_VARIABLE} to its path."
    )


def is_refusal(error: CheckpointError) -> bool:
    """Whether a file is not damaged: it could execute code, or asks for a newer torch."""
    return any(words in str(error) for words in (TRUST_VARIABLE, _NEWER))


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
    if "weights_only" in text:  # torch says how to switch the check off, and what it has found
        text = text.partition(_FOUND)[2].partition(" Check the documentation")[0]
        text = text.rstrip(". ") or "its pickle makes no sense"
    return text if len(text) <= 200 else text[:200] + "..."
