"""The mesh of a run and its checkpoints: who writes them, and what they say of it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composer_fsdp2.checkpoint.describe import MESH
from composer_fsdp2.step.run import run_of

__all__ = ["first_copy", "note_mesh"]

_FIRST = "_fsdp2_first_copy"
"""attribute of a mesh, for `first_copy`"""


def first_copy(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Returns the ranks that hold the first copy of a model between them.

    Collective: yes, over the default group, the first time.

    Args:
        mesh: the whole one of a run, copies outermost.
    """
    if not hasattr(mesh, _FIRST):
        setattr(mesh, _FIRST, dist.new_group(mesh.mesh[0].flatten().tolist()))
    return getattr(mesh, _FIRST)


def note_mesh(state: dict[str, Any], model: nn.Module) -> None:
    """Writes the axes of a run with tensor parallelism into what is saved.

    Collective: no. No load reads them.

    Args:
        state: of the run, changed in place.
        model: the one that was sharded.
    """
    metadata, sharding = state.get("metadata"), run_of(model)
    if isinstance(metadata, dict) and sharding is not None and sharding.shape.tensor > 1:
        axes = sharding.shape.axes.items()
        metadata[MESH] = " x ".join(f"{name} {size}" for name, size in axes)
