"""Tensors and objects inside what `torch.save` writes, checked and without a copy.

torch writes a zip archive with a CRC-32 for each member, but does not look at it when it loads.
Looking costs less than reading, and finds flipped bytes in every checkpoint, old ones included.
"""

from __future__ import annotations

import io
import mmap
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from composer_fsdp2.checkpoint.pickles import damaged, load_object, unreadable
from composer_fsdp2.errors import CheckpointError

__all__ = ["Archive", "map_file"]

# Written out: asking torch's storage classes for their dtype warns that they are deprecated.
# https://github.com/pytorch/pytorch/blob/v2.7.0/torch/storage.py
_STORAGES = {
    # Other dtypes (float8, uint16, ...) have no storage class. torch writes them with
    # `_rebuild_tensor_v3`, and they are left to torch's own loader.
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}
_LOCAL_HEADER = struct.Struct("<26xHH")
_CHUNK_BYTES = 1 << 26


def map_file(path: Path) -> memoryview:
    """The bytes of a file, read when touched. Writing to them does not change the file.

    Raises:
        CheckpointError: the file is missing or cannot be read.
    """
    try:
        with path.open("rb") as file:
            # The system refuses to map an empty file.
            if path.stat().st_size == 0:
                return memoryview(b"")
            # Private and writable pages: `torch.frombuffer` warns of a buffer that is read-only.
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    except OSError as error:
        raise unreadable(path, error) from error


@dataclass(frozen=True, slots=True)
class _Member:
    start: int
    size: int
    crc: int


class Archive:
    """One `torch.save` archive in memory.

    Args:
        data: its bytes; they stay alive as long as tensors that came out of it.
        where: file and key, for errors.

    Raises:
        CheckpointError: it is not such an archive, or it is cut off.
    """

    def __init__(self, data: memoryview, where: str) -> None:
        self.data = data
        self.where = where
        try:
            self.members = dict(self._find_members())
        except Exception as error:  # a damaged directory raises anything at all
            raise damaged(where, error) from None

    def _find_members(self) -> Iterator[tuple[str, _Member]]:
        with zipfile.ZipFile(_View(self.data)) as archive:
            for info in archive.infolist():
                # torch pads the extra field of the local header, so that the data is aligned.
                # `infolist` reads the central directory, where that field has another length.
                name, extra = _LOCAL_HEADER.unpack_from(self.data, info.header_offset)
                start = info.header_offset + _LOCAL_HEADER.size + name + extra
                if info.compress_type != zipfile.ZIP_STORED:
                    raise zipfile.BadZipFile(f"member '{info.filename}' is compressed")
                if start + info.file_size > len(self.data):
                    raise zipfile.BadZipFile(f"member '{info.filename}' is cut off")
                yield info.filename, _Member(start, info.file_size, info.CRC)

    def check(self, share: tuple[int, int] = (0, 1)) -> None:
        """Compares members with their checksums.

        Args:
            share: (i, n) checks every n-th member from the i-th, so that ranks divide the work.

        Raises:
            CheckpointError: at least one byte is not the one that was written.
        """
        first, step = share
        for name in list(self.members)[first::step]:
            member = self.members[name]
            crc = 0
            for start in range(0, member.size, _CHUNK_BYTES):
                end = min(start + _CHUNK_BYTES, member.size)
                crc = zlib.crc32(self.data[member.start + start : member.start + end], crc)
            # A writer may have been told to leave checksums out; then all are zero.
            if crc != member.crc and member.crc != 0:
                raise CheckpointError(
                    f"{self.where} is damaged: bytes in '{name}' are not those that were written. "
                    "Training would go on from wrong values. Take another checkpoint."
                )

    def data_crcs(self) -> tuple[int, ...]:
        """The stored checksums of the tensors' bytes: equal tensors have equal ones."""
        return tuple(m.crc for name, m in self.members.items() if "/data/" in name)

    def tensor(self) -> torch.Tensor:
        """The single tensor of the archive, as a view of its bytes where possible."""
        found = self._mapped_tensor()
        if found is None:
            found = load_object(self.data, self.where)
        if not isinstance(found, torch.Tensor):
            raise CheckpointError(
                f"{self.where} holds a {type(found).__name__} where its metadata promises a "
                "tensor. Its file belongs to another checkpoint. Take another copy."
            )
        return found

    def _mapped_tensor(self) -> torch.Tensor | None:
        """Builds the tensor over the mapped bytes; None for a layout only torch knows."""
        prefix = next((n[: -len("data.pkl")] for n in self.members if n.endswith("data.pkl")), None)
        # Older versions of torch do not write this member; torch then reads in native order.
        order = self.members.get(f"{prefix}byteorder")
        if prefix is None or (order is not None and bytes(self._bytes(order)) != b"little"):
            return None
        try:
            recipe = _Recipe(io.BytesIO(self._bytes(self.members[f"{prefix}data.pkl"]))).load()
        except (pickle.UnpicklingError, AttributeError, LookupError, EOFError, TypeError):
            return None
        if not isinstance(recipe, _Layout):
            return None
        member = self.members.get(f"{prefix}data/{recipe.key}")
        return None if member is None else recipe.over(self._bytes(member))

    def _bytes(self, member: _Member) -> memoryview:
        return self.data[member.start : member.start + member.size]


@dataclass(frozen=True, slots=True)
class _Layout:
    key: str
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def over(self, data: memoryview) -> torch.Tensor | None:
        # `torch.frombuffer` refuses an empty buffer.
        if len(data) == 0:
            return torch.empty(self.size, dtype=self.dtype)
        if len(data) % self.dtype.itemsize:
            return None
        flat = torch.frombuffer(data, dtype=self.dtype)
        try:
            return flat.as_strided(self.size, self.stride, self.offset)
        except RuntimeError:  # it reaches beyond the bytes
            return None


class _Recipe(pickle.Unpickler):
    """Reads how a tensor is laid out instead of building it; finds nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _layout
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        # torch writes ("storage", storage class, key, device, elements).
        _, dtype, key, _, _ = pid
        return dtype, key


def _layout(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> _Layout:
    dtype, key = storage
    return _Layout(key, dtype, offset, tuple(size), tuple(stride))


class _View(io.RawIOBase):
    """A file over bytes in memory, without a copy of them, as far as `ZipFile` reads it."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        end = len(self._data) if size is None or size < 0 else self._at + size
        found = bytes(self._data[self._at : end])
        self._at += len(found)
        return found
