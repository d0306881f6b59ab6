"""The launcher, with ranks that are small programs."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from composer_fsdp2.cli.launch import launch_ranks, rank_error
from tests.support.faults_table import record
from tests.support.limits import Limit, scaled
from tests.support.pool import start_server

pytestmark = [pytest.mark.slow, pytest.mark.new_python]

ROOT = Path(__file__).parents[2]


class Launcher:
    """A process that starts two ranks, forked from the server: importing torch takes seconds."""

    def __init__(self, rank_program: str, log_dir: Path) -> None:
        self._files = [log_dir / f"launcher.{name}" for name in ("out", "err")]
        arguments = (rank_program, log_dir, self._files)
        # A test that fails leaves it; a daemon is told to stop at the end, and not waited for.
        self.process = start_server().Process(target=_launch, args=arguments, daemon=True)
        self.process.start()

    def wait(self, seconds: float) -> tuple[int, str, str]:
        """Its exit code, and what it and rank 0 have written."""
        self.process.join(scaled(seconds))
        code = self.process.exitcode
        assert code is not None, f"the launcher is busy after {seconds:g} s"
        out, err = (file.read_text() for file in self._files)
        return code, out, err


def _launch(rank_program: str, log_dir: Path, files: list[Path]) -> None:
    os.chdir(ROOT)
    for stream, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
    launch_ranks(["-c", rank_program], 2, log_dir)


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def gone_within(seconds: float, pids: list[int]) -> bool:
    end = time.monotonic() + scaled(seconds)
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    return not any(map(alive, pids))


def test_ranks_know_each_other_and_rank_0_is_heard(tmp_path):
    program = """
import os
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"])
"""
    code, out, err = Launcher(program, tmp_path).wait(120)
    assert (code, out) == (0, "rank 0 of 2 127.0.0.1\n"), err
    logs = [file.read_text() for file in tmp_path.rglob("stdout.log")]
    assert logs == ["rank 1 of 2 127.0.0.1\n"]


def test_ranks_have_what_composer_asks_for_once_a_group_is_there(tmp_path):
    """A run without FSDP2 too: `parity` trains FSDP1's file so. torchrun sets GROUP_RANK only."""
    program = """
from composer.utils import dist
from torch import distributed
distributed.init_process_group("gloo")
print(dist.get_node_rank(), dist.get_local_rank(), dist.get_local_world_size())
"""
    code, out, err = Launcher(program, tmp_path).wait(120)
    assert (code, out) == (0, "0 0 2\n"), err


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
    limit = Limit(60)
    code, out, err = Launcher(program, tmp_path).wait(120)
    assert code == 1
    assert f"Rank 1 failed: {reason}" in err
    assert "last words" in err
    assert "All it wrote: " in err
    assert limit.left()
    assert not alive(int(out))


RAISES = """
import time
from pathlib import Path
from torch import distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from composer_fsdp2.cli.launch import rank_guard

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
    code, _, err = Launcher(f"FILE = {str(raised)!r}\n{RAISES}", tmp_path).wait(120)
    assert time.time() - float(raised.read_text()) < scaled(30)
    assert code == 1
    assert "Rank 1 failed: ValueError: broken on purpose" in err
    assert err.count("ValueError: broken on purpose") == 1
    (file,) = tmp_path.glob("rank-1-traceback.log")
    assert f"The traceback: {file}" in err
    assert "in work" in file.read_text()


@pytest.mark.fault("an exception on rank 0 of the launcher", "reported")
def test_an_exception_on_rank_0_does_not_fill_the_console(tmp_path):
    program = RAISES.replace("get_rank() == 1", "get_rank() == 0")
    raised = tmp_path / "raised"
    code, _, err = Launcher(f"FILE = {str(raised)!r}\n{program}", tmp_path).wait(120)
    assert code == 1
    assert err.count("ValueError: broken on purpose") == 1
    assert "Rank 0 failed: ValueError: broken on purpose" in err
    assert "in work" in (tmp_path / "rank-0-traceback.log").read_text()


def test_the_first_to_fail_is_reported(tmp_path):
    """The others lose a peer and fail within the second that torch counts in."""
    failures = {}
    for rank, nanoseconds in enumerate((900, 200, 900)):
        file = tmp_path / f"{rank}.json"
        told = {"message": f"of {rank}", "extraInfo": {"py_callstack": "", "timestamp": "5"}}
        file.write_text(json.dumps({"message": told}))
        os.utime(file, ns=(0, 5 * 10**9 + nanoseconds))
        failures[rank] = ProcessFailure(rank, 0, 1, str(file))
    assert str(rank_error(failures, tmp_path, "run")) == "Rank 1 failed: of 1"


# As Composer does: leave in an orderly way. The second lock is a collective that never ends.
STUCK = """
import ctypes, os, signal, sys
from composer_fsdp2.cli.launch import rank_guard
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
    folders = [tmp_path / number.name for number in EXIT_CODES]
    for folder in folders:
        folder.mkdir()
    launchers = [Launcher(f"FOLDER = {str(folder)!r}\n{STUCK}", folder) for folder in folders]
    pids = [wait_for_pids(folder) for folder in folders]
    sent = time.monotonic()
    for number, launcher in zip(EXIT_CODES, launchers, strict=True):
        os.kill(launcher.process.pid, number)
    for number, launcher, ranks in zip(EXIT_CODES, launchers, pids, strict=True):
        # torch kills a rank that is in a collective after 30 seconds.
        assert launcher.wait(90)[0] == EXIT_CODES[number]
        assert gone_within(30, ranks), number.name
        record(f"{number.name} to the launcher", "reported", time.monotonic() - sent)


def wait_for_pids(folder: Path) -> list[int]:
    end = time.monotonic() + scaled(60)
    while time.monotonic() < end:
        texts = [file.read_text() for file in folder.glob("*.pid")]
        if len(texts) == 2 and all(texts):
            return [int(text) for text in texts]
        time.sleep(0.1)
    raise TimeoutError("the ranks did not start")
