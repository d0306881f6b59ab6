"""Steps one parameter after the other, with state that is kept in another form.

[Note: one by one] The whole state in the optimizer's own form would be what the setting saves. So
the state of one parameter is read into new memory, the optimizer's class makes its step for this
parameter alone, and the state is kept again.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from itertools import chain
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from composer_fsdp2.config.state import OptimizerState
from composer_fsdp2.errors import PlanError
from composer_fsdp2.optim.elementwise import class_step, makes_no_moments
from composer_fsdp2.optim.local import LocalShards, copy_with, local_value, take_settings
from composer_fsdp2.optim.muon.optimizer import Muon
from composer_fsdp2.optim.state.kept import SMALL, KeptState, is_large
from composer_fsdp2.shard.torch_private.tensors import local_tensor

__all__ = ["KeptSteps", "check_optimizer_state"]


def check_optimizer_state(optimizer: torch.optim.Optimizer, setting: OptimizerState) -> None:
    """Refuses `optimizer_state` for an optimizer of which nothing could be kept so.

    Collective: no.

    Raises:
        PlanError: with what to write.
    """
    if setting == OptimizerState():
        return
    name = type(optimizer).__name__
    if isinstance(optimizer, Muon):
        raise PlanError(
            "'optimizer_state' cannot be had with Muon. Its hidden matrices have one state tensor "
            "where AdamW has two, and it steps them together, by collectives, so none could be "
            "stepped alone. Leave optimizer_state out, or use AdamW with it."
        )
    if makes_no_moments(optimizer, averages=setting.device == "cpu"):
        raise PlanError(
            f"'optimizer_state' is set and the optimizer {name} keeps no moments, so the setting "
            "would have no effect. Leave optimizer_state out, or use an optimizer with state, "
            "such as torch.optim.AdamW or SGD with momentum."
        )
    trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
    others = sorted({str(param.dtype) for param in trained} - {"torch.float32"})
    if setting.dtype == "fp32" and others:
        raise PlanError(
            f"optimizer_state has dtype: fp32, and parameters are in {', '.join(others)}. {name} "
            "makes their state in their own dtype and computes in it, so the setting would have "
            "no effect. Leave dtype out, or build the model in float32."
        )


class KeptSteps:
    """Keeps the state of an optimizer as a setting says, and steps those parameters.

    Collective: no.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, setting: OptimizerState) -> None:
        self._setting, self._shards = setting, LocalShards()
        optimizer.register_state_dict_post_hook(self._saved)
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)
        for param, state in list(optimizer.state.items()):
            if self.takes(param) and state:
                optimizer.state[param] = KeptState(param, setting).keep(state)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if not any(map(self.takes, params)) and dist.get_rank() == 0:
            largest = max((param.numel() for param in params), default=0)
            warnings.warn(
                f"optimizer_state has no effect: the largest sharded parameter has {largest} "
                f"elements, and parameters with less than {SMALL} keep their state as it is. Leave "
                "optimizer_state out.",
                stacklevel=2,
            )

    def takes(self, param: Any) -> TypeGuard[DTensor]:
        """Whether the state of a parameter is kept here, and its step made here."""
        return isinstance(param, DTensor) and (self._setting.device == "cpu" or is_large(param))

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps the parameters whose state is kept here and that have a gradient."""
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if self.takes(param) and param.grad is not None:
                    self._step_alone(optimizer, number, param)

    def _step_alone(self, optimizer: torch.optim.Optimizer, number: int, param: DTensor) -> None:
        self._shards.stepping = []
        plain, held = self._shards.plain(param), optimizer.state.get(param)
        self._shards.give_gradients()
        states: dict[Any, Any] = defaultdict(dict)
        if isinstance(held, KeptState):
            states[plain] = {key: held.plain(value) for key, value in held.stored.items()}
        elif held:
            states[plain] = {key: local_value(value, param) for key, value in held.items()}
        groups: list[dict[str, Any]] = [{**g, "params": []} for g in optimizer.param_groups]
        groups[number]["params"] = [plain]
        alone = copy_with(optimizer, groups, states)
        class_step(optimizer)(alone)
        take_settings(optimizer, alone)
        self._shards.finish()
        if states[plain]:
            kept = held if isinstance(held, KeptState) else KeptState(param, self._setting)
            optimizer.state[param] = kept.keep(states[plain])

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
            if self.takes(param) and states.get(key):
                dtype = local_tensor(param).dtype
                state = {
                    name: value.to(dtype) if getattr(value, "ndim", 0) else value
                    for name, value in states[key].items()
                }
                states[key] = KeptState(param, self._setting).keep(state).stored
        return {**state_dict, "state": states}

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        for param, state in list(optimizer.state.items()):
            if self.takes(param) and state:
                kept = optimizer.state[param] = KeptState(param, self._setting)
                kept.stored = state
