"""The config transform: where settings go, and what it refuses."""

from __future__ import annotations

import copy
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.foundry import parse_run_config, requests_fsdp2, transform

OTHERS = {"max_seq_len": 128, "model": {"name": "mpt_causal_lm"}}


@pytest.fixture
def uninstalled():
    from composer_fsdp2.trainer import patches

    patches.uninstall()
    yield patches
    patches.uninstall()


# --- Where settings go. ---


def test_fsdp2_goes_to_fsdp_config_with_the_marker():
    cfg = {**OTHERS, "parallelism_config": {"fsdp2": {"activation_checkpointing": True}}}
    parsed = parse_run_config(cfg)
    assert parsed == {
        **OTHERS,
        "fsdp_config": {
            "activation_checkpointing": True,
            "state_dict_type": "sharded",
            "load_monolith_rank0_only": False,
            "version": 2,
        },
    }
    assert requests_fsdp2(parsed)


def test_a_full_checkpoint_leaves_rank0_loading_to_llm_foundry():
    """For `init_device: mixed` it reads the checkpoint on rank 0 only, unless the key is there."""
    parsed = parse_run_config({"parallelism_config": {"fsdp2": {"state_dict_type": "full"}}})
    assert parsed["fsdp_config"] == {"state_dict_type": "full", "version": 2}


def test_fsdp2_through_llm_foundrys_own_key():
    parsed = parse_run_config({"fsdp_config": {"version": 2, "verbose": True}})
    assert parsed["fsdp_config"]["verbose"] is True
    assert requests_fsdp2(parsed)


@pytest.mark.parametrize("key", ["fsdp", "tp"])
def test_other_keys_go_to_llm_foundrys_place(key: str):
    parsed = parse_run_config({"parallelism_config": {key: {"a": 1}}})
    assert parsed == {f"{key}_config": {"a": 1}}
    assert not requests_fsdp2(parsed)


def test_fsdp2_and_tp_together():
    parsed = parse_run_config({"parallelism_config": {"fsdp2": {}, "tp": {"strategy": "ffn"}}})
    assert parsed["tp_config"] == {"strategy": "ffn"}
    assert requests_fsdp2(parsed)


@pytest.mark.parametrize("block", [None, {}, {"fsdp": None, "tp": None}])
def test_an_empty_block_asks_for_nothing(block):
    assert parse_run_config({**OTHERS, "parallelism_config": block}) == OTHERS


@pytest.mark.parametrize(
    "cfg",
    [
        OTHERS,
        {**OTHERS, "fsdp_config": {"sharding_strategy": "FULL_SHARD", "anything": 1}},
        {**OTHERS, "fsdp_config": None, "tp_config": {"tensor_parallel_degree": 2}},
    ],
)
def test_a_run_without_fsdp2_stays_as_it_is(cfg):
    before = copy.deepcopy(cfg)
    assert transform(cfg) == before
    assert cfg == before


def test_version_1_is_fsdp1_without_the_marker():
    """Composer's FSDPConfig takes any key as an attribute, so the marker must not reach it."""
    parsed = parse_run_config({"fsdp_config": {"version": 1, "limit_all_gathers": True}})
    assert parsed == {"fsdp_config": {"limit_all_gathers": True}}


def test_parsing_twice_changes_nothing():
    """`composer-fsdp2 train` registers the transform that the entry point has registered too."""
    once = parse_run_config({"parallelism_config": {"fsdp2": {}}})
    assert parse_run_config(once) == once


# --- What it does besides. ---


def test_transform_leaves_the_given_config_alone(uninstalled):
    cfg = {"parallelism_config": {"fsdp2": {}}}
    transform(cfg)
    assert cfg == {"parallelism_config": {"fsdp2": {}}}


def test_transform_installs_for_fsdp2_only(uninstalled):
    from composer.trainer import Trainer

    original = Trainer._parse_parallelism_config
    transform({"fsdp_config": {"sharding_strategy": "FULL_SHARD"}})
    assert Trainer._parse_parallelism_config is original
    transform({"parallelism_config": {"fsdp2": {}}})
    assert Trainer._parse_parallelism_config is not original


