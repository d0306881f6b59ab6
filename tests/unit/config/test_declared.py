"""A setting that is declared outside the package is like any other, in every place."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from composer.utils.parallelism import FSDP2Config as ComposerFSDP2Config
from torch.distributed.checkpoint import DefaultLoadPlanner

from composer_fsdp2 import __version__
from composer_fsdp2.config.schema import (
    FIELDS,
    FSDP2Config,
    declare_setting,
    describe_values,
    known_settings,
    parse_config,
)
from composer_fsdp2.config.setting import BOOLEAN, Setting, count, settings_of
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.prepare.settings import TrainerFSDP2Config
from composer_fsdp2.trainer.config import parse_parallelism_config
from tests.support.settings_page import example_of, page
from tests.support.toy_setting import declaring

CHANGELOG = Path(__file__).parents[3] / "CHANGELOG.md"


def _not_with_compile(values, errors):
    if values["toy_rounds"] and values["compile"]:
        errors.append("'toy_rounds' and 'compile' are both set. Leave one of them out.")


TOY = Setting(
    name="toy_rounds",
    default=0,
    values=count("rounds", least=0),
    meaning="plays so many rounds",
    check_together=_not_with_compile,
)


@pytest.fixture
def toy() -> Iterator[None]:
    with declaring(TOY):
        yield


def error_of(make, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        make(*args, **kwargs)
    return str(caught.value)


def test_it_is_parsed(toy):
    assert TOY.of(parse_config({"toy_rounds": 3})) == 3
    assert TOY.of(FSDP2Config(extra={"toy_rounds": 3})) == 3
    assert TOY.of(parse_config({})) == 0
    assert parse_config({"toy_rounds": 0}) == FSDP2Config() != parse_config({"toy_rounds": 3})


def test_it_is_checked_with_all_others(toy):
    said = "toy_rounds: -1 is invalid. Expected a number of rounds >= 0."
    assert error_of(parse_config, {"toy_rounds": -1}) == said
    assert error_of(FSDP2Config, extra={"toy_rounds": -1}) == said
    both = error_of(parse_config, {"toy_rounds": -1, "verbose": "yes"})
    assert both.startswith("2 settings are wrong:")
    assert "are both set" in error_of(parse_config, {"toy_rounds": 1, "compile": True})


def test_misspelt_it_is_an_error_with_its_name(toy):
    assert "Did you mean 'toy_rounds'?" in error_of(parse_config, {"toy_round": 3})
    assert "Did you mean 'toy_rounds'?" in error_of(FSDP2Config, extra={"toy_round": 3})


def test_it_is_described(toy):
    shown = page(known_settings())
    assert "| [`toy_rounds`](#toy_rounds) | 0 | plays so many rounds |" in shown
    assert "| Values | a number of rounds >= 0 |" in shown
    assert "toy_rounds" not in page()
    assert "toy_rounds: 3" in describe_values(parse_config({"toy_rounds": 3}))


def test_the_trainers_class_carries_it(toy):
    parsed = parse_parallelism_config({"fsdp2": {"toy_rounds": 3}})
    assert isinstance(parsed.fsdp2, ComposerFSDP2Config)
    assert TOY.of(parsed.fsdp2.settings) == 3
    assert TOY.of(TrainerFSDP2Config(extra={"toy_rounds": 2}).settings) == 2
    assert "toy_rounds: -1 is invalid" in error_of(TrainerFSDP2Config, extra={"toy_rounds": -1})


def test_afterwards_it_is_unknown():
    with declaring(TOY):
        assert "toy_rounds" in known_settings()
    with pytest.raises(ConfigError), declaring(TOY):
        parse_config({"toy_rounds": -1})
    assert known_settings() == FIELDS
    assert "'toy_rounds' is not a key" in error_of(parse_config, {"toy_rounds": 3})
    assert "'toy_rounds' is not a key" in error_of(FSDP2Config, extra={"toy_rounds": 3})


def test_a_name_is_declared_once(toy):
    assert declare_setting(TOY) is TOY
    for name in ("toy_rounds", "compile"):
        other = Setting(name=name, default=False, values=BOOLEAN, meaning="another one")
        assert "declared a second time" in error_of(declare_setting, other)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_configs_can_be_copied(toy, make):
    settings = parse_config({"toy_rounds": 3, "wrap_policy": {"classes": ["Block"]}})
    assert make(settings) == settings
    assert make(TrainerFSDP2Config.of(settings)).settings == settings


# --- Every declaration of the package. ---


@pytest.mark.table(
    "reshard_after_forward",
    "gradient_sync",
    "unused_parameters",
    "wrap_policy",
    "forward_methods",
    "activation_checkpointing",
    "tiled_mlp",
    "cpu_offload",
    "communication",
    "pretrained_weights",
    "load_planner",
    "async_save",
)
@pytest.mark.parametrize("name", FIELDS)
def test_defaults_are_among_the_values(name):
    errors: list[str] = []
    FIELDS[name].values.check(name, FIELDS[name].default, errors)
    assert errors == []
    assert FIELDS[name].meaning


@pytest.mark.table(
    "reshard_after_forward",
    "gradient_sync",
    "keep_fp32",
    "wrap_policy",
    "ignored_params",
    "sequence_parallel",
    "compile",
    "fp8",
    "local_step",
    "state_dict_type",
    "load_monolith_rank0_only",
    "async_save",
)
@pytest.mark.parametrize("name", [n for n in FIELDS if not n.endswith("_planner")])
def test_examples_are_valid(name):
    written = yaml.safe_load(example_of(FIELDS[name]))["parallelism_config"]["fsdp2"]
    assert getattr(parse_config(written), name) != FIELDS[name].default


@pytest.mark.table("expert_parallel", "activation_checkpointing", "optimizer_state")
@pytest.mark.parametrize("name", [n for n in FIELDS if FIELDS[n].values.spec])
def test_errors_show_a_valid_example(name):
    written = yaml.safe_load(FIELDS[name].values.example)
    assert getattr(parse_config(written), name) != FIELDS[name].default


def test_the_page_says_since_when():
    released = re.findall(r"^## (\d\S+) - ", CHANGELOG.read_text(), re.MULTILINE)
    versions = {"", *released, __version__.removesuffix(".dev0")}
    assert {setting.since for setting in FIELDS.values()} <= versions
    assert [name for name in FIELDS if f"\n## `{name}`\n" not in page()] == []


def test_a_setting_is_written_in_sentences():
    for setting in FIELDS.values():
        for text in (setting.meaning, setting.saves, setting.costs):
            assert not text or (
                text[-1] == "." and (text[0].isupper() or text[0] in "`-0123456789")
            )


def test_options_are_described_with_their_setting():
    sections = page().split("\n## ")[1:]
    for setting, section in zip(FIELDS.values(), sections, strict=True):
        if setting.values.spec is not None:
            for option in settings_of(setting.values.spec):
                assert f"| `{option}` |" in section


def test_values_of_objects_are_not_compared_between_ranks():
    shown = describe_values(FSDP2Config(load_planner=DefaultLoadPlanner()))
    assert "planner" not in shown.lower()
    assert "verbose: False" in shown
