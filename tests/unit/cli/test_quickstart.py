"""`composer-fsdp2 quickstart`: the files of the first run, and nothing of the user's lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from composer_fsdp2.cli.main import app

ROOT = Path(__file__).parents[3]
NAMES = ("quickstart.yaml", "quickstart_data.py")
READY = [path for kind in ("yaml", "py") for path in sorted((ROOT / "yamls").rglob(f"*.{kind}"))]


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["quickstart", *arguments])


def test_writes_the_files_of_the_repository(tmp_path):
    done = invoke(str(tmp_path / "run"))
    assert done.exit_code == 0
    assert f"cd {tmp_path}/run && composer-fsdp2 train yamls/quickstart.yaml" in done.stderr
    written = {path for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert written == {tmp_path / "run" / path.relative_to(ROOT) for path in READY}
    for path in written:
        assert path.read_bytes() == (ROOT / path.relative_to(tmp_path / "run")).read_bytes()


def test_here_and_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"Wrote {len(READY)} files into yamls\n" in invoke().stderr
    again = invoke()
    assert (again.exit_code, again.stderr) == (
        0,
        "Next: composer-fsdp2 train yamls/quickstart.yaml\n",
    )


@pytest.mark.parametrize("name", NAMES)
def test_another_file_of_that_name_stays(tmp_path, name):
    own = tmp_path / "yamls" / name
    own.parent.mkdir()
    own.write_text("mine: 1\n")
    done = invoke(str(tmp_path))
    assert done.exit_code == 2
    assert f"'{own}' exists with other content" in " ".join(done.stderr.split())
    assert [path.name for path in own.parent.iterdir()] == [name]
    assert own.read_text() == "mine: 1\n"


@pytest.mark.parametrize("folder", ["/dev/null/run", "/proc/run"])
def test_a_folder_that_cannot_be_made(folder):
    done = invoke(folder)
    assert done.exit_code == 2
    said = " ".join(done.stderr.split())
    assert "cannot be written" in said
    assert "Name another folder" in said
