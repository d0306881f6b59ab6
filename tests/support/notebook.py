"""Runs the code cells of a notebook in one process, without Jupyter.

    python -m tests.support.notebook docs/tutorial.ipynb FOLDER [--write]

The cells run in FOLDER. The one magic that is known is `%%writefile NAME` as the first line of a
cell. The outputs go to standard output as JSON, one text a cell; `--write` puts them into the
notebook, and is how docs/tutorial.ipynb gets them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

__all__ = ["code_cells", "outputs_of", "run_cell"]

_WRITE = "%%writefile "


_STREAM = {"name": "stdout", "output_type": "stream"}


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells with code, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def outputs_of(cell: dict[str, Any]) -> str:
    """What the cell printed when the notebook was last run."""
    return "".join("".join(output["text"]) for output in cell["outputs"])


def run_cell(source: str, names: dict[str, Any]) -> str:
    """Runs one cell with the names of those before it; returns what it prints."""
    if source.startswith(_WRITE):
        first, _, rest = source.partition("\n")
        file = Path(first.removeprefix(_WRITE).strip())
        text = f"{'Overwriting' if file.exists() else 'Writing'} {file}\n"
        file.write_text(f"{rest}\n")
        return text
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "<cell>", "exec"), names)
    return printed.getvalue()


def main(page: str, folder: str, *options: str) -> None:
    """Runs every cell and hands on what they print."""
    path = Path(page).resolve()
    notebook = json.loads(path.read_text())
    os.chdir(folder)
    sys.path.insert(0, os.getcwd())
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = [run_cell("".join(cell["source"]), names) for cell in code_cells(notebook)]
    if "--write" in options:
        for number, (cell, text) in enumerate(zip(code_cells(notebook), printed, strict=True), 1):
            cell["outputs"] = [_STREAM | {"text": text.splitlines(keepends=True)}] if text else []
            cell["execution_count"] = number
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(printed))


if __name__ == "__main__":
    main(*sys.argv[1:])
