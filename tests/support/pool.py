"""A pool of ranks that lives for the whole test session.

Starting ranks is slow (each imports torch) and running a test on them is fast, so the ranks are
forked once from a server that has imported everything and then fed one function after another.
They meet through a file and talk over the loopback interface: no port is chosen, none can clash.

A pool is all or nothing. Once one rank fails, the others wait in a collective that nobody will
join, so the pool kills every rank, reports, and starts anew when it is next used.

How to write a test for it is explained in `tests/conftest.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import faulthandler
import functools
import gc
import glob
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest

from tests.support import covered, mutated
from tests.support.limits import Limit, scaled

PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "composer",
    "pytest",
    "tests.support.models",
    "tests.support.asked_once",
]
"""What every rank finds imported; the server passes over a module that does not exist."""

START_SECONDS = 300.0
"""Bound on importing and meeting, long because a busy machine imports torch slowly."""
TEST_SECONDS = 120.0
COLLECTIVE_SECONDS = 100.0
"""Shorter than a test, so that a lost rank reads as an error inside torch and not as a kill."""
CROWDED_THREADS = 100
"""Process groups stay until a rank ends, each with threads of its own; with hundreds of them every
collective costs milliseconds of waking them up, and a new pool is cheaper."""
GRACE_SECONDS = 2.0
"""How long the other ranks may still speak after the first one failed."""

PRETEND = "cpu:gloo,pretend:gloo"
"""Backend of ranks that have the device of `tests/accelerator`."""

SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class RankError(Exception):
    """At least one rank failed, died or ran out of time; the text has one section per rank."""


@dataclass(frozen=True)
class Job:
    """What a rank is sent: a pickled call and the warning filters to run it under."""

    call: bytes
    filters: list[tuple[Any, ...]]
    covers: bool = False
    mutant: mutated.Mutant | None = None


@dataclass(frozen=True)
class Outcome:
    """What a rank sends back: a pickled result, the reason of a skip, or a traceback.

    With `Job.covers` also the lines of the package that ran.
    """

    status: Literal["passed", "skipped", "failed"]
    result: bytes = b""
    text: str = ""
    lines: tuple[covered.Line, ...] = ()


# ---------------------------------------------------------------------------- the session's side


@functools.cache
def start_server(extra: tuple[str, ...] = ()) -> ForkServerContext:
    """Starts the server that ranks are forked from; its imports go on in the background.

    The first call decides what `extra` modules it imports.
    """
    context = multiprocessing.get_context("forkserver")
    # Importing torchao starts CUDA, which a forked rank cannot start again.
    if not glob.glob("/dev/nvidia[0-9]*"):
        context.set_forkserver_preload([*PRELOAD, *extra, "tests.support.frozen"])
    # The libraries read these when they are loaded, which for a forked rank is in the server.
    with mock.patch.dict(os.environ, SINGLE_THREADED):
        forkserver.ensure_running()
    return context


class WorkerPool:
    """Ranks 0 to n-1 of one process group, which all run the same function at the same time."""

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self.world_size = world_size
        self.backend = backend
        self.start_seconds = 0.0
        """How long all starts of its ranks took."""
        self._processes: list[ForkServerProcess] = []
        self._connections: list[connection.Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, call: Callable[[], Any], timeout_seconds: float = TEST_SECONDS) -> list[Any]:
        """Runs a picklable call on every rank under the caller's warning filters.

        Returns:
            The ranks' results, rank 0 first.

        Raises:
            RankError: if a rank raised, died, or was not done in time.
            pytest.skip.Exception: if every rank skipped.
        """
        filters = list(warnings.filters)
        job = pickle.dumps(Job(pickle.dumps(call), filters, covered.is_on(), mutated.planted()))
        if any(_thread_count(process.pid) > CROWDED_THREADS for process in self._processes):
            self._kill()
        if not self._processes:
            self._start()
        self._signal(signal.SIGCONT)
        for conn in self._connections:
            # A rank that died since the last test closed its pipe; collecting reports it.
            with contextlib.suppress(BrokenPipeError):
                conn.send_bytes(job)
        outcomes = self._finish(timeout_seconds)
        self._signal(signal.SIGSTOP)
        for outcome in outcomes:
            covered.add(outcome.lines)
        if outcomes[0].status == "skipped":
            pytest.skip(outcomes[0].text)
        return [pickle.loads(outcome.result) for outcome in outcomes]

    def close(self) -> None:
        """Lets idle ranks leave and ends those that do not within seconds."""
        self._signal(signal.SIGCONT)
        for conn in self._connections:
            conn.close()
        limit = Limit(5)
        for process in self._processes:
            process.join(limit.left())
        self._kill()

    def _signal(self, number: signal.Signals) -> None:
        """Stops ranks between tests, or has them go on.

        Gloo wakes a thread of each process group a hundred times a second, whether there is work or
        not: the ranks of all sizes take half a core while they wait.
        """
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _start(self) -> None:
        begun = time.monotonic()
        context = start_server()
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        folder = Path(self._folder.name)
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main,
                args=(theirs, folder, rank, self.world_size, self.backend),
                name=f"rank-{rank}",
            )
            process.start()
            theirs.close()  # or the pipe would outlive the rank, and its death go unnoticed
            self._processes.append(process)
            self._connections.append(ours)
        self._finish(START_SECONDS)
        self.start_seconds += time.monotonic() - begun

    def _finish(self, timeout_seconds: float) -> list[Outcome]:
        """Waits for all ranks; on the first sign of trouble ends the pool and raises."""
        outcomes = self._collect(timeout_seconds)
        statuses = {outcome.status for outcome in outcomes.values()}
        if len(outcomes) == self.world_size and statuses in ({"passed"}, {"skipped"}):
            return [outcomes[rank] for rank in range(self.world_size)]
        report = self._report(outcomes, timeout_seconds)
        self._kill()
        raise RankError(report)

    def _collect(self, timeout_seconds: float) -> dict[int, Outcome]:
        outcomes: dict[int, Outcome] = {}
        limit = Limit(timeout_seconds)
        while len(outcomes) < self.world_size:
            waiting = {c: r for r, c in enumerate(self._connections) if r not in outcomes}
            ready = connection.wait(list(waiting), left := limit.left())
            if not ready and not left:
                break
            for conn in ready:
                rank = waiting[conn]
                outcomes[rank] = self._receive(rank)
                if outcomes[rank].status != "passed":
                    limit.end_within(GRACE_SECONDS)
        return outcomes

    def _receive(self, rank: int) -> Outcome:
        try:
            return pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(1)
            return Outcome("failed", text=f"died, exit code {self._processes[rank].exitcode}\n")

    def _report(self, outcomes: dict[int, Outcome], timeout_seconds: float) -> str:
        """One section per rank, those that failed first because they are the cause."""
        silent = [rank for rank in range(self.world_size) if rank not in outcomes]
        stacks = self._stacks(silent)
        failed = [rank for rank, outcome in outcomes.items() if outcome.status == "failed"]
        sections = [f"--- rank {rank} failed\n{outcomes[rank].text}" for rank in failed]
        why = "when another rank failed" if outcomes else f"after {timeout_seconds:g} s"
        sections += [f"--- rank {r} was still busy {why}\n{stacks[r]}" for r in silent]
        for rank in sorted(outcomes.keys() - failed):
            sections.append(f"--- rank {rank} {outcomes[rank].status} {outcomes[rank].text}\n")
        return "\n".join(sections)

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Asks busy ranks where they are; works while they wait inside a collective."""
        assert self._folder is not None
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        if ranks:
            time.sleep(scaled(0.3))
        folder = Path(self._folder.name)
        files = {rank: _stack_file(folder, rank) for rank in ranks}
        return {r: f.read_text() if f.exists() else "" for r, f in files.items()}

    def _kill(self) -> None:
        for process in self._processes:
            if process.exitcode is None:
                # A rank leads its own process group: this ends its data loaders as well.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()
        for conn in self._connections:
            conn.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._connections, self._folder = [], [], None


