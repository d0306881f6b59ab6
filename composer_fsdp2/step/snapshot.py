"""Keeps the state that a batch changes, so that another attempt starts from the same state."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from composer_fsdp2.torch_private.tensors import local_part

__all__ = ["Snapshot"]


class Snapshot:
    """Keeps the state that a step changes. Random states are kept from the start.

    What is large is kept in CPU memory; buffers and metrics stay on their device.

    `restore` may be called again and again: for another attempt after the second one, too.
    """

    def __init__(self, device: torch.device) -> None:
        # At once: the first microbatch of an attempt already draws from them (dropout).
        self._kept: list[Callable[[], Any]] = [
            functools.partial(random.setstate, random.getstate()),
            functools.partial(torch.set_rng_state, torch.get_rng_state()),
        ]
        # Torch can do without numpy, which then nothing has imported.
        if (numpy := sys.modules.get("numpy")) is not None:
            state = numpy.random.get_state()
            self._kept.append(functools.partial(numpy.random.set_state, state))
        if device.type != "cpu":
            module: Any = torch.get_device_module(device)
            state = module.get_rng_state(device)
            self._kept.append(functools.partial(module.set_rng_state, state, device))
        self._optimizers: set[int] = set()

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keeps the values of parameters or buffers, of a DTensor this rank's shard."""
        self._kept += [_keep(tensor) for tensor in tensors]

    def keep_buffers(self, model: nn.Module) -> None:
        """Keeps the buffers, also against a module that puts another tensor in their place.

        On their device, for they are kept in every batch: the host would wait for each of them.
        """
        dicts = [module._buffers for module in model.modules() if module._buffers]
        self._kept += [_keep(buffers, on_cpu=False) for buffers in dicts]

    def keep_metric(self, metric: nn.Module) -> None:
        """Keeps the sums of a metric, in lists or in tensors, on their device."""
        for module in metric.modules():
            attributes = {name: _held(value) for name, value in vars(module).items()}
            # Copied again: another attempt adds to what the first one was given.
            self._kept.append(
                lambda module=module, attributes=attributes: vars(module).update(
                    {name: _held(value) for name, value in attributes.items()}
                )
            )

    def keep_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Keeps parameters, state and settings that the optimizer is about to change.

        The first call counts: an optimizer may begin several times with one step.
        """
        if id(optimizer) in self._optimizers:
            return
        self._optimizers.add(id(optimizer))
        self.keep(param for group in optimizer.param_groups for param in group["params"])
        self._kept.append(_keep(optimizer.state))
        for group in optimizer.param_groups:
            keeper = _keep({key: value for key, value in group.items() if key != "params"})
            self._kept.append(lambda group=group, keeper=keeper: group.update(keeper()))

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back in place, random states too."""
        for put_back in self._kept:
            put_back()


def _keep(value: Any, *, on_cpu: bool = True) -> Callable[[], Any]:
    """Copies a value; the function returned restores the copy into the same object."""
    if isinstance(value, torch.Tensor):
        local = local_part(value.detach())
        copy = local.to("cpu" if on_cpu else local.device, copy=True)

        def fill() -> torch.Tensor:
            local_part(value.detach()).copy_(copy)
            return value

        return fill
    if isinstance(value, dict):
        keep: Any = getattr(value, "kept", None)
        if keep is not None:
            return keep()  # state that is kept in another form than it is read
        by_key = {key: _keep(item, on_cpu=on_cpu) for key, item in value.items()}

        def fill_dict() -> dict[Any, Any]:
            items = {key: put_back() for key, put_back in by_key.items()}
            value.clear()
            value.update(items)
            return value

        return fill_dict
    if isinstance(value, list):
        in_order = [_keep(item, on_cpu=on_cpu) for item in value]

        def fill_list() -> list[Any]:
            value[:] = [put_back() for put_back in in_order]
            return value

        return fill_list
    return lambda: value


def _held(value: Any) -> Any:
    """Copies a value that may be added to in place; tensors of a list never are."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict) and any(isinstance(item, torch.Tensor) for item in value.values()):
        return {name: _held(item) for name, item in value.items()}
    return list(value) if isinstance(value, list) else value
