"""The examples of the documentation are run, not read."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from composer_fsdp2 import uninstall
from composer_fsdp2.cli.main import app
from composer_fsdp2.config.fsdp1 import FSDP1_KEYS
from composer_fsdp2.tools.migrate.engine import migrate
from tests.support import first_pages
from tests.support.documents import links
from tests.support.first_pages import (
    ERRORS,
    FROM_FSDP1,
    KEYS,
    ROOT,
    avoided_phrases,
    blocks,
    broken_links,
    check_command,
    check_yaml,
    commands,
    leads_somewhere,
    shell_lines,
)
from tests.support.migration_tables import MARK as TABLE_OF_KEYS
from tests.support.migration_tables import TABLES, table
from tests.support.models import TinyComposer, llama_config
from tests.support.odd_models_page import PAGE as ODD_MODELS
from tests.support.odd_models_page import page as page_of_odd_models
from tests.support.settings_mistakes import MARK as TABLE_OF_MISTAKES
from tests.support.settings_mistakes import WRITTEN, message, sentences
from tests.support.settings_mistakes import table as table_of_mistakes
from tests.support.training import loader_of, samples_of

README = first_pages.README.read_text()
MIGRATION = first_pages.MIGRATION.read_text()
OF_MIGRATION = (first_pages.MIGRATION, FROM_FSDP1, KEYS)
WRITTEN_BY_HAND = (first_pages.README, *OF_MIGRATION, ERRORS)
EXAMPLES = README + "".join(page.read_text() for page in OF_MIGRATION)


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("block", blocks(EXAMPLES, "yaml"))
def test_yaml_blocks_are_valid(block: str):
    check_yaml(block)


def test_the_migrated_run_is_the_one_shown():
    before, after, *_ = blocks(MIGRATION, "yaml")
    assert migrate(before).text == after


@pytest.mark.parametrize("line", commands(EXAMPLES))
def test_commands_and_options_exist(line: str):
    check_command(line)


@pytest.mark.parametrize("line", [c for c in commands(MIGRATION) if "migrate old.yaml" in c])
def test_migrations_run(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before, *_ = blocks(MIGRATION, "yaml")
    monkeypatch.chdir(tmp_path)
    Path("old.yaml").write_text(before)
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert result.exit_code == 0, result.output
    assert Path("new.yaml").exists() == ("-o new.yaml" in line)
    assert Path("old.yaml").read_text() == before


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "block", [*blocks(MIGRATION, "python"), *blocks(FROM_FSDP1.read_text(), "python")]
)
@pytest.mark.filterwarnings("ignore:FSDP1 to FSDP2")
def test_python_blocks_run(block: str):
    try:
        exec(compile(block, "a page on FSDP1", "exec"), {})
    finally:
        uninstall()


def test_every_fsdp1_key_is_in_the_table():
    keys = " ".join(line.split(" | ")[0] for line in table("composer").splitlines())
    assert [key for key in FSDP1_KEYS if f"`{key}`" not in keys] == []


def test_the_tables_of_keys_are_up_to_date():
    """`python -m tests.support.migration_tables` writes them."""
    shown = {name: text for _, name, text in TABLE_OF_KEYS.findall(KEYS.read_text())}
    assert shown == {name: table(name) for name in TABLES}


@pytest.mark.parametrize("name", TABLES)
def test_tests_of_values_say_what_they_test(name: str):
    assert [row.key for row in TABLES[name].rows if callable(row.when) and not row.described] == []


def test_the_table_of_mistakes_is_what_the_parser_says():
    ((_, shown),) = TABLE_OF_MISTAKES.findall(ERRORS.read_text())
    assert shown == table_of_mistakes()


@pytest.mark.parametrize("fixed", list(sentences()), ids=lambda fixed: fixed[0][:30])
def test_every_error_of_the_parser_is_in_the_table(fixed: tuple[str, ...]):
    assert any(all(part in message(written) for part in fixed) for written in WRITTEN)


def _for_the_trainer() -> dict[str, Any]:
    model = TinyComposer()
    loader = loader_of(samples_of(2, 8), 4)
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "dataloader": loader,
    }


def _for_a_loop() -> dict[str, Any]:
    model = LlamaForCausalLM(llama_config())
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.arange(8).reshape(2, 4)
    return {
        "model": model,
        "optimizer": optimizer,
        "dataloader": [{"input_ids": ids, "labels": ids}],
    }


@pytest.mark.world_size(2)
@pytest.mark.parametrize("names", [_for_the_trainer, _for_a_loop])
def test_the_ways_to_use_it_run(names: Callable[[], dict[str, Any]]):
    """In the order of the page; each block has the names that it reads."""
    block = blocks(README, "python")[[_for_the_trainer, _for_a_loop].index(names)]
    given = names()
    before = [param.detach().clone() for param in given["model"].parameters()]
    try:
        # Composer's progress bar wants a file, not a stream in memory.
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
            exec(compile(block, "README.md", "exec"), given)
        assert any(isinstance(module, FSDPModule) for module in given["model"].modules())
        after = [param.full_tensor() for param in given["model"].parameters()]
        assert not any(map(torch.equal, before, after))
    finally:
        uninstall()


def test_every_python_block_of_the_readme_is_run():
    assert len(blocks(README, "python")) == 2


@pytest.mark.parametrize(("name", "most"), [("README.md", 150), ("MIGRATION.md", 200)])
def test_the_first_pages_are_short(name: str, most: int):
    assert len((ROOT / name).read_text().splitlines()) <= most


@pytest.mark.parametrize("page", [first_pages.README, first_pages.MIGRATION], ids=_name)
def test_the_lines_to_copy_need_no_scrolling(page: Path):
    """A page of GitHub shows about 95 characters of code."""
    copied = [line for block in blocks(page.read_text(), "bash") for line in block.splitlines()]
    assert [line for line in copied if len(line) > 90] == []


def test_the_readme_has_the_two_commands():
    """In one line each: set up and train, set up and test."""
    train, more, test = shell_lines(README)
    assert train.startswith("python -m venv .venv && ")
    assert train.endswith(" && .venv/bin/composer-fsdp2 train yamls/quickstart.yaml")
    assert more.startswith(train.rpartition(" && ")[2])
    assert test.endswith(" && .venv/bin/python -m pytest")


@pytest.mark.parametrize("page", [first_pages.README, first_pages.MIGRATION], ids=_name)
def test_links_lead_somewhere(page: Path):
    assert links(page)
    assert list(broken_links(page)) == []


@pytest.mark.parametrize("page", WRITTEN_BY_HAND, ids=_name)
def test_pages_are_in_plain_words(page: Path):
    """`tests.support.first_pages.AVOIDED` has the phrases."""
    assert avoided_phrases(page.read_text()) == []


@pytest.mark.parametrize("text", ["A warning tells of it.", "It is\ntold of.", "FSDP2 has not."])
def test_phrases_to_avoid_are_found(text: str):
    assert bool(avoided_phrases(text)) == (text != "A warning tells of it.")


def _pointers() -> list[tuple[str, str]]:
    """Returns file and target of everything in the package that names a page of the repository."""
    names = r"(?:docs/[\w/-]+|README|MIGRATION|CONTRIBUTING|CHANGELOG)\.(?:md|ipynb)"
    page = re.compile(rf"(?<![\w/]){names}(?:#[\w-]+)?")
    files = [
        file for folder in ("composer_fsdp2", "yamls") for file in (ROOT / folder).rglob("*.*")
    ]
    texts = {_name(file): file.read_text() for file in files if file.suffix in {".py", ".yaml"}}
    return [(name, target) for name, text in sorted(texts.items()) for target in page.findall(text)]


def test_pages_that_the_package_names_exist():
    assert [(name, target) for name, target in _pointers() if not leads_somewhere(target)] == []


def test_the_page_of_odd_models_is_up_to_date():
    """`python -m tests.support.odd_models_page` writes it."""
    assert ODD_MODELS.read_text() == page_of_odd_models()