def _thread_count(pid: int | None) -> int:
    """Threads of a process; none where the system does not say or the process is gone."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


class Pools:
    """The session's pools by size and backend, each started when first used and then kept."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, str], WorkerPool] = {}

    def get(self, world_size: int, backend: str = "gloo") -> WorkerPool:
        """Returns the pool of that size, whose ranks may not have started yet."""
        key = (world_size, backend)
        if key not in self._pools:
            self._pools[key] = WorkerPool(world_size, backend)
        return self._pools[key]

    @property
    def start_seconds(self) -> float:
        """How long all starts of ranks took so far."""
        return sum(pool.start_seconds for pool in self._pools.values())

    def close(self) -> None:
        """Ends every rank of every pool."""
        for pool in self._pools.values():
            pool.close()


# ---------------------------------------------------------------------------- the rank's side


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank}.txt"


def _rank_main(
    conn: connection.Connection, folder: Path, rank: int, world_size: int, backend: str
) -> None:
    """Joins the process group, then runs one job after another until the pipe closes."""
    os.setsid()
    _end_with_the_server()
    with _stack_file(folder, rank).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        join = functools.partial(_join, folder, rank, world_size, backend)
        conn.send_bytes(pickle.dumps(_attempt(join)))
        with contextlib.suppress(EOFError):
            while True:
                job: Job = pickle.loads(conn.recv_bytes())
                with _isolated(job):
                    outcome = _attempt(lambda call=job.call: pickle.loads(call)())
                    if job.covers:
                        outcome = dataclasses.replace(outcome, lines=tuple(covered.take()))
                conn.send_bytes(pickle.dumps(outcome))
    if backend != PRETEND:  # torch 2.7 warns at length that the group has no default backend
        _leave()


