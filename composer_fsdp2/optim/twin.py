"""An optimizer's twin: its class and attributes, with other groups and other state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Twins"]


class Twins:
    """Makes twins of one optimizer. See [Note: twin] in `optim.local_step`.

    Collective: no.
    """

    def __init__(self, kind: type[torch.optim.Optimizer]) -> None:
        contents = self._contents = {}

        def read(index: int, name: str) -> Any:
            def value(twin: Any) -> Any:
                own = contents.get(id(twin))
                return vars(twin)[name] if own is None else own()[index]

            return property(value)

        namespace = {
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "param_groups": read(0, "param_groups"),
            "state": read(1, "state"),
        }
        make: Any = type(kind)
        self._kind: Any = make(kind.__name__, (kind,), namespace)

    def make(
        self, optimizer: torch.optim.Optimizer, contents: Callable[[], tuple[list[Any], Any]]
    ) -> torch.optim.Optimizer:
        """A twin whose groups and state are what `contents` returns. Attributes are shared."""
        twin = object.__new__(self._kind)
        twin.__dict__ = optimizer.__dict__
        self._contents[id(twin)] = contents
        return twin

    def forget(self) -> None:
        """All twins made so far have the optimizer's groups and state from now on."""
        self._contents.clear()
