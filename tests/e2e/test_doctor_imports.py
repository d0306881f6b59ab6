"""`composer-fsdp2 doctor` as a program of its own: what it imports, and that this is enough."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from composer_fsdp2.cli.late_imports import LATE
from tests.support.limits import scaled

pytest.importorskip("llmfoundry", reason="needs the extra foundry")

pytestmark = [pytest.mark.slow, pytest.mark.new_python]

ROOT = Path(__file__).parents[2]


def test_doctor_imports_no_package_that_the_run_does_not_use(tmp_path):
    program = [sys.executable, "-X", "importtime", "-m", "composer_fsdp2.cli.main", "doctor"]
    small = [f"variables.folder={tmp_path}", "variables.text.megabytes=0.1"]
    done = subprocess.run(
        [*program, "yamls/quickstart.yaml", *small],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=scaled(300),
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert {"llmfoundry.utils.builders", "composer.trainer"} <= imported
    # Late modules are in the list too; what is inside a package that ran is not late.
    ran = {"mlflow.tracking.client", "sklearn.base", "scipy.signal._signaltools", "mcli.config"}
    ran |= {"pandas.core.frame", "databricks.sdk.service", "matplotlib.figure", "torchao.dtypes"}
    assert not ran & imported
    assert "mlflow" in LATE
    assert len(done.stdout.splitlines()) <= 20
    assert "Traceback" not in done.stderr
