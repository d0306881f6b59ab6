"""Keeps the state of parameters as a setting says: in bfloat16, in 8 bits, in CPU memory.

[Note: one by one] The whole state in the optimizer's own form would be what the setting saves. So
the state of one parameter is read into new memory, the optimizer's class makes its step for this
parameter alone, and the state is kept again.

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

import copy
import math
import warnings
import zlib
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer_fsdp2.config.placement import OptimizerState
from composer_fsdp2.optim.local import LocalStep, class_step
from composer_fsdp2.shard.layout import sharded_like
from composer_fsdp2.torch_private.tensors import local_tensor, local_value

__all__ = [
    "BLOCK",
    "SMALL",
    "Form",
    "KeptState",
    "KeptSteps",
    "Place",
    "Stored",
    "kept_storages",
    "read",
    "storages_of",
    "write",
]

Form = Literal["own", "bf16", "signed", "unsigned"]

BLOCK = 256
"""most elements that share an exponent"""
_AT_ONCE = 2**16, 2**23
"""elements that are converted at a time, on the CPU and on an accelerator: temporary tensors take
some 20 bytes for each"""
_INT = torch.int32
_NAN = 0x7FC00000
_LARGEST_CODE = {"signed": 127, "unsigned": 255}


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
        shape, first = local_tensor(param).shape, 0
        if shape.numel():
            chunks: Any = param.__create_chunk_list__()
            for size, offset in zip(param.shape, chunks[0].offsets, strict=True):
                first = first * size + offset
        return cls(shape[0], math.prod(shape[1:]), first, math.prod(param.shape[1:]))

    def chunks(self, device: torch.device) -> Iterator[slice]:
        """Cuts the rows, so that not too much is converted at a time."""
        step = max(1, _AT_ONCE[device.type != "cpu"] // max(1, self.row))
        return (slice(start, start + step) for start in range(0, self.rows, step))


@dataclass(slots=True, eq=False)
class Stored:
    """A state tensor between two steps."""

    form: Form
    values: Tensor
    """of the shape of the shard; 8-bit codes in 8-bit forms"""
    exponents: Tensor
    """of each block of a row, in 8-bit forms; else without elements"""
    dtype: torch.dtype
    """in which the optimizer computes"""

    def copied_to(self, device: Any, *, pin: bool = False) -> Stored:
        """Returns a copy on another device, without waiting for it where memory is pinned."""
        made = [
            torch.empty_like(part, device=device, pin_memory=pin).copy_(part, non_blocking=True)
            for part in (self.values, self.exponents)
        ]
        return Stored(self.form, made[0], made[1], self.dtype)


def write(form: Form, value: Tensor, place: Place, step: Tensor | int, key: str) -> Stored:
    """Returns a value in a form; `step` and `key` are part of the chance that rounds it."""
    blocks = -(-place.row // BLOCK) if form in _LARGEST_CODE else 0
    exponents = torch.empty((place.rows, blocks), dtype=torch.uint8, device=value.device)
    if form == "own":
        return Stored(form, value.clone(), exponents, value.dtype)
    kept = torch.bfloat16 if form == "bf16" else torch.uint8
    stored = Stored(form, torch.empty_like(value, dtype=kept), exponents, value.dtype)
    source, target = (one.view(place.rows, place.row) for one in (value, stored.values))
    salt = zlib.crc32(key.encode())
    if isinstance(step, Tensor) and step.device.type != "cpu":
        # Not read by the host, which would wait for the device.
        counted = step.detach().to(device=value.device, dtype=_INT)
        seed = counted.mul(_wrapped(0x85EBCA6B)).add_(_wrapped(salt))
    else:
        seed = _wrapped(int(step) * 0x85EBCA6B + salt)
    for rows in place.chunks(value.device):
        bits = source[rows].float().contiguous().view(_INT)
        # The number of each element in the whole, modulo 2^32.
        starts = torch.arange(len(bits), dtype=_INT, device=bits.device)
        columns = torch.arange(place.row, dtype=_INT, device=bits.device)
        columns.add_(_wrapped(place.first + rows.start * place.stride))
        numbers = starts.mul_(_wrapped(place.stride))[:, None] + columns
        if form == "bf16":
            # A NaN of all ones would carry into the sign.
            size = (bits & 0x7FFFFFFF).clamp_(max=_NAN).add_(_chance(bits, numbers, seed, 16))
            sign = bits & -(2**31)
            target[rows] = size.bitwise_and_(-0x10000).bitwise_or_(sign).view(torch.float32)
        else:
            chance = _chance(bits, numbers, seed, 20)
            target[rows], exponents[rows] = _to_codes(bits, chance, form)
    return stored


def read(stored: Stored, place: Place) -> Tensor:
    """Returns the value in the dtype in which the optimizer computes: always new memory."""
    found = torch.empty_like(stored.values, dtype=stored.dtype)
    if stored.form not in _LARGEST_CODE:
        return found.copy_(stored.values)
    codes, flat = (one.view(place.rows, place.row) for one in (stored.values, found))
    for rows in place.chunks(codes.device):
        flat[rows] = _from_codes(codes[rows], stored.exponents[rows], stored.form)
    return found


# --- Chance. ---


def _wrapped(number: int) -> int:
    """The integer of 32 bits with a sign that has the same lower bits."""
    return (number + 2**31) % 2**32 - 2**31


def _chance(bits: Tensor, numbers: Tensor, seed: Tensor | int, count: int) -> Tensor:
    """Returns so many random bits for each element; a mixing of all bits of what is given."""
    mixed = numbers.mul_(_wrapped(0x9E3779B1)).add_(seed).bitwise_xor_(bits)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed.bitwise_xor_((mixed >> shift).bitwise_and_(2 ** (32 - shift) - 1))
        mixed.mul_(_wrapped(factor))
    # The upper bits of a product depend on all bits of its factors.
    return mixed.bitwise_right_shift_(32 - count).bitwise_and_(2**count - 1)


# --- 8 bits. ---


def _in_blocks(rows: Tensor) -> Tensor:
    """The same as (rows, blocks, elements of a block), with zeros where a block has less."""
    if rows.shape[1] <= BLOCK:
        return rows[:, None]
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))


def _to_codes(bits: Tensor, chance: Tensor, form: str) -> tuple[Tensor, Tensor]:
    most = _LARGEST_CODE[form]
    size, chance = _in_blocks((bits & 0x7FFFFFFF).clamp_(max=_NAN)), _in_blocks(chance)
    exponents = size.amax(dim=-1, keepdim=True) >> 23
    # The largest mantissa of the largest exponent has the largest code. Rounded up it would move
    # the exponent of the block, and what is kept again would be other codes.
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
    found = (size + top).bitwise_left_shift_(20).masked_fill_(size == 0, 0)
    found = found.flatten(1)[:, : codes.shape[1]]
    if form == "signed":
        found = found | (wide & 0x80).bitwise_left_shift_(24)
    return found.contiguous().view(torch.float32)


def _code_of_zero(exponents: Tensor, most: int) -> Tensor:
    """The upper bits of the float that would have code 0 in a block; none is below zero's own."""
    return (exponents << 3).add_(7 - most).clamp_(min=0)


