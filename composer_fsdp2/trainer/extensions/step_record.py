"""Records loss, gradient norm, time and memory of every step of a run, without changing it."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.utils import dist as composer_dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from composer_fsdp2.optim import norms

__all__ = ["NAME", "Recorder", "peak_memory", "recorded_norm"]

NAME = "composer_fsdp2_recorder"
"""in LLM Foundry's registry of algorithms"""


class Recorder(Algorithm):
    """Writes one JSON line per step on rank 0, and ends the training after a number of steps.

    After the last step rank 0 writes the peak memory of each rank beside it, in `memory.json`.

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
        self.tokens = 0

    def match(self, event: Event, state: State) -> bool:
        """Before the optimizer steps, when the loss of all ranks is known, and at both ends."""
        events = (Event.FIT_START, Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.FIT_END)
        return event in events

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Collective: yes, under FSDP, and after the last step."""
        tokens, before = state.timestamp.token.value, self.tokens
        if event == Event.AFTER_TRAIN_BATCH:
            self.norm = recorded_norm(state.model)
            return
        self.tokens = tokens
        if event == Event.FIT_START:
            return
        if event == Event.FIT_END:
            # Not in each step, whose time it would be a part of.
            peaks = composer_dist.all_gather_object(peak_memory(state))
            if composer_dist.get_global_rank() == 0:
                self.file.with_name("memory.json").write_text(json.dumps(peaks), encoding="utf-8")
            return
        if composer_dist.get_global_rank() == 0:
            line = {
                "number": state.timestamp.batch.value,
                "loss": state.total_loss_dict["loss/train/total"],
                "gradient_norm": self.norm,
                "seconds": state.timestamp.batch_wct.total_seconds(),
                "tokens": tokens - before,
            }
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        self.left -= 1
        if self.left <= 0:
            state.stop_training()


def peak_memory(state: State) -> int:
    """Returns the most bytes that this rank has held so far.

    On a GPU by torch's allocator; elsewhere the resident set of the process, which holds imported
    code and the model before it was sharded too.
    """
    if state.device.name == "gpu":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
