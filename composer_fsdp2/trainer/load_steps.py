"""Steps that every way of loading a checkpoint shares."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from composer.utils import checkpoint as composers
from composer.utils import dist
from torch.distributed.checkpoint.api import CheckpointException

from composer_fsdp2.checkpoint.load import (
    Fit,
)
from composer_fsdp2.checkpoint.source import (
    Checkpoint,
    flatten,
)
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.ranks import raise_on_all_ranks
from composer_fsdp2.text import listed

__all__ = [
    "Ignore",
    "StateDict",
    "drop_keys",
    "left_out_notes",
    "lossy_notes",
    "plain_name",
    "remove_keys",
    "run_on_all_ranks",
    "warn_on_rank_0",
]

Ignore = Sequence[str] | Callable[[dict[str, Any]], None] | None


StateDict = dict[str, Any]


def run_on_all_ranks(act: Callable[[], Any]) -> Any:
    """Acts, and raises one error on every rank when any rank could not. Collective: yes."""
    found, error = None, None
    try:
        found = act()
    except CheckpointError as failed:
        error = failed
    except (Exception, CheckpointException) as failed:  # the other ranks must hear of it
        error = CheckpointError(f"{type(failed).__name__}: {failed}")
        error.__cause__ = failed
    raise_on_all_ranks({}, error)
    return found


def plain_name(name: str) -> str:
    """The name in the model nobody wrapped."""
    # Of activation checkpointing, `torch.compile` and FSDP1.
    wrappers = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
    return ".".join(part for part in name.split(".") if part not in wrappers)


def drop_keys(values: StateDict, ignore: Ignore) -> StateDict:
    """The state dict without the keys a user ignores.

    Containers are copied: they may be the very lists that a scheduler goes on with.
    """
    if not ignore:
        return values
    values = _copied_containers(values)
    (ignore if callable(ignore) else composers.glob_filter(list(ignore)))(values)
    values.setdefault("state", {})
    return values


def _copied_containers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied_containers(item) for key, item in value.items()}
    return [_copied_containers(item) for item in value] if type(value) is list else value


def remove_keys(values: StateDict, keys: Sequence[str]) -> None:
    """Takes keys out of a nested state dict, so that nobody asks the checkpoint for them.

    What has none left goes too: it is for its owner to keep what it has, not to load nothing.
    """
    _, ways = flatten(values)
    for key in keys:
        if key in ways:
            *outer, last = ways[key]
            holders: list[Any] = [values]
            for part in outer:
                holders.append(holders[-1][part])
            del holders[-1][last]
            for holder, part in zip(reversed(holders[:-1]), reversed(outer), strict=True):
                if holder[part] != {}:
                    break
                del holder[part]


def lossy_notes(saved: Checkpoint, flat: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence about tensors that the run keeps in a lower precision."""
    keys = [
        key
        for key, value in flat.items()
        if isinstance(value, torch.Tensor) and key in saved.tensors
        if torch.promote_types(saved.tensors[key].dtype, value.dtype) != value.dtype
    ]
    if keys:
        stored, kept = saved.tensors[keys[0]].dtype, flat[keys[0]].dtype
        yield (
            f"{len(keys)} tensors of '{saved.path}' lose precision: '{keys[0]}' is stored in "
            f"{stored} and the run keeps it in {kept}."
        )


def left_out_notes(saved: Checkpoint, fit: Fit) -> Iterator[str]:
    """Yields a sentence about values that the run and the checkpoint do not both have."""
    described = ("state.metadata.", "state.integrations.")  # nobody reads them back
    told = [key for key in fit.left_out if not key.startswith(described)]
    if told:
        yield (
            f"'{saved.path}' and the run do not both have {listed(told, 20, '')}. What the "
            "run has of it stays as it is."
        )


def warn_on_rank_0(notes: Iterable[str]) -> None:
    """Warns of each note, on one rank. Collective: no."""
    if dist.get_global_rank() == 0:
        for note in notes:
            warnings.warn(note, stacklevel=2)
