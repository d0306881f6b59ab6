"""Reads pickles and files of `torch.save`, executing nothing: they come from other people.

[Note: what may be unpickled] A pickle can name any function and call it. Plain pickles
(`.metadata`, Composer's `resumption.pkl`) are read by an unpickler that finds only classes of data;
everything else goes through torch's `weights_only` unpickler, with the types by which Composer
stores random states and wall clock times added by name. A file that asks for more is refused and
the refusal says for which name. `COMPOSER_FSDP2_TRUST` names the paths whose author the user
trusts.

[Note: checksums] torch writes a zip archive with a CRC-32 for each member, but does not look at it
when it loads. Python's zipfile does, and finds flipped bytes in old checkpoints too.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import pickle
import pickletools
import re
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.torch_version import TorchVersion

from composer_fsdp2.errors import CheckpointError

__all__ = [
    "TRUST_VARIABLE",
    "check_member",
    "damaged",
    "damaged_bytes",
    "is_refusal",
    "load_object",
    "load_plainly",
    "newer_torch",
    "open_archive",
    "trusts",
    "unpickle",
    "unreadable",
    "vet_pickle",
]

TRUST_VARIABLE = "COMPOSER_FSDP2_TRUST"
"""Environment variable: paths of checkpoints that may execute code, separated as in `PATH`."""

_NEWER = "was written by a newer torch"
_CHUNK_BYTES = 1 << 22
_LONGEST_PICKLE = 1 << 26
_DCP = "torch.distributed.checkpoint"
_PLAIN = frozenset(
    {
        ("collections", "OrderedDict"),
        # `StorageMeta` holds the folder as it was given: text, or a path.
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("torch", "Size"),
        ("torch._utils", "_rebuild_tensor_v2"),
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
        # numpy 1 and numpy 2 call it by different names.
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
    }
)
"""names of data that plain pickles look up, beside those of `_safe_types`"""
# What LLM Foundry's callbacks keep: classes of plain fields that run nothing when they are made.
# Where it is not imported, nothing could use them.
_FOUNDRY_STATES = (
    ("llmfoundry.callbacks.curriculum_learning_callback", "CurriculumLearningState"),
    ("llmfoundry.callbacks.dataset_swap_callback", "DatasetSwapStateDict"),
    ("composer.core.time", "Time"),
    ("composer.core.time", "TimeUnit"),
)
_REFUSED_BY_TORCH = re.compile(
    "(?:Unsupported global: GLOBAL|Trying to load unsupported GLOBAL|Unsupported class"
    r"|Trying to call reduce for) (\S+)"
)
"""errors of torch's unpickler that name what it refuses; read off
https://github.com/pytorch/pytorch/blob/v2.7.0/torch/_weights_only_unpickler.py#L305
"""
_MODULES_OF_DATA = ("collections", "datetime", "numpy", "torch")
_AS_WRITTEN = {"__builtin__": "builtins", "commands": "subprocess", "nt": "os", "posix": "os"}
"""names of modules that pickles have in place of those their authors wrote"""


def trusts(path: Path) -> bool:
    """Returns whether the user has named this checkpoint, or a folder it is in, as trusted."""
    folders = os.environ.get(TRUST_VARIABLE, "")
    trusted = [Path(item).resolve() for item in folders.split(os.pathsep) if item]
    resolved = path.resolve()
    return any(resolved == item or item in resolved.parents for item in trusted)


# --- Pickles. ---


class _DataUnpickler(pickle.Unpickler):
    """Finds classes of data and nothing else."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.BytesIO(path.read_bytes()))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Returns what a pickle looks up; CheckpointError if it is not data."""
        # A dtype is pickled as its name in the module torch.
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        safe = [kind for kind in _safe_types() if isinstance(kind, type)]
        allowed = {(kind.__module__, kind.__qualname__) for kind in safe} | _PLAIN
        if is_dtype or (module, name) in allowed:
            return super().find_class(module, name)
        # A tensor in a plain pickle holds what `torch.save` wrote of its storage, and torch's own
        # function loads that with `weights_only=False`.
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return self._load_storage
        raise _refusal(str(self._path), f"{module}.{name}")

    def _load_storage(self, data: bytes) -> Any:
        return load_object(io.BytesIO(data), str(self._path))


def unpickle(path: Path) -> Any:
    """Reads a plain pickle; only one that the user trusts may execute anything.

    Raises:
        CheckpointError: it asks for something that could execute code.
        Exception: whatever unpickling it freely would raise too.
    """
    if trusts(path):
        return pickle.loads(path.read_bytes())
    return _DataUnpickler(path).load()


