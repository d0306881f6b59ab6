"""Elements of a model that are not trained, by unit."""

from __future__ import annotations

from torch import nn

from composer_fsdp2.plan.wrap_plan import WrapPlan

__all__ = ["frozen_elements"]


def frozen_elements(model: nn.Module, plan: WrapPlan) -> dict[str, int]:
    """Counts the elements of frozen parameters in the units that have any.

    Collective: no. A tied parameter counts once.

    Args:
        model: on any device, before it is sharded.
        plan: of this model.

    Returns:
        The number of elements over all ranks, by the name of a unit (its first module).
    """
    params = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, int] = {}
    for unit in plan.units:
        held = {id(params[name]): params[name] for name in unit.params}
        count = sum(param.numel() for param in held.values() if not param.requires_grad)
        if count:
            found[unit.modules[0]] = count
    return found
