"""The plugin fits what is installed here: the part of the smoke rows that needs no ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from composer_fsdp2 import installed
from composer_fsdp2.cli import app

pytestmark = pytest.mark.smoke


def _machine() -> dict[str, Any]:
    return json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["machine"]


def test_every_patch_point_fits():
    """An unknown one only turns off its feature, so nothing else would fail."""
    rows = _machine()["patches"]
    assert rows
    assert [row["problem"] for row in rows if row["problem"]] == []


def test_install_reaches_composer():
    with installed():
        states = {row["state"] for row in _machine()["patches"] if "composer." in row["target"]}
    assert states == {"installed"}
