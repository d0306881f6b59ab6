"""The tutorial's notebook runs, and shows what it shows on the page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import scaled
from tests.support.notebook import code_cells, outputs_of

pytestmark = [pytest.mark.slow, pytest.mark.new_python]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.ipynb"
CELLS = code_cells(json.loads(PAGE.read_text()))


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> list[str]:
    """What each cell prints here."""
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    env |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    folder = tmp_path_factory.mktemp("tutorial")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.notebook", str(PAGE), str(folder)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=scaled(300),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def shape_of(text: str) -> list[str]:
    """The output without what differs between runs: the run's name, versions, sizes, losses.

    Ranks print in the order in which they get there.
    """
    text = re.sub(r"^  (run|torch|composer|size) .*", r"  \1", text, flags=re.MULTILINE)
    text = re.sub(r"(?<=; ).*|(loss|norm': ) ?[\d.]+|[\d.]+ KiB", r"\1", text)
    lines = text.splitlines()
    ranks = iter(sorted(line for line in lines if line.startswith("rank ")))
    return [next(ranks) if line.startswith("rank ") else line for line in lines]


def test_every_cell_prints_what_the_page_shows(printed):
    shown = [outputs_of(cell) for cell in CELLS]
    assert [shape_of(text) for text in printed] == [shape_of(text) for text in shown]


def test_the_loss_falls_and_goes_on_from_the_checkpoint(printed):
    losses = [float(loss) for text in printed for loss in re.findall(r"loss ([\d.]+)", text)]
    assert len(losses) == 6
    assert losses == sorted(losses, reverse=True)
    start, _, saved, resumed, *_ = losses
    assert saved - resumed < (start - saved) / 4


def test_the_exported_model_has_learned_to_count(printed):
    assert printed[-1] == "after 10 11 12 13 comes 14\n"


def test_the_page_has_no_output_of_an_error_and_counts_its_cells():
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    kinds = {output["output_type"] for cell in CELLS for output in cell["outputs"]}
    assert kinds == {"stream"}
