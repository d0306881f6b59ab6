"""The launcher, with ranks that are small programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults_table import record

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

LAUNCH = """
import sys
from pathlib import Path
from composer_fsdp2.launch import launch_ranks
launch_ranks(["-c", sys.argv[1]], 2, Path(sys.argv[2]))
"""


def launch(rank_program: str, log_dir: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, rank_program, str(log_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def gone_within(seconds: float, pids: list[int]) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    return not any(map(alive, pids))


def test_ranks_know_each_other_and_rank_0_is_heard(tmp_path):
    program = """
import os
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"])
"""
    out, err = (process := launch(program, tmp_path)).communicate(timeout=120)
    assert (process.returncode, out) == (0, "rank 0 of 2 127.0.0.1\n"), err
    logs = [file.read_text() for file in tmp_path.rglob("stdout.log")]
    assert logs == ["rank 1 of 2 127.0.0.1\n"]


@pytest.mark.fault("a rank of the launcher dies", "reported")
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("sys.exit('out of luck')", "it ended with exit code 1"),
        ("os.kill(os.getpid(), 9)", "it was ended by SIGKILL, which the system sends when memory"),
    ],
)
def test_a_failing_rank_is_reported_and_ends_the_others(tmp_path, end, reason):
    program = f"""
import os, sys, time
if os.environ["RANK"] == "1":
    print("last words", file=sys.stderr, flush=True)
    {end}
print(os.getpid(), flush=True)
time.sleep(600)
"""
    started = time.monotonic()
    out, err = (process := launch(program, tmp_path)).communicate(timeout=120)
    assert process.returncode != 0
    assert f"Rank 1 failed: {reason}" in err
    assert "last words" in err
    assert "All it wrote: " in err
    assert time.monotonic() - started < 60
    assert not alive(int(out))


RAISES = """
import time
from pathlib import Path
from torch import distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from composer_fsdp2.launch import rank_guard

def work():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        Path(FILE).write_text(str(time.time()))
        raise ValueError("broken on purpose")
    dist.barrier()

with rank_guard():
    record(work)()
"""


@pytest.mark.fault("an exception on one rank", "reported")
def test_an_exception_on_one_rank_is_shown_once_and_ends_all(tmp_path):
    raised = tmp_path / "raised"
    process = launch(f"FILE = {str(raised)!r}\n{RAISES}", tmp_path)
    _, err = process.communicate(timeout=120)
    assert time.time() - float(raised.read_text()) < 30
    assert process.returncode == 1
    assert "Rank 1 failed: ValueError: broken on purpose" in err
    assert err.count("\n  ValueError: broken on purpose") == 1


# As Composer does: leave in an orderly way. The second lock is a collective that never ends.
STUCK = """
import ctypes, os, signal, sys
from composer_fsdp2.launch import rank_guard
with rank_guard():
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    mutex = ctypes.create_string_buffer(64)
    with open(os.path.join(FOLDER, os.environ["RANK"] + ".pid"), "w") as file:
        file.write(str(os.getpid()))
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


EXIT_CODES = {
    signal.SIGINT: 128 + signal.SIGINT,
    signal.SIGTERM: 128 + signal.SIGTERM,
    signal.SIGKILL: -signal.SIGKILL,
}


@pytest.mark.fault
def test_no_rank_outlives_the_launcher(tmp_path):
    """Three launchers at the same time: each of them would mostly be waited for."""
    folders = {number: tmp_path / number.name for number in EXIT_CODES}
    processes = {}
    for number, folder in folders.items():
        folder.mkdir()
        processes[number] = launch(f"FOLDER = {str(folder)!r}\n{STUCK}", folder)
    pids = {number: wait_for_pids(folder) for number, folder in folders.items()}
    sent = time.monotonic()
    for number, process in processes.items():
        process.send_signal(number)
    for number, process in processes.items():
        process.communicate(timeout=60)
        assert process.returncode == EXIT_CODES[number]
        assert gone_within(30, pids[number]), number.name
        record(f"{number.name} to the launcher", "reported", time.monotonic() - sent)


@pytest.mark.fault("a rank of the launcher is told to stop", "reported")
def test_a_rank_that_is_told_to_stop_ends_all(tmp_path):
    process = launch(f"FOLDER = {str(tmp_path)!r}\n{STUCK}", tmp_path)
    pids = wait_for_pids(tmp_path)
    os.kill(int((tmp_path / "1.pid").read_text()), signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"Rank 1 failed: it ended with exit code {128 + signal.SIGTERM}" in err
    assert gone_within(30, pids)


def wait_for_pids(folder: Path) -> list[int]:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        texts = [file.read_text() for file in folder.glob("*.pid")]
        if len(texts) == 2 and all(texts):
            return [int(text) for text in texts]
        time.sleep(0.1)
    raise TimeoutError("the ranks did not start")
