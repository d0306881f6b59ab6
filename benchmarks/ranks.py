"""What a rank sends in a step besides gathers and reductions, and what that is at 1,024 ranks.

Method: counts are exact. For each number of ranks a Llama-like model (8 blocks) takes a step in one
process of a fake group, and the collectives of its units are counted. Two gloo ranks of this
machine then train a small model with Composer's Trainer, once for each case, and what goes from
host to host is counted: agreements (`step/agreement.py`), comparisons of the order of collectives
(`guards/order_check.py`), and requests to the store at which the ranks met. The first batch is one
line and the median of batches after the third is another. No count depends on the number of ranks.

Model: gloo sends a small all-reduce around a ring, in 2 (ranks - 1) hops one after the other; from
32 ranks on there are two of them, around a row of ranks and around a column. `--hop-us` is the time
of a hop. `host_ms` is that time for all agreements and comparisons of a
batch: hosts wait so long for each other, while devices go on.

Goal: no request to the store in a batch after the first ones.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

import shapes
import torch
from composer import Trainer
from composer.core import Callback, State
from composer.utils import dist
from sync import Model
from torch.utils.data import DataLoader, TensorDataset

import composer_fsdp2
from composer_fsdp2.guards import order_check, watchdog
from composer_fsdp2.guards.leaving import joint_exit
from composer_fsdp2.step.agreement import agreement_of, neighbours
from composer_fsdp2.torch_private.collectives import Collective, around_collectives
from composer_fsdp2.torch_private.tensors import default_store

CASES: dict[str, tuple[dict[str, Any], int | str]] = {
    "default": ({}, 2),
    "auto": ({}, "auto"),
    "order_check: always": ({"order_check": "always"}, 2),
    "order_check: never": ({"order_check": "never"}, 2),
}
"""settings, and the size of a microbatch"""
BATCHES = 8


def structure(world: int) -> None:
    """A line with the collectives of units in a step of one rank."""
    made: Counter[str] = Counter()

    def count(collective: Collective) -> Any:
        made[collective.key.rpartition(".")[2]] += 1
        return collective()

    torch.manual_seed(0)
    with shapes.fake_group(world):
        model = shapes.LlamaLike()
        shapes.prepare(model, ("Block",))
        for _ in range(2):
            made.clear()
            with around_collectives(count):
                model(torch.randint(0, 8, (1, 33))).backward()
    shapes.emit("ranks.structure", {"ranks": world, "units_collectives": dict(made)})


class Counts(Callback):
    """What each batch sends from host to host."""

    def __init__(self) -> None:
        self.batches: list[dict[str, int]] = []
        self._requests = 0
        self._before = self._told()

    def _told(self) -> dict[str, int]:
        channels = order_check._channels.values()
        return {
            "agreements": agreement_of(torch.device("cpu")).collectives,
            "comparisons": sum(channel.collectives for channel in channels),
            "store_requests": self._requests,
        }

    def ask(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Counts a request to the store."""

        def asked(*args: Any) -> Any:
            self._requests += 1
            return method(*args)

        return asked

    def batch_end(self, state: State, logger: Any) -> None:
        """Ends the counts of a batch."""
        told = self._told()
        self.batches.append({name: count - self._before[name] for name, count in told.items()})
        self._before = told


class Store:
    """The store at which the ranks met, with a count of what is asked."""

    def __init__(self, counts: Counts) -> None:
        self._counts, self._store = counts, default_store()

    def __getattr__(self, name: str) -> Any:
        return self._counts.ask(getattr(self._store, name))


def _trained(name: str) -> list[dict[str, int]]:
    settings, size = CASES[name]
    torch.manual_seed(0)
    counts, model = Counts(), Model()
    store: Any = Store(counts)
    joint_exit.default_store = watchdog.default_store = lambda: store
    tokens = TensorDataset(torch.randint(0, 256, (8 * BATCHES, 33)))
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=DataLoader(tokens, batch_size=4, sampler=dist.get_sampler(tokens)),
        max_duration=f"{BATCHES}ba",
        device="cpu",
        precision="fp32",
        progress_bar=False,
        parallelism_config={"fsdp2": settings},
        device_train_microbatch_size=size,
        callbacks=[counts],
    )
    trainer.fit()
    trainer.close()
    return counts.batches


def hosts(worlds: list[int], hop_us: float) -> None:
    """Lines for each case: counts of two ranks, and the time they would take on more."""
    composer_fsdp2.install()
    for name in CASES:
        batches = _trained(name)
        steady = {key: statistics.median(b[key] for b in batches[3:]) for key in batches[0]}
        for when, found in (("first", batches[0]), ("steady", steady)):
            small = found["agreements"] + found["comparisons"]
            times = {f"host_ms_{n}": small * 2 * neighbours(n) * hop_us / 1e3 for n in worlds}
            if dist.get_global_rank() == 0:
                value = {"case": name, "batch": when, **found, "hop_us": hop_us, **times}
                # With `auto` a rank looks into the store while it waits: no longer, no request.
                bound = when == "steady" and name != "auto"
                value |= {"ratio": found["store_requests"]} if bound else {}
                shapes.emit("ranks.hosts", value, 0 if bound else None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 1024])
    parser.add_argument("--hop-us", type=float, default=50.0)
    options = parser.parse_args()
    for world in options.ranks:
        structure(world)
    shapes.run_ranks(hosts, 2, options.ranks, options.hop_us)


if __name__ == "__main__":
    main()
