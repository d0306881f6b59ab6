"""Where torch gathers, frees and reduces a group of parameters: the methods that are replaced."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from composer_fsdp2.shard.torch_private.units import carry_requires_grad, has_gradient, has_run

__all__ = ["GroupEvents", "attach"]


class GroupEvents(Protocol):
    """Hears what torch does with one group."""

    def tell(self, event: str) -> None:
        """Called just before torch does it, or after it for `after_unsharded`."""

    def may_free(self) -> bool:
        """Says whether the memory of whole parameters may be freed."""
        ...

    def before_backward(self) -> None:
        """Called whenever backward comes to the group."""

    def after_backward(self) -> bool:
        """Called when backward has left the group; says whether the group may reduce now."""
        ...


def attach(group: Any, events: GroupEvents) -> None:
    """Replaces the methods of torch's group in which it changes state, once for all listeners.

    Source: the methods,
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py#L252
    """
    replacements = _Replacements(group, events)
    for name in replacements.original:
        setattr(group, name, getattr(replacements, name))


_NAMES = (
    "pre_forward",
    "post_forward",
    "unshard",
    "wait_for_unshard",
    "pre_backward",
    "post_backward",
    "_to_unsharded",
    "_to_sharded",
    "_to_sharded_post_forward",
)


class _Replacements:
    """Methods of a group, by torch's names, that tell of what the original ones do."""

    def __init__(self, group: Any, events: GroupEvents) -> None:
        self._group, self._events = group, events
        self.original = {name: getattr(group, name) for name in _NAMES}

    def pre_forward(self, *args: Any) -> Any:
        self._events.tell("before_forward")
        return self.original["pre_forward"](*args)

    def post_forward(self, *args: Any) -> Any:
        output = self.original["post_forward"](*args)
        self._events.tell("after_group_forward")
        return output

    def unshard(self, *args: Any, **kwargs: Any) -> None:
        if _gathers(self._group):
            self._events.tell("before_gather")
        self.original["unshard"](*args, **kwargs)

    def wait_for_unshard(self) -> None:
        if not torch.is_inference_mode_enabled():
            self.original["wait_for_unshard"]()
            return
        # Training computes with the same parameters, and what is made in inference mode cannot be
        # saved for backward.
        with torch.inference_mode(False), torch.no_grad():
            self.original["wait_for_unshard"]()

    def pre_backward(self, *args: Any) -> Any:
        self._events.before_backward()
        return self.original["pre_backward"](*args)

    def post_backward(self, *args: Any) -> None:
        if not self._events.after_backward():
            return
        if self._group.reduce_grads and any(map(_has_gradient, self._group.fsdp_params)):
            self._events.tell("before_reduce")
        self.original["post_backward"](*args)

    def _to_unsharded(self) -> None:
        self._events.tell("before_unsharded")
        self.original["_to_unsharded"]()
        self._events.tell("after_unsharded")

    def _to_sharded(self) -> None:
        if self._may_free():
            self.original["_to_sharded"]()

    def _to_sharded_post_forward(self) -> None:
        if self._may_free():
            self.original["_to_sharded_post_forward"]()

    def _may_free(self) -> bool:
        # Hooks of `state_dict` and `load_state_dict` come here too, gathered or not.
        frees = not self._group.is_unsharded or self._events.may_free()
        if frees:
            carry_requires_grad(self._group)
        return frees


def _gathers(group: Any) -> bool:
    """Whether `unshard` sends anything now."""
    if group._all_gather_result is not None or group.is_unsharded:
        return False
    return group.unshard_in_backward or group._training_state.name != "PRE_BACKWARD"


def _has_gradient(param: Any) -> bool:
    return has_run(param) and has_gradient(param)
