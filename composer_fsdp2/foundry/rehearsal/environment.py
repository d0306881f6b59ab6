"""The environment that a launcher gives to a rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator

from composer_fsdp2.foundry.rehearsal.notes import Cluster

__all__ = ["LAUNCHED", "environment_of", "replaced"]

LAUNCHED = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@contextlib.contextmanager
def environment_of(cluster: Cluster) -> Generator[None]:
    """Environment of the first rank, as a launcher sets it."""
    sizes = (0, 0, 0, cluster.ranks, cluster.ranks_per_node)
    with replaced(dict(zip(LAUNCHED, map(str, sizes), strict=True))):
        yield


@contextlib.contextmanager
def replaced(values: dict[str, str]) -> Generator[None]:
    """Sets variables for a block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
