"""Descriptions of algorithms in a checkpoint, which Composer evaluates when it loads one."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from composer_fsdp2.checkpoint.source import Checkpoint, FileCheckpoint
from composer_fsdp2.errors import CheckpointError

__all__ = ["descriptions", "executes", "is_plain_call", "vet_algorithms", "vet_algorithms_of"]


def vet_algorithms(state_dict: Mapping[str, Any]) -> None:
    """Refuses algorithms whose description is more than a call with plain arguments.

    Composer evaluates the description, which comes from the checkpoint.

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
    spread: dict[str, dict[str, Any]] = {}
    for key, way in source.under("state", "algorithms").items():
        if way == ():
            vet_algorithms({"algorithms": source.object(key)})
        elif way[1:] == ("repr",):
            spread[str(way[0])] = {"repr": source.object(key)}
    vet_algorithms({"algorithms": list(spread.items())})


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
    """Whether a description is the algorithm's name, called with plain arguments."""
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
