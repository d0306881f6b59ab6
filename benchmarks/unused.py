"""CPU time that parameters without a gradient cost a step: `unused_parameters` on against off.

Method: as in `step.py`, two gloo ranks and steps that alternate, on two copies of one model, one of
which is prepared with `unused_parameters: false`. `--model dense` is that of `step.py` with `true`
against it, where nothing is ever unused: what is left is looking for it, and one small reduction a
step. `--model experts` has 8 experts in each of 4 blocks with `auto` against it; every expert gets
tokens on both ranks, because without the setting the ranks could not train it otherwise.
`--peer off` compares the model without the setting with itself and shows the noise.

Goal: ratio <= 1.03.
"""

from __future__ import annotations

import argparse
from typing import Any

import shapes
import torch
import torch.distributed as dist
from step import GOAL, OURS, Controls, Trainee
from torch import nn


class Routed(shapes.Mixture):
    """Weighs what all experts say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1).unbind(-1)
        pairs = zip(weights, self.experts, strict=True)
        return x + sum(weight.unsqueeze(-1) * expert(x) for weight, expert in pairs)


def _experts() -> nn.Module:
    model = shapes.LlamaLike(blocks=4)
    for block in model.blocks:
        block.mlp = Routed(256, 8, 168)
    return model


MODELS: dict[str, tuple[Any, bool | str]] = {
    "dense": (shapes.LlamaLike, True),
    "experts": (_experts, "auto"),
}
"""and what is compared with `false`"""


def _trainee(model: str, unused: bool | str) -> Trainee:
    def prepared(_model: nn.Module, _controls: Controls) -> nn.Module:
        torch.manual_seed(0)
        made = MODELS[model][0]()
        shapes.prepare(made, ("Block",), unused_parameters=unused)
        return made

    return Trainee((prepared, OURS[1]), Controls())


def measure(model: str, peer: str, steps: int, warmup: int) -> None:
    """Trains both copies on every rank and prints the line of rank 0."""
    ours = _trainee(model, MODELS[model][1] if peer == "on" else False)
    theirs = _trainee(model, False)
    batches = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, 2048, (4, 129), generator=batches)

    def both(count: int) -> dict[str, float]:
        return shapes.paired_ratio(lambda: ours.step(tokens), lambda: theirs.step(tokens), count)

    both(warmup)
    value = both(steps)
    if dist.get_rank() == 0:
        told = {"model": model, "peer": peer, "ranks": 2, "steps": steps}
        losses = {"ours_loss": ours.loss, "theirs_loss": theirs.loss}
        shapes.emit("unused", {**told, **value, **losses}, GOAL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), default="experts")
    parser.add_argument("--peer", choices=["on", "off"], default="on")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=4)
    options = parser.parse_args()
    shapes.run_ranks(measure, 2, options.model, options.peer, options.steps, options.warmup)


if __name__ == "__main__":
    main()
