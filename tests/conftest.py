"""How to write a test for several ranks.

A module-level function marked `world_size(n)` runs on all n ranks of a pool at the same time::

    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("reshard", [True, False])
    def test_matches_unsharded(reshard, tmp_path): ...

- Plain asserts, with the values shown. The first rank to fail decides; its traceback is reported.
- Arguments are pickled: parametrised values, `tmp_path` (one folder, shared by the ranks) and
  other fixtures whose value is plain data.
- Seeds are set, warnings are errors, `os.environ` is restored, process groups are destroyed.
- `with pytest.raises(...)` inside the function proves that *every* rank raises: a rank that does
  not raise fails, and one that hangs is reported with its stack. The pool survives it.
- `world_size(n, timeout=seconds)` for a slow test; `backend="nccl"` together with `gpu`.
- `new_python` for a test whose new processes import large libraries; such tests run first.
- `table("row", "other row")` for a test of more than twelve rows: those that are named run by
  default, the others with `-m matrix`. The tiers are explained in `tests/support/tiers.py`.
- `smoke` for a test that runs on every version of the README's table.
- `fault("what happens", "survived")` puts it into the table of faults:
  `tests/support/faults_table.py`.
- A skip names what is missing in the words of `tests/support/skips.py`, or it is a failure.

A module of tests may name in `PRELOAD` what its ranks import, if that takes long.

A test that needs several calls or several sizes, such as saving on two ranks and loading on four,
takes the `ranks` fixture instead of the mark; `ranks(n, func, *args)` returns one result per rank.
"""

from __future__ import annotations

import argparse
import functools
import gc
import inspect
import json
import os
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TextIO

import pytest
from hypothesis import settings

from tests.support import covered, faults_table, limits, shards, skips, tiers
from tests.support.pool import TEST_SECONDS, Pools, RankError, start_server

POOLS = pytest.StashKey[Pools]()
NUMBERS = pytest.StashKey[TextIO]()
FAULTS = pytest.StashKey[Path]()
SECONDS = pytest.StashKey[float]()
COVERED = pytest.StashKey[TextIO]()

# The first example of a property pays for lazy imports: a deadline would measure those.
settings.register_profile("default", deadline=None, derandomize=True)
settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--covered",
        type=argparse.FileType("a"),
        metavar="FILE",
        help="add a line of JSON for each test: its name, seconds, and lines of the package it ran",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(skips)
    config.pluginmanager.register(tiers)
    # Or an import of inductor starts two processes, here and in the server of the ranks.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ[limits.VARIABLE] = str(limits.measure())
    _let_threads_finish()
    config.stash[NUMBERS] = shards.claim_numbers()
    config.stash[POOLS] = Pools()
    if (file := config.getoption("--covered")) is not None:
        config.stash[COVERED] = file
    handle, path = tempfile.mkstemp(prefix="faults-")
    os.close(handle)
    config.stash[FAULTS] = Path(path)
    os.environ[faults_table.VARIABLE] = path


def _let_threads_finish() -> None:
    """A thread that is woken waits until another pauses; every process started here inherits it.

    Gloo's threads wake each other while they hold a lock. Where ranks outnumber cores, the woken
    one takes the core only to wait for that lock, and a collective costs five times as much.
    """
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[POOLS].close()
    shards.free_numbers()
    config.stash[NUMBERS].close()
    if COVERED in config.stash:
        config.stash[COVERED].close()
    config.stash[FAULTS].unlink(missing_ok=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found = list(faults_table.lines(terminalreporter.config.stash[FAULTS]))
    if found:
        terminalreporter.section("faults")
        terminalreporter.write("\n".join([*found, ""]))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Records the lines of the package that a test runs, with `--covered`."""
    if COVERED not in item.config.stash:
        return (yield)
    covered.start()
    begun = time.monotonic()
    try:
        return (yield)
    finally:
        seconds = round(time.monotonic() - begun, 3)
        lines = dict[str, list[int]]()
        for file, number in covered.take():
            lines.setdefault(file, []).append(number)
        row = {"test": item.nodeid, "seconds": seconds, "default": tiers.in_default_tier(item)}
        item.config.stash[COVERED].write(json.dumps({**row, "lines": lines}) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Measures a test without the start of its ranks."""
    pools = item.config.stash[POOLS]
    starts, begun = pools.start_seconds, time.monotonic()
    try:
        return (yield)
    finally:
        tiers.check_seconds(item, time.monotonic() - begun - pools.start_seconds + starts)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Puts what became of a test marked `fault` into the table."""
    report = yield
    mark = item.get_closest_marker("fault")
    if mark is not None and report.failed:
        hung = any(text in report.longreprtext for text in faults_table.RAN_OUT)
        fault = mark.args[0] if mark.args else item.name
        faults_table.record(fault, "hung" if hung else "lost", call.duration)
    elif mark is not None and mark.args and report.when == "call" and report.passed:
        faults_table.record(*mark.args, seconds=item.stash.get(SECONDS, call.duration))
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts `new_python` first: the system may soon drop the files just imported from its cache."""
    items.sort(key=lambda item: item.get_closest_marker("new_python") is None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Lets the ranks' imports overlap with the tests that need no ranks."""
    if session.config.option.collectonly:
        return
    gc.freeze()  # thousands of tests live to the end, and no collection need look at them
    items = [item for item in session.items if _needs_ranks(item)]
    if items:
        modules = {getattr(item, "module", None) for item in items}
        start_server(tuple({name for m in modules for name in getattr(m, "PRELOAD", ())}))


def _needs_ranks(item: pytest.Item) -> bool:
    marked = item.get_closest_marker("world_size") is not None
    forks = marked or "ranks" in getattr(item, "fixturenames", ())
    return forks or hasattr(getattr(item, "module", None), "PRELOAD")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test marked `world_size` on its pool instead of in this process."""
    mark = pyfuncitem.get_closest_marker("world_size")
    if mark is None:
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    call = faults_table.seconds_of(functools.partial(pyfuncitem.obj, **arguments))
    found = _run_marked(pyfuncitem.config.stash[POOLS], call, *mark.args, **mark.kwargs)
    if isinstance(found, str):
        pytest.fail(found, pytrace=False)
    pyfuncitem.stash[SECONDS] = found
    return True


def _run_marked(
    pools: Pools,
    call: Callable[[], float],
    world_size: int,
    *,
    timeout: float = TEST_SECONDS,
    backend: str = "gloo",
) -> str | float:
    """How long the slowest rank took, without the start of the pool.

    Or what the ranks reported as wrong; the stack of this process would say nothing.
    """
    try:
        return max(pools.get(world_size, backend).run(call, timeout))
    except RankError as error:
        return str(error)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """A function `ranks(n, func, *args, timeout=120)` that runs `func` on a pool of n ranks."""
    pools = request.config.stash[POOLS]

    def run(
        world_size: int,
        func: Callable[..., Any],
        *args: Any,
        timeout: float = TEST_SECONDS,
        backend: str = "gloo",
    ) -> list[Any]:
        return pools.get(world_size, backend).run(functools.partial(func, *args), timeout)

    return run
