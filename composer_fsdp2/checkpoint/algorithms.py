"""Reads the algorithms in a checkpoint: their descriptions and the averages of EMA.

[Note: descriptions] Composer saves the `repr` of each algorithm, and evaluates it when it loads a
checkpoint. A call with plain arguments executes nothing.

[Note: EMA in checkpoints] Composer's EMA exchanges the weights when it saves: `state.model` has the
averages, and the algorithm's state has the trained weights, with `ema_weights_active` to say so.
The optimizer's state belongs to the trained ones.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from composer_fsdp2.checkpoint.source import Checkpoint, FileCheckpoint
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.text import plain_name

__all__ = [
    "ACTIVE",
    "descriptions",
    "executes",
    "holds_averages",
    "is_plain_call",
    "take_trained_weights",
    "vet_algorithms",
    "vet_algorithms_of",
]

ACTIVE = "ema_weights_active"


def vet_algorithms(state_dict: Mapping[str, Any]) -> None:
    """Refuses algorithms whose description is more than a call with plain arguments.

    Raises:
        CheckpointError: evaluating it could execute code.
    """
    for name, text in descriptions(state_dict):
        if not is_plain_call(name, text):
            raise executes(name, text)


def vet_algorithms_of(source: Checkpoint) -> None:
    """Refuses an open checkpoint in which such a description is; see `vet_algorithms`."""
    if isinstance(source, FileCheckpoint):
        state = source.values.get("state")
        vet_algorithms(state if isinstance(state, Mapping) else {})
        return
    for key, path in source.under("state", "algorithms").items():
        if path == ():
            vet_algorithms({"algorithms": source.object(key)})
        elif path[1:] == ("repr",):
            vet_algorithms({"algorithms": [(str(path[0]), {"repr": source.object(key)})]})


def descriptions(state_dict: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the names of algorithms and what Composer would evaluate to make them."""
    saved = state_dict.get("algorithms")
    for name, value in saved if isinstance(saved, list) else ():
        yield str(name), str(value.get("repr", "") if isinstance(value, Mapping) else "")


def executes(name: str, text: str) -> CheckpointError:
    """Returns the error for a description that could execute code."""
    return CheckpointError(
        f"The checkpoint describes its algorithm '{name}' as {text[:100]!r}. Composer would "
        "evaluate that, and it is more than a name with plain arguments, so it could execute "
        "code. Leave the algorithms out with load_ignore_keys: [state/algorithms]."
    )


def is_plain_call(name: str, text: str) -> bool:
    """Returns whether a description is the algorithm's name, called with plain arguments."""
    try:
        call = ast.parse(text, mode="eval").body
        # No assert: `python -O` would drop it, and Composer evaluates what passes here.
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == name:
            for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
                ast.literal_eval(argument)
            return True
    except (SyntaxError, ValueError, RecursionError):
        pass
    # The default `repr` of an object cannot be evaluated; Composer warns and goes on.
    return text.startswith("<") and text.endswith(">")


def holds_averages(algorithms: Any) -> bool:
    """Returns whether the algorithms' state, or a part of it, says that the model has averages."""
    return any(state[ACTIVE] is True for state in _states_of_ema(algorithms))


def _states_of_ema(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping) and ACTIVE in value:
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
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
    emas = [ema for ema in _states_of_ema(state.get("algorithms")) if ema[ACTIVE] is True]
    if not emas or "ema_model" not in emas[0]:
        raise CheckpointError(
            "The checkpoint holds no averages of EMA in the place of its weights. There are no "
            "other weights to take. Leave --weights trained out."
        )
    trained = {
        _plain(name): tensor
        for part in emas[0]["ema_model"].values()
        for name, tensor in part.items()
    }
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
    saved = state["algorithms"]
    pairs = saved.items() if isinstance(saved, Mapping) else enumerate(saved)
    without_averages = {
        name: algorithm for name, algorithm in pairs if not holds_averages(algorithm)
    }
    state["algorithms"] = (
        without_averages if isinstance(saved, Mapping) else list(without_averages.values())
    )


def _plain(name: str) -> str:
    # EMA takes the names of `state.model`; DDP, where it is around the model, adds this prefix.
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return plain_name(name)
