"""Compiles the pretend accelerator before the ranks that need it start."""

from __future__ import annotations

import pytest

from tests.accelerator import device


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    if (reason := device.missing()) is not None:
        pytest.skip(reason)
    device.build()
