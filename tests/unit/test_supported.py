"""The versions README shows are those `.ci/run` runs."""

from __future__ import annotations

import re

import pytest

from tests.support.supported_table import CI, MARK, PAGE, rows, table, versions

SECOND = re.compile(
    r"^\.venv/bin/uv pip install .*-c \.ci/stable\.txt .* && \.venv/bin/python -m pytest$", re.M
)


def test_the_readme_shows_the_table():
    """`python -m tests.support.supported_table` writes it."""
    assert [text for _, text in MARK.findall(PAGE.read_text())] == [table()]


def test_the_readme_names_the_versions_of_the_first_row():
    stable = versions(*rows()[0][1:4])
    named = PAGE.read_text().partition("`.ci/stable.txt` pins")[2].partition("`.ci/run`")[0]
    assert f"torch {stable['torch']}, mosaicml {stable['mosaicml']}," in named
    assert f"transformers {stable['transformers']})" in " ".join(named.split())
    latest = next(row for row in rows() if row[0] == "latest")
    assert f"torch {versions(*latest[1:4])['torch'].removesuffix('.0')} " in named


def test_ci_finds_the_command_of_the_readme():
    """It runs that line, in two halves."""
    assert len(SECOND.findall(PAGE.read_text())) == 1


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_row_names_files_that_exist(row: list[str]):
    _, pins, overrides, _, runs = row
    assert all((CI / name).is_file() for name in (pins, overrides) if name != "-")
    assert runs in {"suite", "smoke"}


def test_no_file_of_pins_is_forgotten():
    used = {name for row in rows() for name in row[1:3]}
    assert {file.name for file in CI.glob("*.txt")} - used == {"stacks.txt"}
