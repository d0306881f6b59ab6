"""Every YAML in the repository is a run that could start."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from composer_fsdp2.foundry import parse_run_config, requests_fsdp2

ROOT = Path(__file__).parents[2]
YAMLS = sorted((ROOT / "yamls").rglob("*.yaml"))


def test_there_are_some():
    assert ROOT / "yamls" / "quickstart.yaml" in YAMLS


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.name)
def test_asks_for_fsdp2_with_settings_that_hold(path: Path):
    cfg = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    assert requests_fsdp2(parse_run_config(cfg))


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.name)
def test_its_code_is_where_it_says(path: Path):
    for code in OmegaConf.load(path).get("code_paths", []):
        assert (ROOT / code).is_file()


def test_quickstart_shows_the_defaults():
    """It says so in a comment, and a newcomer copies from it."""
    cfg = OmegaConf.load(ROOT / "yamls" / "quickstart.yaml")
    shown = OmegaConf.to_container(cfg.parallelism_config.fsdp2)

    from composer_fsdp2.core.config import FSDP2Config, parse_config

    assert parse_config(shown) == FSDP2Config(verbose=True)
