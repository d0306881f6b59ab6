"""Runs tests against mutants of the package, one mutant after the other in one session.

A mutant replaces the code of one function, in pytest's process and on the ranks, and is taken out
again: starting a session for each would cost a minute. `.ci/mutants` chooses mutants and tests, and
starts sessions with `-p tests.support.mutated`. Commands that a test starts are not mutated.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PLAN = "COMPOSER_FSDP2_MUTANTS"
"""The variable with a file of JSON: mutants, and the tests of each; ROWS is the one to write."""
ROWS = "COMPOSER_FSDP2_MUTANTS_ROWS"
HANGS_SECONDS = 200
"""Of a test, longer than ranks are waited for."""


@dataclass(frozen=True)
class Mutant:
    """A text of a file of the package, from the byte `start` to `end`, and the one in its place."""

    file: str
    line: int
    start: int
    end: int
    after: str


_planted: tuple[Mutant, list[tuple[FunctionType, CodeType]]] | None = None


def planted() -> Mutant | None:
    """Returns the mutant that is in this process."""
    return None if _planted is None else _planted[0]


def plant(mutant: Mutant | None) -> None:
    """Takes out the mutant of before, and puts another one in its place."""
    global _planted
    if mutant == planted():
        return
    if _planted is not None:
        for function, code in _planted[1]:
            function.__code__ = code
        _planted = None
    if mutant is None:
        return
    module = importlib.import_module(f"{mutant.file[:-3].replace('/', '.')}")
    name, source = str(module.__file__), Path(str(module.__file__)).read_bytes()
    changed = source[: mutant.start] + mutant.after.encode() + source[mutant.end :]
    before, after = (_functions(compile(text, name, "exec")) for text in (source, changed))
    index = max(i for i, code in enumerate(before) if code.co_firstlineno <= mutant.line)
    place = before[index].co_name, before[index].co_firstlineno
    replaced = list[tuple[FunctionType, CodeType]]()
    for function in _function_objects(module):
        code = function.__code__
        if code.co_filename == name and (code.co_name, code.co_firstlineno) == place:
            replaced += _replace(code, after[index])
    _planted = mutant, replaced
    for value in vars(module).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def _replace(old: CodeType, new: CodeType) -> list[tuple[FunctionType, CodeType]]:
    """Gives functions other code, those inside them too: closures that were made before."""
    gc.unfreeze()  # what is frozen is not looked through
    found = [each for each in gc.get_referrers(old) if isinstance(each, FunctionType)]
    gc.freeze()
    replaced = list[tuple[FunctionType, CodeType]]()
    for function in found:
        with contextlib.suppress(ValueError):  # it uses other names of the function around it
            function.__code__ = new
            replaced.append((function, old))
    inner = [[each for each in code.co_consts if isinstance(each, CodeType)] for code in (old, new)]
    if len(inner[0]) == len(inner[1]):
        for pair in zip(*inner, strict=True):
            replaced += _replace(*pair)
    return replaced


def _functions(code: CodeType) -> list[CodeType]:
    """Functions of a module and methods of its classes, in the order of their lines."""
    found = list[CodeType]()
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            # The body of a class runs without arguments and locals of its own.
            is_class = not inner.co_flags & 0x2 and not inner.co_name.startswith("<")
            found += _functions(inner) if is_class else [inner]
    return sorted(found, key=lambda each: each.co_firstlineno)


def _function_objects(module: ModuleType) -> list[FunctionType]:
    found = dict[int, FunctionType]()

    def look(value: Any, depth: int = 0) -> None:
        if isinstance(value, FunctionType):
            found[id(value)] = value
        elif isinstance(value, type) and value.__module__ == module.__name__ and depth < 3:
            for inner in list(vars(value).values()):
                look(inner, depth + 1)
        for name in ("__func__", "__wrapped__", "fget", "fset", "func"):
            inner = vars(value).get(name) if hasattr(value, "__dict__") else None
            inner = inner or (getattr(type(value), name, None) and getattr(value, name, None))
            if isinstance(inner, FunctionType) and id(inner) not in found:
                look(inner, depth)

    for value in list(vars(module).values()):
        look(value)
    return list(found.values())


# ---------------------------------------------------------------------------- the session


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Tries the mutants of the plan that have no row yet."""
    rows = Path(os.environ[ROWS])
    items = {item.nodeid: item for item in session.items}
    for entry in json.loads(Path(os.environ[PLAN]).read_text()):
        done = rows.read_text() if rows.exists() else ""
        if json.dumps(entry["name"]) in done:
            continue
        row = {"name": entry["name"], "folder": entry["folder"]}
        tests = {tier: [items[n] for n in entry[tier] if n in items] for tier in _TIERS}
        killed, by, clean = _try(session, Mutant(**entry["mutant"]), tests)
        row |= {"killed": killed, "by": by, "tests": sum(map(len, tests.values())), "clean": clean}
        with rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{killed or 'SURVIVED':8} {entry['name']}", flush=True)
        if not clean:
            pytest.exit("a test fails without the mutant too: a new session is needed", 3)
    return True


_TIERS = ("default", "matrix")


def _try(
    session: pytest.Session, mutant: Mutant, tests: dict[str, list[pytest.Item]]
) -> tuple[str, str, bool]:
    """Returns tier and name of the first test that fails, and whether it passes without."""
    for tier in _TIERS:
        for item, following in itertools.zip_longest(tests[tier], tests[tier][1:]):
            plant(mutant)
            passes = _passes(item, following)
            plant(None)
            if not passes:
                session._setupstate.teardown_exact(None)
                return tier, item.nodeid, _passes(item, None)
    return "", "", True


def _passes(item: pytest.Item, following: pytest.Item | None) -> bool:
    _failed.clear()
    with _hurry():
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    return not _failed


_failed: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remembers failures of the test that runs."""
    _failed.extend([report.nodeid] if report.failed else [])


@contextlib.contextmanager
def _hurry() -> Iterator[None]:
    def fail(*_: object) -> None:
        raise TimeoutError(f"busy after {HANGS_SECONDS} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(HANGS_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
