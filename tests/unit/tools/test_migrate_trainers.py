"""Files that mix: DeepSpeed in another trainer's file, keys that disagree, decisions not taken."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from composer_fsdp2.cli.main import app
from composer_fsdp2.config.schema import parse_config
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.tools.migrate.accelerate import BLOCK, UNSHARDED
from composer_fsdp2.tools.migrate.deepspeed_trainers import ACCELERATE_DEEPSPEED
from composer_fsdp2.tools.migrate.engine import migrate
from composer_fsdp2.tools.migrate.report import Status
from tests.support.migrating import check_stable, entry_of, settings_of

DEC, UN, NOT = Status.DECISION, Status.UNSUPPORTED, Status.NOT_NEEDED
SHARD, REPLICATE = "data_parallel_shard_degree", "data_parallel_replicate_degree"
RESHARD = "reshard_after_forward"
BF16 = {"param_dtype": "bf16", "reduce_dtype": "bf16"}
ZERO3 = {"zero_optimization": {"stage": 3}}
STATE_ON_CPU = {"optimizer_state": {"device": "cpu"}}
COPIES = {SHARD: 1, REPLICATE: -1, RESHARD: False}


def fsdp2(report, *place):
    """The settings as a reader of the new file finds them."""
    data = yaml.safe_load(report.text)
    for name in (*place, "parallelism_config"):
        data = data[name]
    parse_config(data["fsdp2"] or {})
    return data["fsdp2"] or {}


def beside(report, *place):
    data = yaml.safe_load(report.text)
    for name in place:
        data = data[name]
    return {name: data[name] for name in ("precision", "algorithms") if name in data}


# --- Accelerate. ---

ACCELERATE = """\
distributed_type: DEEPSPEED
# ZeRO
deepspeed_config:
  {settings}
  gradient_accumulation_steps: 4
num_processes: 8
"""
PLUGIN = [
    ("zero_stage: 3", {RESHARD: "auto"}),
    ("zero_stage: 2", {RESHARD: False}),
    ("zero_stage: 1", {RESHARD: False}),
    ("zero_stage: 0", COPIES),
    ("zero3_init_flag: true", {RESHARD: False}),
    ("offload_param_device: cpu", {RESHARD: False, "cpu_offload": True}),
    ("offload_optimizer_device: none", {RESHARD: False}),
    ("offload_optimizer_device: cpu", {RESHARD: False, **STATE_ON_CPU}),
    (
        "offload_optimizer_device: cpu\n  offload_param_device: cpu",
        {RESHARD: False, "cpu_offload": True},
    ),
    ("zero3_save_16bit_model: true", {RESHARD: False, "state_dict_type": "full"}),
    ("zero3_save_16bit_model: false", {RESHARD: False, "state_dict_type": "sharded"}),
]


@pytest.mark.parametrize(("settings", "expected"), PLUGIN)
def test_deepspeed_of_accelerate(settings, expected):
    report = migrate(ACCELERATE.format(settings=settings))
    assert report.dialect == "accelerate-deepspeed"
    assert fsdp2(report) == expected
    assert beside(report) == {"precision": "fp32"}
    assert "# ZeRO" in report.text
    check_stable(report)


DEGREES = """
parallelism_config:
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: 2
  parallelism_config_{kind}_size: {size}
  parallelism_config_{kind}_backend: deepspeed
