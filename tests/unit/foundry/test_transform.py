"""The config transform: where settings go, and what it refuses."""

from __future__ import annotations

import copy
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from composer.utils import dist

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.foundry.transform import (
    parse_run_config,
    read_in_slices,
    requests_fsdp2,
    transform,
)

OTHERS = {"max_seq_len": 128, "model": {"name": "mpt_causal_lm"}}


@pytest.fixture
def uninstalled():
    from composer_fsdp2 import patches

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


def test_no_planner_is_left_out():
    """LLM Foundry reads a planner that is there as a mapping."""
    block = {"load_planner": None, "save_planner": {"name": {}}}
    parsed = parse_run_config({**OTHERS, "parallelism_config": {"fsdp2": block}})
    assert "load_planner" not in parsed["fsdp_config"]
    assert parsed["fsdp_config"]["save_planner"] == {"name": {}}


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


TP = {"degree": 2, "layer_plan": {"*.up": "colwise", "*.down": "rowwise"}}


@pytest.mark.parametrize(
    "cfg",
    [
        {"parallelism_config": {"fsdp2": {}, "tp": TP}},
        {"parallelism_config": {"fsdp2": {"tensor_parallel": TP}}},
        {"parallelism_config": {"fsdp2": {}}, "tp_config": TP},
        {"fsdp_config": {"version": 2}, "tp_config": TP},
    ],
)
def test_tensor_parallelism_is_a_setting_of_fsdp2(cfg):
    """LLM Foundry's own handling of `tp_config` takes strategies alone."""
    parsed = parse_run_config(cfg)
    assert "tp_config" not in parsed
    assert parsed["fsdp_config"]["tensor_parallel"] == TP
    # For `init_device: mixed` LLM Foundry would make it true.
    full = {"parallelism_config": {"fsdp2": {"state_dict_type": "full", "tensor_parallel": 2}}}
    assert parse_run_config(full)["fsdp_config"]["load_monolith_rank0_only"] is False
    full = {"parallelism_config": {"fsdp2": {"state_dict_type": "full", "tensor_parallel": 1}}}
    assert "load_monolith_rank0_only" not in parse_run_config(full)["fsdp_config"]


@pytest.mark.parametrize(
    "cfg",
    [
        {"parallelism_config": {"fsdp2": {}, "tp": {"strategy": "ffn"}}},
        {"parallelism_config": {"fsdp2": {"tensor_parallel": {"strategy": "ffn"}}}},
        {"parallelism_config": {"fsdp2": {}}, "tp_config": {"strategy": "ffn"}},
        {"fsdp_config": {"version": 2}, "tp_config": {"strategy": "ffn"}},
    ],
)
def test_a_strategy_beside_fsdp2_is_refused(cfg):
    with pytest.raises(ConfigError, match=r"the strategy 'ffn'.*drift apart. Take 'strategy' out"):
        parse_run_config(cfg)


LOADER = {"name": "text", "dataset": {"local": "x", "streams": {"a": {"local": "y"}}}}


@pytest.mark.usefixtures("uninstalled")
def test_every_loader_gives_a_group_the_same(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    own = {"name": "mine", "dataset": {}}
    cfg = {
        "parallelism_config": {"fsdp2": {}, "tp": {"degree": 2}},
        "global_train_batch_size": 12,  # of 4 groups
        "train_loader": LOADER,
        "eval_loaders": [{**LOADER, "label": "a"}, own],
    }
    parsed = transform(cfg)
    assert parsed["train_loader"]["dataset"]["replication"] == 2
    assert parsed["eval_loaders"][0]["dataset"]["replication"] == 2
    assert parsed["eval_loaders"][1] == own
    assert "replication" not in LOADER["dataset"]
    with pytest.raises(ConfigError, match="is 6, which the 4 groups of dp_shard 4 x tp 2 cannot"):
        transform({**cfg, "global_train_batch_size": 6})
    stream = {"name": "text", "dataset": {"streams": {"a": {"replication": 8}}}}
    with pytest.raises(ConfigError, match=r"train_loader.dataset.streams.a.replication is 8"):
        transform({**cfg, "train_loader": stream})
    with pytest.raises(ConfigError, match="LLM Foundry has divided the batch by the number of"):
        transform({**cfg, "device_train_batch_size": 1})
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="does not divide the world size 1"):
        transform(cfg)


