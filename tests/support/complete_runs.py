"""Drives the files of `yamls/complete` as their user does: trained, killed, resumed, exported.

    begun = killed("mpt-pretrain-mds", folder, at=6)      # rank 1 gets SIGKILL in batch 6
    ended = run("mpt-pretrain-mds", folder, "max_duration=8ba")
    losses(folder)[5]                                     # of both runs, as batch 5 came twice
    logits(folder)                                        # of the trained model on `IDS`

Each file takes all its folders from `variables.folder`.
"""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from pathlib import Path

import torch
import yaml

from tests.support.forked import PRELOAD, ROOT, command
from tests.support.limits import scaled

__all__ = ["IDS", "PRELOAD", "killed", "logits", "losses", "run"]

IDS = torch.arange(24).reshape(2, 12)

# Rank 1 ends as if the system had run out of memory. What the trained model computes is compared
# with what its export computes.
PROBE = """
import os, signal, torch, torch.distributed as dist
from composer import Callback
from llmfoundry import registry

@registry.callbacks.register("probe")
class Probe(Callback):
    def __init__(self, folder, kill_at=0):
        self.folder, self.kill_at = folder, kill_at

    def batch_end(self, state, logger):
        if state.timestamp.batch == self.kill_at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def fit_end(self, state, logger):
        state.model.eval()
        with torch.no_grad():
            found = state.model.model(input_ids=torch.arange(24).reshape(2, 12)).logits
        if dist.get_rank() == 0:
            torch.save(found, self.folder + "/logits.pt")
"""


def run(name: str, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Runs `yamls/complete/NAME.yaml` on two ranks, with everything it writes in `folder`."""
    file = f"yamls/complete/{name}.yaml"
    code = [*yaml.safe_load((ROOT / file).read_text()).get("code_paths", []), f"{folder}/probe.py"]
    (folder / "probe.py").write_text(PROBE)
    recorder = f"{{file: {folder}/steps.jsonl, steps: 1000}}"
    return command(
        "train",
        file,
        "--ranks=2",
        f"--log-dir={folder}/logs",
        f"variables.folder={folder}",
        f"code_paths=[{','.join(code)}]",
        f"callbacks.probe.folder={folder}",
        f"algorithms.composer_fsdp2_recorder={recorder}",
        # A rank that waits for another must fail the test, not outlast it.
        f"dist_timeout={scaled(60):.0f}",
        *overrides,
    )


def killed(name: str, folder: Path, *overrides: str, at: int) -> subprocess.CompletedProcess[str]:
    """Runs the same until a rank is killed at the end of batch `at`."""
    done = run(name, folder, f"callbacks.probe.kill_at={at}", *overrides)
    assert "Rank 1 failed: it was ended by SIGKILL" in done.stderr, done.stderr
    return done


def losses(folder: Path) -> dict[int, list[float]]:
    """Loss of every batch, once for each run that came to it."""
    found: dict[int, list[float]] = defaultdict(list)
    for line in (folder / "steps.jsonl").read_text().splitlines():
        step = json.loads(line)
        found[step["number"]].append(step["loss"])
    return dict(found)


def logits(folder: Path) -> torch.Tensor:
    """What the trained model computes for `IDS`."""
    return torch.load(folder / "logits.pt")
