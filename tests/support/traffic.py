"""What FSDP2 sends, in bytes by dtype."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Bytes(TorchDispatchMode):
    """Counts the whole tensors that are gathered and reduced while it is active.

    What is all-reduced counts as averaged; the Trainer reduces numbers about a batch as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gathered: Counter[torch.dtype] = Counter()
        self.reduced: Counter[torch.dtype] = Counter()
        self.averaged: Counter[torch.dtype] = Counter()
        self.calls: Counter[str] = Counter()
        """collectives that gather, and those that reduce"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "_allgather_base_" in name:
            self.calls["gather"] += 1
            self.gathered[args[0].dtype] += args[0].numel() * args[0].itemsize
        elif "_reduce_scatter_base_" in name:
            self.calls["reduce"] += 1
            self.reduced[args[1].dtype] += args[1].numel() * args[1].itemsize
        elif "allreduce_" in name and args[0][0].numel() > 4:
            self.averaged[args[0][0].dtype] += args[0][0].nbytes
        return func(*args, **(kwargs or {}))
