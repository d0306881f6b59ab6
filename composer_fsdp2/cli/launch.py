"""Starts one process per rank on this node, and ends all of them when one fails.

torch's elastic agent does the work, as it does under `torchrun`: it starts each rank in a session
of its own, takes its children down with it, and kills a rank that does not leave a collective
within 30 seconds. Added here is what an interactive command needs: which output goes where, and a
short report of the first failure.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

__all__ = [
    "RankError",
    "default_ranks",
    "launch_ranks",
    "own_program",
    "rank_error",
    "rank_guard",
    "under_launcher",
    "under_own_launcher",
]

_SCRIPT = "composer-fsdp2"
_PARENT = "COMPOSER_FSDP2_LAUNCHER"
_DETAIL_LINES = 40
_PR_SET_PDEATHSIG = 1


class RankError(Exception):
    """The first rank that failed.

    Args:
        rank: its number.
        reason: type and text of its exception, or how the process ended.
        details: the end of its output, where there is no exception to show.
        log: the file with all its output; `None` for one that writes to the console.
        traceback: the file with the traceback of its exception.
    """

    def __init__(
        self, rank: int, reason: str, details: str, log: Path | None, traceback: Path | None = None
    ) -> None:
        self.headline = f"Rank {rank} failed: {reason}"
        lines = [f"  {line}" for line in details.splitlines()[-_DETAIL_LINES:] if log is not None]
        files = {"The traceback: ": traceback, "All it wrote: ": log}
        lines += [f"{label}{path}" for label, path in files.items() if path is not None]
        self.rest = "\n".join(lines)
        super().__init__("\n".join((self.headline, *lines)))


def under_launcher() -> bool:
    """Returns whether any launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def under_own_launcher() -> bool:
    """Returns whether this module started this process as a rank."""
    return _PARENT in os.environ


def default_ranks() -> int:
    """Returns one rank per GPU, and two ranks on a machine without GPUs."""
    import torch

    return torch.cuda.device_count() or 2


def own_program() -> list[str]:
    """Returns this program as the beginning of a command for `launch_ranks`."""
    # As this process was started: `-m` would put the current folder before installed packages.
    script = Path(sys.argv[0])
    return [str(script)] if script.name == _SCRIPT else ["-m", "composer_fsdp2.cli.main"]


def launch_ranks(command: list[str], ranks: int, log_dir: Path, *, on_console: bool = True) -> None:
    """Runs `command` once per rank on this node and returns when all have ended well.

    Rank 0 writes to this console, the others to files under `log_dir`.

    Args:
        command: arguments of this Python interpreter.
        ranks: number of processes.
        log_dir: folder for the logs; made when missing.
        on_console: whether rank 0 does not write to a file like the others.

    Raises:
        RankError: a rank failed; all the others have been ended.
        SystemExit: this process was told to stop; all ranks have been ended.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # It reports a failure in 30 lines of its own; ours follows from the same facts.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # The ranks inherit these; what the user set stays. Rank 0 inherits our output: in a pipe its
    # lines would wait for a full buffer. One thread per rank, as under torchrun: more would have
    # the ranks fight for cores. Composer asks for NODE_RANK in runs without FSDP2 too; torchrun
    # sets GROUP_RANK instead.
    os.environ[_PARENT] = str(os.getpid())
    for name in ("PYTHONUNBUFFERED", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("NODE_RANK", "0")
    # gloo chooses an interface by host name, which many containers cannot resolve.
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # One node, whose ranks meet at this process over the loopback interface.
    redirects = dict.fromkeys(range(1 if on_console else 0, ranks), Std.ALL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex[:8],
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(log_dir), redirects=redirects),
    )
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        raise rank_error(error.failures, log_dir, config.run_id) from None
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None


def rank_error(failures: Mapping[int, ProcessFailure], log_dir: Path, run_id: str) -> RankError:
    """Returns the first rank that failed, and why.

    The traceback of an exception goes to a file of its own; without an exception the end of the
    rank's output is shown.
    """

    def failed_at(rank: int) -> float:
        # torch counts seconds, and the others often fail within the same one.
        error_file = Path(failures[rank].error_file)
        return error_file.stat().st_mtime if error_file.is_file() else failures[rank].timestamp

    rank = min(failures, key=failed_at)
    failure = failures[rank]
    # One node: global and local ranks are the same. torch makes up the first folder's last part.
    log = next(log_dir.glob(f"{run_id}_*/attempt_0/{rank}/stderr.log"), None)
    message: Any = failure.message
    if isinstance(message, dict):
        traceback = None
        if text := message["extraInfo"]["py_callstack"]:
            log_dir.mkdir(parents=True, exist_ok=True)
            traceback = log_dir / f"rank-{rank}-traceback.log"
            traceback.write_text(f"{text.rstrip()}\n", errors="backslashreplace")
        return RankError(rank, message["message"], "", log, traceback)
    reason = f"it ended with exit code {failure.exitcode}"
    if failure.exitcode < 0:
        name = failure.signal_name()
        hint = ", which the system sends when memory runs out" if name == "SIGKILL" else ""
        reason = f"it was ended by {name}{hint}"
    return RankError(rank, reason, log.read_text(errors="replace") if log else "", log)


@contextmanager
def rank_guard() -> Generator[None]:
    """Ends this rank when its launcher is gone, even in a collective.

    An exception that torch has written down for the launcher ends the rank without a second copy
    of its traceback on the console.
    """
    if sys.platform == "linux":
        # The kernel ends this rank when the launcher is killed and cannot do it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[_PARENT]):
        raise SystemExit(128 + signal.SIGTERM)
    # Python's own handler prints a traceback; Composer replaces this one with an orderly exit.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    except Exception:
        file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
        if os.environ["RANK"] == "0" and file.is_file() and file.stat().st_size > 0:
            raise SystemExit(1) from None
        raise
