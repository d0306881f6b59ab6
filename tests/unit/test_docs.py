"""The examples of the documentation are run, not read."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from composer_fsdp2.cli.main import app
from composer_fsdp2.config.describe import describe_page
from composer_fsdp2.config.fsdp1 import FSDP1_KEYS, convert_fsdp1
from composer_fsdp2.config.schema import FIELDS
from composer_fsdp2.tools.migrate.engine import migrate
from composer_fsdp2.trainer.config import parse_parallelism_config
from tests.support.migration_tables import MARK as TABLE_OF_KEYS
from tests.support.migration_tables import TABLES, table
from tests.support.odd_models_page import PAGE as ODD_MODELS
from tests.support.odd_models_page import page as page_of_odd_models
from tests.support.settings_mistakes import MARK as TABLE_OF_MISTAKES
from tests.support.settings_mistakes import WRITTEN, message, sentences
from tests.support.settings_mistakes import table as table_of_mistakes

ROOT = Path(__file__).parents[2]
MIGRATION = (ROOT / "MIGRATION.md").read_text()
README = (ROOT / "README.md").read_text()


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("block", _blocks(MIGRATION + README, "yaml"))
def test_yaml_blocks_are_valid(block: str):
    config = yaml.safe_load(block)
    if "fsdp_config" in config:
        convert_fsdp1(config["fsdp_config"], world_size=8, local_world_size=8)
    else:
        assert parse_parallelism_config(config["parallelism_config"]) is not None


def test_the_migrated_run_is_the_one_shown():
    before, after, *_ = _blocks(MIGRATION, "yaml")
    assert migrate(before).text == after


def _commands(text: str) -> list[str]:
    lines = [line for block in _blocks(text, "bash") for line in block.splitlines()]
    return [line.partition(" #")[0] for line in lines if line.startswith("composer-fsdp2 ")]


@pytest.mark.parametrize("line", _commands(MIGRATION + README))
def test_commands_and_options_exist(line: str):
    """Parsed as the command line does it; nothing is run."""
    command, words = get_command(app), shlex.split(line)[1:]
    context = typer.Context(command)
    while isinstance(command, TyperGroup):
        name, command, words = command.resolve_command(context, words)
        context = typer.Context(command, parent=context, info_name=name)
    command.parse_args(context, words)


@pytest.mark.parametrize("line", [c for c in _commands(MIGRATION) if "migrate old.yaml" in c])
def test_migrations_run(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before, *_ = _blocks(MIGRATION, "yaml")
    monkeypatch.chdir(tmp_path)
    Path("old.yaml").write_text(before)
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert result.exit_code == 0, result.output
    assert Path("new.yaml").exists() == ("-o new.yaml" in line)
    assert Path("old.yaml").read_text() == before


@pytest.mark.world_size(2)
@pytest.mark.parametrize("block", _blocks(MIGRATION, "python"))
@pytest.mark.filterwarnings("ignore:FSDP1 to FSDP2")
def test_python_blocks_run(block: str):
    from composer_fsdp2 import uninstall

    try:
        exec(compile(block, "MIGRATION.md", "exec"), {})
    finally:
        uninstall()


def test_every_fsdp1_key_is_in_the_table():
    keys = " ".join(line.split(" | ")[0] for line in table("composer").splitlines())
    assert [key for key in FSDP1_KEYS if f"`{key}`" not in keys] == []


def test_the_tables_of_keys_are_up_to_date():
    """`python -m tests.support.migration_tables` writes them."""
    shown = {name: text for _, name, text in TABLE_OF_KEYS.findall(MIGRATION)}
    assert shown == {name: table(name) for name in TABLES}


@pytest.mark.parametrize("name", TABLES)
def test_tests_of_values_say_what_they_test(name: str):
    assert [row.key for row in TABLES[name].rows if callable(row.when) and not row.described] == []


def test_the_table_of_mistakes_is_what_the_parser_says():
    ((_, shown),) = TABLE_OF_MISTAKES.findall(MIGRATION)
    assert shown == table_of_mistakes()


@pytest.mark.parametrize("fixed", list(sentences()), ids=lambda fixed: fixed[0][:30])
def test_every_error_of_the_parser_is_in_the_table(fixed: tuple[str, ...]):
    assert any(all(part in message(written) for part in fixed) for written in WRITTEN)


def test_links_within_the_page_lead_somewhere():
    headings = re.findall(r"^#+ (.*)$", MIGRATION, re.MULTILINE)
    anchors = {heading.lower().replace(",", "").replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#(.*?)\)", MIGRATION)) <= anchors


def test_the_tables_of_settings_are_made_from_their_declarations():
    """`python -m composer_fsdp2.config.describe README.md` writes them."""
    assert describe_page(README) == README
    missing = [key for key in FIELDS if f"| `{key}` |" not in README]
    assert not missing


def test_the_page_of_odd_models_is_up_to_date():
    """`python -m tests.support.odd_models_page` writes it."""
    assert ODD_MODELS.read_text() == page_of_odd_models()
