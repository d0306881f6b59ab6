"""What other rooms know of a way to divide a model is stated in one file."""

from __future__ import annotations

import re
from pathlib import Path

import composer_fsdp2

PACKAGE = Path(composer_fsdp2.__file__).parent
IMPORTS = re.compile(r"^\s*from composer_fsdp2\.parallel\.(?:tensor|sequence)\b", re.MULTILINE)


def test_other_rooms_import_the_interface_alone():
    """`TRANSFORMATIONS`, a public name, and `generate`, which may get a model without a run."""
    files = {
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        if IMPORTS.search(file.read_text())
    }
    others = {file for file in files if not file.startswith("parallel/")}
    assert others == {"__init__.py", "trainer/hugging_face.py", "trainer/prepare.py"}
    inside = [file for file in files if file.startswith("parallel/")]
    assert all(file.startswith(("parallel/tensor/", "parallel/sequence/")) for file in inside)


def test_divisions_do_not_know_each_other():
    for one, other in (("tensor", "sequence"), ("sequence", "tensor")):
        for file in (PACKAGE / "parallel" / one).glob("*.py"):
            assert f"composer_fsdp2.parallel.{other}" not in file.read_text()
