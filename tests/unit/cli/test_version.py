"""`composer-fsdp2 --version`: right, and without a large import."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

from typer.testing import CliRunner

import composer_fsdp2
from composer_fsdp2.cli.main import app
from tests.support.limits import scaled

LARGE = ("composer", "llmfoundry", "torch", "transformers")


def test_shows_this_package_and_those_beside_it():
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0
    rows = dict(line.split(" ") for line in done.stdout.splitlines())
    assert rows.pop("composer-fsdp2") == composer_fsdp2.__version__
    assert {"torch", "mosaicml"} <= set(rows) <= {"torch", "mosaicml", "llm-foundry"}
    assert rows == {name: importlib.metadata.version(name) for name in rows}


def test_imports_none_of_them():
    program = (
        "import sys\n"
        "from composer_fsdp2.cli.main import app\n"
        "app(['--version'], standalone_mode=False)\n"
        f"sys.exit(', '.join(set(sys.modules) & set({LARGE})) or None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=scaled(60),
    )
    assert (done.returncode, done.stderr) == (0, "")
