"""Every setting of Composer's FSDP1, key by key, as settings of FSDP2."""

from __future__ import annotations

import dataclasses

import pytest
from composer.utils.parallelism import FSDPConfig

from composer_fsdp2.config.fsdp1 import FSDP1_KEYS, convert_fsdp1, convert_fsdp1_unit
from composer_fsdp2.config.schema import FSDP2Config, parse_config
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.prepare.settings import resolve_settings


def convert(world_size: int = 8, local_world_size: int = 4, **config):
    return convert_fsdp1(config, world_size=world_size, local_world_size=local_world_size)


def test_the_keys_are_those_of_composer():
    theirs = {f.name for f in dataclasses.fields(FSDPConfig)} - {"_device_mesh"}
    assert theirs == FSDP1_KEYS


DEFAULTS = {f.name: f.default for f in dataclasses.fields(FSDPConfig) if f.name != "_device_mesh"}


def test_composers_defaults_convert_to_ours_but_for_checkpoints_and_one_unit_in_backward():
    settings = parse_config(convert(**DEFAULTS).settings)
    assert settings == FSDP2Config(state_dict_type="full", backward_prefetch=0)
    assert resolve_settings(FSDPConfig()).backward_prefetch is None  # nobody has asked for it


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("activation_checkpointing", True),
        ("activation_cpu_offload", True),
        ("cpu_offload", True),
        ("data_parallel_replicate_degree", 2),
        ("data_parallel_shard_degree", 4),
        ("load_monolith_rank0_only", True),
        ("load_planner", {"mine": {}}),
        ("mixed_precision", "PURE"),
        ("save_planner", {"mine": {}}),
        ("sharded_ckpt_prefix_dir", "ba{batch}"),
        ("state_dict_type", "sharded"),
        ("verbose", True),
    ],
)
def test_keys_that_mean_the_same(key, value):
    conversion = convert(**{key: value})
    assert conversion.settings[key] == value
    assert conversion.notes == ()


@pytest.mark.parametrize("value", ["BACKWARD_POST", "backward_post", "NONE", None])
def test_one_unit_at_a_time_in_backward_stays_so(value):
    conversion = convert(backward_prefetch=value)
    assert conversion.settings["backward_prefetch"] == 0
    (note,) = conversion.notes
    assert note.startswith(f"'backward_prefetch: {value}' becomes 0")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("activation_checkpointing_reentrant", False),
        ("backward_prefetch", "BACKWARD_PRE"),
        ("backward_prefetch_limit", 2),
        ("forward_prefetch", True),
        ("forward_prefetch_limit", 2),
        ("limit_all_gathers", False),
        ("sync_module_states", True),
        ("te_checkpoint_wrapper", True),
        ("use_orig_params", False),
    ],
)
def test_keys_that_are_not_needed_are_noted(key, value):
    conversion = convert(**{key: value})
    assert conversion.settings == convert().settings
    (note,) = conversion.notes
    assert note.startswith(f"'{key}' is no longer needed: ")


@pytest.mark.parametrize(
    ("key", "value", "harmless"),
    [
        ("auto_wrap", False, True),
        ("ignored_modules", ["a"], None),
        ("keep_low_precision_grads", True, False),
        ("process_group", "node", None),
        ("te_shard_fp8_weight", True, False),
    ],
)
def test_keys_that_would_change_the_run_are_refused(key, value, harmless):
    with pytest.raises(ConfigError) as caught:
        convert(**{key: value})
    message = str(caught.value)
    assert f"'{key}: {value}' of FSDP1 has no equal in FSDP2" in message
    assert "Instead: " in message
    assert convert(**{key: harmless}) == convert()


def test_the_tables_above_cover_every_key():
    marks = [
        mark
        for test in (
            test_keys_that_mean_the_same,
            test_keys_that_are_not_needed_are_noted,
            test_keys_that_would_change_the_run_are_refused,
        )
        for mark in test.pytestmark
    ]
    covered = [row[0] for mark in marks for row in mark.args[1]]
    assert sorted([*covered, "sharding_strategy"]) == sorted(FSDP1_KEYS)


@pytest.mark.parametrize(
    ("strategy", "meant"),
    [
        ("FULL_SHARD", {"reshard_after_forward": "auto"}),
        ("full_shard", {"reshard_after_forward": "auto"}),
        ("SHARD_GRAD_OP", {"reshard_after_forward": False}),
        (
            "HYBRID_SHARD",
            {
                "reshard_after_forward": "auto",
                "data_parallel_shard_degree": 4,
                "data_parallel_replicate_degree": 2,
            },
        ),
        (
            "_HYBRID_SHARD_ZERO2",
            {
                "reshard_after_forward": False,
                "data_parallel_shard_degree": 4,
                "data_parallel_replicate_degree": 2,
            },
        ),
        (
            "NO_SHARD",
            {
                "reshard_after_forward": False,
                "data_parallel_shard_degree": 1,
                "data_parallel_replicate_degree": 8,
            },
        ),
    ],
)
def test_every_strategy(strategy, meant):
    settings = convert(sharding_strategy=strategy).settings
    assert settings == {"state_dict_type": "full", **meant}
    assert parse_config(settings).state_dict_type == "full"


def test_hybrid_shard_keeps_the_degree_it_was_given():
    settings = convert(sharding_strategy="HYBRID_SHARD", data_parallel_shard_degree=2).settings
    assert settings["data_parallel_shard_degree"] == 2
    assert settings["data_parallel_replicate_degree"] == 4
    for wrong in (0, -2, "two"):
        settings = convert(sharding_strategy="HYBRID_SHARD", data_parallel_shard_degree=wrong)
        with pytest.raises(ConfigError, match="data_parallel_shard_degree"):
            parse_config(settings.settings)


def test_given_degrees_come_before_those_of_the_strategy():
    settings = convert(
        sharding_strategy="HYBRID_SHARD",
        data_parallel_shard_degree=2,
        data_parallel_replicate_degree=4,
    ).settings
    assert settings["data_parallel_shard_degree"] == 2
    assert settings["data_parallel_replicate_degree"] == 4


def test_mistakes_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        convert(sharding_strategy="FULL_SHRAD", auto_wrap=False, forward_prefetc=True)
    message = str(caught.value)
    assert "Did you mean 'FULL_SHARD'?" in message
    assert "'auto_wrap: False'" in message
    assert "Did you mean 'forward_prefetch'?" in message


def test_a_strategy_nobody_knows():
    with pytest.raises(ConfigError, match=r"'ZERO3'.* Use one of FULL_SHARD, SHARD_GRAD_OP"):
        convert(sharding_strategy="ZERO3")


def test_settings_of_single_units():
    conversion = convert_fsdp1_unit(
        "'a'", {"sharding_strategy": "SHARD_GRAD_OP", "forward_prefetch": True, "anything": 1}
    )
    assert conversion.settings == {"reshard_after_forward": False, "anything": 1}
    assert conversion.notes == (
        "'forward_prefetch' of 'a' is no longer needed: FSDP2 prefetches from its own stream "
        "without blocking the CPU.",
    )


def test_no_shard_does_not_ignore_degrees():
    with pytest.raises(ConfigError, match="NO_SHARD holds a replica on each of 8 ranks"):
        convert_fsdp1(
            {"sharding_strategy": "NO_SHARD", "data_parallel_shard_degree": 4},
            world_size=8,
            local_world_size=8,
        )
