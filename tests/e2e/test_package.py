"""The wheel and the source archive: what they hold, what they say, and that they run elsewhere."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

import composer_fsdp2
from composer_fsdp2.cli.init import write_quickstart
from tests.support.limits import scaled
from tests.unit.cli.test_quickstart import READY

pytestmark = [pytest.mark.slow, pytest.mark.new_python]

ROOT = Path(__file__).parents[2]
VERSION = composer_fsdp2.__version__
INFO = f"composer_fsdp2-{VERSION}.dist-info"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with both, built by hatchling in this environment: nothing is downloaded."""
    folder = tmp_path_factory.mktemp("built")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=scaled(120),
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built, tmp_path_factory) -> Path:
    """The folder of the unpacked wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(built / f"composer_fsdp2-{VERSION}-py3-none-any.whl") as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def sources(built) -> set[str]:
    """The files of the source archive."""
    with tarfile.open(built / f"composer_fsdp2-{VERSION}.tar.gz") as archive:
        names = [member.name.split("/", 1) for member in archive if member.isfile()]
    assert {top for top, _ in names} == {f"composer_fsdp2-{VERSION}"}
    return {name for _, name in names}


@pytest.fixture(scope="module")
def metadata(wheel) -> Message:
    return message_from_string((wheel / INFO / "METADATA").read_text())


def run(*command: str, wheel: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs `composer-fsdp2` of the unpacked wheel in another folder."""
    return python("-m", "composer_fsdp2.cli.main", *command, wheel=wheel, folder=folder)


def python(*arguments: str, wheel: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    env |= {"PYTHONPATH": str(wheel), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=scaled(400),
    )


# --- What they hold. ---


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    packed = {file.relative_to(wheel).as_posix() for file in wheel.rglob("*") if file.is_file()}
    package = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "composer_fsdp2").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    ready = {f"composer_fsdp2/{path.relative_to(ROOT).as_posix()}" for path in READY}
    pins = ("stacks.txt", "stable.txt", "latest.txt", "newest-overrides.txt")
    ready |= {f"composer_fsdp2/versions/{name}" for name in pins}
    about = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
    assert packed == package | ready | {f"{INFO}/{name}" for name in about}


def test_the_source_archive_has_all_that_tests_and_pages_need(sources):
    kept = {
        file.relative_to(ROOT).as_posix()
        for name in (".ci", ".github", "benchmarks", "composer_fsdp2", "docs", "tests", "yamls")
        for file in (ROOT / name).rglob("*")
        if file.is_file() and not {"__pycache__", ".hypothesis"} & set(file.parts)
    }
    pages = {file.name for file in ROOT.glob("*.md")}
    top = {"LICENSE", "pyproject.toml", ".pre-commit-config.yaml"}
    assert sources >= kept | pages | top
    assert sources - kept - pages - top <= {"PKG-INFO", ".gitignore"}


# --- What they say. ---


def test_the_metadata(metadata):
    assert metadata["Name"] == "composer-fsdp2"
    assert metadata["Version"] == VERSION
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Author"] == "composer_fsdp2 contributors"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert not [row for row in metadata.get_all("Classifier", []) if row.startswith("License ::")]


def test_links_of_an_index_page_lead_somewhere(metadata):
    """pyproject.toml has the patterns by which README.md is changed for it."""
    page, readme = metadata.get_payload(), (ROOT / "README.md").read_text()
    assert re.findall(r"\]\((?!https://)[^)]*\)", page) == []
    kept = re.compile(r"^(?:#.*|```\w*)$", re.MULTILINE)
    assert kept.findall(page) == kept.findall(readme)
    assert "tensor parallelism (`docs/recipes/tensor-parallel.md`)" in page


def test_the_licence_is_the_standard_text(wheel):
    text = (wheel / INFO / "licenses" / "LICENSE").read_text()
    assert text == (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "9. Accepting Warranty or Additional Liability." in text
    assert text.rstrip().endswith("limitations under the License.")


def test_every_entry_point_is_in_the_wheel(wheel):
    entries = configparser.ConfigParser(delimiters=("=",))
    entries.optionxform = str
    entries.read(wheel / INFO / "entry_points.txt")
    values = {value for section in entries.sections() for value in entries[section].values()}
    assert values == {
        "composer_fsdp2.cli.main:main",
        "composer_fsdp2.foundry.transform:transform",
        "composer_fsdp2:FSDP2Monitor",
        "composer_fsdp2:Muon",
    }


# --- They run elsewhere. ---


def test_the_first_commands_of_a_user_of_the_wheel(wheel, tmp_path):
    program = "import composer_fsdp2; print(composer_fsdp2.__file__)"
    where = python("-c", program, wheel=wheel, folder=tmp_path).stdout.strip()
    assert Path(where).is_relative_to(wheel)
    shown = run("--version", wheel=wheel, folder=tmp_path)
    assert shown.stdout.splitlines()[0] == f"composer-fsdp2 {VERSION}"
    written = run("quickstart", wheel=wheel, folder=tmp_path)
    assert written.returncode == 0, written.stderr
    for path in READY:
        assert (tmp_path / path.relative_to(ROOT)).read_bytes() == path.read_bytes()


def test_the_quickstart_trains_from_the_wheel(wheel, tmp_path):
    pytest.importorskip("llmfoundry", reason="needs the extra foundry")
    write_quickstart(tmp_path)
    # The quickstart's own sizes, made small as in test_quickstart.
    small = (
        "variables.text.megabytes=0.2",
        "variables.text.vocab_size=512",
        "max_seq_len=32",
        "model.d_model=32",
        "model.n_layers=2",
        "max_duration=2ba",
        "eval_interval=2ba",
        "eval_subset_num_batches=2",
        "save_interval=2ba",
        f"dist_timeout={scaled(60):.0f}",
    )
    done = run("train", "yamls/quickstart.yaml", *small, wheel=wheel, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "at batch 2" in done.stdout
    assert (tmp_path / "runs" / "quickstart" / "checkpoints" / "ep0-ba2").is_dir()
