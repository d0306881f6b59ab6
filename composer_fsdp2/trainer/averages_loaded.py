"""Refuses to train on from averages that a checkpoint holds as the model.

See [Note: EMA in checkpoints]. Whether a run trains is known when it begins to: the same load is
right for evaluation.
"""

from __future__ import annotations

from typing import Any

from composer.algorithms import EMA
from composer.core import State

from composer_fsdp2.errors import CheckpointError

__all__ = ["check_trains_own_weights", "note_loaded"]

_ATTRIBUTE = "_fsdp2_averages_from"


def note_loaded(state: State, path: str | None, loaded: Any) -> None:
    """Notes what the model holds after a load. Collective: no.

    Args:
        state: of the run.
        path: the checkpoint, if its weights are averages.
        loaded: `loaded["state"]`, or `None` where only weights were loaded.
    """
    goes_on = loaded is not None and "algorithms" in loaded and _has_ema(state)
    mixed = loaded is not None and "optimizers" in loaded and not goes_on
    setattr(state, _ATTRIBUTE, path if mixed else None)


def _has_ema(state: State) -> bool:
    return any(isinstance(algorithm, EMA) for algorithm in state.algorithms)


def check_trains_own_weights(state: State) -> None:
    """Refuses the optimizer's state beside weights it is not of.

    Collective: no. All ranks loaded the same.

    Raises:
        CheckpointError: with what to do instead.
    """
    path = getattr(state, _ATTRIBUTE, None)
    if path is not None:
        raise CheckpointError(
            f"'{path}' was saved with the algorithm EMA: its model is the averages, and its "
            "optimizer has the state of the trained weights beside them. Training would go on from "
            "the averages with the state of other weights. Add EMA to the Trainer's algorithms "
            "(and leave state/algorithms out of load_ignore_keys); or start anew from the averages "
            "with load_weights_only: true; or take the trained weights, which the checkpoint "
            "holds: "
            f"`composer-fsdp2 checkpoint convert {path} NEW.pt --to full --weights trained`."
        )
