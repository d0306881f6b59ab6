"""Composer's and LLM Foundry's FSDP1 configurations, key by key."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from composer.utils.parallelism import FSDPConfig
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from typer.testing import CliRunner

from composer_fsdp2.cli.main import app
from composer_fsdp2.config.schema import parse_config
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.foundry.transform import parse_run_config
from composer_fsdp2.tools.migrate.composer import FSDP1, FSDP_VERSION_2
from composer_fsdp2.tools.migrate.document import dump
from composer_fsdp2.tools.migrate.engine import migrate
from composer_fsdp2.tools.migrate.report import Report, Status
from tests.support.migrating import (
    check_stable,
    entry_of,
    files,
    missing,
    rows_without_a_case,
    settings_of,
)

K, C, NOT, CH = Status.KEPT, Status.CONVERTED, Status.NOT_NEEDED, Status.CHANGES
DEC, UN = Status.DECISION, Status.UNSUPPORTED
SHARD, REPLICATE = "data_parallel_shard_degree", "data_parallel_replicate_degree"
HYBRID = {SHARD: 4, REPLICATE: 2, "reshard_after_forward": "auto"}

CASES = [
    ("sharding_strategy", "FULL_SHARD", C, {"reshard_after_forward": "auto"}),
    ("sharding_strategy", "full_shard", C, {"reshard_after_forward": "auto"}),
    ("sharding_strategy", "SHARD_GRAD_OP", C, {"reshard_after_forward": False}),
    ("sharding_strategy", "HYBRID_SHARD", C, HYBRID),
    ("sharding_strategy", "_HYBRID_SHARD_ZERO2", C, HYBRID | {"reshard_after_forward": False}),
    (
        "sharding_strategy",
        "NO_SHARD",
        C,
        {SHARD: 1, REPLICATE: 8, "reshard_after_forward": False},
    ),
    ("sharding_strategy", "ZERO3", DEC, {}),
    (SHARD, 8, K, {SHARD: 8}),
    (SHARD, 0, DEC, {}),
    (REPLICATE, 2, K, {REPLICATE: 2}),
    (REPLICATE, 3, DEC, {}),
    ("process_group", None, NOT, {}),
    ("process_group", "node", DEC, {}),
    ("process_group", [0, 1], DEC, {}),
    ("mixed_precision", "FULL", K, {"mixed_precision": "FULL"}),
    ("mixed_precision", "PURE", CH, {"mixed_precision": "PURE"}),
    ("mixed_precision", {"param_dtype": "bf16"}, K, {"mixed_precision": {"param_dtype": "bf16"}}),
    (
        "mixed_precision",
        {"param_dtype": "bf16", "keep_low_precision_grads": True},
        CH,
        {"mixed_precision": {"param_dtype": "bf16"}},
    ),
    ("mixed_precision", "HALF", DEC, {}),
    ("keep_low_precision_grads", False, NOT, {}),
    ("keep_low_precision_grads", True, UN, {}),
    ("state_dict_type", "full", K, {"state_dict_type": "full"}),
    ("state_dict_type", "sharded", K, {"state_dict_type": "sharded"}),
    ("state_dict_type", "local", DEC, {}),
    ("load_planner", None, K, {"load_planner": None}),
    ("save_planner", None, K, {"save_planner": None}),
    ("sharded_ckpt_prefix_dir", "ba{batch}", K, {"sharded_ckpt_prefix_dir": "ba{batch}"}),
    ("verbose", True, K, {"verbose": True}),
    ("load_monolith_rank0_only", True, K, {"load_monolith_rank0_only": True}),
    ("activation_checkpointing", True, K, {"activation_checkpointing": True}),
    ("activation_cpu_offload", True, K, {"activation_cpu_offload": True}),
    ("activation_checkpointing_reentrant", False, NOT, {}),
    ("activation_checkpointing_reentrant", True, CH, {}),
    ("te_checkpoint_wrapper", False, NOT, {}),
    ("te_checkpoint_wrapper", True, CH, {}),
    ("te_shard_fp8_weight", False, NOT, {}),
    ("te_shard_fp8_weight", True, UN, {}),
    ("auto_wrap", True, NOT, {}),
    ("auto_wrap", False, DEC, {}),
    ("cpu_offload", False, NOT, {}),
    ("cpu_offload", True, K, {"cpu_offload": True}),
    ("ignored_modules", None, NOT, {}),
    ("ignored_modules", ["a"], DEC, {}),
    ("backward_prefetch", "BACKWARD_PRE", NOT, {}),
    ("backward_prefetch", "BACKWARD_POST", C, {"backward_prefetch": 0}),
    ("backward_prefetch", None, C, {"backward_prefetch": 0}),
    ("backward_prefetch_limit", 2, NOT, {}),
    ("forward_prefetch", True, NOT, {}),
    ("forward_prefetch_limit", 2, NOT, {}),
    ("limit_all_gathers", True, NOT, {}),
    ("sync_module_states", True, NOT, {}),
    ("sync_module_states", False, CH, {}),
    ("use_orig_params", True, NOT, {}),
    ("use_orig_params", False, CH, {}),
    ("version", 1, NOT, {}),
    ("sharding_strateggy", "FULL_SHARD", DEC, {}),
]


def migrate_block(key, value, place="fsdp_config"):
    data = {key: value}
    for name in reversed(place.split(".")):
        data = {name: data}
    return migrate(dump(data), world_size=8, gpus_per_node=4)


@pytest.mark.table(
    "fsdp_config-load_planner-None-kept-becomes24",
    "parallelism_config.fsdp-sharding_strategy-FULL_SHARD-converted-becomes0",
    "parallelism_config.fsdp-process_group-value13-needs a decision-becomes13",
    "parallelism_config.fsdp-save_planner-None-kept-becomes25",
)
@pytest.mark.parametrize(("key", "value", "status", "becomes"), CASES)
@pytest.mark.parametrize("place", ["fsdp_config", "parallelism_config.fsdp"])
def test_each_key_of_fsdp1(key, value, status, becomes, place):
    report = migrate_block(key, value, place)
    entry = entry_of(report, f"{place}.{key}")
    assert (entry.status, entry.settings) == (status, becomes)
    assert entry.reason
    assert bool(entry.options) == (status in (DEC, UN))
    # FSDP1's default is written out unless the input says another one.
    written = {"state_dict_type": "full", **becomes}
    assert settings_of(report) == ({} if key == "state_dict_type" and not becomes else written)
    parsed = OmegaConf.to_container(OmegaConf.create(report.text))
    assert parsed["parallelism_config"]["fsdp2"] == settings_of(report)
    parse_config(settings_of(report))
    check_stable(report)


OUTSIDE = [
    ("model", {"init_device": "mixed"}, "model.init_device", K),
    ("model", {"init_device": "meta"}, "model.init_device", K),
    ("model", {"init_device": "cpu"}, "model.init_device", K),
    ("optimizer", {"name": "muon", "lr": 0.02}, "optimizer.name", K),
    ("optimizer", {"name": "dion"}, "optimizer.name", CH),
    ("tp_config", None, "tp_config", NOT),
]
FFN = {"strategy": "ffn", "tensor_parallel_degree": 2}
PLAN = {"*.up": "colwise", "*.down": "rowwise"}
TENSOR = [
    ({"strategy": "ffn", "tensor_parallel_degree": 1}, NOT, None),
    (FFN, CH, {"degree": 2}),
    ({"tensor_parallel_degree": 4}, C, {"degree": 4}),
    ({"degree": 4, "layer_plan": PLAN}, C, {"degree": 4, "layer_plan": PLAN}),
    ({"strategy": "ffn"}, DEC, None),
    ({"tensor_parallel_degree": 2, "device_mesh": 1}, DEC, None),
]


def migrate_beside(name, value):
    return migrate(dump({"fsdp_config": {"verbose": True}, name: value}))


def migrate_tp(value):
    return migrate(dump({"parallelism_config": {"fsdp": {"verbose": True}, "tp": value}}))


def migrate_both(value):
    """LLM Foundry's key, and Composer's."""
    return migrate_beside("tp_config", value), migrate_tp(value)


@pytest.mark.parametrize(("value", "status", "becomes"), TENSOR)
def test_tensor_parallelism_beside_fsdp_becomes_a_setting(value, status, becomes):
    for report, key in zip(
        migrate_both(value), ("tp_config", "parallelism_config.tp"), strict=True
    ):
        assert entry_of(report, key).status is status
        assert settings_of(report).get("tensor_parallel") == becomes
        parsed = OmegaConf.to_container(OmegaConf.create(report.text))
        assert "tp_config" not in parsed
        assert "tp" not in parsed["parallelism_config"]
        parse_run_config(parsed)
        check_stable(report)


def test_no_tensor_parallelism_stays_as_it_is():
    parsed = yaml.safe_load(migrate_tp(None).text)
    assert parsed["parallelism_config"]["tp"] is None


@pytest.mark.parametrize(("value", "status"), [(FFN, DEC), ({"degree": 2}, K)])
def test_tensor_parallelism_beside_fsdp2(value, status):
    """Only what is outside of our block: it stays."""
    for outer in ({"tp_config": value, "fsdp_config": {"version": 2}},):
        report = migrate(dump(outer))
        assert entry_of(report, "tp_config").status is status
        assert yaml.safe_load(report.text)["tp_config"] == value
    report = migrate(dump({"parallelism_config": {"fsdp2": {}, "tp": value}}))
    assert entry_of(report, "parallelism_config.tp").status is status


@pytest.mark.parametrize(("name", "value", "key", "status"), OUTSIDE)
def test_keys_around_the_block_stay_and_are_explained(name, value, key, status):
    report = migrate_beside(name, value)
    assert entry_of(report, key).status is status
    assert OmegaConf.create(report.text)[name] == value


def fsdp1_reports() -> list[Report]:
    """One migration of every row and more."""
    reports = [migrate_block(key, value) for key, value, *_ in CASES]
    reports += [migrate_beside(name, value) for name, value, *_ in OUTSIDE]
    reports += [report for value, *_ in TENSOR for report in migrate_both(value)]
    reports += [
        migrate(dump({"fsdp_config": {"version": 2}, "tp_config": value}))
        for value in (FFN, {"degree": 2})
    ]
    reports += [
        migrate(dump({"parallelism_config": {"fsdp2": {}, "tp": value}}))
        for value in (FFN, {"degree": 2})
    ]
    return [*reports, migrate_tp(None)]


def test_every_row_and_every_key_of_composer_has_a_case():
    assert rows_without_a_case(FSDP1, fsdp1_reports()) == []
    fields = {name for name in FSDPConfig.__dataclass_fields__ if not name.startswith("_")}
    assert fields <= {row.key for row in FSDP1.rows}


@pytest.mark.parametrize("file", files("foundry/*.yaml"), ids=lambda file: file.stem)
def test_yamls_of_llm_foundry_need_no_decision(file):
    text = file.read_text()
    report = migrate(text)
    assert report.dialect == "composer"
    assert report.having(Status.DECISION) == []
    old = OmegaConf.to_container(OmegaConf.create(text))
    assert missing(old, report) == []
    migrated = OmegaConf.create(report.text)
    parsed = parse_run_config(OmegaConf.to_container(migrated, resolve=True))
    assert parsed["fsdp_config"]["version"] == 2
    new = OmegaConf.to_container(migrated)
    block = new.pop("parallelism_config")["fsdp2"]
    assert block["state_dict_type"] == old["fsdp_config"].get("state_dict_type", "full")
    del old["fsdp_config"]
    assert new == old
    check_stable(report)


# --- Layout, decisions, and the FSDP_VERSION=2 style. ---

COMMENTED = """\
# top
variables: {strategy: SHARD_GRAD_OP, degree: 2}
base: &base
  q: 'x'   # stays

