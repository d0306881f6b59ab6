"""Keeps what users freeze or unfreeze while a unit is gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from composer_fsdp2.runtime.events import Event
from composer_fsdp2.shard.torch_private.units import carry_requires_grad

__all__ = ["CarriedFlags"]


class CarriedFlags:
    """Listens for the forward of a unit that stayed gathered, and carries flags to its shards.

    A unit that is freed carries them itself, before the shards take their places again.

    Args:
        groups: torch's, of each unit, by its name.
    """

    def __init__(self, groups: Mapping[str, Sequence[Any]]) -> None:
        self._groups = groups

    def hear(self, event: Event, name: str) -> None:
        """Collective: no."""
        if event == "forward":
            for group in self._groups[name]:
                carry_requires_grad(group)
