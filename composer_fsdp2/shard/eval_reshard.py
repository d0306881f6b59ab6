"""Changes the choice between memory and gathers for a while, such as an evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping

from torch.distributed.fsdp import FSDPModule

from composer_fsdp2.torch_private.units import (
    free_after_forward,
    frees_after_forward,
    lazy_init,
    param_groups,
)

__all__ = ["resharding"]


@contextlib.contextmanager
def resharding(units: Mapping[str, FSDPModule], after_forward: bool | None) -> Generator[None]:
    """Frees all parameters after a forward, or none, whatever the units were told before.

    Collective: no. For between steps; afterwards all parameters are shards again.

    Args:
        units: by name, children before parents.
        after_forward: `None` leaves everything as it is.
    """
    if after_forward is None:
        yield
        return
    # Parents first: torch takes the first unit that is initialised for the root of those inside.
    for unit in reversed(list(units.values())):
        # Or the first forward would change the outermost unit again. It does nothing the next time.
        # https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_state.py#L138
        lazy_init(unit)
    groups = [group for unit in units.values() for group in param_groups(unit)]
    # Newer torch has a public setter, which could not bring back a number of ranks.
    told = [frees_after_forward(group) for group in groups]
    try:
        for group in groups:
            free_after_forward(group, after_forward)
        yield
    finally:
        for group, before in zip(groups, told, strict=True):
            free_after_forward(group, before)
        for unit in units.values():
            unit.reshard()