"""


@pytest.mark.parametrize("kind", ["sp", "cp"])
def test_sequence_ranks_of_deepspeed_are_read(kind):
    """ZeRO shards over all ranks, so that the other degrees say nothing more."""
    text = ACCELERATE.format(settings="zero_stage: 3")
    report = migrate(text + DEGREES.format(kind=kind, size=4))
    ulysses = {"sequence_parallel": {"degree": 4, "method": "ulysses"}}
    assert fsdp2(report) == {RESHARD: "auto", **ulysses}
    assert report.having(DEC, UN) == []
    off = migrate(text + DEGREES.format(kind=kind, size=4) + "use_parallelism_config: false\n")
    assert fsdp2(off) == {RESHARD: "auto"}
    assert fsdp2(migrate(text + DEGREES.format(kind=kind, size=1))) == {RESHARD: "auto"}


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ("offload_param_device: nvme", UN),
        ("offload_param_device: disk", DEC),
        ("zero_stage: auto", DEC),
        ("zero_stag: 3", DEC),
    ],
)
def test_deepspeed_of_accelerate_that_has_to_be_asked(settings, status):
    report = migrate(ACCELERATE.format(settings=settings))
    assert entry_of(report, f"deepspeed_config.{settings.partition(':')[0]}").status is status


PLUGIN_CASES = [
    *(("zero_stage", stage) for stage in range(4)),
    *(("offload_optimizer_device", device) for device in ("none", "cpu", "nvme")),
    *(("offload_param_device", device) for device in ("none", "cpu", "nvme")),
    *((f"offload_{part}_nvme_path", "/x") for part in ("optimizer", "param")),
    *(("gradient_clipping", value) for value in (0, 1.0, "auto")),
    *(("gradient_accumulation_steps", value) for value in (4, "auto")),
    ("zero3_init_flag", True),
    *(("zero3_save_16bit_model", value) for value in (True, False)),
    *((f"{owner}_cls_names", "A") for owner in ("deepspeed_moe_layer", "transformer_moe")),
    *(("enable_msamp", on) for on in (False, True)),
    ("msamp_opt_level", "O2"),
    ("seq_parallel_communication_data_type", "bf16"),
    *((f"deepspeed_{name}", "x") for name in ("hostfile", "multinode_launcher")),
    *((f"deepspeed_{name}", "x") for name in ("exclusion_filter", "inclusion_filter")),
]


DEGREE_CASES = [
    *((f"{kind}_size", size) for kind in ("cp", "sp") for size in (1, 2, "many")),
    *((f"{name}_size", size) for name in ("dp_shard", "dp_replicate", "tp") for size in (1, 2)),
    *(
        (f"{kind}_{name}", "x")
        for kind in ("cp", "sp")
        for name in ("attn_implementation", "backend", "comm_strategy", "seq_length")
    ),
    *((f"{kind}_seq_length_is_variable", True) for kind in ("cp", "sp")),
]


def plugin_reports():
    """One migration of every row that is Accelerate's own."""
    data = [{"deepspeed_config": {key: value}} for key, value in PLUGIN_CASES]
    degrees = ((f"parallelism_config_{key}", value) for key, value in DEGREE_CASES)
    data += [{"parallelism_config": {key: value}} for key, value in degrees]
    return [migrate(yaml.safe_dump({"distributed_type": "DEEPSPEED", **one})) for one in data]


def unsharded_reports():
    """One migration of every row about files that shard nothing."""
    kinds = [migrate(f"distributed_type: {kind}\n") for kind in KINDS]
    blocks = (BLOCK, "deepspeed_config", "megatron_lm_config")
    return kinds + [migrate(f"distributed_type: 'NO'\n{block}: {{}}\n") for block in blocks]


KINDS = ("MULTI_GPU", "MEGATRON_LM", "XLA", "SOMETHING")
OWN_ROWS = [
    row
    for row in ACCELERATE_DEEPSPEED.rows
    if row.key.startswith(("config.", "degrees.")) and ".deepspeed_config_file." not in row.key
]


def test_every_row_has_a_case():
    reports = [*plugin_reports(), *unsharded_reports()]
    reached = [id(entry.row) for report in reports for entry in report.entries]
    assert [row for row in (*OWN_ROWS, *UNSHARDED.outside) if id(row) not in reached] == []


JSON = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}},
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW"},
    "train_micro_batch_size_per_gpu": "auto",
}
READ = {RESHARD: "auto", "cpu_offload": True, "mixed_precision": BF16}


