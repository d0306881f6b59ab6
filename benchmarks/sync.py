"""Small collectives of a step of the Trainer, and how many of them wait for the device.

Method: two gloo ranks of this machine train two copies of a Llama-like model (2 blocks, d=64) with
Composer's Trainer: one with `parallelism_config.fsdp2`, one without any, which is Composer's own
loop (DDP reduces gradients in C++ and is not seen). Counted are the all-reduces, broadcasts and
exchanges of objects that Python starts in a batch, the median over batches after the first three;
gathers and reductions of units are not among them. What this package sends from host to host
(`step/agreement.py`) waits for no device: with NCCL it goes over a gloo group. All others are
read by the host as soon as they are made, and wait for what the device still computes.

`ratio` is that of those that wait, ours over Composer's; `ratio_of_all` counts those from host to
host as well.

Goal: ratio <= 1.0.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import shapes
import torch
from composer import Trainer
from composer.core import Callback, State
from composer.models import ComposerModel
from composer.utils import dist
from torch.utils.data import DataLoader, TensorDataset

import composer_fsdp2
from composer_fsdp2.step.agreement import agreement_of
from composer_fsdp2.torch_private.collectives import Collective, around_collectives

GOAL = 1.0
COUNTED = ("all_reduce", "barrier", "broadcast", "all_gather_object", "broadcast_object_list")


class Model(ComposerModel):
    """A language model whose forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = shapes.LlamaLike(2, 64, 256, 172)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any, *args: Any) -> torch.Tensor:
        return outputs


class Count(Callback):
    """Collectives of each batch: all, and those from host to host."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.on_hosts: list[int] = []
        self._made = self._on_hosts = 0

    def count(self, collective: Collective) -> Any:
        """Makes a collective, and counts it."""
        self._made += collective.key.rpartition(".")[2] in COUNTED
        return collective()

    def batch_end(self, state: State, logger: Any) -> None:
        """Ends the count of a batch."""
        on_hosts = agreement_of(torch.device("cpu")).collectives
        self.made.append(self._made)
        self.on_hosts.append(on_hosts - self._on_hosts)
        self._made, self._on_hosts = 0, on_hosts


def _collectives(parallelism: Any, size: int, batches: int) -> tuple[float, float]:
    """Of a batch: all, and those from host to host."""
    torch.manual_seed(0)
    count, model = Count(), Model()
    tokens = TensorDataset(torch.randint(0, 256, (8 * batches, 33)))
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=DataLoader(tokens, batch_size=4, sampler=dist.get_sampler(tokens)),
        max_duration=f"{batches}ba",
        device="cpu",
        precision="fp32",
        progress_bar=False,
        parallelism_config=parallelism,
        device_train_microbatch_size=size,
        callbacks=[count],
    )
    with around_collectives(count.count):
        trainer.fit()
    trainer.close()
    return statistics.median(count.made[3:]), statistics.median(count.on_hosts[3:])


def measure(size: int, batches: int) -> None:
    """Prints the line of rank 0."""
    composer_fsdp2.install()
    composers, _ = _collectives(None, size, batches)
    made, on_hosts = _collectives({"fsdp2": {}}, size, batches)
    if dist.get_global_rank() == 0:
        told = {"ranks": 2, "batches": batches, "samples": 4, "microbatch_size": size}
        waiting = made - on_hosts
        found = {"ours_waiting": waiting, "ours_host_to_host": on_hosts, "composers": composers}
        ratios = {"ratio": waiting / composers, "ratio_of_all": made / composers}
        shapes.emit("small collectives", {**told, **found, **ratios}, GOAL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--microbatch", type=int, default=2)
    parser.add_argument("--batches", type=int, default=12)
    options = parser.parse_args()
    shapes.run_ranks(measure, 2, options.microbatch, options.batches)


if __name__ == "__main__":
    main()