def _end_with_the_server() -> None:
    """Has the system end a rank that is stopped when the session is killed; Linux alone can.

    The server ends when nobody holds its pipe any more, which every process that it forks is given.
    """
    server = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, int(signal.SIGKILL))


def _join(folder: Path, rank: int, world_size: int, backend: str) -> None:
    import torch
    from torch import distributed as dist

    os.environ.update(_environment(rank, world_size))
    _rewrite_asserts()
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    if backend == PRETEND:
        from tests.accelerator import device

        device.register()
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(folder / "store"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=scaled(COLLECTIVE_SECONDS)),
    )
    # Everything alive now stays: out of the collector's sight, `_tidy` costs milliseconds.
    gc.freeze()


def _environment(rank: int, world_size: int) -> dict[str, str]:
    return {
        **SINGLE_THREADED,
        "GLOO_SOCKET_IFNAME": "lo",
        # Composer reads these even when the process group exists already.
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # nothing may listen: the ranks have met already
    }


def _rewrite_asserts() -> None:
    """Makes a plain assert in a test module show its values, as pytest does in its own process."""
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    install_importhook(get_config())


def _attempt(call: Callable[[], Any]) -> Outcome:
    try:
        return Outcome("passed", result=pickle.dumps(call()))
    except pytest.skip.Exception as skipped:
        return Outcome("skipped", text=str(skipped))
    except BaseException as error:  # pytest.fail and SystemExit are no Exception
        tb = error.__traceback__
        while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
            tb = tb.tb_next
        return Outcome("failed", text="".join(traceback.format_exception(type(error), error, tb)))


@contextlib.contextmanager
def _isolated(job: Job) -> Iterator[None]:
    """Gives a test its seeds, the session's warning filters and an environment of its own."""
    import numpy as np
    import torch

    with warnings.catch_warnings(), mock.patch.dict(os.environ):
        mutated.plant(job.mutant)
        if job.covers:
            covered.start()
        warnings.resetwarnings()
        warnings.filters.extend(job.filters)
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        try:
            yield
        finally:
            _tidy()


def _tidy() -> None:
    """Undoes what tests leave behind in a process: global switches and garbage.

    Process groups stay: torch caches DTensor layouts by the shape of their mesh, and an entry of an
    earlier test would lead to a dead group.
    """
    import torch

    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    gc.collect()
    # What is left is caches, which every later collection would look through in vain.
    gc.freeze()


def _leave() -> None:
    from torch import distributed as dist

    dist.destroy_process_group()
