"""The drawings: what is in them, that text neither overlaps nor leaves the page, and the files."""

from __future__ import annotations

import dataclasses
import io
import itertools
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import nn

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.estimate.forecast import Forecast
from composer_fsdp2.estimate.trace import Window
from composer_fsdp2.plan.planner import plan_wrapping
from composer_fsdp2.plan.rules import by_class, root_rule
from composer_fsdp2.plan.unit_size import frozen_elements
from composer_fsdp2.plan.wrap_plan import ShardUnit, WrapPlan
from composer_fsdp2.tools.parity import RunComparison, Step
from composer_fsdp2.tools.pictures import (
    MOST_ROWS,
    check_picture_path,
    comparison_picture,
    elements_text,
    plan_picture,
    plan_rows,
    write_figure,
)
from tests.support.models import TinyLM

ROOT = Path(__file__).parents[3]


def unit(name: str, numel: int = 1000, **values: object) -> ShardUnit:
    values = {"reshard_after_forward": True, "reason": "class", "top_level": not name, **values}
    return ShardUnit(module=name, params=(f"{name}.w",), numel=numel, **values)


def plan_of(*units: ShardUnit, **values: object) -> WrapPlan:
    return WrapPlan((*units, unit("", 500, reshard_after_forward=False)), **values)


def texts_of(figure: Figure) -> list[str]:
    legends = [text for legend in figure.legends for text in legend.get_texts()]
    titles = [legend.get_title() for legend in figure.legends]
    ticks = [label for axes in figure.axes for label in axes.get_yticklabels()]
    drawn = [text for axes in figure.axes for text in axes.texts]
    shown = [text.get_text() for text in (*figure.texts, *legends, *titles, *ticks, *drawn)]
    return [line.strip("\N{NO-BREAK SPACE} ") for text in shown for line in text.split("\n")]


