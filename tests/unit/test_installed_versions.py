"""The plugin fits what is installed here: the part of the smoke rows that needs no ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from composer_fsdp2 import installed
from composer_fsdp2.cli.main import app

pytestmark = pytest.mark.smoke


def _doctor() -> dict[str, Any]:
    return json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)


def test_nothing_here_is_unknown(monkeypatch: pytest.MonkeyPatch):
    """A patch point that does not fit may turn off its feature alone: no other test would fail."""
    for name in ("FSDP_VERSION", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    found = _doctor()
    assert found["machine"]["patches"]
    assert [row["problem"] for row in found["machine"]["patches"] if row["problem"]] == []
    assert found["findings"] == []


def test_install_reaches_composer():
    with installed():
        rows = _doctor()["machine"]["patches"]
    assert {row["state"] for row in rows if row["target"].startswith("composer.")} == {"installed"}
