"""Every example of docs/ is run or parsed, every link leads somewhere."""

from __future__ import annotations

import importlib.util
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import composer_fsdp2
from composer_fsdp2.config.fsdp1 import convert_fsdp1
from composer_fsdp2.trainer.config import parse_parallelism_config
from tests.support import (
    api_page,
    command_line_page,
    extension_table,
    odd_models_page,
    tensor_pairs,
    upstream_page,
    versions_page,
)
from tests.support.documents import (
    DOCS,
    PAGES,
    ROOT,
    Example,
    anchors,
    command_lines,
    examples,
    links,
    parse_command,
    programs,
)
from tests.support.first_pages import avoided_phrases

SHELL = {"cd", "export", "mkdir", "source"}
INSTALLING = {"python", ".venv/bin/pip", ".venv/bin/uv", ".venv/bin/python", "pip"}
NOT_RUN = {"text", "json"}
OF_ONE_MODEL = {"load_path", "model", "model_name", "tokenizer"}
"""which an evaluation may have beside its other keys"""


def _shown(language: str) -> list[Example]:
    return [example for example in examples(language) if not example.included]


MADE = (api_page, command_line_page, tensor_pairs, upstream_page, versions_page)
MADE_PAGES = {made.PAGE for made in (*MADE, extension_table, odd_models_page)}


# --- Pages that are made from code; those of settings and callbacks have tests beside the code. ---


@pytest.mark.parametrize("made", MADE, ids=lambda made: made.__name__.rpartition(".")[2])
def test_the_page_is_current(made: Any):
    """`python -m tests.support.NAME` writes it."""
    assert made.PAGE.read_text() == made.page()


def test_the_table_of_mistakes_in_a_run_is_current():
    """`python -m tests.support.run_mistakes_page` writes it."""
    pytest.importorskip("llmfoundry", reason="needs the extra foundry")
    from tests.support.run_mistakes_page import MARK, PAGE, table

    assert [text for _, text in MARK.findall(PAGE.read_text())] == [table()]


def test_the_api_page_has_every_public_name():
    named = [name for names in api_page.GROUPS.values() for name in names]
    assert sorted([*named, "__version__"]) == sorted(composer_fsdp2.__all__)


# --- Blocks of code. ---


def test_every_block_has_a_language_that_is_tested():
    untested = [str(e) for e in examples() if e.language not in {"bash", "python", "yaml"}]
    assert [name for name in untested if name.split(":")[1] not in NOT_RUN] == []


@pytest.mark.parametrize("example", _shown("yaml"), ids=str)
def test_yaml_is_valid(example: Example, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "32")
    config = yaml.safe_load(example.text)
    if "fsdp_config" in config:
        convert_fsdp1(config["fsdp_config"], world_size=8, local_world_size=8)
    elif "parallelism_config" in config:
        assert parse_parallelism_config(config["parallelism_config"]) is not None


@pytest.mark.parametrize("example", _shown("yaml"), ids=str)
def test_keys_of_yaml_are_those_of_a_run(example: Example):
    pytest.importorskip("llmfoundry", reason="needs the extra foundry")
    from llmfoundry.utils.config_utils import EVAL_CONFIG_KEYS, TRAIN_CONFIG_KEYS

    known = TRAIN_CONFIG_KEYS | EVAL_CONFIG_KEYS | OF_ONE_MODEL | {"parallelism_config"}
    assert set(yaml.safe_load(example.text)) <= known


def test_included_files_are_there():
    included = [file for example in examples() for file in example.included]
    assert included
    assert [file for file in included if not (ROOT / file).is_file()] == []


@pytest.mark.world_size(2)
@pytest.mark.parametrize("example", _shown("python"), ids=str)
def test_python_runs(example: Example):
    from composer_fsdp2 import uninstall

    try:
        exec(compile(example.text, str(example), "exec"), {"__name__": "__main__"})
    finally:
        uninstall()


# --- Commands. ---


@pytest.mark.parametrize(("page", "line"), command_lines())
def test_commands_exist(page: str, line: str):
    for words in programs(line):
        if not words:  # variables alone
            continue
        program = words[0].removeprefix(".venv/bin/")
        if program == "composer-fsdp2":
            _check(parse_command(words[1:]))
        elif program == "torchrun":
            _check_torchrun(words[1:])
        elif words[0] in INSTALLING:
            _check_installation(words)
        else:
            assert program in SHELL, page


def _check_torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(words)
    assert parsed.no_python
    assert parsed.training_script == "composer-fsdp2"
    _check(parse_command(parsed.training_script_args))


def _check_installation(words: list[str]) -> None:
    """Files that are named are there; a module that is run is one."""
    for option, value in itertools.pairwise(words):
        if option in {"-c", "--override"}:
            assert (ROOT / value).is_file()
        if option == "-m" and not value.startswith("build"):
            assert importlib.util.find_spec(value) is not None


def _check(given: dict[str, Any]) -> None:
    """A file of the repository is there, and takes the overrides."""
    file = str(given.get("run") or given.get("config") or "")
    if not file.startswith(("yamls/", "tests/")):
        return
    assert (ROOT / file).is_file()
    pytest.importorskip("llmfoundry", reason="needs the extra foundry")
    from composer_fsdp2.foundry.run_file import load_run, read_run

    overrides = given.get("overrides") or []
    load_run(ROOT / file, overrides)
    top = set(yaml.safe_load((ROOT / file).read_text()))
    for key in read_run(ROOT / file, overrides):
        assert key in top


# --- Links. ---


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_links_lead_somewhere(page: Path):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_the_navigation():
    nav = (ROOT / ".ci" / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    named = set(re.findall(r"[\w/.-]+\.md", nav)) - {"migration.md", "changelog.md"}
    named -= {"contributing.md"}
    assert named - {"tutorial.md"} == {page.relative_to(DOCS).as_posix() for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_pages_are_in_plain_words(page: Path):
    """`tests.support.first_pages.AVOIDED` has the phrases."""
    assert page in MADE_PAGES or avoided_phrases(page.read_text()) == []


def test_pages_name_their_subject_once():
    """One first heading, with which the page begins."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        assert text.startswith("# "), page
        assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1, page
