"""What plain `pytest` runs, and limits of time that grow with the machine's load."""

from __future__ import annotations

import time

import pytest

from tests.support import limits

pytest_plugins = ["pytester"]

TESTS = """
import pytest

@pytest.mark.table("b")
@pytest.mark.parametrize("row", ["a", "b", "c"])
def test_row(row): pass

@pytest.mark.slow
def test_command(): pass

def test_plain(): pass
"""


@pytest.fixture
def session(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder of tests with the tiers of this one."""
    pytester.makeini(
        '[pytest]\nmarkers = matrix\n  slow\n  table(rows)\naddopts = -m "not (matrix or slow)"\n'
    )
    pytester.makeconftest("from tests.support import tiers\npytest_plugins = [tiers.__name__]")
    return pytester


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ([], ["test_row[b]", "test_plain"]),
        (["-m", "matrix"], ["test_row[a]", "test_row[c]"]),
        (["-m", "slow"], ["test_command"]),
        (["-m", ""], ["test_row[a]", "test_row[b]", "test_row[c]", "test_command", "test_plain"]),
    ],
)
def test_each_tier_has_its_tests(session: pytest.Pytester, options, names):
    session.makepyfile(TESTS)
    lines = session.runpytest_inprocess("--collect-only", "-q", *options).outlines
    assert [line.partition("::")[2] for line in lines if "::" in line] == names


def test_a_test_that_is_too_slow_is_named(session: pytest.Pytester):
    session.makepyfile(
        "from tests.support import tiers\n"
        "def test_one(request): tiers.check_seconds(request.node, 1e6)"
    )
    done = session.runpytest_inprocess()
    assert done.ret == pytest.ExitCode.OK
    done.stdout.fnmatch_lines(["TOO SLOW*test_one: 1000000 s*"])


def test_a_limit_is_measured_anew_before_it_is_over(monkeypatch):
    monkeypatch.delenv(limits.VARIABLE)
    monkeypatch.setattr(limits, "measure", lambda: 1000.0)
    limit = limits.Limit(0.01)
    time.sleep(0.02)
    assert 1 < limit.left() < 10
    limit.end_within(0)
    assert limit.left() == 0


def test_the_measure_is_of_a_process_that_starts():
    assert limits.measure() >= 1
