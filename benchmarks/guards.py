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

from composer_fsdp2.trainer.loop.step import train_batch


def _automatic(trainee: Trainee) -> Callable[[], float]:
    """A step as the Trainer takes it after three batches in a row have fitted."""
    state = trainee.state
    state.optimizers, state.auto_microbatching = trainee.optimizer, True
    state.batch, state.device_train_microbatch_size = trainee.tokens, 1

    def compute(_microbatches: object, losses: dict[str, torch.Tensor]) -> torch.Tensor:
        trainee.model(trainee.tokens).backward()
        return losses["loss/train/total"]

    trainer = SimpleNamespace(
        state=state,
        logger=trainee.logger,
        first_train_batch_complete=True,
        num_consecutive_non_OOM_batches=3,
        _train_data_spec=SimpleNamespace(split_batch=lambda batch, _size: [batch]),
        _train_microbatches=compute,
        _use_closures=lambda: True,
    )

    def step() -> float:
        start = time.process_time()
        train_batch(lambda *_: {}, trainer, False)
        trainee.optimizer.zero_grad()
        return time.process_time() - start

    return step


def measure(peer: str, pairs: int, warmup: int) -> None:
    """Prints the line."""
    ours, theirs = Trainee(), Trainee()
    step = _automatic(ours) if peer == "on" else ours.plain
    emit_cost("guards", peer, step, theirs, pairs, warmup)


if __name__ == "__main__":
    run(measure, __doc__)
