"""Every form in which users of Composer have their settings."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
from composer.utils.parallelism import FSDP2Config as ComposerFSDP2Config
from composer.utils.parallelism import FSDPConfig, ParallelismConfig, TPConfig
from omegaconf import OmegaConf
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from composer_fsdp2.config.parallel import TensorSpec
from composer_fsdp2.config.schema import FSDP2Config, parse_config
from composer_fsdp2.config.wrapping import PrecisionSpec, Selector, UnitSettings, WrapPolicy
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.prepare.settings import TrainerFSDP2Config, resolve_settings
from composer_fsdp2.trainer.config import concerns_fsdp2, parse_parallelism_config


@pytest.fixture(autouse=True)
def no_switch(monkeypatch):
    monkeypatch.delenv("FSDP_VERSION", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture
def eight_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")


def composers(**values) -> ComposerFSDP2Config:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ComposerFSDP2Config(**values)


def error_of(config) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_parallelism_config(config)
    return str(caught.value)


# --- our class in Composer's place ---


def test_it_is_composers_and_says_nothing_about_experiments():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = TrainerFSDP2Config()
    assert isinstance(config, ComposerFSDP2Config)


def test_composers_fixed_answers_are_real_fields_here():
    load, save = DefaultLoadPlanner(), DefaultSavePlanner()
    config = TrainerFSDP2Config(
        data_parallel_shard_degree=4,
        data_parallel_replicate_degree=2,
        load_planner=load,
        save_planner=save,
        sharded_ckpt_prefix_dir="ba{batch}",
    )
    assert (config.data_parallel_shard_degree, config.data_parallel_replicate_degree) == (4, 2)
    assert (config.load_planner, config.save_planner) == (load, save)
    assert config.sharded_ckpt_prefix_dir == "ba{batch}"
    config.device_mesh = None
    config.sync_module_states = True
    assert config.use_orig_params
    composers_fields = {f.name for f in dataclasses.fields(ComposerFSDP2Config)}
    assert composers_fields <= {f.name for f in dataclasses.fields(TrainerFSDP2Config)}


def test_fields_and_defaults_are_those_of_the_core():
    assert TrainerFSDP2Config().settings == FSDP2Config()
    ours = {f.name for f in dataclasses.fields(TrainerFSDP2Config)}
    assert {f.name for f in dataclasses.fields(FSDP2Config)} <= ours


def test_there_and_back():
    settings = FSDP2Config(
        data_parallel_replicate_degree=2,
        reshard_after_forward=4,
        wrap_policy=WrapPolicy(classes=(Selector("A", UnitSettings(reshard_after_forward=2)),)),
        ignored_params=("a",),
    )
    assert TrainerFSDP2Config.of(settings).settings == settings


def test_it_is_checked_like_the_core():
    with pytest.raises(ConfigError, match="tied_weights: 'untie'"):
        TrainerFSDP2Config(tied_weights="untie")


# --- resolve_settings ---


def test_forms_of_settings():
    expected = FSDP2Config(reshard_after_forward=False)
    for form in (
        expected,
        TrainerFSDP2Config(reshard_after_forward=False),
        {"reshard_after_forward": False},
        OmegaConf.create({"reshard_after_forward": False}),
        composers(reshard_after_forward=False),
    ):
        assert resolve_settings(form) == expected


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({}, {}),
        ({"reshard_after_forward": True}, {"reshard_after_forward": "auto"}),
        ({"reshard_after_forward": 2}, {"reshard_after_forward": 2}),
        ({"mixed_precision": "PURE"}, {"mixed_precision": "PURE"}),
        ({"state_dict_type": "full"}, {"state_dict_type": "full"}),
        ({"activation_checkpointing": True}, {"activation_checkpointing": True}),
        ({"activation_cpu_offload": True}, {"activation_cpu_offload": True}),
        ({"verbose": True}, {"verbose": True}),
        (
            {"load_monolith_rank0_only": True, "state_dict_type": "full"},
            {"load_monolith_rank0_only": True, "state_dict_type": "full"},
        ),
    ],
)
def test_composers_own_settings(given, meant):
    assert resolve_settings(composers(**given)) == parse_config(meant)


def test_an_fsdp1_config_is_converted_aloud():
    with pytest.warns(UserWarning, match="FSDP1 to FSDP2: 'forward_prefetch' is no longer needed"):
        settings = resolve_settings(
            FSDPConfig(sharding_strategy="SHARD_GRAD_OP", forward_prefetch=True)
        )
    assert settings == FSDP2Config(reshard_after_forward=False, state_dict_type="full")


def test_an_fsdp1_config_says_only_what_was_given():
    """Its other fields are class defaults; a warning about each would be noise."""
    assert resolve_settings(FSDPConfig()) == FSDP2Config(state_dict_type="full")


def test_an_fsdp1_config_takes_misspelt_words_and_is_refused():
    with pytest.raises(ConfigError, match="Did you mean 'sharding_strategy'"):
        resolve_settings(FSDPConfig(sharding_strateg="SHARD_GRAD_OP"))


@pytest.mark.parametrize("thing", [None, "full", 2, ["verbose"], object()])
def test_anything_else_is_refused_by_its_type(thing):
    with pytest.raises(ConfigError, match=f"is a {type(thing).__name__}"):
        resolve_settings(thing)


# --- parse_parallelism_config ---


def test_nothing_is_nothing():
    assert parse_parallelism_config(None) is None
    assert parse_parallelism_config({}) is None
    assert parse_parallelism_config({"fsdp": None, "tp": None}) is None
    assert parse_parallelism_config(ParallelismConfig()) is None


@pytest.mark.parametrize("written", [{"fsdp2": None}, {"fsdp": None, "fsdp2": None, "tp": None}])
def test_an_empty_block_is_fsdp2_with_default_settings(written):
    assert parse_parallelism_config(written) == parse_parallelism_config({"fsdp2": {}})


@pytest.mark.parametrize("switch", [True, False])
def test_fsdp2_is_no_switch(switch):
    with pytest.raises(ConfigError, match=r"is no switch.*fsdp2: \{\} for FSDP2"):
        parse_parallelism_config({"fsdp2": switch})


@pytest.mark.parametrize(
    "tp",
    [
        {"tensor_parallel_degree": 1, "layer_plan": {"*.up": ColwiseParallel()}},
        {"degree": 1, "layer_plan": {"*.up": "colwise"}},
        TPConfig(layer_plan={"*.up": ColwiseParallel()}),
    ],
)
def test_tensor_parallelism_beside_it_is_its_setting(tp):
    parsed = parse_parallelism_config({"fsdp2": None, "tp": tp})
    assert parsed is not None
    assert parsed.tp is None
    assert parsed.fsdp2.settings.tensor_parallel == TensorSpec(layer_plan=(("*.up", "colwise"),))


@pytest.mark.parametrize(
    ("tp", "match"),
    [
        ({"tensor_parallel_degree": 2}, "degree is 2, which does not divide the world size 1"),
        ({"strategy": "ffn"}, "strategy 'ffn'"),
        ({"layer_plan": {"*.norm": SequenceParallel()}}, "SequenceParallel is invalid"),
        ({"layer_plan": {"*.up": RowwiseParallel(output_layouts=Shard(1))}}, "RowwiseParallel"),
        ({"degrees": 2}, "Did you mean 'degree'"),
        (TPConfig(device_mesh=object()), "TPConfig has a device_mesh"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_tensor_parallelism_that_is_wrong(tp, match):
    with pytest.raises(ConfigError, match=match):
        parse_parallelism_config({"fsdp2": None, "tp": tp})


@pytest.mark.parametrize("key", ["load_planner", "save_planner"])
def test_the_trainer_makes_no_planner_of_a_name(key):
    with pytest.raises(ConfigError, match=f"'{key}' is .*Only LLM Foundry"):
        parse_parallelism_config({"fsdp2": {key: {"mine": {}}}})


@pytest.mark.parametrize(
    "written",
    [
        {"reshard_after_forward": False},
        OmegaConf.create({"reshard_after_forward": False}),
        FSDP2Config(reshard_after_forward=False),
        TrainerFSDP2Config(reshard_after_forward=False),
        composers(reshard_after_forward=False),
    ],
    ids=["mapping", "OmegaConf", "core", "trainer", "Composer"],
)
@pytest.mark.parametrize("key", ["fsdp2", "fsdp"])
def test_fsdp2_in_every_form(key, written):
    if key == "fsdp" and not dataclasses.is_dataclass(written):
        written = {**written, "version": 2}
    parsed = parse_parallelism_config({key: written})
    assert parsed.fsdp is None
    assert type(parsed.fsdp2) is TrainerFSDP2Config
    assert parsed.fsdp2.settings == FSDP2Config(reshard_after_forward=False)


def test_an_empty_block_asks_for_fsdp2_with_defaults():
    assert parse_parallelism_config({"fsdp2": {}}).fsdp2.settings == FSDP2Config()


def test_fsdp1_settings_stay_fsdp1():
    written = {"sharding_strategy": "SHARD_GRAD_OP", "use_orig_params": False}
    for block in (written, {**written, "version": 1}, OmegaConf.create(written)):
        parsed = parse_parallelism_config({"fsdp": block})
        assert parsed.fsdp2 is None
        assert type(parsed.fsdp) is FSDPConfig
        assert parsed.fsdp.sharding_strategy == "SHARD_GRAD_OP"
        assert parsed.fsdp.use_orig_params is False
        assert not hasattr(parsed.fsdp, "version")
    given = FSDPConfig(**written)
    assert parse_parallelism_config({"fsdp": given}).fsdp is given


def test_parallelism_config_objects():
    fsdp1 = FSDPConfig()
    assert parse_parallelism_config(ParallelismConfig(fsdp=fsdp1)).fsdp is fsdp1
    parsed = parse_parallelism_config(ParallelismConfig(fsdp2=composers()))
    assert type(parsed.fsdp2) is TrainerFSDP2Config
    assert parse_parallelism_config(ParallelismConfig()) is None
    assert "'fsdp' and 'fsdp2'" in error_of(ParallelismConfig(fsdp=fsdp1, fsdp2=composers()))


def test_tensor_parallelism_passes_through():
    parsed = parse_parallelism_config({"tp": {"tensor_parallel_degree": 2}})
    assert parsed == ParallelismConfig(tp=TPConfig(tensor_parallel_degree=2))
    given = TPConfig()
    assert parse_parallelism_config({"tp": given}).tp is given


@pytest.mark.table(
    "written1-not a key of parallelism_config",
    "written3-both 'fsdp' and 'fsdp2'",
    "written5-'sharding_strategy' is a key of FSDP1",
    "written6-is a str",
    "written7-is true. It takes settings",
    "written8-'version' of parallelism_config.fsdp2 is 1",
    "written9-'version' of parallelism_config.fsdp is 3",
    "written10-Did you mean 'sharding_strategy'?",
    "written11-FSDP2 settings go under 'fsdp2'",
    "written12-Did you mean 'tied_weights'?",
    "written13-world size 1",
    "written14-shard degree 1",
)
@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"fdsp2": {}}, "Did you mean 'fsdp2'?"),
        ({"ddp": {}}, "not a key of parallelism_config"),
        ({"xyz": {}}, "Valid keys: fsdp, fsdp2, tp."),
        ({"fsdp": {}, "fsdp2": {}}, "both 'fsdp' and 'fsdp2'"),
        ({"fsdp2": {"reshard_after_forwrd": True}}, "Did you mean 'reshard_after_forward'?"),
        ({"fsdp2": {"sharding_strategy": "FULL_SHARD"}}, "'sharding_strategy' is a key of FSDP1"),
        ({"fsdp2": "yes"}, "is a str"),
        ({"fsdp2": True}, "is true. It takes settings"),
        ({"fsdp2": {"version": 1}}, "'version' of parallelism_config.fsdp2 is 1"),
        ({"fsdp": {"version": 3}}, "'version' of parallelism_config.fsdp is 3"),
        ({"fsdp": {"sharding_strateg": "FULL_SHARD"}}, "Did you mean 'sharding_strategy'?"),
        ({"fsdp": {"tied_weights": "lift"}}, "FSDP2 settings go under 'fsdp2'"),
        ({"fsdp": {"version": 2, "tied_weight": "lift"}}, "Did you mean 'tied_weights'?"),
        ({"fsdp2": {"data_parallel_shard_degree": 2}}, "world size 1"),
        ({"fsdp2": {"reshard_after_forward": 2}}, "shard degree 1"),
    ],
)
def test_what_would_silently_become_something_else_is_an_error(written, said):
    assert said in error_of(written)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("fsdp2_config", "Valid keys: fsdp, fsdp2, tp."),
        ("wrap_policy", "Settings of FSDP2 go under 'fsdp2'."),
        ("fully_shard", "Valid keys: fsdp, fsdp2, tp."),
        ("parallelism_config", "Valid keys: fsdp, fsdp2, tp."),
    ],
)
def test_settings_at_another_level_are_not_left_to_composer(key, said):
    assert concerns_fsdp2({key: {}})
    assert said in error_of({key: {}})


def test_degrees_fit_the_run(eight_ranks):
    parsed = parse_parallelism_config({"fsdp2": {"data_parallel_replicate_degree": 2}})
    assert parsed.fsdp2.data_parallel_replicate_degree == 2
    assert "world size 8" in error_of({"fsdp2": {"data_parallel_shard_degree": 3}})
    both = {"data_parallel_replicate_degree": 2, "reshard_after_forward": 8}
    assert "shard degree 4" in error_of({"fsdp2": both})


# --- Composer's switch ---


def test_the_switch_converts_fsdp1_settings(monkeypatch, eight_ranks):
    monkeypatch.setenv("FSDP_VERSION", "2")
    block = {
        "sharding_strategy": "HYBRID_SHARD",
        "backward_prefetch": "BACKWARD_PRE",
        "activation_checkpointing": True,
        "mixed_precision": "PURE",
    }
    with pytest.warns(UserWarning, match="'backward_prefetch' is no longer needed"):
        parsed = parse_parallelism_config({"fsdp": block})
    assert parsed.fsdp is None
    assert parsed.fsdp2.settings == FSDP2Config(
        data_parallel_shard_degree=4,
        data_parallel_replicate_degree=2,
        activation_checkpointing=True,
        mixed_precision="PURE",
        state_dict_type="full",
    )


def test_the_switch_leaves_fsdp2_settings_as_they_are(monkeypatch):
    monkeypatch.setenv("FSDP_VERSION", "2")
    for key in ("fsdp", "fsdp2"):
        parsed = parse_parallelism_config({key: {"tied_weights": "error"}})
        assert parsed.fsdp2.settings == FSDP2Config(tied_weights="error")
    low = "keep_low_precision_grads"
    assert low in error_of({"fsdp": {low: True}})
    assert "'forward_prefetc'" in error_of({"fsdp": {"forward_prefetc": True}})


def test_a_version_in_the_settings_comes_before_the_switch(monkeypatch):
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert parse_parallelism_config({"fsdp": {"version": 1}}).fsdp2 is None
    monkeypatch.setenv("FSDP_VERSION", "1")
    assert parse_parallelism_config({"fsdp": {"version": 2}}).fsdp is None


def test_a_switch_that_says_one_changes_nothing(monkeypatch):
    monkeypatch.setenv("FSDP_VERSION", "1")
    assert parse_parallelism_config({"fsdp": {}}).fsdp2 is None
    assert "a key of FSDP1" in error_of({"fsdp2": {"sharding_strategy": "FULL_SHARD"}})


@pytest.mark.parametrize("given", ["DEFAULT", {"reduce_dtype": "fp32", "buffer_dtype": "bf16"}])
def test_master_weights_dtype_of_llm_foundry(given):
    """It writes its own precision into the block, with a key of FSDP1."""
    from llmfoundry.utils.config_utils import process_init_device

    block = {"version": 2, "mixed_precision": given}
    process_init_device({"master_weights_dtype": "bf16"}, block)
    spec = parse_parallelism_config({"fsdp2": block}).fsdp2.settings.mixed_precision
    asked = given if isinstance(given, dict) else {}
    assert spec == PrecisionSpec(**asked)
