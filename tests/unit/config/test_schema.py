"""The configuration: what it takes, and that every mistake in it is named, all at once."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

from composer_fsdp2.config.blocks import (
    ActivationSpec,
    ChunkingSpec,
    CompileSpec,
    Float8Spec,
    TilingSpec,
)
from composer_fsdp2.config.messages import nearest
from composer_fsdp2.config.parallel import ExpertSpec, SequenceSpec, TensorSpec
from composer_fsdp2.config.placement import Communication, CPUOffload, OptimizerState
from composer_fsdp2.config.schema import FIELDS, FSDP2Config, parse_config
from composer_fsdp2.config.setting import plain
from composer_fsdp2.config.wrapping import (
    DTYPES,
    PrecisionSpec,
    Selector,
    UnitSettings,
    WrapPolicy,
    parse_unit_settings,
)
from composer_fsdp2.errors import ConfigError

KEYS = list(FIELDS)
LOAD, SAVE = DefaultLoadPlanner(), DefaultSavePlanner()

GOOD = {
    "data_parallel_shard_degree": [1, 8, -1],
    "data_parallel_replicate_degree": [None, 1, 2],
    "reshard_after_forward": ["auto", True, False, 1, 4],
    "eval_reshard_after_forward": [None, True, False],
    "forward_prefetch": [0, 1, 3],
    "backward_prefetch": [None, 0, 1, 3],
    "gradient_sync": ["every", "last", "reduce_scatter_only"],
    "order_check": ["first", "always", "never"],
    "mixed_precision": ["DEFAULT", "PURE", "FULL"],
    "keep_fp32": [None, (), ("*norm", "re:.*gate")],
    "unused_parameters": ["auto", True, False, ("tower", "re:.*experts")],
    "tied_weights": ["lift", "error"],
    "ignored_params": [(), ("a.*",), ("a.weight", "b.*")],
    "frozen": ["shard", "replicate"],
    "forward_methods": [(), ("model.encode",)],
    "activation_checkpointing": [
        True,
        False,
        ActivationSpec(),
        ActivationSpec(classes=("Block",), every=2, mode="selective"),
        *(ActivationSpec(target=t) for t in (2, "first-1, 3-5", (0, "last-2", "range-1-3"))),
    ],
    "activation_cpu_offload": [True, False],
    "compile": [True, False, CompileSpec(), CompileSpec(backend="eager", dynamic=True)],
    "tensor_parallel": [None, TensorSpec(), TensorSpec(layer_plan=(("*.up", "colwise"),))],
    "sequence_parallel": [None, SequenceSpec(), SequenceSpec(degree=4, method="ulysses")],
    "expert_parallel": [None, ExpertSpec(), ExpertSpec(degree=4, modules=("*.experts",))],
    "tiled_mlp": [None, TilingSpec(shards=2), TilingSpec(shards=4, names=("*.mlp",))],
    "chunked_loss": [None, ChunkingSpec(chunks=1), ChunkingSpec(chunks=8, names=("head",))],
    "fp8": [
        True,
        False,
        Float8Spec(all_gather=True, names=("*.up",)),
        Float8Spec(recipe="rowwise"),
    ],
    "cpu_offload": [True, False, CPUOffload(pin_memory=False)],
    "local_step": ["auto", True, False],
    "optimizer_state": [
        OptimizerState(),
        OptimizerState(dtype="bf16", device="cpu"),
        OptimizerState(dtype="fp32"),
        OptimizerState(bits=8),
    ],
    "communication": [Communication(), Communication(reduce_scatter_buffers=2)],
    "pretrained_weights": [None, "/a/folder"],
    "state_dict_type": ["full", "sharded"],
    "load_monolith_rank0_only": [False],
    "load_planner": [None, LOAD, {"mine": {"option": 1}}],
    "save_planner": [None, SAVE, {"mine": {}}],
    "sharded_ckpt_prefix_dir": ["ba{batch}"],
    "async_save": [True, False],
    "verbose": [True, False],
    "wrap_policy": [WrapPolicy(), WrapPolicy(min_num_params=10)],
}
"""Values the constructor takes; the parser takes lists for tuples and mappings for objects."""

BAD = {
    "load_planner": [
        "x",
        object(),
        1,
        True,
        [],
        {},
        {"a": 1},
        {"a": {}, "b": {}},
        SAVE,
        type(LOAD),
    ],
    "save_planner": ["x", object(), 1, False, [], {}, {"a": None}, LOAD, type(SAVE)],
    "data_parallel_shard_degree": [0, -2, 1.5, True, "2", None, []],
    "data_parallel_replicate_degree": [0, -2, 1.5, False, "2"],
    "reshard_after_forward": [0, -1, 1.5, "yes", "AUTO", None, [2]],
    "eval_reshard_after_forward": ["auto", 2, "no"],
    "forward_prefetch": [True, -1, None, "BACKWARD_PRE", 1.5],
    "backward_prefetch": [True, -1, "BACKWARD_PRE", 1.5],
    "gradient_sync": ["lasts", True, None, 2],
    "order_check": ["off", False, None, "First"],
    "mixed_precision": ["PURR", None, 1, True, []],
    "keep_fp32": ["*norm", True, 3, ("",), {"norm": {}}],
    "unused_parameters": ["reduce", None, 1, ("",), {"tower": {}}],
    "tied_weights": ["untie", None, True, ["lift"]],
    "ignored_params": ["a.*", 1, (1,), ("",)],
    "frozen": ["replicated", True, None, ["shard"]],
    "forward_methods": ["model.encode", {"a": 1}, (None,)],
    "activation_checkpointing": [
        "true",
        1,
        None,
        ActivationSpec(classes="Block"),
        ActivationSpec(names=("",)),
        *(ActivationSpec(every=every) for every in (0, True, "2")),
        *(ActivationSpec(target=t) for t in (0, -1, True, "some-1", "first", "1-", (), (-1,))),
        ActivationSpec(mode="some"),
        ActivationSpec(preserve_rng_state=1),
        *(ActivationSpec(memory_budget=b) for b in (-0.1, 1.1, True, "half")),
    ],
    "activation_cpu_offload": ["true", 0, None],
    "compile": [
        "yes",
        1,
        None,
        CompileSpec(backend=""),
        CompileSpec(mode=1),
        CompileSpec(fullgraph=None),
        CompileSpec(dynamic="no"),
    ],
    "tensor_parallel": [
        "2",
        True,
        *(TensorSpec(degree=degree) for degree in (0, -1, 2.5, None, True)),
        TensorSpec(layer_plan=(("*.up", "across"),)),
        TensorSpec(layer_plan=((1, "colwise"),)),
    ],
    "sequence_parallel": [
        "2",
        True,
        *(SequenceSpec(degree=degree) for degree in (0, -1, 2.5, None, True)),
        SequenceSpec(method="ring"),
    ],
    "expert_parallel": [
        "2",
        True,
        *(ExpertSpec(degree=degree) for degree in (0, -1, 2.5, None, True)),
        ExpertSpec(modules=(1,)),
    ],
    "tiled_mlp": [
        2,
        True,
        *(TilingSpec(shards=shards) for shards in (1, 0, 2.5, None, True)),
        TilingSpec(shards=2, names=(1,)),
    ],
    "chunked_loss": [
        8,
        True,
        *(ChunkingSpec(chunks=chunks) for chunks in (0, -1, 2.5, None, True)),
        ChunkingSpec(chunks=2, names=(1,)),
    ],
    "fp8": [
        "tensorwise",
        1,
        None,
        Float8Spec(recipe="blockwise"),  # pyright: ignore
        Float8Spec(all_gather=1),  # pyright: ignore
        Float8Spec(names="*.up"),  # pyright: ignore
        Float8Spec(emulate="yes"),  # pyright: ignore
    ],
    "cpu_offload": ["yes", 1, None, CPUOffload(pin_memory="no")],  # pyright: ignore
    "local_step": ["yes", 1, None, "AUTO"],
    "optimizer_state": [
        "bf16",
        True,
        8,
        OptimizerState(dtype="fp16"),  # pyright: ignore
        OptimizerState(bits=4),
        OptimizerState(bits=True),
        OptimizerState(device="disk"),  # pyright: ignore
        OptimizerState(device=None),  # pyright: ignore
    ],
    "communication": [
        True,
        "nccl",
        Communication(reduce_scatter_buffers=0),
        Communication(symmetric_memory="yes"),  # pyright: ignore
    ],
    "pretrained_weights": ["", 3, True, ["a"]],
    "state_dict_type": ["local", "Full", None, 1],
    "load_monolith_rank0_only": ["no", 0, None],
    "sharded_ckpt_prefix_dir": ["", None, 3],
    "async_save": ["yes", 1, None],
    "verbose": ["yes", 1, None],
    "wrap_policy": ["blocks", 3, ["Block"], True],
}


def pairs(table):
    return [
        pytest.param(key, value, id=f"{key}={value!r:.20}") for key in table for value in table[key]
    ]


def error_of(make, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        make(*args, **kwargs)
    return str(caught.value)


def test_the_tables_above_cover_every_key():
    assert sorted(GOOD) == sorted(KEYS)
    assert sorted(BAD) == sorted(KEYS)


def test_nothing_said_is_the_defaults():
    assert parse_config({}) == FSDP2Config()


@pytest.mark.table(
    "reshard_after_forward=False",
    "backward_prefetch=0",
    "mixed_precision='DEFAULT'",
    "unused_parameters=('tower', 're:.*expe",
    "activation_checkpointing=False",
    "activation_checkpointing=ActivationSpec(class2",
    "compile=CompileSpec(backend=0",
    "tiled_mlp=None",
    "fp8=Float8Spec(recipe='t",
    "optimizer_state=OptimizerState(dtype0",
    "state_dict_type='full'",
    "save_planner={'mine': {}}",
)
@pytest.mark.parametrize(("key", "value"), pairs(GOOD))
def test_constructor_takes_good_values(key, value):
    assert getattr(FSDP2Config(**{key: value}), key) == value


@pytest.mark.table(
    "reshard_after_forward=False",
    "backward_prefetch=0",
    "mixed_precision='DEFAULT'",
    "unused_parameters=('tower', 're:.*expe",
    "activation_checkpointing=True",
    "activation_checkpointing=ActivationSpec(class4",
    "compile=False",
    "sequence_parallel=SequenceSpec(degree=1",
    "fp8=False",
    "local_step=False",
    "pretrained_weights='/a/folder'",
    "save_planner=None",
)
@pytest.mark.parametrize(
    ("key", "value"), pairs({key: GOOD[key] for key in GOOD if key != "wrap_policy"})
)
def test_parser_takes_good_values(key, value):
    written = list(value) if isinstance(value, tuple) else value
    assert getattr(parse_config({key: written}), key) == value


@pytest.mark.table(
    "save_planner={'a': None}",
    "reshard_after_forward='yes'",
    "gradient_sync='lasts'",
    "keep_fp32={'norm': {}}",
    "activation_checkpointing='true'",
    "activation_checkpointing=ActivationSpec(class14",
    "tensor_parallel=TensorSpec(degree=0,",
    "tensor_parallel=TensorSpec(degree=1,1",
    "tiled_mlp=TilingSpec(shards=1,",
    "fp8=Float8Spec(recipe='b",
    "optimizer_state=OptimizerState(dtype1",
    "load_monolith_rank0_only='no'",
)
@pytest.mark.parametrize(("key", "value"), pairs(BAD))
def test_bad_values_are_named_by_parser_and_constructor(key, value):
    parsed = error_of(parse_config, {key: value})
    built = error_of(FSDP2Config, **{key: value})
    for message in (parsed, built):
        assert re.search(rf"\b{key}[:.]", message)
        assert "is invalid. Expected" in message


def test_a_list_of_names_may_be_left_empty():
    config = parse_config({"ignored_params": None, "forward_methods": []})
    assert (config.ignored_params, config.forward_methods) == ((), ())


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("reshard_after_foward", "reshard_after_forward"),
        ("shard_degree", "data_parallel_shard_degree"),
        ("wrap_polciy", "wrap_policy"),
        ("mixed_precison", "mixed_precision"),
    ],
)
def test_misspelt_key_shows_the_nearest(written, meant):
    message = error_of(parse_config, {written: 1})
    assert f"'{written}' is not a key" in message
    assert f"Did you mean '{meant}'?" in message


def test_key_like_no_other_shows_all():
    message = error_of(parse_config, {"xyzzy": 1})
    assert all(key in message for key in KEYS)


def test_a_degree_under_two_names_is_refused():
    message = error_of(
        parse_config, {"tensor_parallel": {"tensor_parallel_degree": 2, "degree": 4}}
    )
    assert "'tensor_parallel_degree' is not a key of tensor_parallel" in message


def test_all_mistakes_at_once_and_numbered():
    message = error_of(
        parse_config,
        {
            "verbos": True,
            "reshard_after_forward": "no",
            "tied_weights": "untie",
            "wrap_policy": {"clases": ["A"], "min_num_params": 0, "names": ["re:("]},
            "mixed_precision": {"buffer_dtype": "bf61", "param_dtype": "int7"},
        },
    )
    assert message.startswith("8 settings are wrong:")
    assert [line[:5] for line in message.splitlines()[1:]] == [f"  {n}. " for n in range(1, 9)]
    for name in (
        "'verbos'",
        "reshard_after_forward",
        "tied_weights",
        "'clases'",
        "wrap_policy.min_num_params",
        "wrap_policy.names",
        "mixed_precision.buffer_dtype",
        "mixed_precision.param_dtype",
    ):
        assert name in message


def test_constructor_reports_all_mistakes_too():
    message = error_of(FSDP2Config, verbose="yes", tied_weights="no", state_dict_type="local")
    assert message.startswith("3 settings are wrong:")


def test_one_mistake_is_not_numbered():
    assert error_of(parse_config, {"verbose": "yes"}).startswith("verbose: 'yes' is invalid")


# --- wrap_policy ---


def policy(**written) -> WrapPolicy:
    return parse_config({"wrap_policy": written}).wrap_policy


@pytest.mark.parametrize("key", ["classes", "names"])
def test_selectors_as_string_list_and_mapping(key):
    one = (Selector("Block"),)
    assert getattr(policy(**{key: "Block"}), key) == one
    assert getattr(policy(**{key: ["Block"]}), key) == one
    assert getattr(policy(**{key: ("Block",)}), key) == one
    assert getattr(policy(**{key: {"Block": None}}), key) == one
    assert getattr(policy(**{key: {"Block": True}}), key) == one
    assert getattr(policy(**{key: {"Block": {}}}), key) == one


def test_selectors_with_settings_keep_their_order():
    read = policy(
        names={
            "model.layers.1*": {"reshard_after_forward": 4},
            "model.layers.*": {"mixed_precision": "pure"},
            r"re:model\.layers\.\d+": {"mixed_precision": {"param_dtype": "bf16"}},
        }
    )
    assert read.names == (
        Selector("model.layers.1*", UnitSettings(reshard_after_forward=4)),
        Selector("model.layers.*", UnitSettings(mixed_precision="PURE")),
        Selector(
            r"re:model\.layers\.\d+",
            UnitSettings(mixed_precision=PrecisionSpec(param_dtype="bf16")),
        ),
    )


def test_embeddings_and_head_as_switch_and_mapping():
    read = policy(embeddings=True, lm_head={"reshard_after_forward": False})
    assert read.embeddings == UnitSettings()
    assert read.lm_head == UnitSettings(reshard_after_forward=False)
    off = policy(embeddings=False, lm_head=None)
    assert off.embeddings is False
    assert off.lm_head is None


def test_an_empty_policy_is_the_default():
    assert parse_config({"wrap_policy": None}) == parse_config({"wrap_policy": {}}) == FSDP2Config()


@pytest.mark.parametrize(
    ("written", "selects"),
    [
        ({}, False),
        ({"embeddings": True, "lm_head": True}, False),
        ({"classes": "A"}, True),
        ({"names": "a"}, True),
        ({"min_num_params": 1}, True),
    ],
)
def test_selects_blocks(written, selects):
    assert policy(**written).selects_blocks is selects


@pytest.mark.table(
    "written1-named1",
    "written2-named2",
    "written5-named5",
    "written7-named7",
    "written9-named9",
    "written11-named11",
    "written13-named13",
    "written14-named14",
    "written16-named16",
    "written17-named17",
    "written18-named18",
    "written19-named19",
)
@pytest.mark.parametrize(
    ("written", "named"),
    [
        ({"clases": ["A"]}, ["'clases'", "'classes'"]),
        ({"classes": []}, ["wrap_policy.classes"]),
        ({"classes": {}}, ["wrap_policy.classes"]),
        ({"classes": 3}, ["wrap_policy.classes"]),
        ({"classes": ""}, ["wrap_policy.classes"]),
        ({"classes": [{"A": 1}]}, ["wrap_policy.classes: [{A: 1}]"]),
        ({"names": ["re:("]}, ["wrap_policy.names", "re:(", "no regular expression"]),
        ({"names": {"a.*": "yes"}}, ["wrap_policy.names.a.*"]),
        ({"names": {"a.*": {"reshard": True}}}, ["'reshard'", "wrap_policy.names.a.*"]),
        (
            {"names": {"a.*": {"reshard_after_forward": 0}}},
            ["wrap_policy.names.a.*.reshard_after_forward"],
        ),
        (
            {"names": {"a.*": {"mixed_precision": "PURR"}}},
            ["wrap_policy.names.a.*.mixed_precision", "'PURE'"],
        ),
        (
            {"classes": {"A": {"mixed_precision": {"param_dtype": "int7"}}}},
            ["wrap_policy.classes.A.mixed_precision.param_dtype", "int7"],
        ),
        ({"embeddings": "yes"}, ["wrap_policy.embeddings"]),
        ({"embeddings": 0}, ["wrap_policy.embeddings"]),
        ({"max_unit_bytes": 0}, ["wrap_policy.max_unit_bytes", "a number of bytes >= 1"]),
        ({"min_unit_bytes": "1 MB"}, ["wrap_policy.min_unit_bytes"]),
        (
            {"lm_head": {"reshard_after_forwrd": 1}},
            ["wrap_policy.lm_head", "reshard_after_forward"],
        ),
        ({"min_num_params": 0}, ["wrap_policy.min_num_params"]),
        ({"min_num_params": True}, ["wrap_policy.min_num_params"]),
        ({"min_num_params": "1e6"}, ["wrap_policy.min_num_params"]),
    ],
)
def test_mistakes_inside_the_policy(written, named):
    message = error_of(parse_config, {"wrap_policy": written})
    assert all(name in message for name in named), message


@pytest.mark.parametrize(
    ("built", "named"),
    [
        (WrapPolicy(names=(Selector("re:("),)), "wrap_policy.names"),
        (WrapPolicy(names=("a.*",)), "wrap_policy.names"),
        (WrapPolicy(names=(Selector(3),)), "wrap_policy.names"),
        (WrapPolicy(classes=[Selector("A")]), "wrap_policy.classes"),
        (WrapPolicy(min_num_params=-1), "wrap_policy.min_num_params"),
        (WrapPolicy(lm_head=True), "wrap_policy.lm_head"),
        (
            WrapPolicy(classes=(Selector("A", UnitSettings(reshard_after_forward=0)),)),
            "wrap_policy.classes.A.reshard_after_forward",
        ),
        (
            WrapPolicy(embeddings=UnitSettings(mixed_precision=PrecisionSpec(param_dtype="int7"))),
            "wrap_policy.embeddings.mixed_precision.param_dtype",
        ),
    ],
)
def test_a_policy_built_by_hand_is_checked_like_a_parsed_one(built, named):
    assert named in error_of(FSDP2Config, wrap_policy=built)


# --- mixed_precision ---


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_name(name):
    spec = parse_config({"mixed_precision": {"param_dtype": name}}).mixed_precision
    assert spec == PrecisionSpec(param_dtype=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_torch_dtypes_are_taken_by_name(dtype):
    spec = parse_config({"mixed_precision": {"reduce_dtype": dtype}}).mixed_precision
    assert DTYPES[spec.reduce_dtype] is dtype


def test_presets_in_any_case():
    assert parse_config({"mixed_precision": "pure"}).mixed_precision == "PURE"


def test_a_whole_precision_spec():
    written = {
        "param_dtype": "bf16",
        "reduce_dtype": "fp32",
        "output_dtype": None,
        "cast_forward_inputs": False,
    }
    assert parse_config({"mixed_precision": written}).mixed_precision == PrecisionSpec(
        param_dtype="bf16", reduce_dtype="fp32", cast_forward_inputs=False
    )


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ({"param_dtype": "int8"}, ["mixed_precision.param_dtype", "fp32, bf16 or fp16"]),
        ({"param_dtype": torch.int8}, ["mixed_precision.param_dtype"]),
        ({"param_dtype": 16}, ["mixed_precision.param_dtype"]),
        ({"param_dtyp": "bf16"}, ["'param_dtyp'", "Did you mean 'param_dtype'?"]),
        ({"buffer_dtype": "bf61"}, ["mixed_precision.buffer_dtype", "fp32, bf16 or fp16"]),
        ({"cast_forward_inputs": "yes"}, ["mixed_precision.cast_forward_inputs"]),
    ],
)
def test_mistakes_inside_the_precision(written, named):
    message = error_of(parse_config, {"mixed_precision": written})
    assert all(name in message for name in named), message


# --- combinations ---


def test_monolith_on_rank0_needs_a_full_checkpoint():
    for make in (parse_config, lambda values: FSDP2Config(**values)):
        message = error_of(make, {"load_monolith_rank0_only": True})
        assert "'load_monolith_rank0_only'" in message
        assert "state_dict_type: full" in message
    ok = parse_config({"load_monolith_rank0_only": True, "state_dict_type": "full"})
    assert ok.load_monolith_rank0_only


def test_only_one_degree_may_be_left_open():
    message = error_of(parse_config, {"data_parallel_replicate_degree": -1})
    assert "'data_parallel_shard_degree'" in message
    assert "'data_parallel_replicate_degree'" in message
    ok = parse_config({"data_parallel_replicate_degree": -1, "data_parallel_shard_degree": 2})
    assert ok.data_parallel_replicate_degree == -1


def test_frozen_parameters_are_either_on_every_device_or_in_cpu_memory():
    message = error_of(parse_config, {"frozen": "replicate", "cpu_offload": True})
    assert "'frozen' is replicate while 'cpu_offload' is set." in message


@pytest.mark.parametrize("make", [parse_config, lambda values: FSDP2Config(**values)])
def test_a_wrong_value_starts_no_argument_about_combinations(make):
    message = error_of(make, {"load_monolith_rank0_only": True, "state_dict_type": "ful"})
    assert message.startswith("state_dict_type: 'ful' is invalid")


# --- forms of the same thing ---


def test_omegaconf_is_a_mapping_like_any_other():
    written = {
        "data_parallel_replicate_degree": 2,
        "ignored_params": ["a.*"],
        "wrap_policy": {"names": {"layers.*": {"mixed_precision": {"param_dtype": "bf16"}}}},
        "mixed_precision": "pure",
    }
    assert parse_config(OmegaConf.create(written)) == parse_config(written)
    interpolated = OmegaConf.create({"n": 2, "fsdp2": {"data_parallel_shard_degree": "${n}"}})
    assert parse_config(interpolated.fsdp2).data_parallel_shard_degree == 2


def test_plain_copies_all_the_way_down():
    inner = {"b": (1, [2])}
    copied = plain(OmegaConf.create({"a": inner}))
    assert copied == {"a": {"b": [1, [2]]}}
    assert type(copied["a"]) is dict
    assert type(copied["a"]["b"]) is list


def test_settings_of_one_unit():
    assert parse_unit_settings("'a'", {}) == UnitSettings()
    assert parse_unit_settings("'a'", True) == UnitSettings()
    read = parse_unit_settings("'a'", {"reshard_after_forward": 2, "mixed_precision": "full"})
    assert read == UnitSettings(reshard_after_forward=2, mixed_precision="FULL")
    message = error_of(parse_unit_settings, "unit 'a'", {"reshard": 1, "mixed_precision": "F"})
    assert message.startswith("2 settings are wrong")
    assert "is not a key of unit 'a'" in message
    assert "unit 'a'.mixed_precision" in message


def test_nearest_is_silent_about_strangers():
    assert nearest("lift", ("left", "right")) == " Did you mean 'left'?"
    assert nearest("xyzzy", ("left", "right")) == ""
    assert nearest("xyzzy", ()) == ""


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FSDP2Config().verbose = True  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        FSDP2Config(8)  # pyright: ignore[reportCallIssue]


# --- properties ---

reshards = st.sampled_from(["auto", True, False, 1, 2, 8])
dtypes = st.none() | st.sampled_from(sorted(DTYPES))
precisions = st.sampled_from(["DEFAULT", "PURE", "FULL"]) | st.fixed_dictionaries(
    {
        "param_dtype": dtypes,
        "reduce_dtype": dtypes,
        "output_dtype": dtypes,
        "buffer_dtype": dtypes,
        "cast_forward_inputs": st.none() | st.booleans(),
    }
)
unit_settings = st.fixed_dictionaries(
    {}, optional={"reshard_after_forward": reshards, "mixed_precision": precisions}
)
patterns = st.text("abc.*", min_size=1, max_size=5)
selectors = st.dictionaries(patterns, unit_settings, min_size=1, max_size=3)
valid = st.fixed_dictionaries(
    {},
    optional={
        "data_parallel_shard_degree": st.integers(1, 64),
        "data_parallel_replicate_degree": st.none() | st.integers(1, 64),
        "reshard_after_forward": reshards,
        "eval_reshard_after_forward": st.none() | st.booleans(),
        "forward_prefetch": st.integers(0, 3),
        "backward_prefetch": st.integers(0, 3),
        "gradient_sync": st.sampled_from(["every", "last", "reduce_scatter_only"]),
        "order_check": st.sampled_from(["first", "always", "never"]),
        "mixed_precision": precisions,
        "keep_fp32": st.none() | st.lists(patterns, max_size=3),
        "unused_parameters": st.just("auto") | st.booleans() | st.lists(patterns, max_size=3),
        "tied_weights": st.sampled_from(["lift", "error"]),
        "wrap_policy": st.fixed_dictionaries(
            {},
            optional={
                "classes": selectors,
                "names": selectors,
                "min_num_params": st.integers(1, 10**9),
                "min_unit_bytes": st.integers(1, 10**9),
                "max_unit_bytes": st.integers(1, 10**9),
                "embeddings": st.just(False) | unit_settings,
                "lm_head": st.just(False) | unit_settings,
            },
        ),
        "ignored_params": st.lists(patterns, max_size=3),
        "frozen": st.just("shard"),  # the other value refuses cpu_offload
        "forward_methods": st.lists(patterns, max_size=3),
        "activation_checkpointing": st.booleans()
        | st.fixed_dictionaries(
            {}, optional={"names": st.lists(patterns), "every": st.integers(1, 9)}
        ),
        "activation_cpu_offload": st.booleans(),
        "compile": st.booleans() | st.fixed_dictionaries({"fullgraph": st.booleans()}),
        "cpu_offload": st.booleans() | st.fixed_dictionaries({"pin_memory": st.booleans()}),
        "local_step": st.sampled_from(["auto", True, False]),
        # Any other value refuses some of those above and below.
        "optimizer_state": st.fixed_dictionaries(
            {}, optional={"dtype": st.none(), "device": st.just("gpu")}
        ),
        "communication": st.fixed_dictionaries(
            {}, optional={"reduce_scatter_buffers": st.integers(1, 4)}
        ),
        "state_dict_type": st.sampled_from(["full", "sharded"]),
        "sharded_ckpt_prefix_dir": patterns.filter(lambda name: name != ".."),
        "async_save": st.booleans(),
        "verbose": st.booleans(),
    },
)


def written_out(config: FSDP2Config) -> dict:
    """The mapping a user would write to get this config."""
    written = dataclasses.asdict(config)
    assert written.pop("extra") == {}
    for key in ("classes", "names"):
        written["wrap_policy"][key] = {
            selector["pattern"]: selector["settings"] for selector in written["wrap_policy"][key]
        } or None
    return written


def test_cpu_offload_as_a_mapping():
    assert parse_config({"cpu_offload": {"pin_memory": False}}).cpu_offload == CPUOffload(
        pin_memory=False
    )
    assert "'pin_memry'" in error_of(parse_config, {"cpu_offload": {"pin_memry": True}})


@given(valid)
def test_a_valid_config_survives_being_written_out(written):
    config = parse_config(written)
    assert parse_config(written_out(config)) == config
    assert parse_config(OmegaConf.create(written)) == config


# --- The inside of blocks. ---


def test_forms_of_the_settings_of_blocks():
    parsed = parse_config(
        {
            "activation_checkpointing": {
                "classes": "Block",
                "target": ["first-1", 3],
                "mode": "selective",
            },
            "compile": {"blocks": True, "backend": "eager"},
        }
    )
    assert parsed.activation_checkpointing == ActivationSpec(
        classes=("Block",), target=("first-1", 3), mode="selective"
    )
    assert parsed.compile == CompileSpec(backend="eager")
    tiles = parse_config({"tiled_mlp": {"shards": 4, "names": ["*.mlp"]}}).tiled_mlp
    assert tiles == TilingSpec(shards=4, names=("*.mlp",))


@pytest.mark.table(
    "written1-is no regular expression",
    "written3-stands beside other settings",
    "written5-blocks are what is compiled here",
    "written7-'tiled_mlp' and 'compile' are both set",
    "written8-tiled_mlp.shards: null is invalid",
    "written9-Did you mean 'shards'",
    "written10-chunked_loss.chunks: null is invalid",
    "written11-Did you mean 'chunks'",
    "written12-Did you mean 'all_gather'",
    "written13-one scale for the whole weight",
    "written14-'fp8' and 'tiled_mlp' are both set",
    "written15-torch loses track of the cast",
)
@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"activation_checkpointing": {"class": ["A"]}}, "Did you mean 'classes'"),
        ({"activation_checkpointing": {"names": "re:("}}, "is no regular expression"),
        ({"activation_checkpointing": {"memory_budget": 0.5}}, "Write compile: true"),
        (
            {"activation_checkpointing": {"memory_budget": 0.5, "every": 2}, "compile": True},
            "stands beside other settings",
        ),
        ({"activation_checkpointing": {"every": 2, "target": 1}}, "both 'every' and 'target'"),
        ({"compile": {"blocks": False}}, "blocks are what is compiled here"),
        ({"compile": {"full_graph": True}}, "Did you mean 'fullgraph'"),
        ({"tiled_mlp": {"shards": 2}, "compile": True}, "'tiled_mlp' and 'compile' are both set"),
        ({"tiled_mlp": {}}, "tiled_mlp.shards: null is invalid"),
        ({"tiled_mlp": {"shard": 2}}, "Did you mean 'shards'"),
        ({"chunked_loss": {}}, "chunked_loss.chunks: null is invalid"),
        ({"chunked_loss": {"chunk": 2}}, "Did you mean 'chunks'"),
        ({"fp8": {"allgather": True}}, "Did you mean 'all_gather'"),
        ({"fp8": {"recipe": "rowwise", "all_gather": True}}, "one scale for the whole weight"),
        ({"fp8": True, "tiled_mlp": {"shards": 2}}, "'fp8' and 'tiled_mlp' are both set"),
        ({"fp8": {"all_gather": True}, "cpu_offload": True}, "torch loses track of the cast"),
        ({"expert_parallel": {"degree": 2, "modules": "re:("}}, "is no regular expression"),
    ],
)
def test_mistakes_in_the_settings_of_blocks(written, said):
    with pytest.raises(ConfigError) as caught:
        parse_config(written)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "beside",
    [
        {"fp8": True},
        {"compile": {"fullgraph": True}},
        {"tiled_mlp": {"shards": 2}},
        {"cpu_offload": True},
        {"ignored_params": ["norm"]},
        {"frozen": "replicate"},
        {"communication": {"symmetric_memory": True}},
        {"unused_parameters": False},
        {"optimizer_state": {"bits": 8}},
        {"local_step": False},
    ],
    ids=lambda beside: next(iter(beside)),
)
def test_settings_that_have_not_been_tried_with_experts_over_ranks(beside):
    (name,) = beside
    with pytest.raises(ConfigError, match=f"'{name}' is .* beside 'expert_parallel'"):
        parse_config({"expert_parallel": 2, **beside})
    parse_config({"expert_parallel": 1, **beside})


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"optimizer_state": {"bit": 8}}, "Did you mean 'bits'"),
        (
            {"optimizer_state": {"dtype": "bfloat16"}},
            "optimizer_state.dtype: 'bfloat16' is invalid",
        ),
        ({"optimizer_state": {"bits": 4}}, "optimizer_state.bits: 4 is invalid. Expected 8"),
        ({"optimizer_state": {"bits": 8, "dtype": "bf16"}}, "both bits: 8 and dtype: bf16"),
        ({"optimizer_state": {"bits": 8}, "local_step": False}, "Write local_step: auto"),
        ({"optimizer_state": {"device": "cpu"}, "cpu_offload": True}, "Take cpu_offload out"),
    ],
)
def test_mistakes_in_the_form_of_state(written, said):
    with pytest.raises(ConfigError) as caught:
        parse_config(written)
    assert said in str(caught.value)


def test_no_form_of_state_goes_with_everything():
    for given_as in (None, {}, {"device": "gpu"}):
        parsed = parse_config({"optimizer_state": given_as, "local_step": False})
        assert parsed.optimizer_state == OptimizerState()


def test_a_budget_goes_with_compile():
    parsed = parse_config({"activation_checkpointing": {"memory_budget": 0.5}, "compile": True})
    assert parsed.activation_checkpointing == ActivationSpec(memory_budget=0.5)


def test_units_are_gathered_ahead_where_a_setting_says_so():
    settings = {}, {"forward_prefetch": 2}, {"forward_prefetch": 1, "backward_prefetch": 3}
    assert [parse_config(each).units_ahead for each in settings] == [0, 2, 3]