def test_the_file_that_accelerate_names(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(JSON))
    text = "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n"
    text += "  deepspeed_config_file: ds.json\n  gradient_clipping: 0.5\n"
    report = migrate(text, folder=tmp_path)
    assert report.having(DEC, UN) == []
    assert fsdp2(report) == READ
    clipping = {"clipping_type": "norm", "clipping_threshold": 0.5}
    assert beside(report) == {
        "precision": "amp_bf16",
        "algorithms": {"gradient_clipping": clipping},
    }


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("NO", Status.KEPT),
        ("'NO'", Status.KEPT),
        ("MULTI_GPU", Status.KEPT),
        ("multi_cpu", Status.KEPT),
        ("MEGATRON_LM", UN),
        ("TPU", UN),
        ("XLA", UN),
        ("SOMETHING", DEC),
    ],
)
def test_the_type_decides_what_a_file_is(kind, status):
    text = f"distributed_type: {kind}\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n"
    report = migrate(text)
    entry = entry_of(report, "distributed_type")
    assert entry.status is status
    notes = [f"# {status.value}: distributed_type: "] if entry.is_open else []
    assert report.text.endswith(text)
    assert report.text.startswith("".join(notes))
    assert report.text.count("#") == len(notes)
    assert "not read" in entry_of(report, "fsdp_config").reason or status is not Status.KEPT


def test_the_other_block_is_not_read():
    both = "fsdp_config:\n  fsdp_sharding_strategy: NO_SHARD\ndeepspeed_config:\n  zero_stage: 3\n"
    deepspeed = migrate(f"distributed_type: DEEPSPEED\n{both}")
    assert fsdp2(deepspeed) == {RESHARD: "auto"}
    fsdp = migrate(f"distributed_type: FSDP\n{both}")
    assert fsdp2(fsdp) == {**COPIES, "state_dict_type": "full"}


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
def test_version_2_of_accelerate_ignores_the_strategy(strategy):
    text = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n"
    report = migrate(text + f"  fsdp_sharding_strategy: {strategy}\n")
    entry = entry_of(report, "fsdp_config.fsdp_sharding_strategy")
    assert entry.status is NOT
    assert "ignores it" in entry.reason
    assert fsdp2(report) == {"state_dict_type": "sharded"}
    word = migrate(text + "  fsdp_reshard_after_forward: FULL_SHARD\n")
    assert entry_of(word, "fsdp_config.fsdp_reshard_after_forward").status is DEC


# --- TrainingArguments. ---


@pytest.mark.parametrize("key", ["deepspeed", "deepspeed_config"])
@pytest.mark.parametrize("place", [(), ("training",)])
def test_deepspeed_of_training_arguments(tmp_path, key, place):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "zero3.json").write_text(json.dumps(JSON))
    for value in ("configs/zero3.json", JSON, json.dumps(JSON)):
        data = {key: value, "bf16": True, "max_grad_norm": 0.5, "learning_rate": 1e-5}
        for name in reversed(place):
            data = {name: data}
        report = migrate(yaml.safe_dump(data, sort_keys=False), folder=tmp_path)
        assert report.dialect == "huggingface-deepspeed"
        assert report.having(DEC, UN) == []
        assert fsdp2(report, *place) == READ
        assert beside(report, *place)["precision"] == "amp_bf16"
        check_stable(report)


@pytest.mark.parametrize(
    "content",
    [None, "{", "[]", '{"zero_optimization": 1, "zero_optimization": 2}', "a: 1\n---\nb: 1"],
)
def test_a_file_that_cannot_be_read_is_asked_for(tmp_path, content):
    if content is not None:
        (tmp_path / "ds.json").write_text(content)
    report = migrate("deepspeed: ds.json\nbf16: true\n", folder=tmp_path)
    entry = entry_of(report, "deepspeed")
    assert entry.status is DEC
    assert "'deepspeed=null'" in str(entry.options)
    assert f"# {DEC.value}: deepspeed: ds.json" in report.text
    out = migrate("deepspeed: ds.json\n", folder=tmp_path, decisions={"deepspeed": ZERO3})
    assert fsdp2(out) == {RESHARD: "auto"}
    assert migrate("deepspeed: ds.json\n", decisions={"deepspeed": None}).having(DEC) == []


def test_a_file_of_fsdp_settings_is_read(tmp_path):
    (tmp_path / "fsdp.json").write_text('{"fsdp_offload_params": true}')
    text = "fsdp: full_shard auto_wrap\nfsdp_config: fsdp.json\n"
    report = migrate(text, folder=tmp_path)
    expected = {RESHARD: "auto", "cpu_offload": True, "state_dict_type": "full"}
    assert fsdp2(report) == expected
    assert entry_of(migrate(text), "fsdp_config").status is DEC


