"""Resets units after a step that was left in the middle."""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed.fsdp import FSDPModule

from composer_fsdp2.shard.averaging import AverageOverReplicas
from composer_fsdp2.shard.torch_private.units import (
    all_reduce_hook,
    drop_unreduced,
    is_root,
    param_groups,
    reset_iteration,
)

__all__ = ["reset"]


def reset(units: Iterable[FSDPModule]) -> None:
    """Makes the next forward start as if the aborted one had not been.

    Collective: no. All parameters are shards again. Gradients that were not reduced yet are
    dropped; those of the shards are worth nothing any more, and newer torch drops them too.
    """
    units = list(units)
    reset_iteration(units)
    for unit in units:
        if is_root(unit) is None:
            continue  # has not run
        for group in param_groups(unit):
            drop_unreduced(group)
            hook = all_reduce_hook(group)
            if isinstance(hook, AverageOverReplicas):
                hook.forget()
        # Now that no state is that of a forward, in which some units would stay gathered.
        unit.reshard()
