"""Trained weights of a checkpoint that holds averages in their place.

[Note: EMA in checkpoints] Composer's EMA exchanges the weights when it saves: `state.model` has the
averages, and the algorithm's state has the trained weights, with `ema_weights_active` to say so.
The optimizer's state belongs to the trained ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from composer_fsdp2.errors import CheckpointError

__all__ = ["ACTIVE", "holds_averages", "take_trained_weights"]

ACTIVE = "ema_weights_active"
# In the names: activation checkpointing, `torch.compile`, FSDP1.
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")


def holds_averages(algorithms: Any) -> bool:
    """Whether the algorithms' state, or a part of it, says that the model has averages."""
    return any(state[ACTIVE] is True for state in _states_of_ema(algorithms))


def _states_of_ema(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        if ACTIVE in value:
            yield value
        else:
            for inner in value.values():
                yield from _states_of_ema(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _states_of_ema(inner)


def take_trained_weights(values: dict[str, Any]) -> None:
    """Puts the trained weights in the place of the averages, and takes EMA out.

    Collective: no.

    Args:
        values: nested, with whole tensors, as in a full checkpoint; changed in place.

    Raises:
        CheckpointError: it holds no averages, or not the weights they are of.
    """
    state = values.get("state", {})
    found = [ema for ema in _states_of_ema(state.get("algorithms")) if ema[ACTIVE] is True]
    if not found or "ema_model" not in found[0]:
        raise CheckpointError(
            "The checkpoint holds no averages of EMA in the place of its weights. There are no "
            "other weights to take. Leave --weights trained out."
        )
    kept = found[0]["ema_model"]
    trained = {_plain(name): tensor for part in kept.values() for name, tensor in part.items()}
    model: dict[str, Any] = state["model"]
    names = {_plain(name): name for name in model}
    missing = sorted(set(trained) - set(names))
    if missing:
        raise CheckpointError(
            f"EMA kept {', '.join(map(repr, missing[:5]))}, which the model of the checkpoint has "
            "not. Weights would stay averages. Resume with EMA among the algorithms."
        )
    replaced = {id(model[names[name]]): tensor for name, tensor in trained.items()}
    # Tied weights are one tensor under several names, of which EMA keeps one.
    state["model"] = {name: replaced.get(id(old), old) for name, old in model.items()}
    state["algorithms"] = _without_ema(state["algorithms"])


def _without_ema(algorithms: Any) -> Any:
    if isinstance(algorithms, Mapping):
        return {name: one for name, one in algorithms.items() if not holds_averages(one)}
    return [one for one in algorithms if not holds_averages(one)]


def _plain(name: str) -> str:
    # EMA takes the names of `state.model`; DDP, where it is around the model, adds this prefix.
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
