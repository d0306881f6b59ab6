"""The examples of the documentation are run, not read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from composer_fsdp2.core.config import FSDP2Config
from composer_fsdp2.migrate.fsdp1 import FSDP1_KEYS, convert_fsdp1
from composer_fsdp2.trainer.config import parse_parallelism_config

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


def test_the_converted_run_is_the_one_shown():
    before, after = (yaml.safe_load(block) for block in _blocks(MIGRATION, "yaml"))
    converted = convert_fsdp1(before["fsdp_config"], world_size=8, local_world_size=8).settings
    shown = after["parallelism_config"]["fsdp2"]
    written = FSDP2Config(**shown)
    assert {key: getattr(written, key) for key in converted} == converted


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
    missing = [key for key in FSDP1_KEYS if f"`{key}" not in MIGRATION]
    assert not missing


def test_every_setting_is_in_the_readme():
    missing = [key for key in FSDP2Config.__slots__ if f"`{key}`" not in README]
    assert not missing
