"""`migrate --code` on notebooks, and on methods of objects whose type is not known."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from composer_fsdp2.cli.main import app
from composer_fsdp2.tools.migrate.python_code.files import migrate_code
from composer_fsdp2.tools.migrate.python_code.source import Source
from composer_fsdp2.tools.migrate.python_code.uses import find_uses

FSDP = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"


def notebook(*cells: Any, **metadata: Any) -> str:
    """The JSON of a notebook; a text is a cell with code."""
    written = [
        {"cell_type": "code", "source": cell.splitlines(keepends=True), "outputs": []}
        if isinstance(cell, str)
        else cell
        for cell in cells
    ]
    return json.dumps({"cells": written, "metadata": metadata, "nbformat": 4})


def examined(tmp_path, text: str | bytes):
    path = tmp_path / "train.ipynb"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    (file,) = migrate_code(tmp_path)
    return file


def places(file) -> list[tuple[int | None, int, int]]:
    return [(use.cell, use.line, use.column) for use in file.uses]


PROSE = {"cell_type": "markdown", "source": ["FSDP(model)"]}


def test_a_later_cell_uses_what_an_earlier_one_imports(tmp_path):
    file = examined(tmp_path, notebook(FSDP, PROSE, "x = 1\nmodel = FSDP(model)"))
    assert file.problem is None
    assert places(file) == [(1, 1, 36), (3, 2, 9)]


MAGICS = [
    "%matplotlib inline\n",
    "!pip install x\n",
    "files = !ls\n",
    "t = %timeit -o f()\n",
    "model?\n",
    "?model\n",
    "model.fit??\n",
    "await start()\n",
    "if a:\n    !ls\n",
    "%%time\n",
    "%%capture out\n",
    "%%writefile train.py\n",
]


@pytest.mark.parametrize("magic", MAGICS)
def test_commands_of_ipython_are_passed_over(tmp_path, magic):
    file = examined(tmp_path, notebook(FSDP, f"{magic}FSDP(m)"))
    assert file.problem is None
    assert places(file)[1:] == [(2, magic.count("\n") + 1, 1)]


def test_what_a_timed_line_does_is_read(tmp_path):
    file = examined(tmp_path, notebook(FSDP, "%time model = FSDP(m)"))
    assert places(file)[1:] == [(2, 1, 9)]


@pytest.mark.parametrize("magic", ["%%bash", "%%html", "%%script perl"])
def test_cells_of_other_languages_are_no_problem(tmp_path, magic):
    file = examined(tmp_path, notebook(FSDP, f"{magic}\nfor x in *; do echo FSDP; done"))
    assert (file.problem, len(file.uses)) == (None, 1)


def test_a_cell_that_is_no_python_is_named(tmp_path):
    file = examined(tmp_path, notebook(FSDP, "def f(:", "FSDP(m)"))
    assert file.problem is not None
    assert file.problem.startswith("cell 2: line 1: ")
    assert len(file.uses) == 2
    assert file.needs_work


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"cells": 3}', b"\xff\xfe", notebook("x", language_info={"name": "R"})],
)
def test_what_is_no_notebook_of_python_is_named(tmp_path, text):
    file = examined(tmp_path, text)
    assert file.problem is not None
    assert "notebook" in file.problem


def test_the_report_names_the_cell(tmp_path, monkeypatch):
    examined(tmp_path, notebook("x", FSDP))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["migrate", "--code", "."])
    assert "train.ipynb:cell 2:1:36" in result.stdout
    asked = CliRunner().invoke(app, ["migrate", "--code", ".", "--json"])
    (found,) = json.loads(asked.stdout)["files"][0]["uses"]
    assert (found["cell"], found["line"]) == (2, 1)


# --- Methods of objects whose type is not known. ---


@pytest.mark.parametrize(
    "code",
    [
        "model.clip_grad_norm_(1.0)",
        "self.model.clip_grad_norm_(max_norm=clip)",
        "def step(net, clip):\n    norm = net.clip_grad_norm_(clip)",
        "clip = state.model.module.clip_grad_norm_",
    ],
)
def test_clipping_of_an_untyped_model_is_perhaps(code):
    (use,) = find_uses(Source.read(code.encode()))
    assert (use.row.title, use.certain) == ("FSDP.clip_grad_norm_", False)


@pytest.mark.parametrize(
    "code",
    [
        "torch.nn.utils.clip_grad_norm_(p, 1.0)",
        "from torch.nn.utils import clip_grad_norm_\nclip_grad_norm_(p, 1.0)",
        "from torch import nn\nnn.utils.clip_grad_norm_(p, 1.0)",
        "import torch.nn.utils as u\nu.clip_grad_norm_(p, 1.0)",
        "accelerator.clip_grad_norm_(model.parameters(), 1.0)",
        "self.fabric.clip_grad_norm_(p, 1.0)",
    ],
)
def test_clipping_by_other_functions_is_not_reported(code):
    assert find_uses(Source.read(code.encode())) == []
