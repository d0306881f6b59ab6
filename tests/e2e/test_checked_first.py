"""`train` of a run with a mistake: what doctor finds, or what a rank under torchrun says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support import foundry
from tests.support.forked import ROOT
from tests.support.limits import scaled
from tests.support.run_mistakes import changed, good

pytest.importorskip("llmfoundry", reason="needs the extra foundry")
pytestmark = pytest.mark.slow

TRAIN = ["-m", "composer_fsdp2.cli.main", "train"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    foundry.write_assets(folder)
    wrong = {"optimizer.name": "decoupled_adamv", "train_loader.dataset.local": "no/where"}
    (folder / "run.yaml").write_text(yaml.safe_dump(changed(good(folder, "text"), wrong)))
    return folder / "run.yaml"


@pytest.mark.parametrize("launcher", [[], TORCHRUN], ids=["own", "torchrun"])
@pytest.mark.parametrize("overrides", [[], ["optimizer.name=decoupled_adamw"]], ids=["two", "one"])
def test_a_mistake_is_a_sentence(run: Path, launcher: list[str], overrides: list[str]):
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    program = [sys.executable, *launcher, *TRAIN, str(run), "dist_timeout=600", *overrides]
    done = subprocess.run(
        program, cwd=ROOT, env=env, capture_output=True, text=True, timeout=scaled(120), check=False
    )
    said = " ".join(done.stderr.split())
    if not overrides:  # under torchrun each rank finds it by itself
        assert "optimizer.name: 'decoupled_adamv' is in no registry of optimizers." in said
        assert "Did you mean 'decoupled_adamw'?" in said
    if overrides or not launcher:
        assert "local file no/where/train/index.json does not exist" in said
        assert "Starting" not in said
    assert "is no mistake that composer-fsdp2 knows" not in said
    assert said.count("Traceback") == bool(launcher)  # torchrun's own, of its main function
    assert done.returncode == (1 if launcher else 2)
