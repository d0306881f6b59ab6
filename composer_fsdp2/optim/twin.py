"""An optimizer's twin: its class and attributes, with other groups and other state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["Twins"]

_OWN = ("param_groups", "state")
Contents = Callable[[], tuple[list[Any], Any]]


class Twins:
    """Makes twins of one optimizer. See [Note: twin] in `optim.local_step`.

    Collective: no.
    """

    def __init__(
        self, kind: type[torch.optim.Optimizer], methods: Mapping[str, Callable[..., Any]]
    ) -> None:
        """Takes the optimizer's class, and methods that its twins have instead of the class's."""
        self._filled: list[Any] = []
        self._contents: dict[int, Contents] = {}
        # Slots are read as fast as attributes, which a step does for each parameter. While they are
        # empty, Python asks `__getattr__`.
        namespace: dict[str, Any] = {
            **methods,
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__slots__": _OWN,
            "__getattr__": _reader(kind, self._contents, self._filled),
            "__setattr__": _set_other,
        }
        make: Any = type(kind)
        self._kind: Any = make(kind.__name__, (kind,), namespace)

    def make(self, optimizer: torch.optim.Optimizer, contents: Contents) -> torch.optim.Optimizer:
        """A twin whose groups and state are what `contents` returns when they are first read.

        Attributes are shared.
        """
        twin = object.__new__(self._kind)
        twin.__dict__ = optimizer.__dict__
        self._contents[id(twin)] = contents
        return twin

    def ask_again(self) -> None:
        """Twins ask for groups and state anew when they are needed next."""
        for twin in self._filled:
            for name in _OWN:
                object.__delattr__(twin, name)
        self._filled.clear()

    def forget(self) -> bool:
        """All twins made so far have the optimizer's groups and state from now on.

        Returns whether there were any.
        """
        if not self._contents:
            return False
        self.ask_again()
        self._contents.clear()
        return True


def _reader(
    kind: type[torch.optim.Optimizer], contents: dict[int, Contents], filled: list[Any]
) -> Callable[[Any, str], Any]:
    otherwise = getattr(kind, "__getattr__", None)

    def read(twin: Any, name: str) -> Any:
        if name in _OWN:
            own = contents.get(id(twin))
            if own is None:
                return vars(twin)[name]
            for slot, value in zip(_OWN, own(), strict=True):
                object.__setattr__(twin, slot, value)
            filled.append(twin)
            return object.__getattribute__(twin, name)
        if otherwise is not None:
            return otherwise(twin, name)
        raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}", name=name)

    return read


def _set_other(twin: Any, name: str, value: Any) -> None:
    if name in _OWN:
        raise AttributeError(
            f"The step of the optimizer replaces its '{name}', which cannot be followed on local "
            "shards. Set local_step: false."
        )
    object.__setattr__(twin, name, value)
