"""Records loss and gradient norm of every step of a run, without changing it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.utils import dist as composer_dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from composer_fsdp2.optim import norms

__all__ = ["NAME", "Recorder", "recorded_norm"]

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
            self.norm = recorded_norm(state.model)
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


def recorded_norm(model: nn.Module) -> float:
    """Returns the 2-norm of all gradients of a model, which stay as they are.

    Under FSDP1 they are multiplied by 1, or by NaN where the norm is infinite already.

    Collective: yes, under FSDP.
    """
    roots = [m for m in model.modules() if isinstance(m, FullyShardedDataParallel)]
    # FSDP1's `clip_grad_norm_` raises on a unit inside another one.
    roots = [module for module in roots if module.check_is_root()]
    covered = {param for root in roots for param in root.parameters()}
    squares = sum(root.clip_grad_norm_(float("inf")).item() ** 2 for root in roots)
    others = [param for param in model.parameters() if param not in covered]
    squares += norms.gradient_norm(others, dtype=torch.float64).item() ** 2
    return squares**0.5