fsdp_config:  # the block
  # how
  sharding_strategy: ${variables.strategy}  # ZeRO-2
  # how many
  data_parallel_shard_degree: ${variables.degree}
  limit_all_gathers: true  # was needed
  mixed_precision: 'PURE'
  # the end
other: *base   # alias
"""

MIGRATED = """\
# top
variables: {strategy: SHARD_GRAD_OP, degree: 2}
base: &base
  q: 'x'   # stays

parallelism_config:
  fsdp2:
    # the block
    # how
    reshard_after_forward: false  # ZeRO-2
    # how many
    data_parallel_shard_degree: ${variables.degree}
    # was needed
    mixed_precision: 'PURE'
    state_dict_type: full
  # the end
other: *base   # alias
"""


def test_comments_order_anchors_and_interpolations_survive():
    assert migrate(COMMENTED).text == MIGRATED
    check_stable(migrate(COMMENTED))


def test_a_decision_is_read_as_the_value_of_the_input():
    text = dump({"fsdp_config": {"te_shard_fp8_weight": True, "auto_wrap": False}})
    assert len(migrate(text).having(Status.DECISION, Status.UNSUPPORTED)) == 2
    decided = migrate(text, decisions={"te_shard_fp8_weight": None, "fsdp_config.auto_wrap": True})
    assert [entry.status for entry in decided.entries[:2]] == [NOT, NOT]
    extra = migrate(text, decisions={"fsdp2.async_save": True})
    assert settings_of(extra) == {"state_dict_type": "full", "async_save": True}
    with pytest.raises(ConfigError, match="'cpu_ofload', which is no sharding key"):
        migrate(text, decisions={"cpu_ofload": None})


def test_a_key_written_twice_is_a_decision():
    text = "fsdp_config:\n  verbose: true\n  verbose: false\n"
    entry = entry_of(migrate(text), "fsdp_config.verbose")
    assert (entry.status, entry.options) == (
        DEC,
        ("fsdp_config.verbose=true", "fsdp_config.verbose=false"),
    )
    assert settings_of(migrate(text, decisions={"verbose": False}))["verbose"] is False


def test_a_mapping_written_twice_is_a_decision_too():
    text = "fsdp_config:\n  mixed_precision: {a: 1}\n  mixed_precision: {a: 2}\n"
    assert entry_of(migrate(text), "fsdp_config.mixed_precision").status is DEC


def test_what_two_merged_mappings_share_is_not_written_twice():
    text = (
        "a: &a {x: 1}\nb: &b {x: 2}\nmerged:\n  <<: *a\n  <<: *b\nfsdp_config:\n  verbose: true\n"
    )
    assert settings_of(migrate(text))["verbose"] is True
    with pytest.raises(ConfigError, match=r"says 'top' more than once"):
        migrate("top: {x: 1}\ntop: {x: 2}\nfsdp_config: {verbose: true}\n")


def test_ranks_decide_what_depends_on_them():
    text = dump({"fsdp_config": {"sharding_strategy": "HYBRID_SHARD"}})
    (entry,) = migrate(text).having(Status.DECISION)
    assert entry.options[0] == "--gpus-per-node N"
    report = migrate(text, gpus_per_node=4)
    assert settings_of(report)[SHARD] == 4
    assert settings_of(report)[REPLICATE] == -1


def test_a_full_checkpoint_option_without_effect_is_left_out():
    text = dump({"fsdp_config": {"load_monolith_rank0_only": True, "state_dict_type": "sharded"}})
    assert settings_of(migrate(text)) == {"state_dict_type": "sharded"}


LOCAL = {
    "sharding_strategy": "FULL_SHARD",
    "state_dict_type": "local",
    "load_monolith_rank0_only": True,
    "activation_checkpointing": True,
}


def test_an_open_decision_leaves_the_other_keys_alone():
    report = migrate(dump({"fsdp_config": LOCAL}))
    assert [entry.path[-1] for entry in report.having(DEC)] == list(LOCAL)[1:3]
    kept = {"reshard_after_forward": "auto", "activation_checkpointing": True}
    assert settings_of(report) == kept
    decided = migrate(dump({"fsdp_config": LOCAL}), decisions={"state_dict_type": "full"})
    whole = {"state_dict_type": "full", "load_monolith_rank0_only": True}
    assert settings_of(decided) == {**kept, **whole}
    assert "state_dict_type: full" in decided.text


def test_only_the_keys_of_a_contradiction_are_decisions():
    block = {SHARD: -1, REPLICATE: -1, "verbose": True, "activation_checkpointing": True}
    report = migrate(dump({"fsdp_config": block}))
    assert [entry.path[-1] for entry in report.having(DEC)] == [REPLICATE]
    block = {SHARD: 3, "verbose": True}
    report = migrate(dump({"fsdp_config": block}), world_size=4)
    assert [entry.path[-1] for entry in report.having(DEC)] == [SHARD]


VERSION2 = [
    ("reshard_after_forward", True, C, {"reshard_after_forward": "auto"}),
    ("reshard_after_forward", False, K, {"reshard_after_forward": False}),
    ("device_mesh", None, NOT, {}),
    ("device_mesh", [2], DEC, {}),
    ("mixed_precision", "PURE", CH, {"mixed_precision": "PURE"}),
    ("mixed_precision", "FULL", K, {"mixed_precision": "FULL"}),
    ("mixed_precision", {"param_dtype": "bf16", "keep_low_precision_grads": True}, CH, None),
    ("mixed_precision", {"param_dtype": "bf16"}, K, None),
    ("activation_checkpointing", True, K, {"activation_checkpointing": True}),
    ("activation_cpu_offload", True, K, {"activation_cpu_offload": True}),
    ("verbose", True, K, {"verbose": True}),
    ("load_monolith_rank0_only", False, K, {"load_monolith_rank0_only": False}),
    ("load_monolith_rank0_only", True, NOT, {}),
    ("state_dict_type", "full", K, {"state_dict_type": "full"}),
    ("sync_module_states", True, NOT, {}),
]
IGNORED = [row.key for row in FSDP_VERSION_2.rows if "ignored it" in row.reason]


def migrate_version2(key, value):
    return migrate(dump({"fsdp_config": {"reshard_after_forward": False, key: value}}))


@pytest.mark.table(
    "device_mesh-value3-needs a decision-becomes3",
    "mixed_precision-value6-changes behaviour-None",
    "activation_checkpointing-True-kept-becomes8",
    "load_monolith_rank0_only-True-no longer needed-becomes12",
)
@pytest.mark.parametrize(("key", "value", "status", "becomes"), VERSION2)
def test_each_key_of_version_2(key, value, status, becomes):
    report = migrate_version2(key, value)
    assert report.dialect == "composer-fsdp2"
    entry = entry_of(report, f"fsdp_config.{key}")
    expected = {"mixed_precision": {"param_dtype": "bf16"}} if becomes is None else becomes
    assert (entry.status, entry.settings) == (status, expected)
    assert settings_of(report)["state_dict_type"] == expected.get("state_dict_type", "sharded")
    check_stable(report)


@pytest.mark.table(
    "auto_wrap",
    "backward_prefetch",
    "data_parallel_replicate_degree",
    "forward_prefetch",
    "ignored_modules",
    "limit_all_gathers",
    "process_group",
    "save_planner",
    "sharding_strategy",
    "te_checkpoint_wrapper",
    "te_shard_fp8_weight",
    "use_orig_params",
)
@pytest.mark.parametrize("key", IGNORED)
def test_what_version_2_ignored_stays_out(key):
    report = migrate_version2(key, "SHARD_GRAD_OP")
    assert entry_of(report, f"fsdp_config.{key}").status is NOT
    assert settings_of(report) == {"reshard_after_forward": False, "state_dict_type": "sharded"}


def version2_reports() -> list[Report]:
    """One migration of every row of the block."""
    cases = [(key, value) for key, value, *_ in VERSION2] + [(key, 1) for key in IGNORED]
    block = {"fsdp_config": {"reshard_after_forward": True}}
    beside = [migrate(dump({**block, "tp_config": value})) for value, *_ in TENSOR]
    return [migrate_version2(key, value) for key, value in cases] + beside


def test_every_row_of_version_2_has_a_case():
    unreached = [r.key for r in rows_without_a_case(FSDP_VERSION_2, version2_reports())]
    # The keys around the block are the FSDP1 table's.
    assert unreached == [row.key for row in FSDP1.outside]


VALUES = st.one_of(st.booleans(), st.none(), st.integers(-1, 9), st.sampled_from(["full", "node"]))
# A key with a star is of the file around the block.
KEYS = {row.key for row in FSDP1.rows if "*" not in row.key} | {"unknown", "fsdp_size"}
BLOCKS = st.dictionaries(st.sampled_from(sorted(KEYS)), VALUES)


@pytest.mark.matrix
@settings(max_examples=150, deadline=None)
@given(BLOCKS, st.dictionaries(st.sampled_from(["model", "seed", "tp_config"]), VALUES))
def test_no_key_is_missing_and_twice_changes_nothing(block, others):
    data = {"fsdp_config": {**block, "verbose": False}, **others}
    report = migrate(dump(data), world_size=4)
    assert missing(data, report) == []
    parse_config(settings_of(report))
    check_stable(report)


# --- The command. ---


def run(*args, code=0):
    result = CliRunner().invoke(app, ["migrate", *map(str, args)])
    assert result.exit_code == code, result.output
    return result.stdout


def test_command_writes_beside_the_input(tmp_path):
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(COMMENTED)
    said = run(old, "-o", new)
    assert "fsdp_config.limit_all_gathers" in said
    assert (old.read_text(), new.read_text()) == (COMMENTED, MIGRATED)
    assert run(old) == MIGRATED
    run(old, "-o", old, code=2)
    assert old.read_text() == COMMENTED


def test_command_says_what_comes_next(tmp_path):
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(dump({"fsdp_config": {"state_dict_type": "local"}}))
    said = run(old, "-o", new, code=1).splitlines()
    assert said[-1] == f"Next: composer-fsdp2 migrate {old} -o {new} --force --set KEY=VALUE"
    said = run(old, "-o", new, "--force", "--set", "state_dict_type=full").splitlines()
    assert said[-1] == f"Next: composer-fsdp2 parity {old} {new}"


def test_a_file_that_exists_stays_unless_forced(tmp_path):
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(COMMENTED)
    new.write_text("mine: 1\n")
    run(old, "-o", new, code=2)
    assert new.read_text() == "mine: 1\n"
    run(old, "-o", new, "--force")
    assert new.read_text() == MIGRATED


def test_command_exit_codes(tmp_path):
    file = tmp_path / "old.yaml"
    file.write_text(dump({"fsdp_config": {"auto_wrap": False, "use_orig_params": False}}))
    assert run(file, code=1).startswith("parallelism_config:")
    run(file, "--check", code=1)
    run(file, "--check", "--set", "auto_wrap=true")
    run(file, "--strict", "--set", "auto_wrap=true", code=1)
    run(file, "--strict", "--set", "auto_wrap=null", "--set", "use_orig_params=true")
    found = json.loads(run(file, "--json", code=1))
    assert found["dialect"] == "composer"
    assert found["keys"][0]["status"] == "needs a decision"


@pytest.mark.parametrize(
    ("text", "args", "said"),
    [
        ("a: [", [], "is not valid YAML"),
        ("- a", [], "holds no settings"),
        ("a: 1", ["--from", "composer"], "holds no settings in the dialect"),
        ("a: 1", ["--from", "composr"], "Did you mean 'composer'"),
        ("a: 1", ["--set", "a"], "not key=value"),
        ("fsdp_config: {x: &x 1}\nb: *x", [], "used elsewhere"),
    ],
)
def test_command_explains_what_it_cannot_do(tmp_path, text, args, said):
    file = tmp_path / "old.yaml"
    file.write_text(text)
    result = CliRunner().invoke(app, ["migrate", str(file), *args])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


BRACES = """\
parallelism_config: {fsdp: {sharding_strategy: SHARD_GRAD_OP, verbose: "${v}"}, tp: null}  # stays
v: true
"""
UNFOLDED = """\
parallelism_config:  # stays
  fsdp2:
    reshard_after_forward: false
    verbose: ${v}
    state_dict_type: full
  tp: null
