"""What operators make and how long it lives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Counts operators, and the bytes of their results that somebody still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ran[func.overloadpacket.__name__] += 1
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and type(leaf) is torch.Tensor:
                storage = leaf.untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.bytes())
        return out

    def bytes(self) -> int:
        """Held now."""
        self._made = {k: made for k, made in self._made.items() if not made[0].expired()}
        return sum(size for _, size in self._made.values())
