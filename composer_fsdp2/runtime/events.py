"""Which unit a model is at, as torch itself tells it.

[Note: labels] FSDP tells nobody which unit it gathers. But just before it does anything to a unit
it asks the unit for a label for the profiler, in the thread that does it. A unit whose labels pass
through here therefore tells everything in the order in which it happens, and what torch does stays
as it is, whoever else replaces a unit's methods. Labels of a gather and of a reduction:
https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py#L267
https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py#L416
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from composer_fsdp2.runtime.watchdog import CollectiveWatchdog
from composer_fsdp2.shard.torch_private.units import label_hook

__all__ = ["Event", "UnitEvents"]

Event = Literal["begin", "forward", "gather", "backward", "reduce", "end", "error", "aborted"]
"""`begin` is a forward of training of the whole model; `gather` and `reduce` are collectives; `end`
comes before ranks agree on what a first forward has shown; `error` has a text for a name; after
`aborted` nothing counts that was heard since `begin`"""

_EVENTS: Mapping[str, Event | None] = {
    "FSDP::pre_forward": "forward",
    "FSDP::all_gather": "gather",
    "FSDP::post_forward": None,
    "FSDP::pre_backward": "backward",
    "FSDP::post_backward_reduce": "reduce",
}
"""by label; `None` tells nobody, but shows that the unit has run"""


class UnitEvents:
    """Hears of every event of a model's units, and passes it on.

    Args:
        model: its forward is one microbatch.
        groups: torch's, of each unit that has parameters, by the unit's name.
        watchdog: hears about collectives; `None` where no other rank waits.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Mapping[str, Sequence[Any]],
        watchdog: CollectiveWatchdog | None,
    ) -> None:
        self.watchdog = watchdog
        self.listeners: tuple[Callable[[Event, str], None], ...] = ()
        """called with an event and the name of its unit, before torch does it"""
        self._microbatch = 0
        self._previous: tuple[str, str] | None = None
        # Before torch's own hook, which may gather.
        # https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_state.py#L214
        model.register_forward_pre_hook(self._begin, prepend=True)
        for name, of_unit in groups.items():
            for group in of_unit:
                label_hook(group, partial(self._hear, name))
        for group in next(iter(groups.values()), ()):
            group.forget_events = self._abort

    def _begin(self, _module: nn.Module, _args: object) -> None:
        if not torch.is_grad_enabled():
            return
        self._microbatch += 1
        self.tell("begin", "")

    def _abort(self) -> None:
        self._previous = None
        self.tell("aborted", "")

    def _hear(self, name: str, label_of: Callable[[str], str], label: str) -> str:
        if label in _EVENTS:
            event, previous = _EVENTS[label], self._previous
            self._previous = (label, name)
            # Torch may ask for the same label twice, for the log.
            if event is not None and previous != (label, name):
                self.tell(event, name)
        return label_of(label)

    def tell(self, event: Event, name: str) -> None:
        """Tells the listeners, and the watchdog of what may last. Collective: as they are."""
        for listener in self.listeners:
            listener(event, name)
        if self.watchdog is not None and event in ("gather", "reduce"):
            self.watchdog.entered = (event, name, self._microbatch)
