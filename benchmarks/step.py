"""CPU time of a training step, against hand-written `fully_shard` calls on the same units.

Method: two gloo ranks of this machine, one thread each, train two copies of a Llama-like model (8
blocks, d=256, vocabulary 2048, fp32): one prepared by this package, one by hand. The steps
alternate and the order within a pair is swapped every time; the figure is the median over the pairs
of the ratio of process CPU times on rank 0. Both copies see the same batches, and their last losses
are reported. `--peer hand` compares by hand with itself and shows the noise of the method.

Goal: ratio <= 1.03.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import shapes
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

GOAL = 1.03


def _by_hand(model: nn.Module) -> nn.Module:
    return shapes.shard_by_hand(
        model, ("Block",), init_device_mesh("cpu", (dist.get_world_size(),))
    )


def _ours(model: nn.Module) -> nn.Module:
    shapes.prepare(model, ("Block",))
    return model


PEERS = {"ours": _ours, "hand": _by_hand}


class Trainee:
    """A model, its optimizer and the processor time of every step it made."""

    def __init__(self, shard: Callable[[nn.Module], nn.Module]) -> None:
        torch.manual_seed(0)
        self.model = shard(shapes.LlamaLike())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.loss = float("nan")

    def step(self, tokens: torch.Tensor) -> float:
        """One optimizer step; returns its CPU seconds, the backend's threads included."""
        start = time.process_time()
        loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        elapsed = time.process_time() - start
        self.loss = loss.item()
        return elapsed


def measure(peer: str, steps: int, warmup: int) -> None:
    """Trains both copies on every rank and prints the line of rank 0."""
    ours, theirs = Trainee(PEERS[peer]), Trainee(_by_hand)
    batches = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, 2048, (4, 129), generator=batches)

    def timed(trainee: Trainee) -> Callable[[], float]:
        return lambda: trainee.step(tokens)

    shapes.paired_ratio(timed(ours), timed(theirs), warmup)
    value = shapes.paired_ratio(timed(ours), timed(theirs), steps)
    if dist.get_rank() == 0:
        losses = {"ours_loss": ours.loss, "theirs_loss": theirs.loss}
        shapes.emit("step", {"peer": peer, "ranks": 2, "steps": steps, **value, **losses}, GOAL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peer",
        choices=list(PEERS),
        default="ours",
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=4)
    options = parser.parse_args()
    shapes.run_ranks(measure, 2, options.peer, options.steps, options.warmup)


if __name__ == "__main__":
    main()
