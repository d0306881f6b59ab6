"""`composer-fsdp2 parity` on the quickstart, smaller: an FSDP1 file and its migration."""

from __future__ import annotations

import csv
import json
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from composer_fsdp2.cli import launch, main
from composer_fsdp2.tools.migrate.engine import migrate
from tests.e2e.test_quickstart import SMALL
from tests.support.forked import PRELOAD, ROOT, command

pytest.importorskip("llmfoundry", reason="needs the extra foundry")
pytestmark = pytest.mark.slow
__all__ = ["PRELOAD"]

# In the warm-up the learning rate is 0 for two steps; the weights change from the third on.
STEPS = 6
KINDS = ("old", "new")
FSDP1 = """
fsdp_config:
  sharding_strategy: FULL_SHARD
  mixed_precision: PURE
  activation_checkpointing: false
  limit_all_gathers: true
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """`old.yaml`, which is the quickstart with FSDP1, and `new.yaml`, which `migrate` makes."""
    folder = tmp_path_factory.mktemp("parity")
    text = (ROOT / "yamls" / "quickstart.yaml").read_text()
    start, end = text.index("parallelism_config:"), text.index("run_name:")
    old = text[:start] + FSDP1 + text[end:]
    (folder / "old.yaml").write_text(old)
    (folder / "new.yaml").write_text(migrate(old).text)
    return folder


@pytest.fixture(scope="module")
def agreed(folder) -> subprocess.CompletedProcess[str]:
    """With dropout, of which both runs have to draw the same."""
    dropout = ("model.resid_pdrop=0.1", "model.emb_pdrop=0.1")
    files = (f"{folder}/old.yaml", f"{folder}/new.yaml", f"variables.folder={folder}")
    options = ("--ranks=2", f"--steps={STEPS}", f"--out={folder}/same")
    return command("parity", *files, *options, *SMALL, *dropout)


def test_an_fsdp1_run_and_its_migration_agree(agreed, folder):
    assert agreed.returncode == 0, agreed.stderr
    assert "the old configuration runs as DDP, whose numbers FSDP1's are." in agreed.stderr
    assert "Within the tolerance of 1e-05 (the default for fp32)." in agreed.stdout
    rows = list(csv.DictReader((folder / "same" / "parity.csv").read_text().splitlines()))
    assert [row["step"] for row in rows] == [str(number) for number in range(1, STEPS + 1)]
    shares = [float(v) for row in rows for k, v in row.items() if k.endswith("difference")]
    assert len(shares) == 2 * STEPS
    assert max(shares) <= 1e-5
    # Clipping to 1 comes after it.
    assert all(float(row["gradient_norm_old"]) > 1 for row in rows)
    assert len({row["loss_old"] for row in rows}) == STEPS


def test_speed_and_memory_are_compared(agreed, folder):
    lines = agreed.stdout.splitlines()
    assert f"Speed after 3 of {STEPS} steps, and memory:" in lines
    peaks = [line for line in lines if line.startswith("peak memory, rank")]
    assert len(peaks) == 2
    (tokens,) = (line.split() for line in lines if line.startswith("tokens a second"))
    assert min(int(number.replace(",", "")) for number in tokens[3:5]) > 0
    for kind in KINDS:
        assert len(json.loads((folder / "same" / kind / "memory.json").read_text())) == 2


def test_the_picture_is_written(agreed, folder):
    assert (folder / "same" / "parity.png").read_bytes().startswith(b"\x89PNG")


def test_what_the_ranks_say_is_in_logs_and_nothing_is_saved(agreed, folder):
    said = "FSDP2 is not requested"
    (log,) = (folder / "same" / "old" / "logs").glob("*/attempt_0/0/stderr.log")
    assert said in log.read_text()
    assert said not in agreed.stderr
    assert not (folder / "checkpoints").exists()


@pytest.fixture
def replayed(agreed, folder, monkeypatch):
    """The command in this process, with what the ranks of `agreed` recorded as the runs."""
    recorded = {name: (folder / "same" / name / "steps.jsonl").read_text() for name in KINDS}

    def replay(command: list[str], ranks: int, logs: Path, **kwargs: object) -> None:
        place = Path(command[-1]).parent
        if place.name not in recorded:
            raise launch.RankError(1, "ValueError: no", "the last line", logs / "stderr.log")
        (place / "steps.jsonl").write_text(recorded[place.name])

    monkeypatch.setattr(launch, "launch_ranks", replay)
    monkeypatch.chdir(ROOT)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def run(new: Path, *args: str):
        command = ["parity", f"{folder}/old.yaml", str(new), f"--steps={STEPS}", "-n2", *args]
        return CliRunner().invoke(main.app, command)

    return recorded, run


def test_another_learning_rate_is_refused_and_on_demand_compared(replayed, folder):
    """The second run is the recorded one of the same files but for its last norm."""
    recorded, run = replayed
    *others, last = recorded["new"].splitlines()
    line = json.loads(last)
    line["gradient_norm"] *= 1.001
    recorded["new"] = "\n".join([*others, json.dumps(line)]) + "\n"
    new = folder / "other.yaml"
    text = (folder / "new.yaml").read_text()
    new.write_text(text.replace("lr: 4.0e-3", "lr: 5.0e-3"))
    refused = run(new)
    assert refused.exit_code == 2
    assert "optimizer.lr: 0.004 -> 0.005" in refused.stderr
    done = run(new, "--allow-different", "--json", f"--out={folder}/replayed")
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)
    assert found["within"] is False
    first, *_, last = found["steps"]
    assert first["gradient_norm"]["relative_difference"] <= 1e-5
    assert last["gradient_norm"]["relative_difference"] == pytest.approx(1e-3, rel=1e-2)
    assert "different jobs" in found["notes"][0]
    looser = ("--allow-different", "--tolerance=0.01", f"--out={folder}/looser")
    assert run(new, *looser).exit_code == 0


def test_a_run_that_fails_is_named_with_its_error(replayed, folder):
    recorded, run = replayed
    del recorded["new"]
    done = run(folder / "new.yaml", f"--out={folder}/failed")
    assert done.exit_code == 1
    assert "The new run (FSDP2) failed." in done.stderr
    assert "Rank 1 failed: ValueError: no" in done.stderr
    assert "All it wrote: " in done.stderr
