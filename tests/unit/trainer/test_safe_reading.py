"""What guards against code in a checkpoint holds under `python -O` too, which drops asserts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.data_folder import ROOT

ALGORITHM = """
from composer_fsdp2.checkpoint.algorithms import vet_algorithms
vet_algorithms({"algorithms": [("EMA", {"repr": TEXT})]})
"""
CHECKSUMS = """
import json, pathlib, tempfile
from composer_fsdp2.checkpoint.contents import _read_checksums
with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    found = {"files": {"../climbed": 1}, "metadata_sha256": ""}
    (folder / "checksums.json").write_text(json.dumps(found))
    _read_checksums(folder)
"""
CODE = {
    "another name": ALGORITHM.replace("TEXT", repr("exit()")),
    "a call of a call": ALGORITHM.replace("TEXT", repr("EMA()()")),
    "a comparison": ALGORITHM.replace("TEXT", repr("exit() == EMA()")),
    "a file elsewhere": CHECKSUMS,
}


@pytest.mark.slow
@pytest.mark.new_python
def test_guards_without_asserts():
    """One process for all: it imports Composer."""
    tries = "".join(
        f"try:\n    exec({code!r}, {{}})\nexcept CheckpointError:\n    print({what!r})\n"
        for what, code in CODE.items()
    )
    program = f"from composer_fsdp2.errors import CheckpointError\n{tries}"
    done = subprocess.run(
        [sys.executable, "-O", "-W", "ignore", "-c", program],
        capture_output=True,
        check=False,
        cwd=ROOT,
        text=True,
    )
    assert done.stdout.splitlines() == list(CODE), done.stderr
