"""Makes a sharded tensor of this rank's part."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

__all__ = ["sharded_like"]


def sharded_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """Returns a DTensor of `like`'s shape and placements that holds `local`. Collective: no."""
    # Without a shape torch takes every shard for as large as this one; its check may send.
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
