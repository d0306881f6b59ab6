"""The mesh of the run that saved a checkpoint, for those who look at it later."""

from __future__ import annotations

from typing import Any

from torch import nn

from composer_fsdp2.checkpoint.describe import MESH
from composer_fsdp2.trainer.sharding import sharding_of

__all__ = ["note_mesh"]


def note_mesh(state: dict[str, Any], model: nn.Module) -> None:
    """Writes the axes of a run with tensor parallelism into what is saved.

    Collective: no. No load reads them.

    Args:
        state: of the run, changed in place.
        model: the one that was sharded.
    """
    metadata, sharding = state.get("metadata"), sharding_of(model)
    if isinstance(metadata, dict) and sharding is not None and sharding.shape.tensor > 1:
        axes = sharding.shape.axes.items()
        metadata[MESH] = " x ".join(f"{name} {size}" for name, size in axes)