def vet_pickle(path: Path) -> None:
    """Reads a plain pickle that somebody else is about to read freely; see `unpickle`."""
    if not trusts(path):
        unpickle(path)


class Placeholder:
    """Stands for an object whose class is not imported: has its values, and none of its code."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def _member(owner: Any, name: str) -> Placeholder:
    """Stands for `getattr`, by which Python 3.11.0 to 3.11.3 pickle the member of an enum."""
    if owner is not Placeholder:
        raise pickle.UnpicklingError("Trying to call reduce for builtins.getattr")
    return Placeholder(name)


def load_object(
    file: Path | BinaryIO, where: str, *, trusted: bool = False, foreign: str | None = None
) -> Any:
    """Loads what `torch.save` wrote, onto the CPU, without executing anything.

    Tensors of a path are mapped where the format allows it: they cost no memory until they are
    read, and writing to them does not change the file.

    Args:
        file: a path, or an open file.
        where: file and key, for the error.
        trusted: whether the user said that it may execute code.
        foreign: a package that is not imported; its objects are read as `Placeholder`.

    Raises:
        CheckpointError: it is damaged, or asks for something that could execute code.
    """
    # torch maps a path only, and only a zip archive; older files are none.
    mapped = isinstance(file, Path) and zipfile.is_zipfile(file)
    globals_: list[Any] = []
    try:
        if foreign is not None and mapped:
            asked = torch.serialization.get_unsafe_globals_in_checkpoint(str(file))
            globals_ = [(Placeholder, name) for name in asked if name.startswith(f"{foreign}.")]
            globals_.append((_member, "builtins.getattr"))
        with torch.serialization.safe_globals(globals_):
            return _load(file, map_location="cpu", mmap=mapped, weights_only=not trusted)
    except pickle.UnpicklingError as error:
        raise _refused_or_damaged(file, where, error) from None
    except Exception as error:  # a damaged archive raises anything at all
        if isinstance(file, Path) and isinstance(error, PermissionError):
            raise unreadable(file, error) from error
        raise damaged(where, error) from error


def load_plainly(path: Path, map_location: str) -> Any:
    """Returns what `torch.load(path, map_location)` does, without executing anything.

    Raises:
        CheckpointError: it could execute code, or is no pickle.
        Exception: whatever `torch.load` raises.
    """
    try:
        return _load(path, map_location=map_location, weights_only=not trusts(path))
    except (pickle.UnpicklingError, EOFError) as error:
        raise _refused_or_damaged(path, str(path), error) from None


def _load(file: Path | BinaryIO, **options: Any) -> Any:
    with torch.serialization.safe_globals(_safe_types()), warnings.catch_warnings():
        # It stands before the error that follows, and advises to switch the check off.
        warnings.filterwarnings("ignore", "Detected pickle protocol")
        return torch.load(file, **options)


def _safe_types() -> list[Any]:
    reconstruct, scalar = np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]
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
        (reconstruct, "numpy.core.multiarray._reconstruct"),
        (reconstruct, "numpy._core.multiarray._reconstruct"),
        (scalar, "numpy.core.multiarray.scalar"),
        (scalar, "numpy._core.multiarray.scalar"),
        *dtypes,
    ]


# --- Archives. ---


def open_archive(file: Path | BinaryIO, where: str) -> zipfile.ZipFile:
    """Opens what `torch.save` wrote as the zip archive that it is.

    Raises:
        CheckpointError: it is none, it is cut off, or torch would inflate it in memory, whatever
            size that turns out to be.
    """
    try:
        archive = zipfile.ZipFile(file)
    except Exception as error:  # a damaged directory raises anything at all
        raise damaged(where, error) from None
    packed = [item for item in archive.infolist() if item.compress_type != zipfile.ZIP_STORED]
    if packed:
        size, kept = sum(m.file_size for m in packed), sum(m.compress_size for m in packed)
        raise CheckpointError(
            f"{where} is compressed: its members say that {kept:,} bytes become {size:,}. Values "
            "could not be read where they lie, and inflating all of them could take any amount of "
            "memory. torch.save compresses nothing; pack the members again without compression, "
            "for example with `unzip` and `zip -0 -r`."
        )
    return archive


def check_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, where: str) -> int:
    """Compares one member with its checksum; returns its bytes.

    Raises:
        CheckpointError: at least one byte is not the one that was written.
    """
    # A writer may have been told to leave checksums out; then all are zero.
    if member.CRC:
        try:
            with archive.open(member) as opened:
                while opened.read(_CHUNK_BYTES):
                    pass
        except Exception as error:  # what zipfile raises depends on the byte
            raise damaged_bytes(where, f"'{member.filename}'") from error
    return member.file_size


# --- Errors. ---


def damaged_bytes(where: str, member: str) -> CheckpointError:
    """Returns the error for bytes that differ from their checksum."""
    return CheckpointError(
        f"{where} is damaged: bytes in {member} are not those that were written. Training would go "
        "on from wrong values. Take another checkpoint."
    )


def _refused_or_damaged(file: Path | BinaryIO, where: str, error: BaseException) -> CheckpointError:
    """Returns the error for what torch's unpickler did not read."""
    text = " ".join(str(error).split())
    match = _REFUSED_BY_TORCH.search(text)
    name = match[1].rstrip(".,") if match else ""
    # torch does not know newer protocols, and stops before it comes to the name.
    if not name and ("Unsupported operand" in text or "protocol" in text):
        with contextlib.suppress(Exception):  # it is damaged as well
            name = _name_in(file)
    return _refusal(where, name) if name else damaged(where, error)