def check_text(figure: Figure) -> None:
    """No text leaves the page, and no two lie over each other."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    width, height = figure.bbox.width, figure.bbox.height
    parts = (figure, *figure.subfigs)
    texts = [text for part in parts for text in part.texts]
    texts += [text for axes in figure.axes for text in axes.texts]
    for axes in figure.axes:
        low, high = sorted(axes.get_ylim())
        ticks = axes.get_yticklabels()  # those beyond the axis are not drawn
        texts += [label for label in ticks if low <= label.get_position()[1] <= high]
    shown = [*texts, *(legend for part in parts for legend in part.legends)]
    found = [(str(part), part.get_window_extent(renderer)) for part in shown]
    outside = [t for t, box in found if not (box.x0 >= 0 and box.x1 <= width and box.y0 >= 0)]
    assert not outside + [text for text, box in found if box.y1 > height]
    pairs = itertools.combinations(found, 2)
    both = [(a, b) for (a, x), (b, y) in pairs if x.padded(-1).overlaps(y.padded(-1))]
    assert not both


BLOCKS = [unit(f"model.blocks.{n}", 7_000_000) for n in range(98)]
PLANS = {
    "three": plan_of(unit("embed", role="embedding"), unit("head", role="head")),
    "a hundred": plan_of(*BLOCKS, unit("model.embed", 9_000_000)),
    "a hundred different": plan_of(
        *(unit(f"{'abcdefghij'[n % 10]}.{'xyz' * (n // 10)}w", n) for n in range(100))
    ),
    "nested": plan_of(
        *(unit(f"layers.{n}.{part}", 10) for n in range(4) for part in ("attn", "mlp")),
        *(unit(f"layers.{n}", 20) for n in range(4)),
    ),
    "long names": plan_of(
        unit("a_name_that_is_long." * 8 + "attention", 3),
        unit("$a_b$", 2**40),
        tied=(("x" * 90, "y.weight"), *((f"a{n}", f"b{n}") for n in range(9))),
        ignored=tuple(f"left.out.{n}.weight" for n in range(100)),
    ),
    "nothing": WrapPlan((unit("", 0),)),
}


@pytest.mark.table("long names", "nothing")
@pytest.mark.parametrize("name", PLANS)
def test_text_of_a_plan_is_apart_and_on_the_page(name: str):
    frozen = {"embed": 1000, "layers.0": 5, "model.blocks.3": 7_000_000}
    figure = plan_picture(PLANS[name], frozen, f"A title that is too long for a page {'x' * 60}")
    check_text(figure)


def test_repeated_units_are_one_row():
    rows = plan_rows(PLANS["a hundred"], {})
    assert [(row.label, row.depth, len(row.units), row.kind) for row in rows] == [
        ("<root>", 0, 1, "root"),
        ("model.blocks.0-97", 1, 98, "block"),
        ("model.embed", 1, 1, "other"),
    ]


def test_nested_units_are_below_those_around_them():
    rows = plan_rows(PLANS["nested"], {"layers.2": 20})
    assert [(row.label, row.depth, len(row.units), row.frozen) for row in rows] == [
        ("<root>", 0, 1, 0),
        ("layers.0,1,3", 1, 3, 0),
        ("layers.0-3.attn", 2, 4, 0),
        ("layers.0-3.mlp", 2, 4, 0),
        ("layers.2", 1, 1, 20),
    ]


def test_too_many_different_units_end_in_one_row():
    rows = plan_rows(PLANS["a hundred different"], {})
    assert len(rows) <= MOST_ROWS
    assert sum(len(row.units) for row in rows) == 101
    assert sum(row.total for row in rows) == 500 + sum(range(100))
    assert rows[-1].label.endswith("smaller units")


def test_sizes_may_differ_where_there_would_be_too_many_rows():
    plan = plan_of(*(unit(f"blocks.{n}", 100 + n) for n in range(60)))
    rows = plan_rows(plan, {})
    assert [(row.label, len(row.units), row.total) for row in rows][1:] == [
        ("blocks.0-59", 60, sum(range(100, 160)))
    ]
    assert "100 to 159 \N{MULTIPLICATION SIGN} 60" in texts_of(plan_picture(plan))


def test_a_drawing_shows_sizes_ties_and_what_is_frozen():
    model = TinyLM("two modules")
    for param in model.blocks[1].parameters():
        param.requires_grad_(False)
    plan = plan_wrapping(model, [by_class("Block"), root_rule])
    frozen = frozen_elements(model, plan)
    assert frozen == {"blocks.1": sum(p.numel() for p in model.blocks[1].parameters())}
    figure = plan_picture(plan, frozen)
    found = texts_of(figure)
    assert {"<root>", "blocks.0,2", "blocks.1", "frozen", "kept until backward"} <= {*found}
    assert "tie 1: embed.weight = head.weight" in found
    assert any(text.endswith(", tie 1") for text in found)
    assert any(text.endswith(", frozen") for text in found)


def test_memory_over_a_step_is_stacked_by_kind():
    """Areas end at the sum of each moment, whose kinds are in the order of the table."""
    kinds = [
        (("start", ""), {"parameters": 4e9, "optimizer": 8e9}),
        (("microbatch", "0"), {"parameters": 4e9, "optimizer": 8e9, "other": 1e6}),
        (("forward", "a"), {"parameters": 4e9, "optimizer": 8e9, "gathered": 1e9}),
        (("forward", "b"), {"parameters": 4e9, "optimizer": 8e9, "activations": 3e9}),
        (("backward", "b"), {"parameters": 4e9, "optimizer": 8e9, "backward": 5e9}),
        (("recomputation", "a"), {"parameters": 4e9, "optimizer": 8e9, "gathered": 2e9}),
        (("backward", "a"), {"parameters": 4e9, "optimizer": 8e9, "gradients": 4e9}),
        (("step", ""), {"parameters": 4e9, "optimizer": 8e9, "gradients": 4e9, "step": 2e9}),
    ]
    windows = [Window(label, {name: int(n) for name, n in sizes.items()}) for label, sizes in kinds]
    step = Forecast(
        ranks=2,
        ranks_per_node=2,
        microbatches=1,
        held={},
        gathered_bytes=0,
        peak=windows[-1].kinds,
        moment="step",
        windows=tuple(windows),
    )
    figure = plan_picture(PLANS["three"], title="A run", step=step)
    check_text(figure)
    (axes,) = figure.subfigs[1].axes
    names = [area.get_label() for area in axes.collections]
    assert names[:4] == ["parameters", "gradients", "optimizer state", "gathered units"]
    tops = dict.fromkeys(range(len(windows)), 0.0)
    for moment, size in axes.collections[-1].get_paths()[0].vertices:
        tops[int(moment)] = max(size, tops[int(moment)])
    assert list(tops.values()) == [sum(window.kinds.values()) for window in windows]
    ticks = {label.get_text(): label.get_position()[0] for label in axes.get_xticklabels()}
    assert ticks == {"forward": 2, "backward": 4, "step": 7}
    assert "Memory of a rank over one step: 16.76 GiB at most" in figure.subfigs[1].get_suptitle()


def test_a_tied_parameter_counts_once():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    model.requires_grad_(False)
    assert frozen_elements(model, plan_wrapping(model, [root_rule])) == {"": 9}


@pytest.mark.matrix
def test_text_of_two_runs_is_apart_and_on_the_page():
    old = tuple(Step(n, 5.0 - n / 10, 1.0) for n in range(1, 9))
    new = tuple(dataclasses.replace(step, loss=step.loss * (1 + 1e-7)) for step in old)
    for runs in (
        RunComparison(old, new, 1e-5),
        RunComparison(old, new, 0.0),
        RunComparison(old, old, 1e-5),
    ):
        check_text(comparison_picture(runs, ("old", "new"), "Two runs"))
        check_text(comparison_picture(runs, ("old", "new"), "Losses", ["loss"]))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00 K"),
        (9999, "10.0 K"),
        (7.09e6, "7.09 M"),
        (2**40, "1100 B"),
    ],
)
def test_numbers_have_three_digits(count: float, text: str):
    assert elements_text(count) == text


# --- Files. ---


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("plan.xyz", "writes no files that end in '.xyz'"),
        ("plan", "writes no files that end in ''"),
        ("missing/plan.svg", "there is no folder"),
    ],
)
def test_a_picture_that_cannot_be_written(tmp_path: Path, name: str, said: str):
    with pytest.raises(ConfigError, match=said):
        check_picture_path(tmp_path / name)


def test_without_matplotlib_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'composer-fsdp2\[plot\]'"):
        check_picture_path(Path("plan.svg"))


@pytest.mark.table
@pytest.mark.parametrize("kind", ["svg", "png", "pdf"])
def test_a_file_is_the_same_whatever_the_users_style(tmp_path: Path, kind: str):
    def written(name: str) -> bytes:
        file = tmp_path / f"{name}.{kind}"
        write_figure(plan_picture(PLANS["nested"]), file)
        return file.read_bytes()

    plain = written("a")
    with mpl.rc_context({"font.size": 30, "figure.facecolor": "black", "svg.fonttype": "path"}):
        assert written("b") == plain


def test_an_svg_is_white_and_holds_text():
    file = io.BytesIO()
    plan_picture(PLANS["three"]).savefig(file, format="svg")
    root = ElementTree.fromstring(file.getvalue())
    first = next(path for path in root.iter("{http://www.w3.org/2000/svg}path"))
    assert "#ffffff" in first.attrib["style"]


@pytest.mark.matrix
def test_matplotlib_is_imported_only_to_draw():
    code = (
        "import sys\n"
        "import composer_fsdp2.cli.main, composer_fsdp2.tools.pictures\n"
        "print('matplotlib' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT, text=True
    )
    assert done.stdout.strip() == "False"
