"""Encodes a state tensor in bfloat16 or 8 bits, exactly alike on any number of ranks.

[Note: forms of state] A moment changes by a tenth of a per cent a step. Rounded to the nearest of
few values it would not change at all, so it goes to one of its two neighbours by chance: on average
nothing is lost. Chance is a hash of the element's index in the full parameter, the number of the
step, the name of the state and the value itself. So the same run makes the same choices on any
number of ranks, and a resumed run makes those of the run that was not interrupted.

Everything is integer arithmetic on the bits of float32, which gives the same on every device and
for every size of a shard. Eight bits are a small float: one sign, four bits of exponent, three of
mantissa; moments that are never negative have five bits of exponent instead. Exponents count from
the largest of a block. Blocks are at most 256 elements of one row of dim 0, and FSDP2 cuts between
rows, so no rank cuts a block. Where it shards along another dimension (see `plan.shard_dims`), the
blocks are the same if what a rank has without a gap is a multiple of 256 elements. No scale is
multiplied, hence what is read is exact, and keeping it again in the same blocks gives the same
bits: a checkpoint in float32 loses nothing.
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

from composer_fsdp2.torch_private.tensors import local_tensor

__all__ = ["BLOCK", "ShardPosition", "StateFormat", "Stored", "decode", "encode"]

StateFormat = Literal["own", "bf16", "signed", "unsigned"]


BLOCK = 256
"""most elements that share an exponent"""


_AT_ONCE = 2**16, 2**23
"""elements that are converted at a time, on the CPU and on an accelerator: temporary tensors take
some 20 bytes for each"""


_INT = torch.int32


_NAN = 0x7FC00000


_LARGEST_CODE = {"signed": 127, "unsigned": 255}


@dataclass(frozen=True, slots=True)
class ShardPosition:
    """Where this rank's shard of a parameter lies in the full tensor."""

    rows: int
    """parts of the shard that have no gap in the full tensor; rows where it is cut between rows"""
    row: int
    """elements of a part"""
    first: int
    """index of the shard's first element in the full tensor, flattened"""
    stride: int
    """elements of the full tensor from one part to the next"""

    @classmethod
    def of(cls, param: DTensor) -> ShardPosition:
        """Returns the position of a sharded parameter's shard. Collective: no."""
        shape, first = local_tensor(param).shape, 0
        if shape.numel():
            chunks: Any = param.__create_chunk_list__()
            for size, offset in zip(param.shape, chunks[0].offsets, strict=True):
                first = first * size + offset
        cut = max([1, *(getattr(placement, "dim", 1) for placement in param.placements)])
        stride = math.prod(param.shape[cut:])
        return cls(math.prod(shape[:cut]), math.prod(shape[cut:]), first, stride)

    def chunks(self, device: torch.device) -> Iterator[slice]:
        """Cuts the rows into pieces that are small enough to be converted at a time."""
        step = max(1, _AT_ONCE[device.type != "cpu"] // max(1, self.row))
        return (slice(start, start + step) for start in range(0, self.rows, step))


@dataclass(slots=True, eq=False)
class Stored:
    """A state tensor between two steps."""

    form: StateFormat
    values: Tensor
    """in the shape of the shard; codes in 8-bit forms"""
    exponents: Tensor
    """(parts, blocks of a part) in 8-bit forms, else without elements"""
    dtype: torch.dtype
    """dtype in which the optimizer computes"""

    def copied_to(self, device: Any, *, pin: bool = False) -> Stored:
        """Returns a copy on another device, without waiting for it where memory is pinned."""
        made = [
            torch.empty_like(part, device=device, pin_memory=pin).copy_(part, non_blocking=True)
            for part in (self.values, self.exponents)
        ]
        return Stored(self.form, made[0], made[1], self.dtype)


def encode(
    form: StateFormat, value: Tensor, position: ShardPosition, step: Tensor | int, key: str
) -> Stored:
    """Returns a state tensor in a form, rounded by a chance that `step` and `key` are part of."""
    blocks = -(-position.row // BLOCK) if form in _LARGEST_CODE else 0
    exponents = torch.empty((position.rows, blocks), dtype=torch.uint8, device=value.device)
    if form == "own":
        return Stored(form, value.clone(), exponents, value.dtype)
    dtype = torch.bfloat16 if form == "bf16" else torch.uint8
    stored = Stored(form, torch.empty_like(value, dtype=dtype), exponents, value.dtype)
    source, target = (part.view(position.rows, position.row) for part in (value, stored.values))
    salt = zlib.crc32(key.encode())
    if isinstance(step, Tensor) and step.device.type != "cpu":
        # Not read by the host, which would wait for the device.
        counted = step.detach().to(device=value.device, dtype=_INT)
        seed = counted.mul(_wrapped(0x85EBCA6B)).add_(_wrapped(salt))
    else:
        seed = _wrapped(int(step) * 0x85EBCA6B + salt)
    for rows in position.chunks(value.device):
        bits = source[rows].float().contiguous().view(_INT)
        # The index of each element in the full tensor, modulo 2^32.
        starts = torch.arange(len(bits), dtype=_INT, device=bits.device)
        columns = torch.arange(position.row, dtype=_INT, device=bits.device)
        columns.add_(_wrapped(position.first + rows.start * position.stride))
        numbers = starts.mul_(_wrapped(position.stride))[:, None] + columns
        if form == "bf16":
            # A NaN of all ones would carry into the sign.
            size = (bits & 0x7FFFFFFF).clamp_(max=_NAN).add_(_chance(bits, numbers, seed, 16))
            sign = bits & -(2**31)
            target[rows] = size.bitwise_and_(-0x10000).bitwise_or_(sign).view(torch.float32)
        else:
            chance = _chance(bits, numbers, seed, 20)
            target[rows], exponents[rows] = _to_codes(bits, chance, form)
    return stored


def decode(stored: Stored, position: ShardPosition) -> Tensor:
    """Returns a state tensor, in new memory, in the dtype in which the optimizer computes."""
    value = torch.empty_like(stored.values, dtype=stored.dtype)
    if stored.form not in _LARGEST_CODE:
        return value.copy_(stored.values)
    codes, flat = (tensor.view(position.rows, position.row) for tensor in (stored.values, value))
    for rows in position.chunks(codes.device):
        flat[rows] = _from_codes(codes[rows], stored.exponents[rows], stored.form)
    return value


def _wrapped(number: int) -> int:
    """Returns the integer of 32 bits with a sign that has the same lower bits."""
    return (number + 2**31) % 2**32 - 2**31


def _chance(bits: Tensor, numbers: Tensor, seed: Tensor | int, count: int) -> Tensor:
    """Returns `count` random bits for each element: a hash of its bits, its number and the seed."""
    mixed = numbers.mul_(_wrapped(0x9E3779B1)).add_(seed).bitwise_xor_(bits)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed.bitwise_xor_((mixed >> shift).bitwise_and_(2 ** (32 - shift) - 1))
        mixed.mul_(_wrapped(factor))
    # The upper bits of a product depend on all bits of its factors.
    return mixed.bitwise_right_shift_(32 - count).bitwise_and_(2**count - 1)


def _in_blocks(rows: Tensor) -> Tensor:
    """Returns rows as (rows, blocks, elements of a block), padded with zeros to whole blocks."""
    if rows.shape[1] <= BLOCK:
        return rows[:, None]
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))


