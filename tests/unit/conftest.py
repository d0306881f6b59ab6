"""What tests of several commands need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.shards import free_numbers


@pytest.fixture(autouse=True)
def _shared_memory_ends() -> Iterator[None]:
    """Frees the numbers of datasets that a test has built in this process.

    Streaming keeps them until the process ends, and opens those of all earlier datasets for each
    new one: files would run out with the square of their number.
    """
    yield
    free_numbers()


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a run and gives its path."""

    def file(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return file
