"""Each committed SVG is what `docs/pictures.py` makes of the committed data."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from composer_fsdp2.tools.pictures import write_figure

FOLDER = Path(__file__).parents[3] / "docs"
SVG = "{http://www.w3.org/2000/svg}"
NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")
NEAR = 3.0
"""points that a place may differ by: versions of matplotlib measure text differently"""


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_pictures", FOLDER / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = _script()


def structure(svg: bytes) -> list[tuple[str, str, list[float]]]:
    """Shapes and texts in order, with colours and with numbers."""
    found: list[tuple[str, str, list[float]]] = []
    for element in ElementTree.fromstring(svg).iter():
        kind = element.tag.removeprefix(SVG)
        if kind in ("path", "text", "use"):
            colors = re.findall(r"(?:fill|stroke): ?(#\w+|none)", element.attrib.get("style", ""))
            place = element.attrib.get("d", "") + element.attrib.get("transform", "")
            text = " ".join([*colors, "".join(element.itertext()).strip()])
            found.append((kind, text, [float(n) for n in NUMBER.findall(place)]))
    return found


def differences(svg: bytes, other: bytes) -> list[object]:
    ours, theirs = structure(svg), structure(other)
    if [one[:2] for one in ours] != [one[:2] for one in theirs]:
        return [{one[:2] for one in ours} ^ {one[:2] for one in theirs} or "order or number"]
    return [
        (kind, text)
        for (kind, text, places), (_, _, others) in zip(ours, theirs, strict=True)
        if len(places) != len(others)
        or any(abs(a - b) > NEAR for a, b in zip(places, others, strict=True))
    ]


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="matplotlib before 3.11 draws other ticks of logarithms"
)
@pytest.mark.table("parity-curves.svg")
@pytest.mark.parametrize("name", SCRIPT.PICTURES)
def test_the_picture_is_current(name: str, tmp_path: Path):
    write_figure(SCRIPT.drawn(name), tmp_path / name)
    made = (tmp_path / name).read_bytes()
    again = "run: python docs/pictures.py"
    assert not differences(made, (FOLDER / "pictures" / name).read_bytes()), again


def test_there_are_no_other_pictures():
    assert {file.name for file in (FOLDER / "pictures").glob("*.svg")} == {*SCRIPT.PICTURES}


def test_a_picture_of_other_data_is_found(monkeypatch, tmp_path: Path):
    plan = json.loads((SCRIPT.DATA / "plan.json").read_text())
    for unit in plan["units"]:
        unit["numel"] += 40_000_000 * (unit["modules"] == ["vision_tower"])
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    monkeypatch.setattr(SCRIPT, "DATA", tmp_path)
    write_figure(SCRIPT.drawn("plan-bars.svg"), tmp_path / "changed.svg")
    changed = (tmp_path / "changed.svg").read_bytes()
    assert differences(changed, (FOLDER / "pictures" / "plan-bars.svg").read_bytes())


def test_the_timeline_counts_what_the_monitor_counted():
    found = json.loads((SCRIPT.DATA / "step.json").read_text())
    collectives = [one for one in found["events"] if one["event"] in ("gather", "reduce")]
    assert len(collectives) == found["monitor"]["fsdp2/collectives"]


def test_the_memory_plots_are_of_the_figures_in_the_table():
    table = (FOLDER.parent / "benchmarks" / "README.md").read_text()
    for line in SCRIPT._lines("memory-8b.jsonl"):
        shown = f"{line['peak_gib']:.2f} / {line['ends_in_root_gib']:.2f} / {line['ratio']:.3f}"
        assert shown in table