v: true
"""


def test_a_mapping_in_braces_becomes_a_block():
    report = migrate(BRACES)
    assert report.text == UNFOLDED
    check_stable(report)
    nested = "a: 1\nrun: {x: 2, fsdp_config: {fsdp_min_num_params: 5}}\nb: 3\n"
    assert yaml.safe_load(migrate(nested).text)["run"]["x"] == 2
    with pytest.raises(ConfigError, match="holds an anchor, an alias or a comment"):
        migrate("parallelism_config: {fsdp: &here {verbose: true}}\n")


PLATFORM = """\
name: llama
compute: {gpus: 16}
parameters:
  model:
    init_device: mixed
  # FSDP
  fsdp_config:
    sharding_strategy: FULL_SHARD  # all of it
  tp_config: {strategy: ffn, tensor_parallel_degree: 2}
  precision: amp_bf16
"""


def test_a_run_under_parameters_is_migrated_where_it_is():
    """As the platform's files hold it; its keys are those of LLM Foundry all the same."""
    report = migrate(PLATFORM)
    lines = report.text.splitlines()
    start = lines.index("  # FSDP")
    assert lines[start + 1 : start + 5] == [
        "  parallelism_config:",
        "    fsdp2:",
        "      reshard_after_forward: auto  # all of it",
        "      tensor_parallel:",
    ]
    assert report.remarks == ()
    assert "built on rank 0" in entry_of(report, "parameters.model.init_device").reason
    assert entry_of(report, "parameters.tp_config").status is CH
    check_stable(report)


