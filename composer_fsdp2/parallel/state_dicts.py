"""Has state dicts of modules and optimizers show parameters as FSDP2 alone would shard them.

State dicts of the model and of the optimizer are put into that form, and what is loaded is taken
from it. Fused rows are changed here; experts, whose rows travel, in `expert.views`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2.parallel.form import (
    FULLY_SHARDED,
    FusedRowsForm,
    ParameterForm,
    form_of,
    form_on,
)

__all__ = [
    "States",
    "change_optimizer_state_dicts",
    "change_state_dicts",
    "show_model_order",
    "show_model_order_of_states",
]

States = Mapping[int, Mapping[Any, Any]]
"""state of each parameter, by its number in the state dict of the optimizer"""
_Change = Callable[[Mapping[int, tuple[Any, Any]], States], States]


def change_state_dicts(
    module: nn.Module, show: Callable[..., None], load: Callable[..., None]
) -> None:
    """Changes every state dict of a module from now on.

    Collective: no, but each state dict is from then on, as the functions are.

    Args:
        module: a part of the model.
        show: changes a state dict that is made, as a hook of torch does.
        load: changes a state dict that is about to be loaded.
    """
    module.register_state_dict_post_hook(show)
    module.register_load_state_dict_pre_hook(load)


def change_optimizer_state_dicts(
    optimizer: torch.optim.Optimizer, kind: type[ParameterForm], show: _Change, load: _Change
) -> None:
    """Changes every state dict of an optimizer from now on.

    Collective: no, but each state dict is from then on, as the functions are.

    Args:
        optimizer: over sharded parameters.
        kind: class of the forms that are changed.
        show: returns the states that a state dict shows, given parameters and their forms by the
            numbers that the state dict has for them, and the states of this rank.
        load: returns the states that this rank loads, given those of a state dict.
    """
    if any(isinstance(form_of(p), kind) for g in optimizer.param_groups for p in g["params"]):
        optimizer.register_state_dict_post_hook(functools.partial(_with_states, kind, show))
        optimizer.register_load_state_dict_pre_hook(functools.partial(_with_states, kind, load))


def _with_states(
    kind: type[ParameterForm],
    change: _Change,
    optimizer: torch.optim.Optimizer,
    saved: dict[str, Any],
) -> dict[str, Any]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    named = zip(numbers, params, strict=True)
    forms = {n: (param, form) for n, param in named if isinstance(form := form_of(param), kind)}
    return {**saved, "state": change(forms, saved["state"])}


# --- Fused rows ---


def show_model_order(module: nn.Module) -> None:
    """Has state dicts of a module show the order of the model; see [Note: order of rows].

    Collective: no, but each state dict is from then on, over the ranks of a fused parameter.
    """
    params = module._parameters.items()
    forms = {name: form for name, p in params if isinstance(form := form_of(p), FusedRowsForm)}
    if forms:
        # The forms are kept for the hooks: a gathered parameter is another object in the place of
        # the one that has the note.
        change_state_dicts(
            module,
            functools.partial(_change, False, forms),
            functools.partial(_change, True, forms),
        )


def _change(
    loads: bool,
    forms: Mapping[str, FusedRowsForm],
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    *_args: Any,
    **_kwargs: Any,
) -> None:
    for name, form in forms.items():
        param, value = module._parameters[name], state.get(prefix + name)
        # A tensor in the place of a summoned parameter is in the model's order.
        if form_on(param) is not FULLY_SHARDED and isinstance(value, torch.Tensor):
            state[prefix + name] = _changed(loads, value, form, param)


@torch.no_grad()
def _changed(loads: bool, value: torch.Tensor, form: FusedRowsForm, param: Any) -> torch.Tensor:
    if not loads:
        return form.to_checkpoint(value)
    # Who asks for the state dict divides a full tensor.
    sharded = isinstance(value, DTensor)
    return form.from_checkpoint(value, param) if sharded else form.to_ranks(value)


def show_model_order_of_states(optimizer: torch.optim.Optimizer) -> None:
    """Has state dicts of an optimizer show the order of the model; see [Note: order of rows].

    Collective: no, but each state dict is from then on, over the ranks of the parameters.
    """
    change_optimizer_state_dicts(
        optimizer,
        FusedRowsForm,
        functools.partial(_change_states, False),
        functools.partial(_change_states, True),
    )


def _change_states(
    loads: bool, forms: Mapping[int, tuple[Any, FusedRowsForm]], states: States
) -> States:
    """Returns states whose tensors for fused parameters are in the other order."""
    changed = dict(states)
    for number, (param, form) in forms.items():
        # Other tensors of a state are no rows: a step, or a moment that is factored.
        before = form.model_shape(param.shape) if loads else param.shape
        if number in states:
            changed[number] = {
                key: _changed(loads, value, form, param)
                if isinstance(value, torch.Tensor) and value.shape == before
                else value
                for key, value in states[number].items()
            }
    return changed