def test_what_the_run_fills_in_is_asked_for_where_it_does_not_say_it(tmp_path):
    report = migrate(yaml.safe_dump({"deepspeed": JSON}))
    assert [e.key for e in report.having(DEC)] == [
        "deepspeed.bf16.enabled",
        "deepspeed.gradient_clipping",
    ]


def test_fsdp_and_deepspeed_in_one_place_are_refused():
    with pytest.raises(ConfigError, match=r"both 'a\.deepspeed' and 'a\.fsdp'"):
        migrate("a: {deepspeed: x.json, fsdp: full_shard}\n")


@pytest.mark.parametrize("kind", ["plain", "prefixed"])
def test_version_2_beside_the_block(kind):
    text = "fsdp_version: 2\nbf16: true\nfsdp_config:\n  reshard_after_forward: false\n"
    text += "  offload_params: true\n  auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    if kind == "prefixed":
        text = text.replace("  ", "  fsdp_")
    report = migrate(text)
    assert report.dialect == "huggingface"
    settings = {RESHARD: False, "cpu_offload": True, "state_dict_type": "sharded"}
    assert fsdp2(report) == {**settings, "mixed_precision": BF16}


def test_older_arguments_without_a_block():
    text = "fsdp: full_shard auto_wrap\nfsdp_transformer_layer_cls_to_wrap: A\nbf16: true\n"
    report = migrate(f"{text}fsdp_offload_params: true\n")
    assert report.dialect == "huggingface"
    assert fsdp2(report)["wrap_policy"] == {"classes": ["A"]}
    assert fsdp2(report)["cpu_offload"] is True


def test_a_word_says_nothing_to_version_2():
    text = "fsdp: shard_grad_op auto_wrap\nfsdp_config:\n  fsdp_version: 2\n"
    assert entry_of(migrate(text), "fsdp").status is DEC
    report = migrate(f"{text}  fsdp_reshard_after_forward: true\n")
    assert fsdp2(report)[RESHARD] == "auto"
    assert report.having(DEC) == []


# --- Keys that disagree. ---

DISAGREE = [
    (
        "fsdp: shard_grad_op auto_wrap\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n",
        RESHARD,
    ),
    (
        "gradient_checkpointing: true\nfsdp_config:\n  fsdp_activation_checkpointing: false\n",
        "activation_checkpointing",
    ),
    (
        "fsdp_config:\n  fsdp_activation_checkpointing: true\ngradient_checkpointing: false\n",
        "activation_checkpointing",
    ),
    ("fsdp: full_shard\nbf16: true\nfp16: true\n", "mixed_precision"),
    (
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n"
        "  fsdp_reshard_after_forward: SHARD_GRAD_OP\n",
        RESHARD,
    ),
    (
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "fp16": {"enabled": true}}',
        "m",
    ),
    ("zero_optimization:\n  stage: 0\n  mics_shard_size: 4\n", SHARD),
    ("deepspeed: {zero_optimization: {stage: 3}, fp16: {enabled: true}}\nbf16: true\n", "m"),
    (
        "parallelism_config:\n  fsdp2:\n    sharding_strategy: FULL_SHARD\n"
        "    reshard_after_forward: false\n",
        RESHARD,
    ),
]


@pytest.mark.parametrize(("text", "setting"), DISAGREE)
def test_keys_that_disagree_are_a_decision(text, setting):
    report = migrate(text)
    first, second = report.having(DEC)
    assert setting not in fsdp2(report)
    assert first.reason == second.reason
    for entry in (first, second):
        assert "say different things" in entry.reason
        assert entry.options == (f"{first.key}=null", f"{second.key}=null")
        assert f"# {DEC.value}: {entry.key}:" in report.text
    for out in (first, second):
        decided = migrate(text, decisions={out.key: None})
        assert decided.having(DEC) == []


def test_keys_that_agree_are_written_once():
    text = "fsdp: full_shard auto_wrap\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n"
    report = migrate(text)
    assert report.having(DEC) == []
    assert report.text.count(RESHARD) == 1


# --- Decisions that are not taken. ---


HYBRID = """\
seed: 1
fsdp_config:
  # how
  sharding_strategy: HYBRID_SHARD  # per node
  verbose: true
"""


