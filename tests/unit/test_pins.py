"""Lists of tested versions: complete, read by Python alone, and what doctor says about them."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from composer_fsdp2.pins import ROWS, lines_of, row_of, text_of, versions_of
from composer_fsdp2.tools.doctor import Machine, examine

CI = Path(__file__).parents[2] / ".ci"
STACK = ("torch", "mosaicml", "llm-foundry", "transformers")


def test_every_row_has_the_versions_of_its_overrides():
    newest = versions_of("newest", STACK)
    for line in (CI / "newest-overrides.txt").read_text().splitlines():
        assert line.startswith("#") or line in lines_of("newest")
    assert newest["transformers"].startswith("5.")
    assert newest["torch"] == versions_of("latest", STACK)["torch"]


@pytest.mark.parametrize("row", ROWS)
def test_a_list_is_complete(row: str):
    """What each package of the list needs is in the list, as far as it is installed here."""
    needed = [Requirement(line) for line in lines_of(row)]
    names = {canonicalize_name(need.name) for need in needed}
    for need in needed:
        try:
            here = metadata.distribution(need.name)
        except metadata.PackageNotFoundError:
            continue
        for other in map(Requirement, here.requires or []):
            if not need.specifier.contains(here.version):  # another version may need others
                continue
            if other.marker is None:
                assert canonicalize_name(other.name) in names, (need.name, other.name)


def test_python_alone_prints_a_list():
    command = [
        sys.executable,
        "-I",
        "-S",
        str(Path(__file__).parents[2] / "composer_fsdp2/pins.py"),
    ]
    for row in ROWS:
        done = subprocess.run([*command, row], capture_output=True, check=True, text=True)
        assert done.stdout == text_of(row) + "\n"
    done = subprocess.run([*command, "old"], capture_output=True, check=False, text=True)
    assert (done.returncode, done.stderr) == (
        1,
        "There is no row 'old'. Write one of: stable, newest, latest.\n",
    )


def test_doctor_says_which_row_is_installed_and_what_pip_has_taken_back():
    for row in ROWS:
        versions = versions_of(row, STACK)
        machine = Machine(versions=versions)
        assert row_of(versions) == row
        assert examine(machine, None) == []
    old = versions_of("stable", STACK)
    for package in ("torch", "transformers"):
        versions = {**versions_of("newest", STACK), package: old[package]}
        machine = Machine(versions=versions)
        found = examine(machine, None)
        if package == "transformers":  # that is the row latest
            assert found == []
            continue
        assert row_of(versions) is None
        assert [finding.level for finding in found] == ["warning"]
        assert (
            f"{package} {old[package]} is beside the other versions of the row newest"
            in found[0].what
        )
        assert "python -m composer_fsdp2.pins newest" in found[0].advice
