"""Draws the pictures of the documentation: `python docs/pictures.py [FOLDER]`.

It reads what real runs left in `docs/pictures/data/` and writes one SVG each to `docs/pictures/`.
`docs/pictures/data/README.md` has the commands that made the data.
"""

from __future__ import annotations

import csv
import json
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from composer_fsdp2.plan.wrap_plan import ShardUnit, WrapPlan
from composer_fsdp2.tools.parity import TOLERANCES, RunComparison, Step
from composer_fsdp2.tools.pictures import (
    COLORS,
    comparison_picture,
    own_style,
    plan_picture,
    write_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER = Path(__file__).parent / "pictures"
DATA = FOLDER / "data"
_PALETTE = [COLORS[name] for name in ("blue", "orange", "green", "purple", "sky")]


def _json(name: str) -> dict[str, Any]:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def _page(title: str, height: float, note: str = "") -> tuple[Figure, Axes]:
    """An empty drawing with a title above it and a note below."""
    figure = Figure(figsize=(7, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_xlabel(textwrap.fill(note, 80), loc="left", size=9)
    return figure, axes


def plan_bars() -> Figure:
    """The plan of a vision-language model."""
    found = _json("plan.json")
    units = tuple(
        ShardUnit(module=modules[0], **unit)
        for unit in found["units"]
        for modules in [unit.pop("modules")]
    )
    plan = WrapPlan(units, tuple(tuple(names) for names in found["tied"]))
    return plan_picture(plan, found["frozen"], found["title"])


def mesh_grid() -> Figure:
    """HSDP over eight ranks: two replicas of four shards."""
    figure, axes = _page("HSDP on 8 ranks: dp_replicate 2 x dp_shard 4", 2.8)
    for rank in range(8):
        replica, shard = divmod(rank, 4)
        axes.text(shard, replica, f"rank {rank}", ha="center", va="center")
        axes.barh(replica, 0.9, left=shard - 0.45, color="#E8F1F8", edgecolor=COLORS["blue"])
    axes.set_xticks(range(4), [f"shard {n}" for n in range(4)])
    axes.set_yticks(range(2), [f"replica {n}" for n in range(2)])
    axes.tick_params(length=0)
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.set_xlabel("\u2190 all-gather, reduce-scatter: dp_shard \u2192", color=COLORS["red"])
    axes.set_ylabel("\u2190 all-reduce:\ndp_replicate \u2192", color=COLORS["green"])
    return figure


def step_timeline() -> Figure:
    """One step of a small model on two ranks; one column for each event."""
    found = _json("step.json")
    looks = {
        "gather": ("all-gather", {"color": COLORS["blue"]}),
        "forward": ("forward", {"facecolor": "#DDEEDD", "edgecolor": COLORS["green"]}),
        "backward": ("backward", {"facecolor": "#FBE3C2", "edgecolor": COLORS["red"]}),
        "reduce": ("reduce-scatter", {"facecolor": "white", "edgecolor": COLORS["purple"]}),
    }
    looks["reduce"][1]["hatch"] = "////"
    events: list[tuple[str, str]] = []
    for one in found["events"]:
        event = (one["event"], one["unit"])
        # torch announces that a pass comes to a unit, and then gathers what it computes with.
        own = event[0] == "gather" and bool(events) and events[-1][1] == event[1]
        if event[0] in looks:
            events.insert(len(events) - own, event)
    counts = found["monitor"]
    note = (
        "Time goes to the right; one column for each event. "
        f"Step {found['step']} of rank 0 of {found['ranks']} (gloo). FSDP2Monitor counted "
        f"{counts['fsdp2/collectives']:.0f} collectives, "
        f"{counts['fsdp2/gathered_bytes'] / 2**20:.1f} MiB gathered and "
        f"{counts['fsdp2/reduced_bytes'] / 2**20:.1f} MiB reduced."
    )
    units = [*dict.fromkeys(unit for _, unit in events)]
    figure, axes = _page("Order of one training step", 3.2, note)
    for place, (event, unit) in enumerate(events):
        axes.barh(units.index(unit), 0.9, 0.6, left=place, **looks[event][1])
    turn = [event for event, _ in events].index("backward")
    turn -= events[turn - 1][0] == "gather"  # which the first backward waits for
    axes.axvline(turn - 0.05, color="black", ls="--")
    axes.set_xticks([turn / 2, (turn + len(events)) / 2], ["forward pass", "backward pass"])
    axes.set_yticks(range(len(units)), [unit or "<root>" for unit in units])
    axes.tick_params(length=0)
    axes.invert_yaxis()
    keys = [Patch(label=name, **look) for name, look in looks.values()]
    figure.legend(handles=keys, loc="outside lower left", ncols=4)
    return figure


def loss_curves() -> Figure:
    """The same model under torch's FSDP1 and under FSDP2."""
    found = _json("losses.json")

    def run(name: str) -> tuple[Step, ...]:
        return tuple(Step(n, loss, 0.0) for n, loss in enumerate(found[name], 1))

    comparison = RunComparison(run("old"), run("new"), TOLERANCES["fp32"])
    names, title = ("FSDP1", "FSDP2"), "Loss under FSDP1 and FSDP2"
    return comparison_picture(comparison, names, title, ["loss"])


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
    comparison = RunComparison(run("old"), run("new"), TOLERANCES["fp32"])
    return comparison_picture(comparison, names, "Loss before and after migration", ["loss"])


def _bars(
    bars: Mapping[str, Mapping[str, float]], title: str, note: str, unit: str, digits: int = 0
) -> Figure:
    """One bar for each figure, divided into its parts, with the sum at its end."""
    parts = [*dict.fromkeys(part for sizes in bars.values() for part in sizes)]
    figure, axes = _page(title, 1.6 + 0.35 * len(bars), note)
    ends = [0.0] * len(bars)
    for place, part in enumerate(parts):
        sizes = [found.get(part, 0.0) for found in bars.values()]
        look = {"color": "white", "edgecolor": _PALETTE[place]} if place % 2 else {}
        hatch = "////" if place % 2 else None
        look = {"color": _PALETTE[place], **look}
        drawn = axes.barh([*bars], sizes, left=ends, label=part, hatch=hatch, **look)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    axes.bar_label(drawn, [f" {end:.{digits}f} {unit}" for end in ends])
    axes.invert_yaxis()
    axes.set_xticks([])
    if len(parts) > 1:
        figure.legend(loc="outside lower left", ncols=len(parts))
    return figure


def memory_parts() -> Figure:
    """Predicted peak memory by how activations are treated."""
    parts = {
        "state_bytes": "weights, Adam",
        "kept_units_bytes": "kept units",
        "activations_bytes": "activations",
        "logits_bytes": "logits, twice",
    }
    lines = _lines("memory-modes.jsonl")
    bars = {
        line["mode"]: {label: line[name] / 2**20 for name, label in parts.items()} for line in lines
    }
    note = "Predicted with fake tensors for one of 8 ranks (benchmarks/memory.py), not on a GPU."
    title = "Peak memory by activation mode"
    return _bars(bars, title, note, "MiB")


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
    return _bars(bars, "Peak memory of a rank", note, "GiB", digits=1)


def communication() -> Figure:
    """Bytes on the wire for four microbatches, by when gradients and weights move."""
    names = {
        "accumulate_every": "every",
        "accumulate_last_freed": "last, freed",
        "accumulate_last": "last",
        "accumulate_last_kept": "last, kept",
    }
    lines = _lines("comm.jsonl")
    bars = {names[line["case"]]: {"": line["wire_bytes"][0] / 2**20} for line in lines}
    note = (
        "gradient_sync, and reshard_after_forward: true (freed), auto or false (kept). Exact count "
        "for one of 8 ranks (benchmarks/comm.py --backend fake)."
    )
    title = "Sent per batch of 4 microbatches"
    return _bars(bars, title, note, "MiB")


def sequence_memory() -> Figure:
    """Peak memory of a step by the length of the sequence, for each degree and method."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for found in _lines("sequence.jsonl"):
        degree, method = found["degree"], found["method"]
        name = "one rank" if degree == 1 else f"{degree} ranks, {method}"
        lines.setdefault(name, []).append((found["length"], found["peak"] / 2**20))
    note = (
        "By tokens of a sequence. A small Llama of 8 blocks, recomputed, its loss in 8 chunks. "
        "Peak of a step less weights, "
        "counted with fake tensors (benchmarks/sequence.py), not on a GPU."
    )
    figure, axes = _page("Memory by length of a sequence", 4.5, note)
    for place, (name, points) in enumerate(lines.items()):
        x, y = zip(*points, strict=True)
        style = "--o" if place % 2 else "-o"
        axes.plot(x, y, style, label=name, color=_PALETTE[place % len(_PALETTE)], ms=4)
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        scale("log", base=2)
        axis.set_major_formatter("{x:,.0f}")
    axes.set_ylabel("MiB")
    axes.legend()
    return figure


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


def drawn(name: str) -> Figure:
    """One picture, whatever the user's style of matplotlib."""
    with own_style():
        return PICTURES[name]()


def main(folder: Path = FOLDER) -> None:
    """Writes all pictures."""
    for name in PICTURES:
        write_figure(drawn(name), folder / name)


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:2]))
