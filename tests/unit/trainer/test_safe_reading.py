"""What guards against code in a checkpoint holds under `python -O` too, which drops asserts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.data_folder import ROOT

ALGORITHM = """
from composer_fsdp2.trainer.safe_reading import vet_algorithms
vet_algorithms({"algorithms": [("EMA", {"repr": TEXT})]})
"""
CODE = {
    "another name": ALGORITHM.replace("TEXT", repr("exit()")),
    "a call of a call": ALGORITHM.replace("TEXT", repr("EMA()()")),
    "a comparison": ALGORITHM.replace("TEXT", repr("exit() == EMA()")),
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
