"""Keeps the state of parameters as a setting says: in bfloat16, in 8 bits, in CPU memory.

[Note: one by one] All state in the optimizer's own form at once would take the memory that the
setting saves. So the state of one parameter is read into new memory, the optimizer's class makes
its step for this parameter alone, and the state is kept again.
"""

from __future__ import annotations

import copy
import warnings
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer_fsdp2.config.placement import OptimizerState
from composer_fsdp2.optim.codec import ShardPosition, StateFormat, Stored, decode, encode
from composer_fsdp2.optim.local import LocalStep, class_step
from composer_fsdp2.torch_private.tensors import local_tensor, local_value, sharded_like

__all__ = ["SMALL", "KeptState", "KeptSteps", "kept_storages", "storages_of"]


SMALL = 4096
"""parameters with less elements, on all ranks together, keep their state in its own form"""
_FORMS: dict[str, StateFormat] = {
    **dict.fromkeys(("acc_delta", "exp_avg_sq", "exp_inf", "max_exp_avg_sq"), "unsigned"),
    **dict.fromkeys(("max_exp_avg_sqs", "square_avg", "sum"), "unsigned"),
    **dict.fromkeys(("exp_avg", "grad_avg", "momentum_buffer", "prev"), "signed"),
}
"""name of a state -> its form of 8 bits; other moments are kept in bf16"""
_WEIGHTS = "ax"
"""averaged weights of ASGD, which are no moments"""


def _is_large(param: Tensor) -> bool:
    """Says whether a parameter has enough elements, on all ranks: sizes of shards differ."""
    return param.numel() >= SMALL and param.is_floating_point()


# A dict too, for `isinstance`: every method is that of `UserDict`.
class KeptState(UserDict[Any, Any], dict[Any, Any]):  # pyright: ignore
    """A parameter's state. Moments are read as DTensors, in the optimizer's form.

    A moment that was read is a copy: put it back to change it.
    """

    def __init__(self, param: DTensor, setting: OptimizerState) -> None:
        self._param, self._setting, self._position = param, setting, ShardPosition.of(param)
        self.data: dict[Any, Any] = {}
        """the values as they are kept: moments as `Stored`, which nobody changes in place"""

    def __getitem__(self, key: Any) -> Any:
        value = self.data[key]
        return sharded_like(self.plain(value), self._param) if isinstance(value, Stored) else value

    def __setitem__(self, key: Any, value: Any) -> None:
        param, value = self._param, local_value(value, self._param)
        shape = local_tensor(param).shape
        if isinstance(value, Tensor) and value.shape == shape and value.is_floating_point():
            form: StateFormat = "own"
            if _is_large(param) and key != _WEIGHTS:
                in_eight, in_bf16 = self._setting.bits == 8, self._setting.dtype == "bf16"
                form = _FORMS.get(key, "bf16") if in_eight else "bf16" if in_bf16 else "own"
            # A moment is rounded on the device where it was computed, and then sent.
            step = self.data.get("step", 0)
            value = self._placed(encode(form, value, self._position, step, str(key)))
        self.data[key] = value

    def keep(self, state: Mapping[Any, Any]) -> KeptState:
        """Replaces all values; `step` comes first, as it is part of the chance."""
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
        return decode(
            value if value.values.device == device else value.copied_to(device), self._position
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
        """Copies all values to CPU memory, and returns a function that puts them back."""
        cpu_copies = {
            key: value.copied_to("cpu") if isinstance(value, Stored) else copy.deepcopy(value)
            for key, value in self.data.items()
        }

        def put_back() -> KeptState:
            self.data = {key: self._placed(value) for key, value in cpu_copies.items()}
            return self

        return put_back

    def _placed(self, value: Any) -> Any:
        """Returns a moment on the device of the setting; any other value as it is."""
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
        """Says whether the state of a parameter is kept here, and its step made alone."""
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

    def read(self, param: DTensor, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """Returns the state of a parameter for a step of its shard."""
        if isinstance(state, KeptState):
            return {key: state.plain(value) for key, value in state.data.items()}
        return super().read(param, state)

    def write(
        self, optimizer: torch.optim.Optimizer, param: DTensor, state: Any, values: dict[Any, Any]
    ) -> None:
        """Gives a parameter the state that a step of its shard has left."""
        if not self._keeps(param):
            super().write(optimizer, param, state, values)
        elif values:
            kept_state = state if isinstance(state, KeptState) else KeptState(param, self._setting)
            optimizer.state[param] = kept_state.keep(values)

    def _saved(self, _optimizer: Any, state_dict: dict[str, Any]) -> None:
        state_dict["state"] = {
            key: state.for_checkpoint() if isinstance(state, KeptState) else state
            for key, state in state_dict["state"].items()
        }

    def _before_load(
        self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Encodes moments one by one: torch would bring all to the device in their own form.

        torch leaves values alone that are no tensors, as `Stored` is.
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
                kept_state = optimizer.state[param] = KeptState(param, self._setting)
                kept_state.data = state


def kept_storages(
    params: Iterable[Tensor], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.UntypedStorage]]:
    """Yields memory of this rank: of parameters, their gradients and the optimizer's state.

    Collective: no. A storage that several tensors share comes once for each of them.

    Args:
        params: as they are between steps, sharded or not.
        optimizer: its state is counted, whatever parameters it is of.
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
    """Yields the memory of tensors that are not on meta; skips other values. Collective: no."""
    for tensor in tensors:
        local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        if isinstance(local, Tensor) and not local.is_meta:
            yield local.untyped_storage()