def _to_codes(bits: Tensor, chance: Tensor, form: str) -> tuple[Tensor, Tensor]:
    most = _LARGEST_CODE[form]
    size, chance = _in_blocks((bits & 0x7FFFFFFF).clamp_(max=_NAN)), _in_blocks(chance)
    exponents = size.amax(dim=-1, keepdim=True) >> 23
    # The largest mantissa of the largest exponent has the largest code. Rounded up it would move
    # the exponent of the block, and encoding the values again would give other codes.
    top = _code_of_zero(exponents, most)
    codes = ((size + chance) >> 20).sub_(top).clamp_(max=most)
    # Divided by, a second moment of zero would be an infinite step.
    to_least = size > 0
    if form == "signed":
        least = ((top + 1) << 20).view(torch.float32)
        to_least = chance.float().mul_(2.0**-20).mul_(least) < size.view(torch.float32)
    to_least = to_least.logical_and_(codes < 1)
    codes = codes.clamp_(min=0).add_(to_least).flatten(1)[:, : bits.shape[1]]
    if form == "signed":
        codes = codes | (bits >> 24).bitwise_and_(0x80)
    return codes, exponents.squeeze(-1)


def _from_codes(codes: Tensor, exponents: Tensor, form: str) -> Tensor:
    most, wide = _LARGEST_CODE[form], codes.to(_INT)
    size = _in_blocks(wide & most)
    top = _code_of_zero(exponents.to(_INT), most)[..., None]
    bits = (size + top).bitwise_left_shift_(20).masked_fill_(size == 0, 0)
    bits = bits.flatten(1)[:, : codes.shape[1]]
    if form == "signed":
        bits = bits | (wide & 0x80).bitwise_left_shift_(24)
    return bits.contiguous().view(torch.float32)


def _code_of_zero(exponents: Tensor, most: int) -> Tensor:
    """Returns the upper bits of the float with code 0 in each block, at least those of zero."""
    return (exponents << 3).add_(7 - most).clamp_(min=0)
