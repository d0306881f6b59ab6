"""The versions README shows are those `.ci/run` runs."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.support.documents import shell_lines
from tests.support.supported_table import CI, PAGE, ROOT, rows, versions

SECOND = r"\.venv/bin/uv pip install .*-c \.ci/stable\.txt .* && \.venv/bin/python -m pytest"


def test_the_readme_says_which_row_is_which():
    """The first is what pip gives; the second has the newest torch and transformers."""
    said = PAGE.read_text().partition("<!-- end of supported -->")[2].partition("\n## ")[0]
    (stable, *_), newest = rows()[0], rows()[1]
    assert stable == "stable"
    assert re.search(r"`\.ci/stable\.txt` pins what `pip install mosaicml llm-foundry` gives", said)
    assert f"`.ci/install {newest[0]} .venv`" in said
    for package in ("torch", "transformers"):
        found = [versions(*row[1:4])[package] for row in rows()]
        assert versions(*newest[1:4])[package] == max(found, key=_number)


def _number(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def test_ci_finds_the_command_of_the_readme():
    """It runs that line, in two halves."""
    assert len([line for line in shell_lines(PAGE) if re.fullmatch(SECOND, line)]) == 1
    script = (CI / "run").read_text()
    finding = script[script.index("second=$(") : script.index('step "copy to')]
    shown = subprocess.run(
        ["bash", "-ec", f'{finding}\necho "$second"'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.fullmatch(SECOND, shown.stdout.strip())


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_row_names_files_that_exist(row: list[str]):
    _, pins, overrides, _, runs = row
    assert all((CI / name).is_file() for name in (pins, overrides) if name != "-")
    assert runs in {"suite", "smoke"}


def test_no_file_of_pins_is_forgotten():
    """Every list of `.ci` is named by a row of stacks.txt, or by a script beside it."""
    scripts = [file for file in CI.iterdir() if file.is_file() and file.suffix != ".txt"]
    named = (CI / "stacks.txt").read_text() + "".join(file.read_text() for file in scripts)
    words = set(re.findall(r"[\w.-]+\.txt", named))
    assert {file.name for file in CI.glob("*.txt")} <= words
