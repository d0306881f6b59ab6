"""CPU time of a step of Composer's Trainer with this package over one with Composer's FSDP1.

Run by `step.py --over fsdp1`, which has the method.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import shapes
import torch
import torch.nn as nn
from composer import Trainer
from composer.core import Callback, State
from composer.models import ComposerModel
from composer.utils import dist
from torch.utils.data import DataLoader, TensorDataset

import composer_fsdp2

GOAL = 1.0
BATCHES = 4
OURS = {"fsdp2": {"wrap_policy": {"classes": ["Block"], "embeddings": False, "lm_head": False}}}
FSDP1 = {"fsdp": {"sharding_strategy": "FULL_SHARD", "mixed_precision": "DEFAULT"}}


class Model(ComposerModel):
    """The model of `step.py`; its forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = shapes.LlamaLike()
        # Where Composer's FSDP1 looks: the same units as ours.
        self.net.fsdp_wrap_fn = lambda module: isinstance(module, shapes.Block)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any, *args: Any) -> torch.Tensor:
        return outputs


class Clock(Callback):
    """Processor time from the end of one batch to the end of the next."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.loss = float("nan")

    def batch_end(self, state: State, logger: Any) -> None:
        self.ends.append(time.process_time())
        self.loss = float(state.loss)


class Run:
    """A Trainer that makes a few steps at a time."""

    def __init__(self, parallelism: Any, optimizer: str, microbatch: int, **more: Any) -> None:
        torch.manual_seed(0)
        self.clock, model = Clock(), Model()
        tokens = TensorDataset(torch.randint(0, 2048, (4096, 129)))
        self.trainer = Trainer(
            model=model,
            optimizers=_build(optimizer, model),
            train_dataloader=DataLoader(tokens, batch_size=4, sampler=dist.get_sampler(tokens)),
            max_duration="1ba",
            device="cpu",
            precision="fp32",
            progress_bar=False,
            parallelism_config=parallelism,
            device_train_microbatch_size=microbatch,
            callbacks=[self.clock],
            **more,
        )
        self.trainer.fit()

    def seconds(self) -> float:
        """Processor seconds of a step, from one batch to the next."""
        self.clock.ends.clear()
        self.trainer.fit(duration=f"{BATCHES}ba", reset_time=False)
        return (self.clock.ends[-1] - self.clock.ends[0]) / (BATCHES - 1)


def _build(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    import composer.optim

    return composer.optim.DecoupledAdamW(model.parameters(), lr=1e-3, weight_decay=1e-5)


OPTIMIZERS = ("adamw", "decoupled_adamw")


def measure(optimizer: str, pairs: int, warmup: int, microbatch: int, profiled: bool) -> None:
    """Trains both on every rank and prints the line of rank 0."""
    warnings.simplefilter("ignore")  # FSDP1 is deprecated
    composer_fsdp2.install()
    if not torch.cuda.is_available():
        # Composer hands FSDP1 this as its device, whatever the Trainer's is.
        torch.cuda.current_device = lambda: torch.device("cpu")
    ours, theirs = (Run(how, optimizer, microbatch) for how in (OURS, FSDP1))
    shapes.paired_ratio(ours.seconds, theirs.seconds, warmup)
    value = shapes.paired_ratio(ours.seconds, theirs.seconds, pairs)
    if dist.get_global_rank() == 0:
        losses = {"ours_loss": ours.clock.loss, "theirs_loss": theirs.clock.loss}
        told = {"optimizer": optimizer, "over": "fsdp1", "ranks": 2, "microbatch_size": microbatch}
        told |= {"pairs": pairs, "batches": BATCHES - 1}
        shapes.emit("trainer_step", {**told, **value, **losses}, GOAL)
    if profiled:
        for name, run in (("ours", ours), ("fsdp1", theirs)):
            _profile(name, run)


def _profile(name: str, run: Run) -> None:
    import cProfile
    import pstats
    import sys

    profile = cProfile.Profile()
    profile.enable()
    for _ in range(4):
        run.seconds()
    profile.disable()
    if dist.get_global_rank() == 0:
        sys.stdout.write(f"--- {name}: {4 * BATCHES} steps\n")
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