# --- Kept between two steps. ---

SMALL = 4096
"""parameters with less elements, on all ranks together, keep their state in its own form"""
_FORMS: dict[str, Form] = {
    **dict.fromkeys(("acc_delta", "exp_avg_sq", "exp_inf", "max_exp_avg_sq"), "unsigned"),
    **dict.fromkeys(("max_exp_avg_sqs", "square_avg", "sum"), "unsigned"),
    **dict.fromkeys(("exp_avg", "grad_avg", "momentum_buffer", "prev"), "signed"),
}
"""of 8 bits, by name of the state; another moment is kept in bf16"""
_WEIGHTS = "ax"
"""averaged weights of ASGD, which are no moments"""


def _is_large(param: Tensor) -> bool:
    """Whether a parameter has enough elements, on all ranks: those of a shard differ on ranks."""
    return param.numel() >= SMALL and param.is_floating_point()


# A dict too, for who asks: every method is that of `UserDict`.
class KeptState(UserDict[Any, Any], dict[Any, Any]):  # pyright: ignore
    """A parameter's state. Whoever reads a moment gets it as a DTensor in the optimizer's form.

    A moment that was read is a copy: what is to be changed has to be put back.
    """

    def __init__(self, param: DTensor, setting: OptimizerState) -> None:
        self._param, self._setting, self._place = param, setting, Place.of(param)
        self.data: dict[Any, Any] = {}
        """the values as they are kept: moments as `Stored`, which nobody changes in place"""

    def __getitem__(self, key: Any) -> Any:
        value = self.data[key]
        return sharded_like(self.plain(value), self._param) if isinstance(value, Stored) else value

    def __setitem__(self, key: Any, value: Any) -> None:
        param, value = self._param, local_value(value, self._param)
        shape = local_tensor(param).shape
        if isinstance(value, Tensor) and value.shape == shape and value.is_floating_point():
            form: Form = "own"
            if _is_large(param) and key != _WEIGHTS:
                in_eight, in_bf16 = self._setting.bits == 8, self._setting.dtype == "bf16"
                form = _FORMS.get(key, "bf16") if in_eight else "bf16" if in_bf16 else "own"
            # It is rounded where it was computed, and then sent.
            step = self.data.get("step", 0)
            value = self._placed(write(form, value, self._place, step, str(key)))
        self.data[key] = value

    def keep(self, state: Mapping[Any, Any]) -> KeptState:
        """Keeps these values, and no others; `step` comes first, as it is part of the chance."""
        self.data = {}
        self.update(state)
        return self

    def __deepcopy__(self, memo: Any) -> dict[Any, Any]:
        return {key: copy.deepcopy(value, memo) for key, value in self.items()}

    def plain(self, value: Any) -> Any:
        """Returns a moment as a plain tensor beside the parameter, in new memory."""
        if not isinstance(value, Stored):
            return value
        device = local_tensor(self._param).device
        return read(
            value if value.values.device == device else value.copied_to(device), self._place
        )

    def for_checkpoint(self) -> dict[Any, Any]:
        """Returns the values for a checkpoint: moments in bf16 as they are kept."""
        return {
            key: sharded_like(value.values, self._param)
            if isinstance(value, Stored) and value.form == "bf16" and self._setting.device != "cpu"
            else self[key]
            for key, value in self.data.items()
        }

    def kept(self) -> Callable[[], KeptState]:
        """Copies everything to CPU memory, and returns a function that puts it back."""
        held = {
            key: value.copied_to("cpu") if isinstance(value, Stored) else copy.deepcopy(value)
            for key, value in self.data.items()
        }

        def put_back() -> KeptState:
            self.data = {key: self._placed(value) for key, value in held.items()}
            return self

        return put_back

    def _placed(self, value: Any) -> Any:
        """Returns a moment in the memory in which it is kept."""
        beside = local_tensor(self._param).device
        device = torch.device("cpu") if self._setting.device == "cpu" else beside
        if not isinstance(value, Stored) or value.values.device == device:
            return value
        return value.copied_to(device, pin=device.type == "cpu")