def run(*args):
    return CliRunner().invoke(app, ["migrate", *map(str, args)])


def test_an_open_decision_is_a_comment_at_its_place(tmp_path):
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(HYBRID)
    assert run(old, "-o", new).exit_code == 1
    lines = new.read_text().splitlines()
    place = lines.index("    # how") + 1
    assert lines[place].startswith(
        f"    # {DEC.value}: fsdp_config.sharding_strategy: HYBRID_SHARD"
    )
    assert "--gpus-per-node N" in lines[place]
    assert lines[place].endswith("  # per node")
    assert lines[place + 1] == "    verbose: true"
    check_stable(migrate(HYBRID))
    assert run(old, "-o", new, "--force", "--gpus-per-node", 4).exit_code == 0
    assert DEC.value not in new.read_text()
    assert run(old).exit_code == 1


def test_keys_with_one_reason_share_a_line(tmp_path):
    old = tmp_path / "old.yaml"
    keys = "".join(f"{key}: x\n" for key in ("debug", "machine_rank", "rdzv_backend", "use_cpu"))
    old.write_text(f"{keys}distributed_type: FSDP\nfsdp_config: {{fsdp_version: 2}}\n")
    lines = run(old, "--check").output.splitlines()
    said = [number for number, line in enumerate(lines) if "how the ranks start" in line]
    assert len(said) == 1
    assert lines[said[0] - 1].startswith("  debug: x, machine_rank: x, rdzv_backend: x, use_cpu: x")
    kept = run(old, "--json").output
    assert kept.count("how the ranks start") == 5


def test_what_is_not_supported_is_a_comment_too(tmp_path):
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text("zero_optimization:\n  stage: 3\n  offload_param: {device: nvme}\n")
    assert run(old, "-o", new).exit_code == 1
    assert f"# {UN.value}: zero_optimization.offload_param: " in new.read_text()


@pytest.mark.parametrize("value", ["a\\nb", "a\\u2028b", "\\u0007", "x" * 5000])
def test_a_comment_is_one_line(value):
    report = migrate(f'fsdp_config:\n  sharding_strategy: "{value}"\n')
    assert fsdp2(report) == {"state_dict_type": "full"}
    assert max(len(line) for line in report.text.splitlines()) < 1000


# --- Blocks that are not what they should be. ---


def test_a_block_that_an_interpolation_brings_in():
    text = "variables:\n  f: {sharding_strategy: SHARD_GRAD_OP}\nfsdp_config: ${variables.f}\n"
    report = migrate(text)
    assert fsdp2(report) == {RESHARD: False, "state_dict_type": "full"}
    check_stable(report)


@pytest.mark.parametrize("value", ["FULL_SHARD", "${oc.env:NO_SUCH}", "[a]", "3", "true"])
def test_a_block_that_is_no_mapping_is_a_decision(value):
    report = migrate(f"fsdp_config: {value}\nseed: 1\n")
    assert entry_of(report, "fsdp_config").status is DEC
    assert "# needs a decision: fsdp_config: " in report.text
    decided = migrate(
        f"fsdp_config: {value}\n", decisions={"fsdp_config": {"sharding_strategy": "FULL_SHARD"}}
    )
    assert fsdp2(decided) == {RESHARD: "auto", "state_dict_type": "full"}


def test_interpolations_of_a_job_start_from_its_run():
    text = "parameters:\n  v: {s: SHARD_GRAD_OP}\n  fsdp_config:\n    sharding_strategy: ${v.s}\n"
    assert fsdp2(migrate(text), "parameters")[RESHARD] is False


def test_our_own_block_that_is_a_word_is_a_decision():
    report = migrate("parallelism_config:\n  fsdp2: FULL_SHARD\n")
    assert entry_of(report, "parallelism_config.fsdp2").status is DEC
    assert migrate("parallelism_config:\n  fsdp2:\n").having(DEC) == []


def test_deepspeed_of_roll():
    text = "a:\n  strategy_name: deepspeed_train\n  strategy_config:\n"
    report = migrate(f"{text}    zero_optimization: {{stage: 2}}\n    bf16: {{enabled: true}}\n")
    assert fsdp2(report, "a") == {RESHARD: False, "mixed_precision": BF16}
    named = migrate("strategy_name: deepspeed_infer\nstrategy_config: ${deepspeed_zero3}\n")
    assert entry_of(named, "strategy_config").status is DEC


