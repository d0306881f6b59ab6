"""Reads parts of stored tensors, and compares the checksums of what all ranks have read.

[Note: checksums of ranges] A piece is a zip archive with one CRC-32 for all values, and a rank that
needs some rows reads those alone. CRCs are linear: that of the whole is the sum, by exclusive or,
of those of its ranges, each shifted by the number of bytes behind the range, as zlib's
`crc32_combine` does. So ranks send the shifted CRCs of their ranges to rank 0, which adds them up.
Where the sum is another, or ranges overlap or leave bytes out, ranks read the whole piece.
"""

from __future__ import annotations

import io
import os
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import numpy as np
import torch
import torch.distributed as dist

from composer_fsdp2.checkpoint.pickles import load_object, open_archive
from composer_fsdp2.ranks import is_fake, of_rank0

__all__ = ["FileWindow", "PieceRange", "View", "gather_suspects", "plan_ranges", "read_ranges"]

View = Callable[[torch.Tensor], torch.Tensor]

_WORTH_BYTES = 4096
"""that a load must save to read ranges: several reads take the place of one"""

_MOST_RANGES = 1024
"""of a view; one for each expert of a layer"""


class FileWindow(io.RawIOBase):
    """A range of an open file as a file of its own. Nothing is read ahead.

    Args:
        descriptor: number of the open file, which the window never closes.
        offset: bytes before the range.
        length: of the range, which must not end after the file.
    """

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        super().__init__()
        self._descriptor, self._offset, self._length = descriptor, offset, length
        self._position = 0

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves to a position, and returns it."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise OSError("a position before the beginning")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer, but for what would be behind the end; returns the number of bytes."""
        view = memoryview(buffer).cast("B")
        view = view[: max(self._length - self._position, 0)]
        done = 0
        while done < len(view):
            at = self._offset + self._position + done
            count = os.preadv(self._descriptor, [view[done:]], at)
            if count == 0:
                break
            done += count
        self._position += done
        return done


@dataclass(frozen=True, slots=True)
class PieceRange:
    """Bytes that were read of the values of a piece.

    Attributes:
        size: of all its values.
        begin: of the range.
        end: of the range.
        checksum: CRC-32 of the range, shifted; in the first range of a piece, added to the CRC-32
            that was written. All ranges together add up to 0.
    """

    size: int
    begin: int
    end: int
    checksum: int
    crc: int
    """CRC-32 of the range alone"""

    def is_of(self, values: torch.Tensor) -> bool:
        """Returns whether the values of a whole piece have these bytes in the range."""
        content: Any = values.flatten().view(torch.uint8).numpy()
        return zlib.crc32(content[self.begin : self.end]) == self.crc


