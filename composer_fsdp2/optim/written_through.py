"""Dictionaries whose changes reach another dictionary at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.errors import PlanError

__all__ = ["MISSING", "Mutable", "WrittenThrough"]

MISSING = object()
"""what no dictionary holds"""


class Mutable(dict[Any, Any]):
    """A dictionary whose every change goes through `__setitem__` and `__delitem__`.

    Reading stays that of `dict`, which a step does some ten times for each parameter.
    """

    __slots__ = ()

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As in `dict`."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """As in `dict`."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        """As in `dict`."""
        if key not in self and default:
            return default[0]
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[Any, Any]:
        """As in `dict`."""
        key = next(reversed(self), MISSING)
        if key is MISSING:
            raise KeyError("popitem(): dictionary is empty")
        return key, self.pop(key)

    def clear(self) -> None:
        """As in `dict`."""
        for key in list(self):
            del self[key]


class WrittenThrough(Mutable):
    """A copy of a dictionary with other values for some keys; changes reach the original."""

    __slots__ = ("_original", "_own")

    def __init__(self, original: dict[Any, Any], own: Mapping[Any, Any]) -> None:
        super().__init__(original)
        dict.update(self, own)
        self._original, self._own = original, frozenset(own)

    def __setitem__(self, key: Any, value: Any) -> None:
        if key in self._own:
            raise PlanError(
                f"The step of the optimizer replaces '{key}' of its groups, which cannot be "
                "followed on local shards. Set local_step: false."
            )
        dict.__setitem__(self, key, value)
        self._original[key] = value

    def __delitem__(self, key: Any) -> None:
        dict.__delitem__(self, key)
        self._original.pop(key, None)
