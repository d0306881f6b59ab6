"""`.ci/gpu --dry-run`: every step of the report runs here, but for the kernels."""

from __future__ import annotations

import getpass
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import scaled

pytestmark = [pytest.mark.slow, pytest.mark.new_python]
ROOT = Path(__file__).parents[2]


def test_a_dry_run_has_all_steps_and_their_figures(tmp_path: Path):
    command = [".ci/gpu", "--dry-run", "--python", sys.executable, "--out", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=scaled(1200)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = (tmp_path / "gpu-report.json").read_text()
    report = json.loads(written)
    assert report["dry_run"]
    assert report["machine"]["gpus"] == []
    assert report["machine"]["packages"]["torch"] in done.stdout
    found = {part["step"]: {f["figure"] for f in part["figures"]} for part in report["steps"]}
    expected = {"plan": {"plan_peak"}, "memory": {"memory.modes"}}
    expected |= {
        name: {name}
        for name in ("machine", "tests", "quickstart", "step", "optimizer", "state")
        if name != "quickstart" or "llm-foundry" in report["machine"]["packages"]
    }
    if {"llm-foundry", "peft"} <= set(report["machine"]["packages"]):
        rows = ("mpt-760m", "mpt-760m-composer", "llama3-8b-lora")
        expected |= {f"train-{row}": {"train"} for row in rows}
    assert {name: figures for name, figures in found.items() if figures} == expected
    table = (tmp_path / "gpu-report.md").read_text()
    assert table.startswith("A dry run on the CPU")
    assert all(f"\n| {step} | passed |" in table for step in expected)
    private = {str(ROOT), str(tmp_path), str(Path.home()), sys.prefix, socket.gethostname()}
    private |= {getpass.getuser()} - {"root"}
    assert [name for name in private if name in written + table] == []
