"""CPU time of planning and preparing models with thousands of units, against the same by hand.

Method: models live on meta, the process group is a fake one of 8 ranks in this process, so nothing
but the work of preparation is timed. Both sides run in one process on fresh models, the order
swapped every time, with a garbage collection before each; the figure is the median of the ratios.
`--via drop_in` goes through `prepare_fully_shard`, which also describes and agrees on everything.

This package pauses Python's garbage collector while it prepares and by hand does not, which favours
it: a collection is put off, not saved. `--collector off` turns it off for both sides, and that
ratio compares the work itself. Read both.

Figures:
    nested   4,096 wrapped modules under 512 parents, ratio to by hand; goal <= 1.10
    growth   exponent of our time from 1,024 to 16,384 wrapped modules; goal <= 1.1
    qwen     Qwen3-235B-A22B, 94 layers x 128 experts, each expert and each layer a unit (12,127
             with the root), ratio to by hand; goal <= 1.2
    plan     planning alone on its 49,167 modules; goal <= 3 s
    plan_growth  exponent of planning from an eighth of its layers to all; goal <= 1.1. Python's
             garbage collector is off: one pass over the whole process falls into the larger sizes
             only and would be read as growth. `plan` has it on.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import shapes
import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from composer_fsdp2.plan.wrap_plan import WrapPlan

WORLD_SIZE = 8
NESTED = ("Leaf",)
QWEN = ("Expert", "QwenLayer")

Prepare = Callable[[nn.Module, tuple[str, ...], DeviceMesh], object]


def _ours(model: nn.Module, classes: tuple[str, ...], mesh: DeviceMesh) -> None:
    from composer_fsdp2.shard.apply import apply_plan

    apply_plan(model, shapes.plan(model, classes), mesh)


def _drop_in(model: nn.Module, classes: tuple[str, ...], mesh: DeviceMesh) -> None:
    shapes.prepare(model, classes, unused_parameters=False)  # experts stay units


PEERS: dict[str, Prepare] = {
    "ours": _ours,
    "drop_in": _drop_in,
    "composer": shapes.shard_by_composer,
    "hand": shapes.shard_by_hand,
}


class Bench:
    """Prepares fresh models and times each preparation."""

    def __init__(
        self, build: Callable[[], nn.Module], classes: tuple[str, ...], mesh: DeviceMesh
    ) -> None:
        self.build, self.classes, self.mesh = build, classes, mesh

    def seconds(self, prepare: Prepare) -> float:
        """CPU seconds of one preparation; building the model is not in it."""
        with torch.device("meta"):
            model = self.build()
        return shapes.cpu_seconds(lambda: prepare(model, self.classes, self.mesh))

    def against_hand(self, prepare: Prepare, pairs: int) -> dict[str, float]:
        return shapes.paired_ratio(
            lambda: self.seconds(prepare), lambda: self.seconds(shapes.shard_by_hand), pairs
        )


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Slope of the least-squares line through the logarithms: 1 is linear, 2 quadratic."""
    xs, ys = [math.log(size) for size in sizes], [math.log(value) for value in seconds]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return covariance / sum((x - mean_x) ** 2 for x in xs)


def _sides(options: argparse.Namespace) -> dict[str, str]:
    return {"peer": options.peer, "collector": options.collector}


def nested(options: argparse.Namespace, mesh: DeviceMesh) -> None:
    bench = Bench(lambda: shapes.Nested(options.modules), NESTED, mesh)
    value = bench.against_hand(PEERS[options.peer], options.pairs)
    shapes.emit("prepare.nested", {**_sides(options), "modules": options.modules, **value}, 1.10)


def growth(options: argparse.Namespace, mesh: DeviceMesh) -> None:
    sizes = [1024, 2048, 4096, 8192, 16384]
    benches = [Bench(lambda n=n: shapes.Nested(n), NESTED, mesh) for n in sizes]
    # The least of several: noise of other processes only ever adds.
    runs = range(options.pairs)
    seconds = [min(bench.seconds(PEERS[options.peer]) for _ in runs) for bench in benches]
    value = {**_sides(options), "exponent": exponent(sizes, seconds)}
    shapes.emit("prepare.growth", {**value, "seconds": _by_size(sizes, seconds)}, 1.1)


def _by_size(sizes: Sequence[int], seconds: Sequence[float]) -> dict[str, float]:
    return {str(size): round(value, 3) for size, value in zip(sizes, seconds, strict=True)}


def qwen(options: argparse.Namespace, mesh: DeviceMesh) -> None:
    bench = Bench(shapes.QwenMoE, QWEN, mesh)
    value = bench.against_hand(PEERS[options.peer], options.pairs)
    shapes.emit("prepare.qwen", {**_sides(options), "layers": 94, "experts": 128, **value}, 1.2)


def _planning_seconds(layers: int, runs: int) -> tuple[int, WrapPlan, float]:
    """Number of modules, the plan, and the least of several CPU times."""
    with torch.device("meta"):
        model = shapes.QwenMoE(layers=layers)
    least = min(shapes.cpu_seconds(lambda: shapes.plan(model, QWEN)) for _ in range(runs))
    return sum(1 for _ in model.modules()), shapes.plan(model, QWEN), least


def plan(options: argparse.Namespace, mesh: DeviceMesh) -> None:
    modules, made, seconds = _planning_seconds(94, options.pairs)
    value = {"modules": modules, "units": len(made.units), "seconds": seconds}
    shapes.emit("prepare.plan", value, 3.0)


def plan_growth(options: argparse.Namespace, mesh: DeviceMesh) -> None:
    gc.disable()
    found = [_planning_seconds(layers, options.pairs) for layers in (12, 24, 47, 94)]
    sizes, seconds = [modules for modules, _, _ in found], [least for _, _, least in found]
    value = {"exponent": exponent(sizes, seconds), "seconds": _by_size(sizes, seconds)}
    shapes.emit("prepare.plan_growth", value, 1.1)


FIGURES = {
    "nested": nested,
    "growth": growth,
    "qwen": qwen,
    "plan": plan,
    "plan_growth": plan_growth,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(FIGURES), default="nested")
    parser.add_argument(
        "--modules", type=int, default=4096, help="wrapped modules of the nested shape"
    )
    parser.add_argument(
        "--peer", choices=list(PEERS), default="ours", help="what is compared with by hand"
    )
    parser.add_argument(
        "--via", choices=["plan", "drop_in"], default="plan", help="which of our entries is timed"
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--collector", choices=["on", "off"], default="on", help="Python's garbage collector"
    )
    options = parser.parse_args()
    if options.via == "drop_in" and options.peer == "ours":
        options.peer = "drop_in"
    if options.collector == "off":
        gc.disable()
    with shapes.fake_group(WORLD_SIZE) as mesh:
        # Imports and first-call set-up belong to no side.
        Bench(lambda: shapes.Nested(64), NESTED, mesh).against_hand(PEERS[options.peer], 1)
        FIGURES[options.shape](options, mesh)


if __name__ == "__main__":
    main()
