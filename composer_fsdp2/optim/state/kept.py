"""The state of one parameter: read as the optimizer's own, kept as the setting says."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer_fsdp2.config.placement import OptimizerState
from composer_fsdp2.optim.local import local_value
from composer_fsdp2.optim.state.form import Form, Place, Stored, read, write
from composer_fsdp2.shard.sharded_tensor import sharded_like
from composer_fsdp2.shard.torch_private.tensors import local_tensor

__all__ = ["SMALL", "KeptState", "is_large"]

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


def is_large(param: Tensor) -> bool:
    """Whether a parameter has enough elements, on all ranks: those of a shard differ on ranks."""
    return param.numel() >= SMALL and param.is_floating_point()


# A dict too, for who asks: every method is that of `MutableMapping`.
class KeptState(MutableMapping[Any, Any], dict[Any, Any]):  # pyright: ignore[reportGeneralTypeIssues]
    """A parameter's state. Whoever reads a moment gets it as a DTensor in the optimizer's form.

    A moment that was read is a copy: what is to be changed has to be put back.
    """

    def __init__(self, param: DTensor, setting: OptimizerState) -> None:
        self._param, self._setting, self._place = param, setting, Place.of(param)
        self.stored: dict[Any, Any] = {}
        """the values as they are kept: moments as `Stored`, which nobody changes in place"""

    def __getitem__(self, key: Any) -> Any:
        value = self.stored[key]
        is_moment = isinstance(value, Stored)
        return sharded_like(self.plain(value), self._param) if is_moment else value

    def __setitem__(self, key: Any, value: Any) -> None:
        param, value = self._param, local_value(value, self._param)
        shape = local_tensor(param).shape
        if isinstance(value, Tensor) and value.shape == shape and value.is_floating_point():
            form: Form = "own"
            if is_large(param) and key != _WEIGHTS:
                in_eight, in_bf16 = self._setting.bits == 8, self._setting.dtype == "bf16"
                form = _FORMS.get(key, "bf16") if in_eight else "bf16" if in_bf16 else "own"
            # It is rounded where it was computed, and then sent.
            step = self.stored.get("step", 0)
            value = self._placed(write(form, value, self._place, step, str(key)))
        self.stored[key] = value

    def keep(self, state: Mapping[Any, Any]) -> KeptState:
        """Keeps these values, and no others; `step` comes first, as it is part of the chance."""
        self.stored = {}
        self.update(state)
        return self

    def __delitem__(self, key: Any) -> None:
        del self.stored[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

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
            for key, value in self.stored.items()
        }

    def kept(self) -> Callable[[], KeptState]:
        """Copies everything to CPU memory, and returns a function that puts it back."""
        held = {
            key: value.copied_to("cpu") if isinstance(value, Stored) else copy.deepcopy(value)
            for key, value in self.stored.items()
        }

        def put_back() -> KeptState:
            self.stored = {key: self._placed(value) for key, value in held.items()}
            return self

        return put_back

    def _placed(self, value: Any) -> Any:
        """Returns a moment in the memory in which it is kept."""
        beside = local_tensor(self._param).device
        device = torch.device("cpu") if self._setting.device == "cpu" else beside
        if not isinstance(value, Stored) or value.values.device == device:
            return value
        return value.copied_to(device, pin=device.type == "cpu")