def test_ep_is_a_setting_of_fsdp2():
    block = {"ep": {"degree": 4}, "fsdp2": {}}
    parsed = parse_run_config({**OTHERS, "parallelism_config": block})
    assert parsed["fsdp_config"]["expert_parallel"] == {"degree": 4}
    with pytest.raises(ConfigError, match="are set"):
        parse_run_config({"parallelism_config": {"ep": 2, "fsdp2": {"expert_parallel": 2}}})


def test_an_empty_fsdp2_is_fsdp2_with_default_settings():
    empty = {"parallelism_config": {"fsdp2": None}, "tp_config": {}}
    assert parse_run_config(empty) == parse_run_config(
        {"parallelism_config": {"fsdp2": {}}, "tp_config": {}}
    )
    assert requests_fsdp2(parse_run_config(empty))


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


def test_composer_knows_the_node_before_distributed_starts(monkeypatch, uninstalled):
    monkeypatch.setenv("GROUP_RANK", "3")
    transform(dict(OTHERS))
    assert dist.get_node_rank() == 0, "no FSDP2, no change"
    transform({**OTHERS, "parallelism_config": {"fsdp2": {}}})
    assert dist.get_node_rank() == 3


def test_importing_it_is_light():
    """LLM Foundry imports every entry point, in runs without FSDP2 too."""
    code = "import sys, composer_fsdp2.foundry.transform; print('torch' in sys.modules)"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.stdout.strip() == "False", done.stderr


def test_llm_foundry_finds_it():
    found = importlib.metadata.entry_points(group="llmfoundry_config_transforms")
    ours = [entry for entry in found if entry.name == "composer_fsdp2"]
    assert ours, "composer-fsdp2 is only on the path; install it, or LLM Foundry finds nothing"
    assert ours[0].load() is transform


def test_llm_foundry_finds_the_callback():
    from composer_fsdp2.prepare.measured_step import MONITOR
    from composer_fsdp2.trainer.extensions.monitor import FSDP2Monitor

    found = importlib.metadata.entry_points(group="llmfoundry_callbacks")
    ours = [entry for entry in found if entry.name == MONITOR]
    assert ours, "composer-fsdp2 is only on the path; install it, or LLM Foundry finds nothing"
    assert ours[0].load() is FSDP2Monitor


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
    assert all(re.search(rf"\b{key}\b", str(caught.value)) for key in settings)


# --- Pretrained models. ---


@pytest.fixture
def two_ranks(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)


def pretrained(folder: Path, config: str = "{}", weights: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config)
    (folder / weights).touch()
    return folder


def run_of(path: Path | str, fsdp2: dict | None = None, **model) -> dict:
    settings = {
        "name": "hf_causal_lm",
        "pretrained_model_name_or_path": str(path),
        "init_device": "mixed",
    }
    return {"model": settings | model, "parallelism_config": {"fsdp2": fsdp2 or {}}}


def in_slices(cfg: dict) -> dict:
    return read_in_slices(parse_run_config(cfg))


@pytest.mark.parametrize("device", ["mixed", "meta"])
@pytest.mark.parametrize("flag", [{}, {"pretrained": True}])
@pytest.mark.parametrize("weights", ["model.safetensors", "model.safetensors.index.json"])
def test_a_local_folder_is_read_in_slices(device, flag, weights, two_ranks, tmp_path, capsys):
    folder = pretrained(tmp_path / "model", weights=weights)
    cfg = run_of(folder, init_device=device, **flag)
    before = copy.deepcopy(cfg)
    parsed = in_slices(cfg)
    expected = {**cfg["model"], "pretrained": False, "init_device": "meta"}
    assert parsed["model"] == expected
    assert parsed["fsdp_config"]["pretrained_weights"] == str(folder)
    assert f"only its shards of '{folder}'" in capsys.readouterr().err
    assert cfg == before


