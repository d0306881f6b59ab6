"""A step that `composer-fsdp2 plan` predicts on fake tensors, against the same step on real ranks.

Method: every layout of `tests/support/plan_layouts.py` is predicted for the first and the last rank
in one process, then prepared and stepped on real gloo ranks of this machine, which count their
collectives and storages.

A line for each layout: bytes of every kind of collective on every axis, their number, bytes of
parameters, gradients and optimizer state, and FLOPs have to be equal (`differences` is empty);
`peak_ratio` is predicted over counted. Goal: no differences, 1 +- 0.10.

    PYTHONPATH=. python benchmarks/plan.py --layout HSDP --layout "FSDP on 8"
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import shapes
import torch
import torch.distributed as dist

from tests.support.plan_layouts import LAYOUTS, counted, predicted

GOAL = 0.10


def measure(names: list[str], expected: dict[str, dict[int, dict[str, Any]]]) -> None:
    """Steps several layouts in one process group, and prints their lines on the last rank."""
    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    for name in names:
        found = counted(LAYOUTS[name], rank)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
        if rank == 0:
            _report(name, everyone, expected[name])


def _report(name: str, found: list[dict[str, Any]], expected: dict[int, dict[str, Any]]) -> None:
    differences = [
        f"rank {rank}, {kind}: {of_rank[kind]} predicted, {found[rank][kind]} counted"
        for rank, of_rank in expected.items()
        for kind in ("held", "sent", "calls", "flops")
        if of_rank[kind] != found[rank][kind]
    ]
    ratios = [of_rank["peak"] / found[rank]["peak"] for rank, of_rank in expected.items()]
    value = {
        "layout": name,
        "ranks": len(found),
        "sent_bytes": expected[0]["sent"],
        **{f"{kind}_bytes": size for kind, size in expected[0]["held"].items()},
        "peak_bytes": expected[0]["peak"],
        "peak_ratio": max(ratios, key=lambda ratio: abs(ratio - 1)),
        "differences": differences,
    }
    shapes.emit("plan", value, GOAL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", choices=list(LAYOUTS), action="append")
    names = parser.parse_args().layout or list(LAYOUTS)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    expected = {
        name: {rank: predicted(LAYOUTS[name], rank) for rank in {0, LAYOUTS[name].ranks - 1}}
        for name in names
    }
    for ranks in sorted({LAYOUTS[name].ranks for name in names}):
        together = [name for name in names if LAYOUTS[name].ranks == ranks]
        shapes.run_ranks(measure, ranks, together, {name: expected[name] for name in together})


if __name__ == "__main__":
    main()
