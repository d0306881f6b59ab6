"""Back to a clean state, after a forward or backward that did not end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.distributed.fsdp import FSDPModule

from composer_fsdp2.core.collectives import AverageOverReplicas

__all__ = ["param_groups", "reset"]


def param_groups(unit: FSDPModule) -> list[Any]:
    """What torch gathers and reduces together in this unit: one group, or none without parameters.

    Torch has no public way to what a unit has summed up; newer torch may have several groups.
    """
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in groups or [state._fsdp_param_group] if group is not None]


def reset(units: Iterable[FSDPModule]) -> None:
    """Makes the next forward start as if the aborted one had not been.

    Collective: no. All parameters are shards again. Gradients that were not reduced yet are
    dropped; those of the shards stay for `zero_grad`.
    """
    held = [unit for unit in units if unit._get_fsdp_state()._is_root is not None]  # has run
    for unit in held:
        # Newer torch does most of it, older torch has no such method.
        if unit._get_fsdp_state()._is_root:
            getattr(unit, "reset_iter_state", int)()
    for unit in held:
        _forget_iteration(unit._get_fsdp_state())
        for group in param_groups(unit):
            _forget_gradients(group)
        unit.reshard()


def _forget_iteration(state: Any) -> None:
    state._training_state = _idle(state)
    state._modules_to_run_forward.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    state._comm_ctx.post_forward_order.clear()
    for name in ("all_gather_state", "reduce_scatter_state"):
        under_way = getattr(state._comm_ctx, name, None)
        if under_way is not None:
            state._device_handle.current_stream().wait_event(under_way.event)
            setattr(state._comm_ctx, name, None)


def _forget_gradients(group: Any) -> None:
    group.finalize_backward()  # waits, on the stream, for what has been sent
    group._training_state = _idle(group)
    group._partial_reduce_output = None
    if isinstance(group._all_reduce_hook, AverageOverReplicas):
        group._all_reduce_hook.forget()
    for param in group.fsdp_params:
        param.unsharded_accumulated_grad = None
        if hasattr(param, "_unsharded_param"):
            param._unsharded_param.grad = None


def _idle(busy: Any) -> Any:
    states: Any = type(busy._training_state)
    return states["IDLE"]