@pytest.mark.parametrize("named", ["run_name", "RUN_NAME"])
def test_autoresume_that_llm_foundry_announces(named, two_ranks, capsys, monkeypatch):
    """Its log says that autoresume is on, and it is not: an answer follows."""
    run, env = {"parallelism_config": {"fsdp2": {}}, "save_folder": "runs"}, named.isupper()
    if env:
        monkeypatch.setenv(named, "r")
    else:
        run[named] = "r"
    for more in ({}, {"autoresume": False}):
        assert transform({**run, **more}).get("autoresume", False) is False
        assert capsys.readouterr().err.count("autoresume is off") == 1
    others = ({"autoresume": True}, {"save_overwrite": True}, {"save_weights_only": True})
    for more in (*others, {"save_folder": None}):
        transform({**run, **more})
    monkeypatch.setenv("RANK", "1")
    transform(run)
    assert "autoresume" not in capsys.readouterr().err


def test_other_ranks_do_not_say_it_again(two_ranks, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert "pretrained_weights" in in_slices(run_of(pretrained(tmp_path)))["fsdp_config"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "model",
    [
        {"init_device": "cpu"},
        {"pretrained": False},
        {"name": "hf_t5"},
        {"peft_config": {"r": 8}},
        {"pretrained_lora_id_or_path": "there"},
        {"load_in_8bit": True},
        {"allow_embedding_resizing": True},
        {"pretrained_model_name_or_path": "org/not-in-the-cache"},
        {"pretrained_model_name_or_path": "not a name: of anything"},
    ],
    ids=lambda model: next(iter(model)),
)
def test_what_else_stays_with_llm_foundry(model, two_ranks, tmp_path):
    cfg = run_of(pretrained(tmp_path), **model)
    assert in_slices(cfg) == parse_run_config(cfg)


@pytest.mark.parametrize(
    "config", ['{"text_config": {"a": 1}}', "[]", "", '{"quantization_config": {"b": 4}}']
)
def test_folders_that_are_more_than_a_model(config, two_ranks, tmp_path):
    cfg = run_of(pretrained(tmp_path, config))
    assert in_slices(cfg) == parse_run_config(cfg)


@pytest.mark.parametrize(
    ("overrides", "slices"),
    [
        ({"num_hidden_layers": 1}, False),
        ({"tie_word_embeddings": True}, False),
        ({"num_hidden_layers": 2, "layer_norm_eps": 1e-6, "output_router_logits": True}, True),
    ],
)
def test_overrides_that_add_or_remove_weights(overrides, slices, two_ranks, tmp_path):
    """`from_pretrained` takes those."""
    folder = pretrained(tmp_path, '{"num_hidden_layers": 2, "tie_word_embeddings": false}')
    parsed = in_slices(run_of(folder, config_overrides=overrides))
    assert ("pretrained_weights" in parsed["fsdp_config"]) is slices


def test_pickles_stay_with_llm_foundry(two_ranks, tmp_path):
    cfg = run_of(pretrained(tmp_path, weights="pytorch_model.bin"))
    assert in_slices(cfg) == parse_run_config(cfg)


@pytest.mark.parametrize("path", [None, "/other"])
def test_what_is_written_is_followed(path, two_ranks, tmp_path):
    cfg = run_of(pretrained(tmp_path), {"pretrained_weights": path})
    assert in_slices(cfg) == parse_run_config(cfg)


def test_one_rank_reads_it_too(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    folder = pretrained(tmp_path)
    assert in_slices(run_of(folder))["fsdp_config"]["pretrained_weights"] == str(folder)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_name_in_the_local_cache(nodes, two_ranks, tmp_path, monkeypatch):
    """On several nodes the caches may differ."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", str(2 * nodes))
    repository = tmp_path / "models--org--name"
    folder = pretrained(repository / "snapshots" / "a1b2")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a1b2")
    found = in_slices(run_of("org/name"))["fsdp_config"].get("pretrained_weights")
    assert found == (str(folder) if nodes == 1 else None)
