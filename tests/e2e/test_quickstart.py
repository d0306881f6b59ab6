"""The quickstart as a newcomer runs it, only smaller."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.forked import PRELOAD, ROOT
from tests.support.limits import scaled

pytest.importorskip("llmfoundry", reason="needs the extra foundry")
pytestmark = [pytest.mark.slow, pytest.mark.new_python]
__all__ = ["PRELOAD"]

SMALL = [
    "variables.text.megabytes=0.2",
    "variables.text.vocab_size=512",
    "max_seq_len=32",
    "model.d_model=32",
    "model.n_layers=2",
    "eval_interval=4ba",
    "eval_subset_num_batches=2",
    "save_interval=4ba",
    "scheduler.t_warmup=1ba",
    "console_log_interval=2ba",
    # A rank that waits for another must fail the test, not outlast it.
    f"dist_timeout={scaled(60):.0f}",
]


def arguments(folder: Path, *overrides: str) -> list[str]:
    run = ("train", "yamls/quickstart.yaml", f"--log-dir={folder}/logs")
    return [*run, f"variables.folder={folder}", *SMALL, *overrides]


def quickstart(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Runs two ranks in the root of the repository, as the README says."""
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    # CPU also where there are GPUs: the numbers below are for two ranks.
    env |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    program = [sys.executable, "-m", "composer_fsdp2.cli.main"]
    return subprocess.run(
        [*program, *arguments(folder, *overrides)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=scaled(400),
    )


def summary(output: str) -> tuple[float, int, float, int]:
    """Held-out loss and batch, at the start and at the end."""
    found = re.search(r"Held-out loss: ([\d.]+) at batch (\d+), ([\d.]+) at batch (\d+)", output)
    assert found, output
    before, start, after, end = found.groups()
    return float(before), int(start), float(after), int(end)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("quickstart")


@pytest.fixture(scope="module")
def first_run(folder) -> subprocess.CompletedProcess[str]:
    return quickstart(folder, "max_duration=4ba")


def test_a_step_is_as_doctor_predicted(first_run):
    assert re.search(r"^  all-gathers of units .+ \+0\.0%$", first_run.stderr, re.MULTILINE)
    assert re.search(r"^  reductions of units .+ \+0\.0%$", first_run.stderr, re.MULTILINE)
    assert re.search(r"^  optimizer state .+ \+0\.0%$", first_run.stderr, re.MULTILINE)


def test_trains_to_the_end(first_run):
    assert first_run.returncode == 0, first_run.stderr
    assert "Starting 2 ranks" in first_run.stderr
    before, start, after, end = summary(first_run.stdout)
    assert (start, end) == (0, 4)
    assert after < before


def test_a_batch_has_one_line(first_run):
    lines = re.findall(r"^batch +(\d+)", first_run.stdout + first_run.stderr, re.MULTILINE)
    evaluated = re.findall(r"^batch (\d+)/4   evaluated on eval", first_run.stderr, re.MULTILINE)
    assert evaluated == ["0", "4"]
    assert sorted(lines) == ["0", "1", "2", "4", "4"]


def test_the_checkpoint_is_sharded_over_both_ranks(first_run, folder):
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    checkpoint = folder / "checkpoints" / "ep0-ba4"
    assert {file.name for file in checkpoint.glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    assert (folder / "checkpoints" / "latest-sharded-rank0").exists()
    entries = FileSystemReader(checkpoint).read_metadata().state_dict_metadata.items()
    chunks = {
        name: len(entry.chunks)
        for name, entry in entries
        if isinstance(entry, TensorStorageMetadata) and name.startswith("state.model.")
    }
    assert chunks
    assert set(chunks.values()) == {2}


def test_resumes_with_a_longer_duration(first_run, folder):
    overrides = ("max_duration=8ba", "callbacks.fsdp2_monitor={}")
    second = forked.command(*arguments(folder, *overrides), "--ranks=2")
    assert second.returncode == 0, second.stderr
    assert re.search(r"^FSDP2: \d+ units, .* mesh dp_shard 2, ", second.stderr, re.MULTILINE)
    assert "goes on after batch 4\n" in second.stderr
    assert "Preparing data" not in second.stdout
    before, start, after, end = summary(second.stdout)
    assert (before, start) == summary(first_run.stdout)[:2]
    assert after < summary(first_run.stdout)[2]
    assert end == 8
    assert (folder / "checkpoints" / "ep0-ba8").is_dir()


def test_a_checkpoint_is_evaluated_as_the_page_says(first_run, folder, tmp_path):
    page = (ROOT / "docs" / "recipes" / "export.md").read_text()
    block = page.partition("```yaml\n")[2].partition("```")[0]
    run = tmp_path / "evaluation.yaml"
    run.write_text(block.replace("runs/quickstart", str(folder)).replace("128", "32"))
    sizes = ("model.d_model=32", "model.n_layers=2", "model.vocab_size=512")
    done = forked.command("eval", str(run), *sizes, "eval_subset_num_batches=2", "--ranks=2")
    assert done.returncode == 0, done.stderr
    assert re.search(r"metrics/eval/LanguageCrossEntropy: \d", done.stdout + done.stderr)
    assert "DEBUG" not in done.stdout + done.stderr