class KeptSteps(LocalStep):
    """Keeps the state of an optimizer as a setting says; see [Note: one by one]. Collective: no."""

    def __init__(self, optimizer: torch.optim.Optimizer, setting: OptimizerState) -> None:
        super().__init__(optimizer)
        self._setting = setting
        optimizer.register_state_dict_post_hook(self._saved)
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)
        for param, state in list(optimizer.state.items()):
            if self._keeps(param) and state:
                optimizer.state[param] = KeptState(param, setting).keep(state)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if not any(map(self._keeps, params)) and dist.get_rank() == 0:
            largest = max((param.numel() for param in params), default=0)
            warnings.warn(
                f"optimizer_state has no effect: the largest sharded parameter has {largest} "
                f"elements, and parameters with less than {SMALL} keep their state as it is. Leave "
                "optimizer_state out.",
                stacklevel=2,
            )

    def _keeps(self, param: Any) -> TypeGuard[DTensor]:
        """Whether the state of a parameter is kept here, and its step made alone."""
        return isinstance(param, DTensor) and (self._setting.device == "cpu" or _is_large(param))

    def params_of(self, group: Mapping[str, Any]) -> Sequence[Any]:
        """Returns the parameters of a group that are stepped together."""
        return [param for param in group["params"] if not self._keeps(param)]

    def step_alone(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps the parameters whose state is kept here and that have a gradient."""
        alone: list[list[Any]] = [[] for _ in optimizer.param_groups]
        for chosen, group in zip(alone, optimizer.param_groups, strict=True):
            for param in group["params"]:
                if self._keeps(param) and param.grad is not None:
                    chosen[:] = [param]
                    stepped = self.begin(optimizer, alone, {})
                    class_step(optimizer)(stepped)
                    self.end(optimizer, stepped)
            chosen.clear()

    def read(self, param: DTensor, held: Mapping[Any, Any]) -> dict[Any, Any]:
        """Returns the state of a parameter for a step of its shard."""
        if isinstance(held, KeptState):
            return {key: held.plain(value) for key, value in held.data.items()}
        return super().read(param, held)

    def write(
        self, optimizer: torch.optim.Optimizer, param: DTensor, held: Any, values: dict[Any, Any]
    ) -> None:
        """Gives a parameter the state that a step of its shard has left."""
        if not self._keeps(param):
            super().write(optimizer, param, held, values)
        elif values:
            kept = held if isinstance(held, KeptState) else KeptState(param, self._setting)
            optimizer.state[param] = kept.keep(values)

    def _saved(self, _optimizer: Any, state_dict: dict[str, Any]) -> None:
        state_dict["state"] = {
            key: state.for_checkpoint() if isinstance(state, KeptState) else state
            for key, state in state_dict["state"].items()
        }

    def _before_load(
        self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Takes up moments one by one: torch would bring all to the device in their own form.

        torch leaves alone what is no tensor, as `Stored` is.
        """
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        states = dict(state_dict["state"])
        for key, param in zip(saved, params, strict=False):
            if self._keeps(param) and states.get(key):
                dtype = local_tensor(param).dtype
                state = {
                    name: value.to(dtype) if getattr(value, "ndim", 0) else value
                    for name, value in states[key].items()
                }
                states[key] = KeptState(param, self._setting).keep(state).data
        return {**state_dict, "state": states}

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        for param, state in list(optimizer.state.items()):
            if self._keeps(param) and state:
                kept = optimizer.state[param] = KeptState(param, self._setting)
                kept.data = state


def kept_storages(
    params: Iterable[Tensor], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.UntypedStorage]]:
    """Yields memory of this rank: of parameters, their gradients and the optimizer's state.

    Collective: no. A storage that several tensors share comes once for each of them.

    Args:
        params: sharded ones as they are between steps.
        optimizer: of these parameters.
    """
    params, state = list(params), list[Any]()
    for of_param in optimizer.state.values():
        values = of_param.data if isinstance(of_param, KeptState) else of_param
        for value in values.values():
            state += (value.values, value.exponents) if isinstance(value, Stored) else (value,)
    kinds = {"parameters": params, "gradients": [p.grad for p in params], "optimizer": state}
    for kind, tensors in kinds.items():
        for storage in storages_of(tensors):
            yield kind, storage


def storages_of(tensors: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """Yields the memory of those that are tensors and are not on meta. Collective: no."""
    for tensor in tensors:
        local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        if isinstance(local, Tensor) and not local.is_meta:
            yield local.untyped_storage()
