"""The state of one parameter in another form: read as the optimizer's own, kept as asked for."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer_fsdp2.config.state import OptimizerState
from composer_fsdp2.optim import state_form
from composer_fsdp2.optim.state_form import Form, Place, Stored
from composer_fsdp2.optim.written_through import Mutable
from composer_fsdp2.shard.sharded_tensor import sharded_like
from composer_fsdp2.shard.torch_private.tensors import local_tensor

__all__ = ["SMALL", "WEIGHTS", "KeptState", "Policy", "is_moment"]

SMALL = 4096
"""parameters with less elements, on all ranks together, keep their state in its own form"""
_NEVER_NEGATIVE = frozenset(
    {
        "acc_delta",
        "exp_avg_sq",
        "exp_inf",
        "max_exp_avg_sq",
        "max_exp_avg_sqs",
        "square_avg",
        "sum",
    }
)
_WITH_A_SIGN = frozenset({"exp_avg", "grad_avg", "momentum_buffer", "prev"})
WEIGHTS = frozenset({"ax"})
"""averaged weights of ASGD, which are no moments"""


@dataclass(frozen=True, slots=True)
class Policy:
    """Applies the setting `optimizer_state` to any tensor."""

    setting: OptimizerState

    @property
    def changes(self) -> bool:
        """Whether any state is kept in another form or in another place."""
        setting = self.setting
        return self.on_cpu or setting.bits is not None or setting.dtype == "bf16"

    @property
    def on_cpu(self) -> bool:
        """Whether state is kept in CPU memory."""
        return self.setting.device == "cpu"

    def takes(self, param: Any) -> bool:
        """Whether state of a parameter is kept in another form or in another place.

        The number of elements of the whole parameter decides: that of a shard differs on ranks.
        """
        return isinstance(param, DTensor) and (self.on_cpu or self._is_large(param))

    def form_of(self, key: Any, param: Tensor) -> Form:
        """The form of a state tensor. Names that are not known are not kept in 8 bits."""
        setting = self.setting
        if not self._is_large(param) or key in WEIGHTS:
            return "own"
        if setting.bits is None:
            return "bf16" if setting.dtype == "bf16" else "own"
        if key in _NEVER_NEGATIVE:
            return "unsigned"
        return "signed" if key in _WITH_A_SIGN else "bf16"

    def device_of(self, local: Tensor) -> torch.device:
        """Where state of a shard is kept."""
        return torch.device("cpu") if self.on_cpu else local.device

    def _is_large(self, param: Tensor) -> bool:
        return param.numel() >= SMALL and param.is_floating_point()


def is_moment(value: Any, param: DTensor) -> bool:
    """Whether a value of the state belongs to the elements of the parameter one by one."""
    if not isinstance(value, Tensor) or value.ndim == 0 or not value.is_floating_point():
        return False
    if isinstance(value, DTensor):
        return value.shape == param.shape
    return value.shape == local_tensor(param).shape


class KeptState(Mutable):
    """A parameter's state. Whoever reads a moment gets it as a DTensor in the optimizer's form.

    A moment that was read is a copy: what is to be changed has to be put back.
    """

    __slots__ = ("_param", "_place", "policy")

    def __init__(self, param: DTensor, policy: Policy) -> None:
        super().__init__()
        self._param, self.policy = param, policy
        self._place = Place.of(param)

    # --- What others see. ---

    def __getitem__(self, key: Any) -> Any:
        value = dict.__getitem__(self, key)
        return self._whole(self.read(value)) if isinstance(value, Stored) else value

    def __setitem__(self, key: Any, value: Any) -> None:
        self.keep(key, value, self._counted())

    def __iter__(self) -> Iterator[Any]:
        # With an `__iter__` of its own, `dict(state)` reads values by `__getitem__`.
        return dict.__iter__(self)

    def __reduce__(self) -> Any:
        return dict, (list(self.items()),)

    def __deepcopy__(self, memo: Any) -> dict[Any, Any]:
        return {key: _copied(value) for key, value in self.items()}

    def get(self, key: Any, default: Any = None) -> Any:
        """As in `dict`."""
        return self[key] if key in self else default  # noqa: SIM401, which would be this method

    def items(self) -> Any:
        """As in `dict`; each moment is read when its turn comes."""
        return ItemsView(self)

    def values(self) -> Any:
        """As in `dict`; each moment is read when its turn comes."""
        return ValuesView(self)

    def copy(self) -> dict[Any, Any]:
        """As in `dict`: a dictionary that is none of these."""
        return dict(self.items())

    # --- What the step and checkpoints see. ---

    def stored(self) -> Mapping[Any, Any]:
        """The values as they are kept: moments as `Stored`."""
        return dict(zip(self, dict.values(self), strict=True))

    def read(self, stored: Stored) -> Tensor:
        """A moment in the optimizer's form: a plain tensor beside the parameter, in new memory."""
        local = local_tensor(self._param)
        if stored.values.device != local.device:
            parts = [part.to(local.device, non_blocking=True) for part in stored.parts]
            if stored.form == "own":
                return parts[0]
            stored = Stored(stored.form, parts[0], (*parts, None)[1], stored.dtype)
        return state_form.read(stored, self._place)

    def keep(self, key: Any, value: Any, step: Tensor | int) -> None:
        """Keeps a value; `step` is part of what decides about rounding."""
        param = self._param
        if not is_moment(value, param):
            dict.__setitem__(self, key, value)
            return
        if isinstance(value, DTensor):
            if value.placements != param.placements:
                value = value.redistribute(param.device_mesh, param.placements)
            value = local_tensor(value)
        held = dict.get(self, key)
        form = self.policy.form_of(key, param)
        if not isinstance(held, Stored) or not _fits(held, form, value):
            local = local_tensor(param)
            device = self.policy.device_of(local)
            pin = device.type == "cpu" and local.device.type == "cuda"
            held = state_form.empty(form, value, self._place, device, pin=pin)
            dict.__setitem__(self, key, held)
        self.write(held, key, value, step)

    def write(self, held: Stored, key: Any, value: Tensor, step: Tensor | int) -> None:
        """Keeps a moment in the memory it has."""
        if held.values.device == value.device:
            state_form.write(held, value, self._place, step, str(key))
            return
        # It is rounded where it was computed, and then sent.
        made = state_form.empty(held.form, value, self._place, value.device, pin=False)
        state_form.write(made, value, self._place, step, str(key))
        for part, new in zip(held.parts, made.parts, strict=True):
            part.copy_(new, non_blocking=True)

    def for_checkpoint(self) -> dict[Any, Any]:
        """The values that a checkpoint has.

        A moment in bfloat16 is the memory in which it is kept; all others are copies.
        """
        found: dict[Any, Any] = {}
        for key, value in self.stored().items():
            as_kept = isinstance(value, Stored) and value.form == "bf16" and not self.policy.on_cpu
            found[key] = self._whole(value.values) if as_kept else self[key]
        return found

    def kept(self) -> Callable[[], KeptState]:
        """Copies everything to CPU memory, and returns what puts it back."""
        self._wait()
        copies: dict[Any, Any] = {
            key: [part.to("cpu", copy=True) for part in value.parts]
            if isinstance(value, Stored)
            else _copied(value)
            for key, value in self.stored().items()
        }
        held = self.stored()

        def put_back() -> KeptState:
            self._wait()
            dict.clear(self)
            for key, copy in copies.items():
                value = held[key]
                if isinstance(value, Stored):
                    for part, old in zip(value.parts, copy, strict=True):
                        part.copy_(old)
                elif isinstance(value, Tensor):
                    value.copy_(copy)
                else:
                    value = copy
                dict.__setitem__(self, key, value)
            return self

        return put_back

    @property
    def nbytes(self) -> int:
        """Memory that moments take on this rank."""
        return sum(v.nbytes for v in self.stored().values() if isinstance(v, Stored))

    def _wait(self) -> None:
        """The host reads what copies that were started earlier have brought."""
        if self.policy.on_cpu and local_tensor(self._param).device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _counted(self) -> Tensor | int:
        step = dict.get(self, "step", 0)
        return step if isinstance(step, (Tensor, int)) else int(step)

    def _whole(self, local: Tensor) -> DTensor:
        return sharded_like(local, self._param)


def _fits(held: Stored, form: Form, value: Tensor) -> bool:
    return held.form == form and held.dtype is value.dtype and held.values.shape == value.shape


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
