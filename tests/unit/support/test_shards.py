"""Sessions of tests that run at the same time."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.support import shards


def test_two_sessions_number_differently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv(shards.FIRST, "0")
    monkeypatch.setattr(shards, "SHARED_MEMORY", tmp_path / "none")
    free = []
    with shards.claim_numbers():
        free.append(_passed_over())
        tempfile.tempdir = str(tmp_path)
        with shards.claim_numbers():
            free.append(_passed_over())
    tempfile.tempdir = str(tmp_path)
    with shards.claim_numbers():
        free.append(_passed_over())
    assert free == [64, 128, 64]


def test_what_a_run_left_is_removed_and_nothing_else(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(shards.FIRST, "64")
    kept = ["000063_barrier_filelock", "000128_cache_filelock", "other"]
    for name in (*kept, "000064_barrier_filelock", "000127_cache_filelock"):
        (tmp_path / name).touch()
    monkeypatch.setattr(shards, "SHARED_MEMORY", tmp_path / "none")
    shards.free_numbers()
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(kept)


def _passed_over() -> int:
    return len(list(Path(tempfile.gettempdir()).glob("*_barrier_filelock")))