def plan_ranges(
    shape: Sequence[int], itemsize: int, views: Sequence[View], stored_bytes: int
) -> list[tuple[int, int]] | None:
    """Returns the bytes of contiguous values that views need; `None` if all are to be read.

    Where a view takes some columns, all columns of its rows are read: ranks that need other columns
    read the same range then. Of tensors with more dimensions, a range is read for each matrix.

    Args:
        shape: of the stored tensor.
        itemsize: bytes of a value.
        views: take parts of a tensor of this shape.
        stored_bytes: size of the archive, headers included.
    """
    values = torch.empty(tuple(shape), device="meta")
    spans: list[tuple[int, int]] = []
    try:
        parts = [view(values) for view in views]
    except (RuntimeError, IndexError):
        return None  # the shape is not what the plan takes it for
    for part in parts:
        if part.numel() == 0:
            continue
        steps: list[tuple[int, int]] = list(zip(part.shape, part.stride(), strict=True))
        steps = [step for step in steps if step[0] > 1]
        least = -(-_WORTH_BYTES // itemsize)
        elements = _spans_of(int(part.storage_offset()), steps, least)
        spans += [(begin * itemsize, end * itemsize) for begin, end in elements]
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            begin, end = merged[-1][0], max(end, merged.pop()[1])
        merged.append((begin, end))
    wanted = sum(end - begin for begin, end in merged)
    return None if stored_bytes - wanted < _WORTH_BYTES else merged


def _spans_of(offset: int, steps: Sequence[tuple[int, int]], least: int) -> list[tuple[int, int]]:
    """Returns ranges that hold a view's elements: one for each matrix of which it has a part.

    Args:
        offset: the view's first element.
        steps: (size, stride) of the view's dimensions, without those of size 1.
        least: elements of a range that is read alone.
    """
    if not steps:
        return [(offset, offset + 1)]
    (count, stride), *inner_steps = steps
    inner = _spans_of(offset, inner_steps, least)
    sizes = [end - begin for begin, end in inner]
    if min(sizes) >= least and sum(sizes) < stride and count * len(inner) <= _MOST_RANGES:
        starts = range(0, count * stride, stride)
        return [(start + begin, start + end) for start in starts for begin, end in inner]
    last = offset + sum((count - 1) * stride for count, stride in steps)
    return [(offset // stride * stride, (last // stride + 1) * stride)]


def read_ranges(
    file: FileWindow, where: str, spans: Sequence[tuple[int, int]], *, trusted: bool
) -> tuple[torch.Tensor, list[PieceRange]] | None:
    """Returns a stored tensor and the ranges that were read; other values are not initialized.

    Collective: no. Returns `None` where the whole piece has to be read, also to say what is wrong.

    Args:
        file: the zip archive of one piece.
        where: file and key, for errors.
        spans: bytes to read, of `plan_ranges`.
        trusted: whether the user said that it may execute code.
    """
    try:
        archive = open_archive(cast(BinaryIO, file), where)
        members = archive.infolist()
        storages = [member for member in members if "/data/" in member.filename]
        # A writer may have been told to leave checksums out; then all are zero.
        if len(storages) != 1 or not all(member.CRC for member in members):
            return None
        storage, copied = storages[0], io.BytesIO()
        with zipfile.ZipFile(copied, "w") as copy:
            for member in members:
                if member is not storage:
                    content = archive.read(member)  # compares its checksum
                    copy.writestr(member.filename, content)
                    if member.filename.endswith("/byteorder") and content != sys.byteorder.encode():
                        return None
        copied.seek(0)
        with torch.serialization.skip_data():
            described = load_object(copied, where, trusted=trusted)
        plain = type(described) is torch.Tensor and described.layout is torch.strided
        if not plain or not described.is_contiguous() or described.nbytes != storage.file_size:
            return None
        file.seek(storage.header_offset)
        header = file.read(30)
        if described.storage_offset() or not header or header[:4] != b"PK\3\4":
            return None
        start = storage.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
        # What torch has made is larger. Memory that nobody writes to is not taken from the system.
        values: Any = np.empty(storage.file_size, dtype=np.uint8)
        ranges: list[PieceRange] = []
        tensor = torch.from_numpy(values).view(described.dtype).view(described.shape)
        for begin, end in spans:
            part = values[begin:end]
            file.seek(start + begin)
            if file.readinto(part) != end - begin:
                return None
            crc = zlib.crc32(part)
            checksum = _shifted(crc, storage.file_size - end)
            checksum ^= storage.CRC if begin == 0 else 0
            ranges.append(PieceRange(storage.file_size, begin, end, checksum, crc))
    except Exception:  # a damaged archive raises anything at all
        return None
    return tensor, ranges


_POLYNOMIAL = 0xEDB88320
_POWERS = [1 << 23]
"""x to the power of 8, and squares of the one before: what 1, 2, 4 bytes of zeros multiply by"""


def _product(a: int, b: int) -> int:
    """Multiplies polynomials modulo that of the CRC; the highest bit is the constant.

    Source: https://github.com/madler/zlib/blob/v1.3.1/crc32.c#L157
    """
    product = 0
    while a:
        if a & (1 << 31):
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _shifted(checksum: int, count: int) -> int:
    """Returns the summand that a CRC-32 is of that of bytes with `count` more behind them."""
    for power in range(count.bit_length()):
        if len(_POWERS) <= power:
            _POWERS.append(_product(_POWERS[-1], _POWERS[-1]))
        if count >> power & 1:
            checksum = _product(_POWERS[power], checksum)
    return checksum


def gather_suspects(ranges: Sequence[tuple[int, int, PieceRange]]) -> set[tuple[int, int]]:
    """Returns the pieces that are damaged, or of which ranks have not read each byte once.

    Collective: yes, over the default group.

    Args:
        ranges: of this rank: number of the file and offset of the piece in it, the same on all
            ranks, and what was read of it.
    """
    rows = [(file, at, r.size, r.begin, r.end, r.checksum) for file, at, r in ranges]
    table = np.array(rows, dtype=np.int64).reshape(-1, 6)
    if not dist.is_initialized() or is_fake() or dist.get_world_size() == 1:
        return _suspects(table)
    # By column, where numbers repeat.
    sent = zlib.compress(np.ascontiguousarray(table.T).tobytes(), 1)
    first = dist.get_rank() == 0
    received: list[Any] | None = [None] * dist.get_world_size() if first else None
    dist.gather_object(sent, received)
    suspects: set[tuple[int, int]] = set()
    if received is not None:
        tables = [np.frombuffer(zlib.decompress(part), dtype=np.int64) for part in received]
        suspects = _suspects(np.concatenate([part.reshape(6, -1) for part in tables], axis=1).T)
    return of_rank0(suspects)


def _suspects(table: np.ndarray[Any, Any]) -> set[tuple[int, int]]:
    """Returns the pieces of which the ranges do not add up; see the note above.

    Args:
        table: a row for each range of each rank: file, offset, size, begin, end, checksum.
    """
    if not len(table):
        return set()
    table = table[np.lexsort(table.T[[4, 3, 1, 0]])]
    changes = table[1:] != table[:-1]
    # Replicas read the same ranges.
    table = table[np.concatenate([[True], changes.any(axis=1)])]
    pieces, size, begin, end, checksum = table[:, :3], *table.T[2:]
    starts_piece = np.concatenate([[True], (pieces[1:] != pieces[:-1]).any(axis=1)])
    starts = np.flatnonzero(starts_piece)
    expected = np.where(starts_piece, 0, np.roll(end, 1))
    ends_piece = np.roll(starts_piece, -1)
    wrong = (begin != expected) | (ends_piece & (end != size))
    wrong = np.logical_or.reduceat(wrong, starts)
    wrong |= np.bitwise_xor.reduceat(checksum, starts) != 0
    return {(int(file), int(at)) for file, at in table[starts][wrong][:, :2]}
