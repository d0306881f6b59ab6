"""`.ci/gpu`: what becomes of a step, and what the report says and does not say."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import sys
import time
import zipfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

from tests.support.limits import scaled

FILE = Path(__file__).parents[2] / ".ci" / "gpu"
loader = SourceFileLoader("gpu_report", str(FILE))
spec = importlib.util.spec_from_loader("gpu_report", loader)
assert spec is not None
gpu: Any = importlib.util.module_from_spec(spec)
sys.modules["gpu_report"] = gpu  # dataclasses look for it
loader.exec_module(gpu)

LINE = '{"figure": "step", "torch": "2.7.0", "peer": "ours", "ratio": 1.2, "low": 1.1, "high": 1.3}'
MACHINE = {"figure": "machine", "gpus": ["a GPU, 80 GiB"], "packages": {"torch": "2.7.0"}}
SLEEPS = "import subprocess, time; child = subprocess.Popen(['sleep', '600']); "
SLEEPS += "print(child.pid, flush=True); time.sleep(600)"


def step(name: str, code: str, seconds: float = 300, needs: str = "") -> Any:
    return gpu.Step(name, seconds, ["python", "-c", code], needs)


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The report of steps of which some do not end well."""
    raised = "import os; raise OSError(f'no file {os.getcwd()}/some/file.py')"
    found = [
        step("broken", f"print('{LINE}', flush=True); {raised}"),
        step("stuck", SLEEPS, scaled(1)),
        step("missing", "", needs="no-such-package"),
        step("right", f"print('{LINE}')"),
    ]
    monkeypatch.setattr(gpu, "MACHINE", step("machine", f"print('''{json.dumps(MACHINE)}''')"))
    monkeypatch.setattr(gpu, "steps", lambda dry, gpus: found)
    given = argparse.Namespace(python=sys.executable, out=tmp_path, dry_run=False, only="")
    return gpu.run_all(given, os.environ)


def test_the_others_run_whatever_becomes_of_a_step(report: dict[str, Any], tmp_path: Path):
    outcomes = {part["step"]: part["outcome"] for part in report["steps"]}
    assert outcomes.pop("stuck").startswith("over its limit of ")
    assert outcomes.pop("missing") == "left out: no-such-package is not installed"
    assert outcomes == {"machine": "passed", "broken": "failed", "right": "passed"}
    parts = {part["step"]: part for part in report["steps"]}
    assert parts["broken"]["figures"] == parts["right"]["figures"] == [json.loads(LINE)]
    assert [parts[name]["exit"] for name in ("broken", "stuck", "right")] == [1, None, 0]
    assert json.loads((tmp_path / "gpu-report.json").read_text()) == report
    child, limit = int((tmp_path / "stuck.log").read_text()), time.monotonic() + scaled(10)
    while _is_alive(child):
        assert time.monotonic() < limit
        time.sleep(0.01)


def _is_alive(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_tables_have_outcomes_figures_and_errors(report: dict[str, Any], tmp_path: Path):
    text = (tmp_path / "gpu-report.md").read_text()
    assert text.startswith("a GPU, 80 GiB; torch 2.7.0\n")
    assert "\n| missing | left out: no-such-package is not installed |" in text
    assert "\n| step | ours | ratio 1.2 (1.1-1.3) |  |\n" in text
    assert "\nOSError: no file file.py\n" in text


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ('File "/data/x/train.py", line 3', 'File "train.py", line 3'),
        ("no ~/data/c4/index.json, 1/2 GB", "no index.json, 1/2 GB"),
        (f"{socket.gethostname()}: by ada", "...: by ..."),
    ],
)
def test_names_of_users_machines_and_folders_are_left_out(
    said: str, kept: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("USER", "ada")
    assert gpu.anonymous(said) == kept


def test_what_tests_and_quickstart_say_are_figures():
    text = "FAILED tests/gpu/test_a.py::test_b[x] - no\n=== 1 failed, 30 passed in 20.1s ===\n"
    text += "Held-out loss: 4.000 at batch 0, 3.000 at batch 8 (25% lower).\n"
    failed = {"outcome": "1 failed, 30 passed", "failed": ["tests/gpu/test_a.py::test_b[x]"]}
    losses = {"loss_before": 4.0, "loss_after": 3.0, "batches": 8, "ratio": 0.75}
    assert gpu.figures(text) == [{"figure": "tests", **failed}, {"figure": "quickstart", **losses}]
    assert gpu.figures('{"figure": "ste') == []  # of a step that was ended


def test_wheels_are_unpacked_and_a_folder_without_any_is_an_error(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "small-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("small/__init__.py", "")
    into = tmp_path / "wheels"
    for _ in range(2):
        assert gpu.unpack(tmp_path, into) == str(into)
        assert (into / "small" / "__init__.py").exists()
    with pytest.raises(SystemExit, match="has no wheels"):
        gpu.unpack(into / "small", tmp_path / "other")


def test_the_limits_together_are_half_an_hour():
    steps = [gpu.MACHINE, *gpu.steps(False, 1)]
    assert sum(one.seconds for one in steps) <= 30 * 60
    assert sum(one.seconds for one in steps if not one.name.startswith("train")) <= 9 * 60


def test_a_row_of_training_stands_beside_what_was_published_and_predicted():
    row = {"figure": "train", "row": "mpt-1b", "peer": "ours", "compile": True, "mfu": 0.412}
    row |= {"tokens_per_second": 21345.6, "seconds": 0.7123, "peak_gib": 40.5}
    row |= {"predicted_gib": 41.25, "predicted_seconds": 0.81, "published": "45,455 on H100"}
    assert gpu._row(row) == [
        "train",
        "mpt-1b, ours, compiled",
        "21,346 tokens/s, 0.712 s, predicted 0.81 s, MFU 41.2%, peak 40.50 GiB, "
        "predicted 41.25 GiB",
        "45,455 on H100",
    ]
