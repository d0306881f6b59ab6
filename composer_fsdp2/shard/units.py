"""Units of a model that is sharded: whether there are any, and what frees them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator, Mapping

from torch import nn
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2.torch_private.units import (
    free_after_forward,
    frees_after_forward,
    lazy_init,
    param_groups,
)

__all__ = ["collector_paused", "is_sharded", "reshard", "resharding"]


@contextlib.contextmanager
def collector_paused() -> Generator[None, None, None]:
    """Keeps Python's cycle collector from running.

    Sharding makes some hundred long-lived objects per unit, and each full collection walks all of
    them: with thousands of units that is a third of the time. Full parameters are not kept by
    cycles, so nothing large waits for the collector.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def is_sharded(model: nn.Module) -> bool:
    """Says whether FSDP2 shards a model, or a part of it. Collective: no."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def reshard(model: nn.Module) -> None:
    """Frees units that forward and evaluation left gathered: all parameters are shards again.

    Collective: no. To be called between steps.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextlib.contextmanager
def resharding(units: Mapping[str, FSDPModule], after_forward: bool | None) -> Generator[None]:
    """Frees all parameters after a forward, or none, while a block runs.

    Collective: no. To be entered between steps; afterwards all parameters are shards again.

    Args:
        units: by name, children before parents.
        after_forward: `reshard_after_forward` of all units; `None` leaves each as it is.
    """
    # Parents first: torch takes the first unit that is initialised for the root of those inside.
    for unit in reversed(list(units.values())):
        # Or the first forward would change the outermost unit again. It does nothing the next time.
        # https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_state.py#L138
        lazy_init(unit)
    changed = units.values() if after_forward is not None else ()
    groups = [group for unit in changed for group in param_groups(unit)]
    # Newer torch has a public setter, which could not bring back a number of ranks.
    settings = [frees_after_forward(group) for group in groups]
    try:
        for group in groups:
            free_after_forward(group, after_forward)
        yield
    finally:
        for group, setting in zip(groups, settings, strict=True):
            free_after_forward(group, setting)
        for unit in units.values():
            unit.reshard()