@pytest.mark.parametrize("version", ["2", "'2'"])
def test_version_2_with_keys_of_version_1(version):
    text = f"fsdp_config:\n  version: {version}\n  sharding_strategy: SHARD_GRAD_OP\n"
    report = migrate(f"{text}  use_orig_params: true\n  forward_prefetch: true\n  verbose: true\n")
    assert fsdp2(report) == {RESHARD: False, "verbose": True}
    check_stable(report)


def test_keys_of_fsdp1_in_our_own_block():
    text = "parallelism_config:\n  fsdp2:\n    limit_all_gathers: true\n    forward_prefetch: 2\n"
    report = migrate(text + "    sharding_strategy: HYBRID_SHARD\n", gpus_per_node=4)
    nodes = {SHARD: 4, REPLICATE: -1}
    assert fsdp2(report) == {"forward_prefetch": 2, RESHARD: "auto", **nodes}
    check_stable(report)


@pytest.mark.parametrize(
    "text",
    [
        "fsdp_config: {verbose: true}\nparallelism_config: {fsdp2: {}}\n",
        "parallelism_config: {fsdp: {verbose: true}, fsdp2: {}}\n",
        "parameters:\n  fsdp_config: {verbose: true}\n  parallelism_config: {fsdp2: {}}\n",
        "deepspeed: a.json\nparallelism_config: {fsdp2: {}}\n",
        "fsdp: full_shard\nparallelism_config: {fsdp2: {}}\n",
        "fsdp_config: {version: 2}\nparallelism_config: {fsdp2: {}}\n",
    ],
)
def test_half_migrated_files_are_refused(text):
    with pytest.raises(ConfigError, match="half migrated"):
        migrate(text)


@pytest.mark.parametrize(
    "key",
    ["fsdp_config: {verbose: true}", "fsdp: full_shard", "deepspeed: {zero_optimization: true}"],
)
def test_a_second_block_of_the_same_name_is_refused(key):
    with pytest.raises(ConfigError, match="and 'parallelism_config'"):
        migrate(f"{key}\nparallelism_config:\n")


@pytest.mark.parametrize("block", ["{}", "null", "{parallelism_config_tp_size: 1}"])
def test_degrees_of_accelerate_are_written_once(block):
    text = f"distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\nparallelism_config: {block}\n"
    report = migrate(text)
    assert report.text.count("parallelism_config:") == 1
    assert fsdp2(report) == {"state_dict_type": "sharded"}


# --- Text. ---


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_ends_of_lines_stay(tmp_path, end, mark):
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    text = f"{mark}a: x{{end}}fsdp_config:{{end}}  verbose: true # é{{end}}b: 2{{end}}"
    old.write_bytes(text.replace("{end}", end).encode())
    assert run(old, "-o", new).exit_code == 0
    block = "parallelism_config:\n  fsdp2:\n    verbose: true  # é\n    state_dict_type: full\n"
    expected = f"{mark}a: x\n{block}b: 2\n".replace("\n", end)
    assert new.read_bytes().decode() == expected


@pytest.mark.parametrize("char", ["\u2028", "\u2029", "\x85"])
def test_characters_that_end_no_line(char):
    text = f'a: "x{char}y"\nfsdp_config:\n  verbose: true\nb: z{char}w # c\n'
    report = migrate(text)
    assert report.text.startswith(text.partition("fsdp_config")[0])
    assert report.text.endswith(text.partition("true\n")[2])


@pytest.mark.parametrize(
    ("data", "setting"), [({"a": "no"}, "no"), ({"a": "1e5"}, "1e5"), ({"a": 1e-5}, 1e-5)]
)
def test_json_becomes_yaml_that_every_reader_reads_alike(data, setting):
    report = migrate(json.dumps({**ZERO3, **data}))
    assert yaml.safe_load(report.text)["a"] == setting


