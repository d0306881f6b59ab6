"""Ranks of the command line, forked from the server that has imported LLM Foundry.

    done = command("train", "yamls/quickstart.yaml", "--ranks=2", "max_duration=4ba", ...)

The command runs in this process, and its ranks are what it would start: processes that run
`composer-fsdp2 train ...`. Only the import of LLM Foundry, which takes longer than such a run, is
not done again by every rank. The launcher of the users is that of `test_quickstart` and
`test_launch`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from torch import distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from typer.testing import CliRunner

from composer_fsdp2.cli import launch, main
from tests.support.foundry import PRELOAD
from tests.support.limits import scaled
from tests.support.pool import start_server

__all__ = ["PRELOAD", "ROOT", "command"]

ROOT = Path(__file__).parents[2]
SECONDS = 400.0


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `composer-fsdp2` in the root of the repository; its ranks use the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "launch_ranks", launch_ranks)
        patch.chdir(ROOT)
        for name in ("RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        done = CliRunner().invoke(main.app, list(arguments))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def launch_ranks(command: list[str], ranks: int, log_dir: Path, *, on_console: bool = True) -> None:
    """Does what `launch.launch_ranks` does, with the same files of logs and the same report."""
    run_id = uuid.uuid4().hex[:8]
    folder = log_dir / f"{run_id}_0" / "attempt_0"
    # They meet at this process, as under the launcher: no port is chosen that others could take.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def error_file(rank: int) -> str:
        return str(folder / str(rank) / "error.json")

    processes = []
    for rank in range(ranks):
        logs = folder / str(rank)
        logs.mkdir(parents=True)
        environment = _environment(rank, ranks, store.port)
        environment["TORCHELASTIC_ERROR_FILE"] = error_file(rank)
        process = start_server().Process(target=_be_rank, args=(command[2:], environment, logs))
        process.start()
        processes.append(process)
    try:
        _wait_for_failure(processes)
        failures = {
            rank: ProcessFailure(rank, process.pid or 0, process.exitcode, error_file(rank))
            for rank, process in enumerate(processes)
            if process.exitcode
        }
    finally:
        _end(processes)
        if on_console:
            sys.stdout.write((folder / "0" / "stdout.log").read_text())
            sys.stderr.write((folder / "0" / "stderr.log").read_text())
    if failures:
        raise launch.rank_error(failures, log_dir, run_id)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _be_rank(arguments: list[str], environment: dict[str, str], logs: Path) -> None:
    os.setsid()
    # The server is this rank's parent, as the launcher is that of the ranks of a user.
    os.environ.update(environment, COMPOSER_FSDP2_LAUNCHER=str(os.getppid()))
    os.chdir(ROOT)
    for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
        stream.flush()
        with (logs / f"{name}.log").open("w") as file:
            os.dup2(file.fileno(), 1 if name == "stdout" else 2)
    main.app(arguments)


def _wait_for_failure(processes: list[ForkServerProcess]) -> None:
    """Waits until all have ended well, or one has not."""
    waiting = {process.sentinel: process for process in processes}
    while waiting and not any(process.exitcode for process in processes):
        ended = connection.wait(list(waiting), scaled(SECONDS))
        assert ended, f"{len(waiting)} ranks are busy after {SECONDS:g} s"
        for sentinel in ended:
            waiting.pop(sentinel).join()


def _end(processes: list[ForkServerProcess]) -> None:
    for process in processes:
        if process.exitcode is None and process.pid is not None:
            os.killpg(process.pid, signal.SIGKILL)  # a rank leads a group with its data loaders
        process.join()
