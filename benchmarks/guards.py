"""CPU time that `device_train_microbatch_size: auto` leaves in a step once the size is stable.

Method: that of `monitor.py`: one process, a `fake` group of two ranks, short steps that alternate,
with a standard error that resolves less than a percent. The guards are gone by then; what stays is
what the Trainer calls around every batch and every step of the optimizer, to be able to find a
smaller size. `--peer off` compares a step with itself and shows the noise.

Goal: ratio <= 1.01.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from monitor import Trainee, emit_cost, run

from composer_fsdp2.trainer.auto_microbatching import train_batch


def _automatic(trainee: Trainee) -> Callable[[], float]:
    """A step as the Trainer takes it after three batches in a row have fitted."""
    trainee.state.optimizers = trainee.optimizer
    trainee.state.auto_microbatching = True
    trainer = SimpleNamespace(state=trainee.state, first_train_batch_complete=True)

    def batch(_trainer: object) -> dict[str, torch.Tensor]:
        trainee.step()
        return {}

    def step() -> float:
        start = time.process_time()
        train_batch(batch, trainer)
        return time.process_time() - start

    return step


def measure(peer: str, pairs: int, warmup: int) -> None:
    """Prints the line."""
    ours, theirs = Trainee(), Trainee()
    step = _automatic(ours) if peer == "on" else ours.plain
    emit_cost("guards", peer, step, theirs, pairs, warmup)


if __name__ == "__main__":
    run(measure, __doc__)