def in_linear_time(text_of_items: Callable[[int], str]):
    """The report on the longer text, which takes no more calls than its length says."""
    (_, short), (report, long) = (counted(text_of_items(number)) for number in (150, 600))
    assert long / short < 4.5  # 4 if linear, 16 if each line looked at all others
    return report


def counted(text: str) -> tuple[Any, int]:
    """Counts calls of functions, which no other work on the machine makes more."""
    calls = 0

    def count(_frame: object, event: str, _what: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        report = migrate(text)
    finally:
        sys.setprofile(None)
    return report, calls


@pytest.mark.table("# {n}\\n- x\\n")
@pytest.mark.parametrize(
    "item", ["- item{n}\n", "- {{a: {n}, b: x}}\n", "- a: {n}\n  b: ${{v}}\n", "# {n}\n- x\n"]
)
def test_a_long_list_takes_linear_time(item):
    head = "v: 1\nfsdp_config:\n  verbose: true\nitems:\n"
    report = in_linear_time(lambda n: head + "".join(item.format(n=i) for i in range(n)))
    assert fsdp2_fast(report) == {"verbose": True, "state_dict_type": "full"}


@pytest.mark.matrix
def test_a_long_list_costs_little_more_where_something_is_interpolated():
    """It took four times as long when the list was handed to omegaconf, item by item."""

    def text(value: str) -> str:
        head = f"v: 1\nfsdp_config:\n  verbose: true\nw: {value}\nitems:\n"
        return head + "".join(f"- a: {item}\n  b: x\n" for item in range(400))

    assert counted(text("${v}"))[1] / counted(text("1"))[1] < 2.5


@pytest.mark.matrix
def test_many_roles_take_linear_time():
    """The whole file was read again for each of them."""
    role = "m{n}:\n  strategy_config:\n    fsdp_size: 4\n"
    report = in_linear_time(lambda n: "".join(role.format(n=i) for i in range(n)))
    assert report.text.count("data_parallel_shard_degree: 4") == 600


@pytest.mark.matrix
def test_a_long_list_in_json_takes_linear_time():
    def text(number: int) -> str:
        items = [{"a": item, "b": "no"} for item in range(number)]
        return json.dumps({**ZERO3, "items": items})

    assert in_linear_time(text).text.endswith("- a: 599\n  b: 'no'\n")


def fsdp2_fast(report):
    return yaml.safe_load(report.text.partition("items:")[0])["parallelism_config"]["fsdp2"]


@pytest.mark.parametrize(
    "text", ["a: [", "a: 1\n---\nb: 2\n", "a: *b\n", "- a\n", "", "a: &x [*x]\n"]
)
def test_a_text_that_is_no_mapping_is_refused(text):
    with pytest.raises(ConfigError):
        migrate(text)


# --- Precision. ---


@pytest.mark.parametrize(
    "text",
    [
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_offload_params: false\n",
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n",
        "fsdp: full_shard\n",
        "fsdp: full_shard\nbf16: false\n",
        "deepspeed: {zero_optimization: {stage: 3}}\n",
        "zero_optimization: {stage: 3}\n",
        "zero_optimization: {stage: 3}\nbf16: {enabled: false}\n",
    ],
)
def test_a_file_without_a_precision_is_trained_in_fp32(text):
    report = migrate(text)
    assert beside(report) == {"precision": "fp32"}
    own = migrate(f"{text}precision: amp_fp16\n")
    assert beside(own) == {"precision": "amp_fp16"}


@pytest.mark.parametrize(("dtype", "precision"), [("fp16", "amp_fp16"), ("float32", "fp32")])
def test_roll_computes_in_its_dtype(dtype, precision):
    report = migrate(f"strategy_config:\n  param_dtype: {dtype}\n")
    assert beside(report) == {"precision": precision}


def test_settings_of_every_output_are_valid():
    """What the report says is what a reader of the file finds."""
    for text in (HYBRID, *(text for text, _ in DISAGREE)):
        report = migrate(text, gpus_per_node=4)
        assert fsdp2(report) == settings_of(report)


def test_each_choice_is_shown_once():
    entry = entry_of(migrate("zero_optimization:\n  stage: 4\n"), "zero_optimization.stage")
    assert len(set(entry.options)) == len(entry.options)
    assert entry.options[0] == "zero_optimization.stage=3"
