"""Forms in which a state tensor is kept: bfloat16, and 8 bits with an exponent for each block.

[Note: forms of state] A moment changes by a tenth of a per cent a step. Rounded to the nearest of
few values it would not change at all, so it goes to one of its two neighbours by chance: on average
nothing is lost. Chance is a hash of the element's place in the whole parameter, the number of the
step, the name of the state and the value itself. So the same run makes the same choices on any
number of ranks, and a resumed run makes those of the run that was not interrupted.

Everything is integer arithmetic on the bits of float32, which gives the same on every device and
for every size of a shard. Eight bits are a small float: one sign, four bits of exponent, three of
mantissa; moments that are never negative have five bits of exponent instead. Exponents count from
the largest of a block. Blocks are at most 256 elements of one row of dim 0, and FSDP2 cuts between
rows, so no rank cuts a block. No scale is multiplied, hence what is read is exact, and keeping it
again gives the same bits: a checkpoint in float32 loses nothing.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer_fsdp2.shard.torch_private.tensors import local_tensor

__all__ = ["Form", "Place", "Stored", "empty", "read", "read_into", "write"]

Form = Literal["own", "bf16", "signed", "unsigned"]

BLOCK = 256
"""most elements that share an exponent"""
_AT_ONCE = {"cpu": 2**16, "cuda": 2**23}
"""elements that are converted at a time: temporary tensors take some 20 bytes for each"""
_INT = torch.int32
_SIGN = -(2**31)
_NAN = 0x7FC00000
_CODE_BITS = {"signed": 7, "unsigned": 8}


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank's part of a parameter lies in the whole."""

    rows: int
    row: int
    """elements of a row of this rank's part"""
    first: int
    """number of its first element in the whole"""
    stride: int
    """elements of a row of the whole"""

    @classmethod
    def of(cls, param: DTensor) -> Place:
        """Reads it from a sharded parameter. Collective: no."""
        local = local_tensor(param)
        stride = math.prod(param.shape[1:])
        rows = local.shape[0]
        row = math.prod(local.shape[1:])
        chunks: Any = param.__create_chunk_list__() if local.numel() else ()
        first = 0
        if chunks:
            offsets = chunks[0].offsets
            for size, offset in zip(param.shape, offsets, strict=True):
                first = first * size + offset
        return cls(rows, row, first, stride)

    def chunks(self, device: torch.device) -> Iterator[tuple[int, int]]:
        """Cuts the rows, so that not too much is converted at a time."""
        step = max(1, _AT_ONCE.get(device.type, 2**20) // max(1, self.row))
        for start in range(0, self.rows, step):
            yield start, min(start + step, self.rows)

    def numbers(self, start: int, end: int, device: torch.device) -> Tensor:
        """The number of each element of some rows in the whole, modulo 2^32."""
        first = self.first + start * self.stride
        rows = torch.arange(end - start, dtype=_INT, device=device).mul_(_wrapped(self.stride))
        columns = torch.arange(self.row, dtype=_INT, device=device).add_(_wrapped(first))
        return rows[:, None] + columns


@dataclass(slots=True, eq=False)
class Stored:
    """A state tensor between two steps."""

    form: Form
    values: Tensor
    """of the shape of the shard; 8-bit codes in 8-bit forms"""
    exponents: Tensor | None
    """of each block of a row, in 8-bit forms"""
    dtype: torch.dtype
    """in which the optimizer computes"""

    @property
    def parts(self) -> list[Tensor]:
        """Its tensors."""
        return [self.values] if self.exponents is None else [self.values, self.exponents]

    @property
    def nbytes(self) -> int:
        """Memory that it takes on this rank."""
        return sum(part.numel() * part.element_size() for part in self.parts)


def empty(form: Form, like: Tensor, place: Place, device: torch.device, *, pin: bool) -> Stored:
    """Returns memory for a state tensor of the shape and dtype of another."""

    def made(shape: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device, pin_memory=pin)

    exponents = None
    dtype = {"bf16": torch.bfloat16, "own": like.dtype}.get(form, torch.uint8)
    if form in _CODE_BITS:
        exponents = made((place.rows, _blocks(place.row)), torch.uint8)
    return Stored(form, made(like.shape, dtype), exponents, like.dtype)


def write(stored: Stored, value: Tensor, place: Place, step: Tensor | int, key: str) -> None:
    """Keeps a value; `step` and `key` are part of what decides about rounding."""
    if stored.form == "own":
        stored.values.copy_(value)
        return
    source = value.reshape(place.rows, place.row)
    target = stored.values.view(place.rows, place.row)
    seed = _seed(step, key, value.device)
    for start, end in place.chunks(value.device):
        bits = source[start:end].float().contiguous().view(_INT)
        numbers = place.numbers(start, end, value.device)
        if stored.exponents is None:
            target[start:end] = _to_bf16(bits, _chance(bits, numbers, seed, 16))
        else:
            chance = _chance(bits, numbers, seed, 20)
            codes, exponents = _to_codes(bits, chance, stored.form)
            target[start:end] = codes
            stored.exponents[start:end] = exponents


def read(stored: Stored, place: Place) -> Tensor:
    """Returns the value in the dtype in which the optimizer computes: always new memory."""
    found = torch.empty(stored.values.shape, dtype=stored.dtype, device=stored.values.device)
    read_into(found, stored, place)
    return found


def read_into(target: Tensor, stored: Stored, place: Place) -> None:
    """Fills a tensor of the shard's shape with the value."""
    if stored.exponents is None:
        target.copy_(stored.values)
        return
    codes, flat = stored.values.view(place.rows, place.row), target.view(place.rows, place.row)
    for start, end in place.chunks(codes.device):
        flat[start:end] = _from_codes(codes[start:end], stored.exponents[start:end], stored.form)


# --- Chance. ---


def _wrapped(number: int) -> int:
    """The integer of 32 bits with a sign that has the same lower bits."""
    return (number + 2**31) % 2**32 - 2**31


def _seed(step: Tensor | int, key: str, device: torch.device) -> Tensor | int:
    salt = _wrapped(zlib.crc32(key.encode()))
    if isinstance(step, Tensor) and step.device.type == "cpu":
        step = int(step.item())
    if isinstance(step, Tensor):
        # Not read by the host, which would wait for the device.
        counted = step.detach().to(device=device, dtype=_INT)
        return counted.mul(_wrapped(0x85EBCA6B)).add_(salt)
    return _wrapped(step * 0x85EBCA6B + salt)


def _chance(bits: Tensor, numbers: Tensor, seed: Tensor | int, count: int) -> Tensor:
    """Returns so many random bits for each element; a mixing of all bits of what is given."""
    mixed = numbers.mul_(_wrapped(0x9E3779B1)).add_(seed).bitwise_xor_(bits)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed.bitwise_xor_((mixed >> shift).bitwise_and_(2 ** (32 - shift) - 1))
        mixed.mul_(_wrapped(factor))
    # The upper bits of a product depend on all bits of its factors.
    return mixed.bitwise_right_shift_(32 - count).bitwise_and_(2**count - 1)


# --- bfloat16. ---


def _to_bf16(bits: Tensor, chance: Tensor) -> Tensor:
    # A NaN of all ones would carry into the sign.
    size = (bits & 0x7FFFFFFF).clamp_(max=_NAN)
    size.add_(chance).bitwise_and_(-0x10000)
    return size.bitwise_or_(bits & _SIGN).view(torch.float32).to(torch.bfloat16)


# --- 8 bits. ---


def _blocks(row: int) -> int:
    return -(-row // BLOCK)


def _in_blocks(rows: Tensor) -> Tensor:
    """The same as (rows, blocks, elements of a block), with zeros where a block has less."""
    short = _blocks(rows.shape[1]) * BLOCK - rows.shape[1]
    if rows.shape[1] <= BLOCK:
        return rows[:, None]
    padded = torch.nn.functional.pad(rows, (0, short)) if short else rows
    return padded.view(rows.shape[0], -1, BLOCK)


def _to_codes(bits: Tensor, chance: Tensor, form: str) -> tuple[Tensor, Tensor]:
    most = 2 ** _CODE_BITS[form] - 1
    row = bits.shape[1]
    size, chance = _in_blocks((bits & 0x7FFFFFFF).clamp_(max=_NAN)), _in_blocks(chance)
    exponents = size.amax(dim=-1, keepdim=True) >> 23
    # The largest mantissa of the largest exponent has the largest code. Rounded up it would move
    # the exponent of the block, and what is kept again would be other codes.
    top = _code_of_zero(exponents, most)
    codes = ((size + chance) >> 20).sub_(top).clamp_(max=most)
    below = codes < 1
    if form == "unsigned":
        # Divided by, a zero would be an infinite step.
        to_least = below.logical_and_(size > 0)
    else:
        least = ((top + 1) << 20).view(torch.float32)
        up = chance.float().mul_(2.0**-20).mul_(least) < size.view(torch.float32)
        to_least = below.logical_and_(up)
    codes.clamp_(min=0).add_(to_least)
    codes = codes.view(bits.shape[0], -1)[:, :row]
    if form == "signed":
        codes = codes | (bits >> 24).bitwise_and_(0x80)
    return codes, exponents.squeeze(-1)


def _from_codes(codes: Tensor, exponents: Tensor, form: str) -> Tensor:
    most = 2 ** _CODE_BITS[form] - 1
    row = codes.shape[1]
    wide = codes.to(_INT)
    size = _in_blocks(wide & most)
    top = _code_of_zero(exponents.to(_INT), most)[..., None]
    found = (size + top).bitwise_left_shift_(20).masked_fill_(size == 0, 0)
    found = found.view(codes.shape[0], -1)[:, :row]
    if form == "signed":
        found = found | (wide & 0x80).bitwise_left_shift_(24)
    return found.contiguous().view(torch.float32)


def _code_of_zero(exponents: Tensor, most: int) -> Tensor:
    """The upper bits of the float that would have code 0 in a block; none is below zero's own."""
    return (exponents << 3).add_(7 - most).clamp_(min=0)
