"""The program of docs/recipes/inference.md: the engine has the weights of the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import scaled

pytestmark = [pytest.mark.slow, pytest.mark.new_python]

ROOT = Path(__file__).parents[2]
PROGRAM = str(ROOT / "docs" / "recipes" / "weights_out.py")


def test_the_engine_generates_what_the_run_does():
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.Popen(
        [sys.executable, "-m", *launch, PROGRAM],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    try:
        engine = subprocess.run(
            [sys.executable, PROGRAM, "engine"],
            capture_output=True,
            env=environment,
            text=True,
            timeout=scaled(180),
            check=True,
        )
        told, _ = run.communicate(timeout=scaled(60))
    finally:
        run.kill()
    assert told.split()[0] == "run"
    assert told.split()[1:] == engine.stdout.split()[1:] != []
