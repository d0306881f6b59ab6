"""What no table speaks of and is about sharding all the same: asked for, never passed over."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from composer_fsdp2.cli.main import app
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.tools.migrate.engine import migrate
from composer_fsdp2.tools.migrate.report import Status
from tests.support.migrating import entry_of

FSDP1 = "fsdp_config:\n  sharding_strategy: FULL_SHARD\nprecision: amp_bf16\n"
WORDS = "fsdp: full_shard auto_wrap\nbf16: true\n"
DEEPSPEED = "deepspeed:\n  zero_optimization:\n    stage: 3\nbf16: true\n"
INSIDE = [
    ("runs:\n- name: a\n  fsdp_config:\n    sharding_strategy: SHARD_GRAD_OP\n", "runs"),
    ("runs:\n- [{x: {zero_optimization: {stage: 3}}}]\n", "runs"),
    ("deepspeed: true\nbf16: true\n", "deepspeed"),
    ("command: composer a.py b.yaml fsdp_config.sharding_strategy=HYBRID_SHARD\n", "command"),
    ("command: |\n  cat > c.yaml\n    sharding_strategy: HYBRID_SHARD\n", "command"),
    (f"model:\n  fsdp_config:\n    cpu_offload: true\n{FSDP1}", "model.fsdp_config.cpu_offload"),
    (f"{FSDP1}x:\n  zero_optimization:\n    stage: 2\n", "x.zero_optimization.stage"),
    (f"{FSDP1}tensor_parallel_degree: 2\n", "tensor_parallel_degree"),
    (f"{FSDP1}tp_config: 2\n", "tp_config"),
    (f"{WORDS}tensor_parallel_size: 2\n", "tensor_parallel_size"),
    (f"{WORDS}context_parallel_size: 2\n", "context_parallel_size"),
    (f"{WORDS}sequence_parallel_degree: 2\n", "sequence_parallel_degree"),
    (f"{WORDS}dp_shard_size: 4\n", "dp_shard_size"),
    (f"{WORDS}gradient_checkpointing: offload_disk\n", "gradient_checkpointing"),
    (f"{WORDS}activation_offloading: true\n", "activation_offloading"),
    (f"{WORDS}disable_gradient_checkpointing: true\n", "disable_gradient_checkpointing"),
    (f"{WORDS}fp8: true\n", "fp8"),
    (f"{WORDS}fp8_config: {{recipe: tensorwise}}\n", "fp8_config.recipe"),
    (f"{DEEPSPEED}fp8_backend: torchao\n", "fp8_backend"),
    ("fsdp: full_shard auto_wrap\nbf16: auto\nprecision: fp32\n", "bf16"),
    (
        f"{WORDS}fsdp_config: {{cpu_offload_pin_memory: false}}\n",
        "fsdp_config.cpu_offload_pin_memory",
    ),
    (f"{WORDS}fsdp_new_key: some\n", "fsdp_new_key"),
    (f"{WORDS}ep_size: 2\n", "ep_size"),
    (f"{DEEPSPEED}pipeline_parallel_size: 2\n", "pipeline_parallel_size"),
    (f"{DEEPSPEED}sp_size: 2\n", "sp_size"),
]


@pytest.mark.table(
    "command: |\\n  cat > c.yaml\\n    sharding_strategy: HYBRID_SHARD\\n-command",
    (
        "fsdp_config:\\n  sharding_strategy: FULL_SHARD\\nprecision: amp_bf16\\ntp_config: 2"
        "\\n-tp_config"
    ),
    (
        "fsdp: full_shard auto_wrap\\nbf16: true\\nfp8_config: {recipe: tensorwise}\\n-fp8_config"
        ".recipe"
    ),
    "fsdp: full_shard auto_wrap\\nbf16: true\\nfsdp_new_key: some\\n-fsdp_new_key",
)
@pytest.mark.parametrize(("text", "key"), INSIDE)
def test_what_is_about_sharding_is_asked_for_wherever_it_stands(tmp_path, text, key):
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(text)
    assert entry_of(migrate(text), key).is_open
    assert CliRunner().invoke(app, ["migrate", str(old), "-o", str(new)]).exit_code == 1
    written = new.read_text()
    (note,) = [line for line in written.splitlines() if line.lstrip().startswith("#")]
    assert key in note
    data = yaml.safe_load(text)
    for name, value in yaml.safe_load(written).items():
        assert name == "parallelism_config" or name == "precision" or data[name] == value
    assert migrate(written).text == written


FOREIGN = [
    ("dist_config: {name: fsdp2}\n", "dist_config"),
    ("model:\n  tensor_model_parallel_size: 1\n", "model.tensor_model_parallel_size"),
    ("policy: {strategy: veomni, veomni: {fsdp_size: -1}}\n", "policy.strategy"),
    ("strategy_args: {strategy_name: megatron_train}\n", "strategy_args.strategy_name"),
    ("distributed: {_target_: nemo.fsdp2.FSDP2Manager}\n", "distributed._target_"),
    ("tensor-parallel-size: 2\n", "tensor-parallel-size"),
]


@pytest.mark.parametrize(("text", "key"), FOREIGN)
def test_a_dialect_that_is_not_known_is_said(tmp_path, text, key):
    with pytest.raises(ConfigError, match="a dialect that is not known") as error:
        migrate(f"bf16: true\n{text}")
    assert f"'{key}'" in str(error.value)
    old = tmp_path / "old.yaml"
    old.write_text(text)
    assert CliRunner().invoke(app, ["migrate", str(old), "--check"]).exit_code == 2


@pytest.mark.parametrize(
    "text",
    [
        "run_name: fsdp2\nout: a/megatron\nmodel: {name: nvidia/megatron-bert}\n",
        "trainer: {strategy: ddp, devices: 8}\n",
        "rollout: {name: vllm, tensor_model_parallel_size: 4}\n",
        "dist_config:\nparallelism: {}\ntp_size: 1\n",
    ],
)
def test_names_and_servers_are_no_dialect(text):
    assert migrate(text).dialect == "none"


def test_a_key_in_the_wrong_place_is_not_called_unknown():
    report = migrate("a:\n  strategy_config: {fsdp_size: 4, min_num_params: 5, modle_type: x}\n")
    reason = entry_of(report, "a.strategy_config.min_num_params").reason
    assert "not in this place" in reason
    assert "Did you mean" not in reason
    assert "Did you mean 'model_type'?" in entry_of(report, "a.strategy_config.modle_type").reason


OTHER = [
    "rollout:\n  tensor_parallel_size: 4\n",
    "tensor_parallel_size: 1\nsequence_parallel_degree:\n",
    "name: trained with fsdp_config and zero_optimization\n",
    "runs:\n- fsdp_config: {}\n",
    "teacher:\n  deepspeed: false\n",
]


@pytest.mark.table(
    "rollout:\\n  tensor_parallel_size: 4\\n-fsdp: full_shard auto_wrap\\nbf16: true\\n",
    (
        "tensor_parallel_size: 1\\nsequence_parallel_degree:\\n-fsdp_config:\\n  sharding_st"
        "rategy: FULL_SHARD\\nprecision: amp_bf16\\n"
    ),
    "tensor_parallel_size: 1\\nsequence_parallel_degree:\\n-model:\\n  name: mpt\\n",
    (
        "name: trained with fsdp_config and zero_optimization\\n-fsdp_config:\\n  sharding_"
        "strategy: FULL_SHARD\\nprecision: amp_bf16\\n"
    ),
    (
        "name: trained with fsdp_config and zero_optimization\\n-fsdp: full_shard auto_wra"
        "p\\nbf16: true\\n"
    ),
    "name: trained with fsdp_config and zero_optimization\\n-model:\\n  name: mpt\\n",
    (
        "runs:\\n- fsdp_config: {}\\n-fsdp_config:\\n  sharding_strategy: FULL_SHARD\\nprecis"
        "ion: amp_bf16\\n"
    ),
    "runs:\\n- fsdp_config: {}\\n-fsdp: full_shard auto_wrap\\nbf16: true\\n",
    "runs:\\n- fsdp_config: {}\\n-model:\\n  name: mpt\\n",
    (
        "teacher:\\n  deepspeed: false\\n-fsdp_config:\\n  sharding_strategy: FULL_SHARD\\npr"
        "ecision: amp_bf16\\n"
    ),
    "teacher:\\n  deepspeed: false\\n-fsdp: full_shard auto_wrap\\nbf16: true\\n",
    "teacher:\\n  deepspeed: false\\n-model:\\n  name: mpt\\n",
)
@pytest.mark.parametrize("start", [FSDP1, WORDS, "model:\n  name: mpt\n"])
@pytest.mark.parametrize("text", OTHER)
def test_what_is_off_or_about_something_else_is_left(start, text):
    report = migrate(start + text)
    assert not report.having(Status.DECISION, Status.UNSUPPORTED)
    assert text in report.text or text.startswith("tensor_parallel_size")


def test_the_comment_stands_where_a_comment_can_stand():
    text = f"{FSDP1}x: {{y: 1, tp_config: 2}}\nm:\n  a: |\n    b\n  l:\n  - deepspeed: c\n"
    report = migrate(text)
    lines = report.text.splitlines()
    assert sum("; decide: " in line for line in lines) == 2
    assert lines[lines.index("x: {y: 1, tp_config: 2}") - 1].startswith(
        "# needs a decision: x.tp_config"
    )
    assert lines[lines.index("  l:") - 1].startswith("  # needs")
    whole = json.dumps({"runs": [{"fsdp": "full_shard"}]})
    assert migrate(whole).text == whole
    assert migrate(whole).having(Status.DECISION)


def fsdp2(text: str) -> dict[str, Any]:
    report = migrate(text)
    assert not report.having(Status.DECISION, Status.UNSUPPORTED)
    return yaml.safe_load(report.text)["parallelism_config"]["fsdp2"]


BF16 = {"param_dtype": "bf16", "reduce_dtype": "bf16"}


def test_two_blocks_of_a_file_without_a_type_are_refused():
    with pytest.raises(ConfigError, match="both 'deepspeed_config' and 'fsdp_config'"):
        migrate(f"{FSDP1}deepspeed_config:\n  zero_stage: 2\n")


@pytest.mark.parametrize(
    ("text", "dialect"),
    [
        ("fsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n", "accelerate"),
        ("deepspeed_config:\n  zero_stage: 3\n", "accelerate-deepspeed"),
    ],
)
def test_a_launchers_file_without_a_type_keeps_its_precision(text, dialect):
    report = migrate(f"{text}mixed_precision: bf16\n")
    assert report.dialect == dialect
    assert yaml.safe_load(report.text)["precision"] == "amp_bf16"
    assert fsdp2(f"{text}mixed_precision: bf16\n")["mixed_precision"] == BF16


def test_the_word_offload_and_its_switch():
    text = "fsdp: full_shard auto_wrap offload\nfsdp_config:\n  offload_params: {}\nbf16: true\n"
    report = migrate(text.format("false"))
    assert {entry.key for entry in report.having(Status.DECISION)} == {
        "fsdp",
        "fsdp_config.offload_params",
    }
    assert fsdp2(text.format("true"))["cpu_offload"] is True
    decided = migrate(text.format("false"), decisions={"fsdp_config.offload_params": True})
    assert not decided.having(Status.DECISION)


def test_an_option_about_another_key_names_that_key():
    entry = entry_of(migrate('{"amp": {"enabled": true}}'), "amp.enabled")
    assert entry.options == ("amp.enabled=false", "bf16.enabled=true")
