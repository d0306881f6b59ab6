"""Gives the run's optimizers the state that a checkpoint has: of each parameter all, or none.

[Note: state by parameter] torch makes state for the parameters that are trained when a checkpoint
is loaded, and asks the checkpoint for that of each. But a parameter that had no gradient yet has no
state in the checkpoint, and one that is frozen now may have some, which waits for its unfreezing.
So while torch looks, the parameters that are trained are those with state in the checkpoint.

Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/checkpoint/state_dict.py#L640
(`_init_optim_state`) and L811 (`_split_optim_state_dict`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from composer_fsdp2.checkpoint.source import Checkpoint
from composer_fsdp2.ranks import of_rank0
from composer_fsdp2.text import plain_name

__all__ = ["States", "asking_for", "load_optimizers", "saved_states"]

States = Mapping[str, set[str]]
"""class of an optimizer -> FQNs of the parameters whose state the checkpoint has"""


def saved_states(saved: Checkpoint, optimizers: Sequence[torch.optim.Optimizer]) -> States:
    """Returns whose state a checkpoint has, of the optimizers that both have. Collective: no."""
    states: dict[str, set[str]] = {}
    for name in {type(optimizer).__qualname__ for optimizer in optimizers}:
        fqns = {
            keys[0] for keys in saved.under("state", "optimizers", name, "state").values() if keys
        }
        numbered = any(isinstance(fqn, int) for fqn in fqns)  # not by torch's checkpoints
        if saved.under("state", "optimizers", name) and not numbered:
            states[name] = {str(fqn) for fqn in fqns}
    return states


@contextlib.contextmanager
def asking_for(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], states: States
) -> Generator[None]:
    """Has torch ask for the parameters whose state is saved; see [Note: state by parameter].

    Collective: no. An optimizer that has the state of other parameters loses it: what is loaded
    replaces all state.
    """
    fqns: dict[int, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        fqns.setdefault(id(param), set()).add(plain_name(name))
    trained: list[tuple[nn.Parameter, bool]] = []
    try:
        for optimizer in optimizers:
            saved = states.get(type(optimizer).__qualname__)
            if saved is None:
                continue
            params = [param for group in optimizer.param_groups for param in group["params"]]
            with_state = {id(param) for param in params if not saved.isdisjoint(fqns[id(param)])}
            if with_state != {id(param) for param in params if optimizer.state.get(param)}:
                optimizer.state.clear()
            for param in params:
                if param.requires_grad is not (id(param) in with_state):
                    trained.append((param, param.requires_grad))
                    param.requires_grad_(not param.requires_grad)
        yield
    finally:
        for param, flag in trained:
            param.requires_grad_(flag)


def load_optimizers(
    original: Callable[..., None],
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    states: States,
    state_dict: Mapping[str, Any],
    strict: bool = True,
) -> None:
    """Takes the place of `State.load_optim_state` during a load.

    Collective: yes.

    torch loses the settings of a group without parameters, unless it is the only one and the last,
    and cannot load a full state dict without any state. So such groups stay out of its sight. It
    also wants every setting; those that `load_ignore_keys` has taken out stay as the run has them.
    """
    loaded = state_dict["optimizers"]  # None where rank 0 alone has it
    empty: list[tuple[torch.optim.Optimizer, int, dict[str, Any]]] = []
    for optimizer in optimizers:
        name = type(optimizer).__qualname__
        state = (loaded or {}).get(name, {})
        groups = of_rank0(state.get("param_groups", []))
        pairs = list(itertools.zip_longest(optimizer.param_groups, groups, fillvalue={}))
        for number, (group, saved) in enumerate(pairs):
            settings = {key: value for key, value in saved.items() if key != "params"}
            if not group["params"]:
                empty.append((optimizer, number, {**group, **settings}))
            elif states.get(name) == set():
                group.update(settings)
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        if "param_groups" in state:
            state["param_groups"] = [
                {**{key: value for key, value in group.items() if key != "params"}, **saved}
                for group, saved in pairs
                if group["params"]
            ]
    if not any(fqns == set() for fqns in states.values()):
        with asking_for(model, optimizers, states):
            original(state_dict, strict=strict)
    for optimizer, number, group in empty:
        optimizer.param_groups.insert(number, group)
