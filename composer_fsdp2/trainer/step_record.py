"""Records loss and gradient norm of every step of a run, without changing it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.utils import dist as composer_dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

__all__ = ["NAME", "Recorder", "gradient_norm"]

NAME = "composer_fsdp2_recorder"
"""in LLM Foundry's registry of algorithms"""


class Recorder(Algorithm):
    """Writes one JSON line per step on rank 0, and ends the training after a number of steps.

    An algorithm and not a callback: at the event before the optimizer steps, where gradients are
    complete and unscaled, Composer runs all algorithms before the callbacks, and gradient clipping
    is one. It runs them in reverse there: named last, this one is before it.

    Args:
        file: for the lines.
        steps: number after which training ends as if it had reached its duration. The duration
            itself stays, as the learning rate may depend on it.
    """

    def __init__(self, file: str, steps: int) -> None:
        self.file = Path(file)
        self.left = steps
        self.norm = float("nan")

    def match(self, event: Event, state: State) -> bool:
        """Before the optimizer steps, and when the loss of all ranks is known."""
        return event in (Event.AFTER_TRAIN_BATCH, Event.BATCH_END)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Collective: yes, under FSDP."""
        if event == Event.AFTER_TRAIN_BATCH:
            self.norm = gradient_norm(state.model)
            return
        if composer_dist.get_global_rank() == 0:
            line = {
                "number": state.timestamp.batch.value,
                "loss": state.total_loss_dict["loss/train/total"],
                "gradient_norm": self.norm,
            }
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        self.left -= 1
        if self.left <= 0:
            state.stop_training()


def gradient_norm(model: nn.Module) -> float:
    """2-norm of all gradients of a model, whoever shards it; the gradients stay as they are.

    Under FSDP1 they are multiplied by 1, or by NaN where the norm is infinite already.

    Collective: yes, under FSDP.
    """
    roots = [m for m in model.modules() if isinstance(m, FullyShardedDataParallel)]
    roots = [module for module in roots if module.check_is_root()]
    covered = {param for root in roots for param in root.parameters()}
    squares = sum(root.clip_grad_norm_(float("inf")).item() ** 2 for root in roots)
    squares += _squares(param for param in model.parameters() if param not in covered)
    return squares**0.5


def _squares(params: Iterable[nn.Parameter]) -> float:
    """Sum of the squares of whole gradients.

    A parameter counts without a gradient too: it may have one on another rank, which then waits
    for this one.
    """
    sums: dict[tuple[DeviceMesh, tuple[int, ...]] | None, torch.Tensor] = {}
    for param in params:
        place, square = _sharded_over(param), _local_square(param)
        sums[place] = sums[place] + square if place in sums else square
    for place, total in sums.items():
        mesh, axes = place or (None, ())
        for axis in axes:
            assert mesh is not None
            dist.all_reduce(total, group=mesh.get_group(axis))
    return sum(total.item() for total in sums.values())


def _local_square(param: nn.Parameter) -> torch.Tensor:
    """Sum of squares of what this rank holds of a gradient."""
    grad = param.grad
    if grad is None:
        return torch.zeros((), dtype=torch.float64, device=param.device)
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    return torch.linalg.vector_norm(local, dtype=torch.float64).square()


def _sharded_over(param: nn.Parameter) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """Mesh and axes over which a parameter is split; `None` for a whole one."""
    if not isinstance(param, DTensor):
        return None
    axes = (axis for axis, placed in enumerate(param.placements) if placed.is_shard())
    return param.device_mesh, tuple(axes)