def _name_in(file: Path | BinaryIO) -> str:
    """Returns the first name that a file looks up outside of packages of data, executing nothing.

    Raises:
        Exception: there is none.
    """
    with file.open("rb") if isinstance(file, Path) else contextlib.nullcontext(file) as opened:
        member = opened
        if zipfile.is_zipfile(opened):
            archive = zipfile.ZipFile(opened)
            member = archive.open(next(n for n in archive.namelist() if n.endswith("data.pkl")))
        member.seek(0)
        data, texts = io.BytesIO(member.read(_LONGEST_PICKLE)), list[str]()
    while True:  # older files have four pickles, one after the other
        for operation, value, _ in pickletools.genops(data):
            if operation.name in ("GLOBAL", "INST"):
                name = str(value).replace(" ", ".")
            elif operation.name == "STACK_GLOBAL":
                name = ".".join(texts[-2:])
            else:
                texts += [value] if isinstance(value, str) else []
                continue
            if name.partition(".")[0] not in _MODULES_OF_DATA:
                return name


def _refusal(where: str, asked: str) -> CheckpointError:
    module, _, name = asked.rpartition(".")
    asked = f"{_AS_WRITTEN.get(module, module)}.{name}".removeprefix(".")
    return CheckpointError(
        f"{where} asks for '{asked}', which is not data. Loading it could execute code that came "
        "with the file, so nothing was loaded. If you trust whoever wrote it, set "
        f"{TRUST_VARIABLE} to its path."
    )


def newer_torch(path: Path, error: BaseException) -> CheckpointError:
    """Returns the error for metadata with more properties of tensors than this torch knows."""
    return CheckpointError(
        f"'{path}' {_NEWER} than {torch.__version__}: its tensors have properties that this torch "
        f"does not know ({error}). It is not damaged, but cannot be read here. Load it with the "
        "torch that wrote it, or convert it there for any torch: `composer-fsdp2 checkpoint "
        "convert SRC DST --to full`."
    )


def is_refusal(error: CheckpointError) -> bool:
    """Returns whether a file is not damaged: it could execute code, or asks for a newer torch."""
    return any(words in str(error) for words in (TRUST_VARIABLE, _NEWER))


def damaged(where: str, error: BaseException) -> CheckpointError:
    """Returns the error for a file whose content makes no sense."""
    return CheckpointError(
        f"{where} is damaged: {type(error).__name__}: {_one_line(error)}. What it holds cannot be "
        "trusted. Take another checkpoint; `composer-fsdp2 checkpoint verify` tells whether one "
        "is whole."
    )


def unreadable(path: Path, error: BaseException) -> CheckpointError:
    """Returns the error for a file the system does not hand out."""
    return CheckpointError(
        f"'{path}' cannot be read: {_one_line(error)}. The checkpoint is incomplete without it. "
        "Give the path of a complete checkpoint: a folder with a '.metadata', or a file."
    )


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    if "weights_only" in text:  # torch says how to switch the check off, and what it has found
        said = text.partition("WeightsUnpickler error: ")[2]
        text = said.partition(" Check the doc")[0].rstrip(". ") or "its pickle makes no sense"
    return text if len(text) <= 200 else text[:200] + "..."
