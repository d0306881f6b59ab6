"""Starts one process per rank on this node, and ends all of them when one fails.

torch's elastic agent does the work, as it does under `torchrun`: it starts each rank in a session
of its own and takes its children down with it. Added here is what an interactive command needs:
which output goes where, a short report of the first failure, and ranks that end even when they are
stuck in a collective.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

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
# Time to leave a collective after a signal. Composer finishes uploads when the interpreter ends; a
# rank that got that far is left alone, and torch kills it after 30 s.
_STUCK_SECONDS = 5.0
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
        lines = [f"  {line}" for line in details.splitlines()[-_DETAIL_LINES:]]
        self.details = "\n".join(lines if log is not None else [])
        files = {"The traceback: ": traceback, "All it wrote: ": log}
        self.files = "\n".join(f"{what}{path}" for what, path in files.items() if path is not None)
        parts = (self.headline, self.details, self.files)
        super().__init__("\n".join(part for part in parts if part))


def under_launcher() -> bool:
    """Whether torchrun, the composer launcher or this module started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def under_own_launcher() -> bool:
    """Whether this module started this process as a rank."""
    return _PARENT in os.environ


def default_ranks() -> int:
    """One rank per GPU; two on a machine without any, the fewest that shard something."""
    import torch

    return torch.cuda.device_count() or 2


def own_program() -> list[str]:
    """This program as the beginning of a command for `launch_ranks`."""
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
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    # It reports a failure in 30 lines of its own; ours follows from the same facts.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    _set_rank_environment()
    config = _launch_config(ranks, log_dir, first_logged=1 if on_console else 0)
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        raise rank_error(error.failures, log_dir, config.run_id) from None
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None


def _launch_config(ranks: int, log_dir: Path, first_logged: int) -> LaunchConfig:
    """One node, whose ranks meet at this process over the loopback interface."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    redirects = dict.fromkeys(range(first_logged, ranks), Std.ALL)
    return LaunchConfig(
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


def _set_rank_environment() -> None:
    """Defaults the ranks inherit; what the user set stays."""
    os.environ[_PARENT] = str(os.getpid())
    # Rank 0 inherits our output; in a pipe its lines would wait for a full buffer.
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    # One thread per rank, as under torchrun: more would have the ranks fight for cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Composer asks for it in runs without FSDP2 too; torchrun sets GROUP_RANK instead.
    os.environ.setdefault("NODE_RANK", "0")
    # gloo chooses an interface by host name, which many containers cannot resolve.
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def rank_error(failures: Mapping[int, ProcessFailure], log_dir: Path, run_id: str) -> RankError:
    """Returns the first rank that failed, and why.

    The traceback of an exception goes to a file of its own; without an exception the end of the
    rank's output is shown.
    """
    rank = min(failures, key=lambda rank: _failed_at(failures[rank]))
    failure = failures[rank]
    # One node: global and local ranks are the same. torch makes up the first folder's last part.
    log = next(log_dir.glob(f"{run_id}_*/attempt_0/{rank}/stderr.log"), None)
    message: Any = failure.message
    if isinstance(message, dict):
        traceback = _write_traceback(log_dir, rank, message["extraInfo"]["py_callstack"])
        return RankError(rank, message["message"], "", log, traceback)
    tail = log.read_text(errors="replace") if log else ""
    return RankError(rank, _ending(failure), tail, log)


def _write_traceback(log_dir: Path, rank: int, text: str) -> Path | None:
    """Returns the file that holds the traceback now; `None` where there is none."""
    if not text:
        return None
    log_dir.mkdir(parents=True, exist_ok=True)
    file = log_dir / f"rank-{rank}-traceback.log"
    file.write_text(text if text.endswith("\n") else f"{text}\n", errors="backslashreplace")
    return file


def _failed_at(failure: ProcessFailure) -> float:
    """When a rank failed; torch counts seconds, and the others often fail within the same one."""
    error_file = Path(failure.error_file)
    return error_file.stat().st_mtime if error_file.is_file() else failure.timestamp


def _ending(failure: ProcessFailure) -> str:
    """How a process ended that left no exception."""
    if failure.exitcode >= 0:
        return f"it ended with exit code {failure.exitcode}"
    name = failure.signal_name()
    hint = ", which the system sends when memory runs out" if name == "SIGKILL" else ""
    return f"it was ended by {name}{hint}"


@contextmanager
def rank_guard() -> Generator[None]:
    """Ends this rank when its launcher is gone, and soon after a signal even in a collective.

    An exception that torch has written down for the launcher ends the rank without a second copy
    of its traceback on the console.
    """
    _end_with_parent(int(os.environ[_PARENT]))
    # Python's own handler prints a traceback; Composer replaces this one with an orderly exit.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    left = threading.Event()
    _watch_signals(left)
    try:
        yield
    except Exception:
        if os.environ["RANK"] == "0" and _is_recorded():
            raise SystemExit(1) from None
        raise
    finally:
        left.set()


def _is_recorded() -> bool:
    """Whether the launcher will find the exception of this rank."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    return bool(file) and Path(file).is_file() and Path(file).stat().st_size > 0


def _end_with_parent(parent: int) -> None:
    """Has the kernel end this rank when the launcher is killed and cannot do it (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGTERM)


def _watch_signals(left: threading.Event) -> None:
    """Exits when a signal has come and training has not been left in time.

    Composer handles SIGTERM and SIGINT in Python, which has to wait until the main thread comes
    back from a collective that may never end. The interpreter writes to the wake-up file at once,
    whatever the main thread does.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while (number := os.read(reader, 1)[0]) not in (signal.SIGTERM, signal.SIGINT):
            pass
        if not left.wait(_STUCK_SECONDS):
            os._exit(128 + number)

    threading.Thread(target=watch, name="rank_guard", daemon=True).start()
