"""`composer-fsdp2 plan` as a program: the plan, and no warnings of other packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("llmfoundry", reason="needs the extra foundry")

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def test_standard_error_is_empty():
    command = [sys.executable, "-m", "composer_fsdp2.cli.main", "plan", "yamls/quickstart.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "model.transformer.wte" in done.stdout
    # Newer torch remarks on its own library when a process ends.
    said = [line for line in done.stderr.splitlines() if "nanobind" not in line]
    assert not [line for line in said if "Warning" in line]
