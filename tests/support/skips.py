"""Which skips are allowed: every other one is a failure, so that no test goes missing in silence.

A reason begins with one of `REASONS`, or is "needs the extra NAME" of an extra in `EXTRAS` whose
library is not installed (one that is installed and cannot be imported is a failure too). A test
whose files are missing, or that has no cases, fails. `tests/conftest.py` registers this plugin.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Generator

import pytest

__all__ = ["EXTRAS", "REASONS", "is_allowed"]

REASONS = (
    "needs a CUDA device",
    "needs a C++ compiler",  # of the pretend accelerator, and what it compiles with
    "needs network devices of its own",  # which the kernel of a container may not let it have
    "matplotlib before 3.11 draws ",  # the committed pictures are of 3.11, which Python 3.10 lacks
    "torch has no ",  # a feature by its name
    "transformers has no ",  # a model by its name
)
EXTRAS = {"foundry": "llm-foundry", "fp8": "torchao", "qlora": "bitsandbytes"}
"""Libraries that a run of the tests may go without; all other ones of a test are in `test`."""

_EXTRA = "needs the extra "


def is_allowed(reason: str) -> bool:
    """Whether a test may be skipped for this reason."""
    if reason.startswith(_EXTRA):
        library = EXTRAS.get(reason.removeprefix(_EXTRA))
        return library is not None and not _is_installed(library)
    return reason.startswith(REASONS)


def _is_installed(library: str) -> bool:
    try:
        importlib.metadata.distribution(library)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _fail_if_not_allowed(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    found = report.longrepr
    reason = str(found[2] if isinstance(found, tuple) else found).removeprefix("Skipped: ")
    if not is_allowed(reason):
        report.outcome = "failed"
        report.longrepr = (
            f"skipped for a reason that tests/support/skips.py does not allow: {reason!r}. Such a "
            "test goes missing unseen: let it fail, or name the device, the feature of torch or "
            "the extra that it needs."
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Reports of tests, their fixtures and their marks."""
    report = yield
    _fail_if_not_allowed(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Reports of modules that are skipped as a whole."""
    report = yield
    _fail_if_not_allowed(report)
    return report