@pytest.mark.parametrize(("node_rank", "expected"), [(None, "3"), ("1", "1")])
def test_node_rank_comes_from_torchrun(monkeypatch, node_rank, expected):
    monkeypatch.setenv("NODE_RANK", "removed at the end")
    monkeypatch.delenv("NODE_RANK")
    monkeypatch.setenv("GROUP_RANK", "3")
    if node_rank is not None:
        monkeypatch.setenv("NODE_RANK", node_rank)
    transform(dict(OTHERS))
    assert os.environ["NODE_RANK"] == expected


def test_importing_it_is_light():
    """LLM Foundry imports every entry point, in runs without FSDP2 too."""
    code = "import sys, composer_fsdp2.foundry; print('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.stdout.strip() == "False", done.stderr


def test_llm_foundry_finds_it():
    found = importlib.metadata.entry_points(group="llmfoundry_config_transforms")
    ours = [entry for entry in found if entry.name == "composer_fsdp2"]
    if not ours:
        pytest.skip("composer-fsdp2 is not installed, only on the path")
    assert ours[0].load() is transform


# --- What it refuses, and what it says. ---


@pytest.mark.parametrize(
    ("cfg", "parts"),
    [
        (
            {"parallelism_config": {"fdsp2": {}}},
            ["does not know 'fdsp2'", "train as if it were not there", "Did you mean 'fsdp2'?"],
        ),
        (
            {"parallelism_config": {"zzz": 1, "yyy": 2}},
            ["'zzz', 'yyy'", "Write fsdp2 or fsdp or tp."],
        ),
        (
            {"parallelism_config": "fsdp2"},
            ["is 'fsdp2'", "takes a mapping", "parallelism_config: {fsdp2: {}}"],
        ),
        ({"parallelism_config": []}, ["is []", "takes a mapping"]),
        (
            {"parallelism_config": {"fsdp2": None}},
            ["'parallelism_config.fsdp2' is None", "not clear", "Write fsdp2: {}"],
        ),
        ({"parallelism_config": {"fsdp2": True}}, ["is True", "takes a mapping"]),
        (
            {"parallelism_config": {"fsdp2": {}, "fsdp": {}}},
            ["both 'fsdp' and 'fsdp2'", "sharded by one", "Remove 'fsdp'"],
        ),
        (
            {"parallelism_config": {"fsdp2": {}}, "fsdp_config": {"verbose": True}},
            ["'parallelism_config.fsdp2' and 'fsdp_config'", "ignore the other", "Move"],
        ),
        (
            {"parallelism_config": {"fsdp": {}}, "fsdp_config": {}},
            ["'parallelism_config.fsdp' and 'fsdp_config'"],
        ),
        (
            {"parallelism_config": {"tp": {}}, "tp_config": {}},
            ["'parallelism_config.tp' and 'tp_config'"],
        ),
        (
            {"parallelism_config": {"fsdp2": {"reshard_after_forwrd": True}}},
            ["'reshard_after_forwrd'", "Did you mean 'reshard_after_forward'?"],
        ),
        (
            {"fsdp_config": {"version": 3}},
            ["'fsdp_config.version' is 3", "another way than asked", "version: 2 for FSDP2"],
        ),
        ({"fsdp_config": {"version": "2"}}, ["is '2'"]),
    ],
)
def test_refuses(cfg, parts):
    with pytest.raises(ConfigError) as caught:
        parse_run_config(cfg)
    for part in parts:
        assert part in str(caught.value)


def test_reports_all_wrong_settings_at_once():
    settings = {"verbose": "yes", "tied_weights": "untie", "shard": 2}
    with pytest.raises(ConfigError) as caught:
        parse_run_config({"parallelism_config": {"fsdp2": settings}})
    assert all(f"'{key}'" in str(caught.value) for key in settings)
