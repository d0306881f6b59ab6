"""Draws the pictures of the documentation: `python docs/pictures.py [FOLDER]`.

It reads what real runs left in `docs/pictures/data/` and writes one SVG each to `docs/pictures/`.
`docs/pictures/data/README.md` has the commands that made the data.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_fsdp2.plan.mesh_shape import MeshShape
from composer_fsdp2.plan.wrap_plan import ShardUnit, WrapPlan
from composer_fsdp2.tools.parity.compare import TOLERANCES, Comparison, Step
from composer_fsdp2.tools.pictures.charts import bars_picture, lines_picture, losses_picture
from composer_fsdp2.tools.pictures.mesh import mesh_picture
from composer_fsdp2.tools.pictures.plan import plan_picture
from composer_fsdp2.tools.pictures.sheet import write_figure
from composer_fsdp2.tools.pictures.step import UnitEvent, step_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path(__file__).parent / "pictures"
DATA = FOLDER / "data"


def _json(name: str) -> dict[str, Any]:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def plan_bars() -> Figure:
    """The plan of a vision-language model."""
    found = _json("plan.json")
    units = tuple(ShardUnit(**unit) for unit in found["units"])
    plan = WrapPlan(units, tuple(tuple(names) for names in found["tied"]))
    return plan_picture(plan, found["frozen"], found["title"])


def mesh_grid() -> Figure:
    """HSDP over eight ranks: two replicas of four shards."""
    return mesh_picture(MeshShape(shard=4, replicate=2), "HSDP on 8 ranks")


def step_timeline() -> Figure:
    """One step of a small model on two ranks."""
    found = _json("step.json")
    events = [UnitEvent(one["event"], one["unit"]) for one in found["events"]]
    counts = found["monitor"]
    note = (
        f"Step {found['step']} of rank 0 of {found['ranks']} (gloo). FSDP2Monitor counted "
        f"{counts['fsdp2/collectives']:.0f} collectives, "
        f"{counts['fsdp2/gathered_bytes'] / 2**20:.1f} MiB gathered and "
        f"{counts['fsdp2/reduced_bytes'] / 2**20:.1f} MiB reduced."
    )
    return step_picture(events, "Order of one training step", [note])


def loss_curves() -> Figure:
    """The same model under torch's FSDP1 and under FSDP2."""
    found = _json("losses.json")

    def run(name: str) -> tuple[Step, ...]:
        return tuple(Step(n, loss, 0.0) for n, loss in enumerate(found[name], 1))

    comparison = Comparison(run("old"), run("new"), TOLERANCES["fp32"])
    return losses_picture(comparison, ("FSDP1", "FSDP2"), "Loss under FSDP1 and FSDP2")


def parity_curves() -> Figure:
    """Both runs of `composer-fsdp2 parity` on the quickstart's model."""
    text = (DATA / "parity.csv").read_text(encoding="utf-8")
    rows = [*csv.DictReader(text.splitlines())]

    def run(name: str) -> tuple[Step, ...]:
        return tuple(
            Step(int(r["step"]), float(r[f"loss_{name}"]), float(r[f"gradient_norm_{name}"]))
            for r in rows
        )

    names = ("FSDP1 file (no CUDA: trains as DDP)", "migrated to FSDP2")
    comparison = Comparison(run("old"), run("new"), TOLERANCES["fp32"])
    return losses_picture(comparison, names, "Loss before and after migration")


def memory_parts() -> Figure:
    """Predicted peak memory by how activations are treated."""
    parts = {
        "state_bytes": "weights, Adam",
        "kept_units_bytes": "kept units",
        "activations_bytes": "activations",
        "logits_bytes": "logits, twice",
    }
    lines = _lines("memory-modes.jsonl")
    bars = {line["mode"]: {label: line[name] for name, label in parts.items()} for line in lines}
    note = "Predicted with fake tensors for one of 8 ranks (benchmarks/memory.py), not on a GPU."
    title = "Peak memory by activation mode"
    return bars_picture(bars, title, [note], lambda size: f"{size / 2**20:.0f} MiB")


def memory_8b() -> Figure:
    """Predicted peak memory of an 8B model, with the ends apart and in the root."""
    bars: dict[str, dict[str, float]] = {}
    for line in _lines("memory-8b.jsonl"):
        bars[f"{line['ranks']} ranks"] = {"": line["peak_gib"]}
        bars[f"{line['ranks']} ranks, ends in root"] = {"": line["ends_in_root_gib"]}
    note = (
        "8B parameters in fp32, every block recomputed, 4,096 tokens. Predicted with fake tensors "
        "(benchmarks/memory.py), not on a GPU. 'Ends in root': embedding and head in the root "
        "unit, as Composer wraps them."
    )
    return bars_picture(bars, "Peak memory of a rank", [note], lambda size: f"{size:.1f} GiB")


def communication() -> Figure:
    """Bytes on the wire for four microbatches, by when gradients and weights move."""
    names = {
        "accumulate_every": "every",
        "accumulate_last_freed": "last, freed",
        "accumulate_last": "last",
        "accumulate_last_kept": "last, kept",
    }
    bars = {names[line["case"]]: {"": line["wire_bytes"][0]} for line in _lines("comm.jsonl")}
    note = (
        "gradient_sync, and reshard_after_forward: true (freed), auto or false (kept). Exact count "
        "for one of 8 ranks (benchmarks/comm.py --backend fake)."
    )
    title = "Sent per batch of 4 microbatches"
    return bars_picture(bars, title, [note], lambda size: f"{size / 2**20:.0f} MiB")


def sequence_memory() -> Figure:
    """Peak memory of a step by the length of the sequence, for each degree and method."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for found in _lines("sequence.jsonl"):
        degree, method = found["degree"], found["method"]
        name = "one rank" if degree == 1 else f"{degree} ranks, {method}"
        lines.setdefault(name, []).append((found["length"], found["peak"] / 2**20))
    note = (
        "A small Llama of 8 blocks, recomputed, its loss in 8 chunks. Peak of a step less weights, "
        "counted with fake tensors (benchmarks/sequence.py), not on a GPU."
    )
    labels = ("tokens of a sequence", "MiB")
    return lines_picture(lines, "Memory by length of a sequence", labels, [note])


PICTURES: dict[str, Callable[[], Figure]] = {
    "plan-bars.svg": plan_bars,
    "mesh-grid.svg": mesh_grid,
    "step-timeline.svg": step_timeline,
    "loss-curves.svg": loss_curves,
    "parity-curves.svg": parity_curves,
    "communication.svg": communication,
    "memory-parts.svg": memory_parts,
    "memory-8b.svg": memory_8b,
    "sequence-memory.svg": sequence_memory,
}


def main(folder: Path = FOLDER) -> None:
    """Writes all pictures."""
    for name, draw in PICTURES.items():
        write_figure(draw(), folder / name)


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:2]))
