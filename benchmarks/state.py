"""Bytes and CPU time of an optimizer whose state is kept in another form between steps.

Method: two gloo ranks of this machine, one thread each. Two copies of a GPT-2-like model (4 blocks,
d=256, fp32, 3.3 million parameters) are prepared, one with the `optimizer_state` of the policy and
one without, and given the same gradients. Their optimizers' steps alternate, the order within a
pair is swapped every time, and the figure is the median over the pairs of the ratio of process CPU
times on rank 0. `bytes` is what moments take on rank 0 between two steps, in a share of the other
copy's. With `--whole` forward and backward of 8 x 128 tokens are part of the step. `--device cuda`
is a step on GPUs, one rank for each of them, in seconds on the clock, of a model with d=2048 and
200 million parameters: rounding and copies take other shares of a step there.

Goal: bytes <= 0.51 for bf16, <= 0.26 for 8 bits, of parameters that are large enough.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import shapes
import torch
import torch.nn as nn
from optimizer import OPTIMIZERS, Block, Model, Params

from composer_fsdp2.optim.codec import Stored
from composer_fsdp2.optim.state import KeptState

POLICIES: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bf16"},
    "8_bits": {"bits": 8},
    "cpu": {"device": "cpu"},
    "bf16_cpu": {"dtype": "bf16", "device": "cpu"},
    "8_bits_cpu": {"bits": 8, "device": "cpu"},
    "own": {},
}
GOALS = {"bf16": 0.51, "8_bits": 0.26}


@dataclass(frozen=True)
class Run:
    """A model, its optimizer and the timed part of a step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    tokens: torch.Tensor

    @classmethod
    def of(cls, optimizer: str, policy: dict[str, Any], device: str) -> Run:
        from composer_fsdp2 import prepare_fully_shard

        torch.manual_seed(0)
        width = 256 if device == "cpu" else 2048
        model = Model((Block(width) for _ in range(4)), width)
        made = OPTIMIZERS[optimizer](list(model.parameters()))
        config = {"wrap_policy": {"classes": ["Block"]}, "optimizer_state": policy}
        prepare_fully_shard(model, made, config, device=shapes.composers(device))
        tokens = torch.randint(512, (8, 128), generator=torch.Generator().manual_seed(1))
        return cls(model, made, tokens.to(device))

    @property
    def params(self) -> Params:
        return list(self.model.parameters())

    def give_gradients(self) -> None:
        """The same in every step, as new tensors."""
        self.optimizer.zero_grad()
        self.model(self.tokens).backward()

    def timed(self, whole: bool) -> float:
        def step() -> None:
            if whole:
                self.give_gradients()
            self.optimizer.step()

        if not whole:
            self.give_gradients()
        return shapes.cpu_seconds(step, self.tokens.device.type)

    @property
    def held_bytes(self) -> int:
        """Of moments, on this rank."""
        return sum(_nbytes(state) for state in self.optimizer.state.values())


def _nbytes(state: Any) -> int:
    if isinstance(state, KeptState):
        moments = [value for value in state.data.values() if isinstance(value, Stored)]
        return sum(moment.values.nbytes + moment.exponents.nbytes for moment in moments)
    moments = [v for v in state.values() if isinstance(v, torch.Tensor) and v.ndim]
    return sum(moment.to_local().nbytes for moment in moments)


def measure_all(names: list[str], options: argparse.Namespace) -> None:
    """Measures one policy after the other in one process group, and prints lines on rank 0."""
    for name in names:
        measure(name, options)


def measure(name: str, options: argparse.Namespace) -> None:
    """Steps both on every rank and prints the line of rank 0."""
    kept, own = (
        Run.of(options.optimizer, policy, options.device) for policy in (POLICIES[name], {})
    )
    gc.collect()
    gc.freeze()

    def timed(run: Run) -> Callable[[], float]:
        return lambda: run.timed(options.whole)

    shapes.paired_ratio(timed(kept), timed(own), options.warmup)
    value = shapes.paired_ratio(timed(kept), timed(own), options.steps)
    gc.unfreeze()
    if torch.distributed.get_rank() == 0:
        held = {"bytes": kept.held_bytes / own.held_bytes, "held_bytes": kept.held_bytes}
        told = {"policy": name, "optimizer": options.optimizer, "whole": options.whole}
        told |= {"device": options.device, "ranks": torch.distributed.get_world_size()}
        shapes.emit("state", {**told, **held, **value}, GOALS.get(name.removesuffix("_cpu")))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", choices=["all", *POLICIES], default="all")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="decoupled_adamw")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--whole", action="store_true", help="forward and backward count too")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=2)
    options = parser.parse_args()
    names = list(POLICIES) if options.policy == "all" else [options.policy]
    ranks = shapes.ranks_on(options.device)
    shapes.run_ranks(measure_all, ranks, names, options, device=options.device)


if __name__ == "__main__":
    main()
