"""The examples of the documentation are run, not read; `.ci/rules.py` checks the rest."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

import composer_fsdp2
from composer_fsdp2.cli.main import app
from composer_fsdp2.config.fsdp1 import FSDP1_KEYS, convert_fsdp1
from composer_fsdp2.tools.migrate.engine import migrate
from composer_fsdp2.trainer.config import parse_parallelism_config
from tests.support import api_page
from tests.support.documents import (
    MIGRATION,
    PAGES,
    README,
    ROOT,
    Example,
    command_lines,
    examples,
    parse_command,
    programs,
    shell_lines,
)
from tests.support.migration_tables import TABLES, table
from tests.support.models import TinyComposer, llama_config
from tests.support.settings_mistakes import WRITTEN, message, sentences
from tests.support.training import loader_of, samples_of

SHELL = {".ci/install", "cd", "export", "mkdir", "source"}
INSTALLING = {"python", ".venv/bin/pip", ".venv/bin/uv", ".venv/bin/python", "pip"}
OF_ONE_MODEL = {"load_path", "model", "model_name", "tokenizer"}
"""which an evaluation may have beside its other keys"""


def failures(check: Callable[[Any], None], values: Iterable[Any]) -> dict[str, str]:
    """Returns the error of each value that a check refuses."""
    errors = {str(value): _error(check, value) for value in values}
    return {name: error for name, error in errors.items() if error}


def _error(check: Callable[[Any], None], value: Any) -> str:
    try:
        check(value)
    except (Exception, SystemExit) as error:
        return repr(error)
    return ""


# --- Blocks of YAML. ---


def test_yaml_is_valid(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "32")

    def check(example: Example) -> None:
        config = yaml.safe_load(example.text)
        if "fsdp_config" in config:
            convert_fsdp1(config["fsdp_config"], world_size=8, local_world_size=8)
        elif "parallelism_config" in config:
            assert parse_parallelism_config(config["parallelism_config"]) is not None

    assert failures(check, examples("yaml")) == {}


def test_keys_of_yaml_are_those_of_a_run():
    pytest.importorskip("llmfoundry", reason="needs the extra foundry")
    from llmfoundry.utils.config_utils import EVAL_CONFIG_KEYS, TRAIN_CONFIG_KEYS

    known = TRAIN_CONFIG_KEYS | EVAL_CONFIG_KEYS | OF_ONE_MODEL | {"parallelism_config"}
    unknown = {str(one): {*yaml.safe_load(one.text)} - known for one in examples("yaml")}
    assert {name: keys for name, keys in unknown.items() if keys} == {}


def test_the_migrated_run_is_the_one_shown():
    before, after, *_ = examples("yaml", [MIGRATION])
    assert migrate(before.text).text == after.text


@pytest.mark.parametrize("line", [c for c in shell_lines(MIGRATION) if "migrate old.yaml" in c])
def test_migrations_run(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = examples("yaml", [MIGRATION])[0].text
    monkeypatch.chdir(tmp_path)
    Path("old.yaml").write_text(before)
    words = shlex.split(line.partition(" #")[0])
    result = CliRunner().invoke(app, words[1:])
    assert result.exit_code == 0, result.output
    assert Path("new.yaml").exists() == ("-o new.yaml" in line)
    assert Path("old.yaml").read_text() == before


# --- Blocks of Python. ---


@pytest.mark.world_size(2, timeout=300)
@pytest.mark.matrix
def test_python_runs():
    def check(example: Example) -> None:
        try:
            code = compile(example.text, str(example), "exec")
            exec(code, {"__name__": "__main__"})
        finally:
            composer_fsdp2.uninstall()

    assert failures(check, examples("python", [page for page in PAGES if page != README])) == {}


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
    trainer, loop = examples("python", [README])
    block = (trainer if names is _for_the_trainer else loop).text
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
        composer_fsdp2.uninstall()


# --- Commands. ---


def test_commands_exist():
    def check(command: tuple[str, str]) -> None:
        for words in filter(None, programs(command[1])):  # without those of variables alone
            program = words[0].removeprefix(".venv/bin/")
            if program == "composer-fsdp2":
                _check(parse_command(words[1:]))
            elif program == "torchrun":
                _check_torchrun(words[1:])
            elif words[0] in INSTALLING:
                _check_installation(words)
            else:
                assert program in SHELL

    assert failures(check, command_lines()) == {}


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
    if importlib.util.find_spec("llmfoundry") is None:
        return  # it reads the run
    from composer_fsdp2.foundry.run_file import read_parallelism, read_run

    overrides = given.get("overrides") or []
    read_parallelism(read_run(ROOT / file, overrides, jobs=False))
    top = set(yaml.safe_load((ROOT / file).read_text()))
    assert {*read_run(ROOT / file, overrides)} <= top


def test_the_readme_has_the_two_commands():
    """In one line each: set up and train, set up and test; then the line of pip."""
    train, more, test, pip = shell_lines(README)
    assert train.startswith("python -m venv .venv && ")
    assert train.endswith(" && .venv/bin/composer-fsdp2 train yamls/quickstart.yaml")
    assert more.startswith(train.rpartition(" && ")[2])
    assert test.endswith(" && .venv/bin/python -m pytest")
    assert " -m composer_fsdp2.pins newest > pins.txt && pip install --no-deps -r pins.txt" in pip


# --- Tables that are made from code are complete. ---


def test_the_api_page_has_every_public_name():
    named = [name for names in api_page.GROUPS.values() for name in names]
    assert sorted([*named, "__version__"]) == sorted(composer_fsdp2.__all__)


def test_every_fsdp1_key_is_in_the_table():
    keys = " ".join(line.split(" | ")[0] for line in table("composer").splitlines())
    assert [key for key in FSDP1_KEYS if f"`{key}`" not in keys] == []


def test_tests_of_values_say_what_they_test():
    rows = [(name, row) for name, one in TABLES.items() for row in one.rows]
    assert [(n, row.key) for n, row in rows if callable(row.when) and not row.when.__doc__] == []


def test_every_error_of_the_parser_is_in_the_table():
    messages = [message(written) for written in WRITTEN]
    missing = [s for s in sentences() if not any(all(p in text for p in s) for text in messages)]
    assert missing == []