def test_words_in_place_of_the_block_stay_composers():
    """`fsdp: full_shard` is how TrainingArguments of transformers say it, at another place."""
    report = migrate("parallelism_config:\n  fsdp: full_shard\n  tp: null\n")
    assert report.dialect == "composer"
    entry = entry_of(report, "parallelism_config.fsdp")
    assert entry.options[0] == "parallelism_config.fsdp={sharding_strategy: FULL_SHARD}"


def test_two_places_for_one_thing_are_refused():
    """Moving the block would write the key `parallelism_config` a second time."""
    text = "fsdp_config:\n  sharding_strategy: FULL_SHARD\nparallelism_config:\n  tp: null\n"
    with pytest.raises(ConfigError, match="both 'fsdp_config' and 'parallelism_config'"):
        migrate(text)


INTERPOLATED = """
max_duration: 1ba
variables: {ac: true, strategy: SHARD_GRAD_OP}
fsdp_config:
  sharding_strategy: ${oc.env:NOWHERE_SET,${variables.strategy}}
  activation_checkpointing: ${..variables.ac}
  activation_cpu_offload: ${fsdp_config.activation_checkpointing}
  verbose: ${variables.ac}
"""


def test_interpolations_lead_to_the_same_values():
    """From its new place a relative one leads elsewhere, and a block that is gone has no values."""
    report = migrate(INTERPOLATED)
    new = OmegaConf.create(report.text)
    block: Any = OmegaConf.to_container(new, resolve=True)
    assert block["parallelism_config"]["fsdp2"] == {
        "reshard_after_forward": False,
        "activation_checkpointing": True,
        "activation_cpu_offload": True,
        "verbose": True,
        "state_dict_type": "full",
    }
    assert "verbose: ${variables.ac}" in report.text
    for key in ("sharding_strategy", "activation_checkpointing", "activation_cpu_offload"):
        assert "here, which is written out" in entry_of(report, f"fsdp_config.{key}").reason
    # It goes by the machine that migrates.
    assert entry_of(report, "fsdp_config.sharding_strategy").status is Status.CHANGES


def test_interpolations_that_lead_nowhere_are_decisions():
    relative = migrate("max_duration: 1ba\nfsdp_config: {verbose: '${..gone}'}\n")
    assert entry_of(relative, "fsdp_config.verbose").status is Status.DECISION
    block = "parallelism_config: {fsdp: {mixed_precision: PURE}}\n"
    text = f"run_name: r-${{parallelism_config.fsdp.mixed_precision}}\n{block}"
    assert entry_of(migrate(text), "run_name").status is Status.DECISION


@pytest.mark.parametrize(("word", "value"), [("yes", True), ("Off", False), ("'no'", "no")])
def test_words_are_truth_values_as_for_the_run(word: str, value: Any):
    """OmegaConf reads YAML 1.1, and dates as text."""
    text = (
        f"made: 2024-05-01\nv: PURE\nfsdp_config: {{verbose: {word}, mixed_precision: '${{v}}'}}\n"
    )
    report = migrate(text)
    entry = entry_of(report, "fsdp_config.verbose")
    assert entry.value == value
    assert entry.is_open is isinstance(value, str)
    assert entry_of(report, "fsdp_config.mixed_precision").value == "PURE"
    assert f"verbose: {word}" in report.text
