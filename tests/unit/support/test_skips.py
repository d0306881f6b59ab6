"""A skip that names no device, no feature of torch and no extra is a failure."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import skips

ROOT = Path(__file__).parents[3]

TESTS = """\
import pytest

def test_of_a_device():
    pytest.skip("needs a CUDA device")

def test_of_a_file():
    pytest.skip("the file is not here")

@pytest.mark.skipif(True, reason="not today")
def test_of_a_mark():
    pass

@pytest.fixture
def server():
    pytest.skip("no server")

def test_of_a_fixture(server):
    pass

@pytest.mark.parametrize("case", [])
def test_of_nothing(case):
    pass

@pytest.mark.xfail(strict=True)
def test_known_to_fail():
    assert False
"""


def outcomes(folder: Path, text: str) -> tuple[int, str]:
    """The exit status of pytest with the plugin, and what it says of each test."""
    (folder / "test_it.py").write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-rA",
        "-p",
        "tests.support.skips",
        "--rootdir",
        folder,
    ]
    command += ["-p", "no:cacheprovider", "-c", "/dev/null", f"--override-ini=pythonpath={ROOT}"]
    done = subprocess.run(
        [*command, folder / "test_it.py"], capture_output=True, text=True, cwd=ROOT
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.matrix
def test_what_pytest_makes_of_skips(tmp_path: Path):
    status, said = outcomes(tmp_path, TESTS)
    assert status == 1, said
    failed = re.findall(r"^(?:FAILED|ERROR) .*::(\w+)", said, re.MULTILINE)
    expected = ["test_of_a_file", "test_of_a_fixture", "test_of_a_mark", "test_of_nothing"]
    assert sorted(failed) == expected
    assert "1 skipped, 1 xfailed" in said
    assert "does not allow: 'the file is not here'" in said


@pytest.mark.table('pytest.importorskip("no_such_library")-2')
@pytest.mark.parametrize(
    ("line", "status"),
    [
        ('pytest.importorskip("no_such_library")', 2),
        ('pytest.skip("torch has no such thing", allow_module_level=True)', 5),
    ],
)
def test_modules_that_are_skipped(tmp_path: Path, line: str, status: int):
    found, said = outcomes(tmp_path, f"import pytest\n{line}\ndef test_it(): pass\n")
    assert found == status, said
    assert ("could not import 'no_such_library'" in said) == (status == 2)


@pytest.mark.parametrize(
    ("reason", "allowed"),
    [
        ("needs a CUDA device", True),
        ("torch has no MXFP8: 2.7 is too old", True),
        ("", False),
        ("there is no CUDA device", False),
        ("needs the extra peft", False),
        ("needs the extra ", False),
    ],
)
def test_reasons(reason: str, allowed: bool):
    assert skips.is_allowed(reason) == allowed


def test_an_extra_that_is_installed_is_no_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(skips.EXTRAS, "fp8", "no-such-library")
    assert skips.is_allowed("needs the extra fp8")
    monkeypatch.setitem(skips.EXTRAS, "fp8", "pytest")
    assert not skips.is_allowed("needs the extra fp8")
