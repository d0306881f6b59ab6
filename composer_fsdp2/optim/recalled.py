"""Lists of a group's parameters and state that torch's optimizers make in every step.

[Note: recalled lists] Before it computes, an optimizer of torch asks each parameter for its
gradient and its state, 1 to 2 microseconds a parameter. All but the gradients are the same objects
as in the step before, if nobody has exchanged them, which `GroupShards` has found out already. So
the lists of that step are handed out again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from composer_fsdp2.optim.group_shards import GroupShards, are_same
from composer_fsdp2.optim.written_through import WrittenThrough

__all__ = ["LocalGroup", "recalling"]


class Recalled(NamedTuple):
    """The lists of a group, and the settings and parameters for which they were made."""

    settings: tuple[Any, ...]
    places: Sequence[int] | None
    lists: list[list[Any]]
    answer: Any


class LocalGroup(WrittenThrough):
    """A group of plain parameters, with where they come from."""

    __slots__ = ("held", "places")

    def __init__(self, group: dict[Any, Any], held: GroupShards) -> None:
        super().__init__(group, {"params": []})
        self.held = held
        self.places: Sequence[int] | None = None

    def settings(self) -> tuple[Any, ...]:
        """Which of the settings are in use: they decide what the lists hold."""
        numbers = (bool, int, float)
        return tuple(bool(v) if type(v) in numbers else type(v) for v in self.values())


def recalling(find: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `find`, the method of a torch optimizer that fills its lists, with a memory.

    The first list is that of parameters, the second that of gradients.
    """

    def found(twin: torch.optim.Optimizer, group: Any, *lists: list[Any]) -> Any:
        if not isinstance(group, LocalGroup) or len(lists) < 2 or any(lists):
            return find(twin, group, *lists)
        held, places, settings = group.held, group.places, group.settings()
        grads = held.gradients(places)
        last = held.recalled
        if last is not None and last.settings == settings and last.places is places:
            for made, same in zip(lists, last.lists, strict=True):
                made.extend(same)
            lists[1].extend(grads)
            return last.answer
        held.give_gradients()
        answer = find(twin, group, *lists)
        if held.is_all_sharded and are_same(lists[1], grads):
            kept = [[] if at == 1 else list(made) for at, made in enumerate(lists)]
            held.recalled = Recalled(settings, places, kept, answer)
        return answer

    return found
