"""Configurations of Accelerate, Hugging Face, ROLL and DeepSpeed, row by row."""

from __future__ import annotations

from collections import Counter

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from composer_fsdp2.config.schema import parse_config
from composer_fsdp2.tools.migrate.accelerate import ACCELERATE
from composer_fsdp2.tools.migrate.arguments import TRAINING_ARGUMENTS
from composer_fsdp2.tools.migrate.counts import DEEPSPEED_KEYS, TRAINING
from composer_fsdp2.tools.migrate.deepspeed import DEEPSPEED
from composer_fsdp2.tools.migrate.document import Document, dump
from composer_fsdp2.tools.migrate.engine import DIALECTS, migrate
from composer_fsdp2.tools.migrate.report import Dialect, Report, Status
from composer_fsdp2.tools.migrate.roll import COUNTS, ROLL
from composer_fsdp2.tools.migrate.shared_rows import SHARDING_KEYS
from composer_fsdp2.tools.migrate.signs import foreign_sign
from tests.support.migrating import (
    check_stable,
    counted,
    entry_of,
    files,
    missing,
    rows_without_a_case,
    settings_of,
    text_of,
)

K, R, C, NOT, CH = (
    Status.KEPT,
    Status.RENAMED,
    Status.CONVERTED,
    Status.NOT_NEEDED,
    Status.CHANGES,
)
DEC, UN = Status.DECISION, Status.UNSUPPORTED
SHARD, REPLICATE = "data_parallel_shard_degree", "data_parallel_replicate_degree"
RESHARD = "reshard_after_forward"
AUTO, KEEP = {RESHARD: "auto"}, {RESHARD: False}
NODES = {SHARD: 4, REPLICATE: -1}
COPIES = {SHARD: 1, REPLICATE: -1, RESHARD: False}
BF16 = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "bf16"}}
FP16 = {"mixed_precision": {"param_dtype": "fp16", "reduce_dtype": "fp16"}}
CLASSES = {"wrap_policy": {"classes": ["A", "B"]}}
SIZE = {"wrap_policy": {"min_num_params": 100}}

# In the block `fsdp_config`, with the prefix `fsdp_`.
BLOCK = [
    ("sharding_strategy", "FULL_SHARD", C, AUTO),
    ("sharding_strategy", 2, C, KEEP),
    ("sharding_strategy", "NO_SHARD", C, COPIES),
    ("sharding_strategy", "HYBRID_SHARD", C, AUTO | NODES),
    ("sharding_strategy", "HYBRID_SHARD_ZERO2", C, KEEP | NODES),
    (RESHARD, True, C, AUTO),
    (RESHARD, False, K, KEEP),
    (RESHARD, "FULL_SHARD", C, AUTO),
    (RESHARD, "SHARD_GRAD_OP", C, KEEP),
    (RESHARD, "NO_SHARD", C, COPIES),
    (RESHARD, "HYBRID_SHARD", C, AUTO | NODES),
    (RESHARD, "5", C, KEEP | NODES),
    ("version", 2, NOT, {}),
    ("auto_wrap_policy", None, NOT, {}),
    ("auto_wrap_policy", "TRANSFORMER_BASED_WRAP", NOT, {}),
    ("auto_wrap_policy", "SIZE_BASED_WRAP", C, {}),
    ("auto_wrap_policy", "NO_WRAP", CH, {}),
    ("transformer_layer_cls_to_wrap", "A, B", R, CLASSES),
    ("transformer_layer_cls_to_wrap", None, NOT, {}),
    ("min_num_params", 100, R, SIZE),
    ("min_num_params", 0, NOT, {}),
    ("state_dict_type", "FULL_STATE_DICT", C, {"state_dict_type": "full"}),
    ("state_dict_type", "SHARDED_STATE_DICT", C, {"state_dict_type": "sharded"}),
    ("state_dict_type", "LOCAL_STATE_DICT", DEC, {}),
    ("offload_params", False, NOT, {}),
    ("offload_params", True, R, {"cpu_offload": True}),
    ("activation_checkpointing", True, K, {"activation_checkpointing": True}),
    ("activation_checkpointing", False, K, {"activation_checkpointing": False}),
    ("cpu_ram_efficient_loading", True, NOT, {}),
    ("sync_module_states", True, NOT, {}),
    ("sync_module_states", False, CH, {}),
    ("use_orig_params", True, NOT, {}),
    ("use_orig_params", False, CH, {}),
    ("forward_prefetch", True, NOT, {}),
    ("backward_prefetch", "BACKWARD_PRE", NOT, {}),
    ("backward_prefetch", "NO_PREFETCH", C, {"backward_prefetch": 0}),
    ("backward_prefetch_policy", "BACKWARD_PRE", NOT, {}),
    ("backward_prefetch_policy", "backward_post", C, {"backward_prefetch": 0}),
    ("limit_all_gathers", True, NOT, {}),
    ("ignored_modules", None, NOT, {}),
    ("ignored_modules", "x", DEC, {}),
    ("mixed_precision_policy", "bf16", C, BF16),
    ("mixed_precision_policy", "fp16", C, FP16),
    ("mixed_precision_policy", None, NOT, {}),
    ("xla", False, NOT, {}),
    ("xla", True, UN, {}),
    ("xla_fsdp_v2", False, NOT, {}),
    ("xla_fsdp_v2", True, UN, {}),
    ("xla_fsdp_settings", {"a": 1}, NOT, {}),
    ("xla_fsdp_grad_ckpt", True, NOT, {}),
    ("sharding_strateggy", 1, DEC, {}),
]
TOP = [
    ("deepspeed_config", {"zero_stage": 3}, NOT, {}),
    ("megatron_lm_config", {"a": 1}, NOT, {}),
    ("num_processes", 8, NOT, {}),
    ("num_machines", 1, NOT, {}),
    ("use_parallelism_config", True, NOT, {}),
    ("mixed_precision", "bf16", C, BF16),
    ("mixed_precision", "fp16", C, FP16),
    ("mixed_precision", "no", C, {"mixed_precision": "FULL"}),
    ("mixed_precision", "fp8", C, {**BF16, "fp8": True}),
]
# In Accelerate's block `parallelism_config`, with that prefix.
ULYSSES = {"sequence_parallel": {"degree": 2, "method": "ulysses"}}
EXCHANGES = [
    *("attn_implementation", "backend", "comm_strategy"),
    *("seq_length", "seq_length_is_variable"),
]
DEGREES = [
    ("dp_replicate_size", 1, NOT, {}),
    ("dp_replicate_size", 2, R, {REPLICATE: 2}),
    ("dp_shard_size", 4, R, {SHARD: 4}),
    ("dp_shard_size", 1, C, {SHARD: 1}),
    ("tp_size", 1, NOT, {}),
    ("tp_size", 2, C, {"tensor_parallel": 2}),
    ("cp_size", 1, NOT, {}),
    ("cp_size", 2, C, {"sequence_parallel": {"degree": 2, "method": "auto"}}),
    ("cp_size", "many", DEC, {}),
    ("sp_size", 1, NOT, {}),
    ("sp_size", 2, C, ULYSSES),
    ("sp_size", "many", DEC, {}),
    *((f"{kind}_{name}", "x", NOT, {}) for kind in ("cp", "sp") for name in EXCHANGES),
]
LAUNCHING = [
    row.key for row in ACCELERATE.rows if "launcher" in row.reason and row.key != "distributed_type"
]
AC = "activation_checkpointing"
CHECKPOINTED = {AC: True, "activation_cpu_offload": True}
SCALES = [row.key for row in ACCELERATE.rows if "pads and scales" in row.reason]
EXPERTS_OF_2 = {"expert_parallel": {"degree": 2}}
ARGUMENTS = [
    ("fsdp", "", NOT, {}),
    ("fsdp", "full_shard auto_wrap", C, AUTO),
    ("fsdp", ["shard_grad_op"], CH, KEEP),
    ("fsdp", "no_shard", CH, COPIES),
    ("fsdp", "hybrid_shard auto_wrap", C, AUTO | NODES),
    ("fsdp", "full_shard auto_wrap offload", C, {**AUTO, "cpu_offload": True}),
    ("fsdp", True, CH, AUTO),
    ("fsdp", "ful_shard", DEC, {}),
    ("fsdp", "full_shard shard_grad_op", DEC, {}),
    ("fsdp_version", 1, NOT, {}),
    ("gradient_checkpointing", None, NOT, {}),
    *(("gradient_checkpointing", on, R, {AC: on}) for on in (True, False)),
    ("max_grad_norm", 0, NOT, {}),
    ("max_grad_norm", 0.5, R, {}),
    ("fsdp_transformer_layer_cls_to_wrap", ["A", "B"], R, CLASSES),
    ("fsdp_transformer_layer_cls_to_wrap", None, NOT, {}),
    ("fsdp_min_num_params", 0, NOT, {}),
    ("fsdp_min_num_params", 100, R, SIZE),
    ("bf16", True, C, BF16),
    ("bf16", False, NOT, {}),
    ("fp16", True, C, FP16),
    ("fp16", False, NOT, {}),
    ("gradient_checkpointing_kwargs", {"use_reentrant": True}, NOT, {}),
]
LOADING = [
    ("ep_size", 4, C, {"expert_parallel": {"degree": 4}}),
    ("ep_size", 1, NOT, {}),
    ("ep_size", "many", DEC, {}),
    ("enable_expert_parallel", False, NOT, {}),
    ("enable_expert_parallel", True, DEC, {}),
    ("tp_size", 1, NOT, {}),
    ("tp_size", 2, C, {"tensor_parallel": 2}),
    ("pp_size", 1, NOT, {}),
    ("pp_size", 2, UN, {}),
    ("fsdp_size", 1, NOT, {}),
    ("fsdp_size", 8, R, {SHARD: 8}),
    ("dp_replicate_size", 1, NOT, {}),
    ("dp_replicate_size", 2, R, {REPLICATE: 2}),
    ("fsdp_mixed_precision", False, NOT, {}),
    (
        "fsdp_mixed_precision",
        True,
        C,
        {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}},
    ),
    ("fsdp_cpu_offload", False, NOT, {}),
    ("fsdp_cpu_offload", True, C, {"cpu_offload": True}),
    ("ep_implementation", "all_to_all", NOT, {}),
    ("enable_sequence_parallel", True, NOT, {}),
    *((f"{kind}_plan", None, NOT, {}) for kind in ("tp", "ep", "fsdp")),
    *((f"{kind}_plan", {"a.b": "c"}, DEC, {}) for kind in ("tp", "ep", "fsdp")),
]
EXPERTS = "wrap_policy.moe_experts"
STRATEGY = [
    ("fsdp_size", 4, C, NODES),
    ("fsdp_size", 8, C, {SHARD: 8, REPLICATE: -1}),
    ("fsdp_size", 1, NOT, {}),
    ("fsdp_size", -1, NOT, {}),
    ("param_dtype", "half", R, {"mixed_precision": {"param_dtype": "fp16"}}),
    ("reduce_dtype", "float32", R, {"mixed_precision": {"reduce_dtype": "float32"}}),
    ("async_save_ckpt", True, R, {"async_save": True}),
    (RESHARD, True, C, AUTO),
    (RESHARD, 2, K, {RESHARD: 2}),
    ("offload_policy", False, NOT, {}),
    ("offload_policy", True, C, {"cpu_offload": True}),
    ("wrap_policy.transformer_layer_cls_to_wrap", ["A", "B"], R, CLASSES),
    ("wrap_policy.transformer_layer_cls_to_wrap", None, NOT, {}),
    (EXPERTS, ["A", "B"], NOT, {}),
    ("wrap_policy.min_num_params", 0, NOT, {}),
    ("wrap_policy.wrap_embeddings", False, NOT, {}),
    ("wrap_policy.wrap_embeddings", True, R, {"wrap_policy": {"embeddings": True}}),
    ("wrap_policy.wrap_lm_output", False, NOT, {}),
    ("wrap_policy.wrap_lm_output", True, R, {"wrap_policy": {"lm_head": True}}),
    ("apply_expert_patch", False, NOT, {}),
    ("apply_expert_patch", True, NOT, {}),
    ("ep_size", 1, NOT, {}),
    ("ep_size", 4, C, {"expert_parallel": {"degree": 4}}),
    ("efsdp_size", 4, NOT, {}),
    ("moe_use_grouped_mm", False, NOT, {}),
    ("moe_use_grouped_mm", True, UN, {}),
    ("forward_prefetch", False, NOT, {}),
    ("forward_prefetch", True, C, {"forward_prefetch": 1}),
    ("forward_prefetch", 2, K, {"forward_prefetch": 2}),
    ("backward_prefetch", False, NOT, {}),
    ("backward_prefetch", True, C, {"backward_prefetch": 1}),
    ("backward_prefetch", 2, K, {"backward_prefetch": 2}),
    ("enable_mix_precision", True, C, {}),
    ("reduce_scatter_during_grad_accumulation", True, NOT, {}),
    ("reduce_scatter_during_grad_accumulation", False, C, {"gradient_sync": "last"}),
    ("save_only_model", False, NOT, {}),
    ("save_only_model", True, CH, {}),
    ("init_tokenizer_processor", False, NOT, {}),
    ("apply_tiled_mlp", False, NOT, {}),
    ("apply_tiled_mlp", True, R, {"tiled_mlp": {"shards": 4}}),
    ("tiled_num_shards", 4, NOT, {}),
    ("model_type", "qwen3", NOT, {}),
    ("ulysses_size", 1, NOT, {}),
    ("ulysses_size", 2, C, ULYSSES),
    ("ulysses_size", "many", DEC, {}),
    ("ep_size", "many", DEC, {}),
]
MODEL_ARGS = [
    ("ulysses_size", 1, NOT),
    ("ulysses_size", 2, C),
    ("ulysses_size", "many", DEC),
    ("freeze_module_prefix", "v", C),
]
Z = "zero_optimization"
GATHERED = [
    "gather_16bit_weights_on_model_save",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
]
UNPINNED = {"cpu_offload": {"pin_memory": False}}
STATE = {"optimizer_state": {"device": "cpu"}}
PARAMETERS = ["offload_param", "cpu_offload_params", "cpu_offload_param"]
STATES = ["offload_optimizer", "cpu_offload"]
OFFLOADS = [*PARAMETERS, *STATES]
FEATURES = [
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "zeropp_loco_param",
    "zenflow",
]
PARALLEL = ["sequence_parallel", "pipeline", "pipeline_parallel_size"]
SEQUENCE = ("sequence_parallel_size", "context_parallel_size")
TENSOR = ("tensor_parallel", "autotp_size", "tp_size")
MASTERS = ["bf16.bf16_master_weights_and_grads", "fp16.fp16_master_weights_and_grads"]
BF16_STATES = "bf16.bf16_optimizer_states"
DEEP = [
    *((f"{Z}.{name}", {"device": "elsewhere"}, DEC, {}) for name in OFFLOADS),
    *((key, 1, NOT, {}) for key in PARALLEL),
    *((key, 2, UN, {}) for key in PARALLEL),
    ("expert_parallel_size", 1, NOT, {}),
    ("expert_parallel_size", 2, C, EXPERTS_OF_2),
    ("tensor_parallel", {"autotp_size": 1, "tp_overlap_comm": True}, NOT, {}),
    *((key, {"autotp_size": "auto"}, DEC, {}) for key in TENSOR),
    ("tensor_parallel", {"autotp_size": 4}, C, {"tensor_parallel": 4}),
    ("tensor_parallel", {"tensor_parallel": {"tp_size": 4}}, C, {"tensor_parallel": 4}),
    *((key, 1, NOT, {}) for key in TENSOR),
    *((key, 2, C, {"tensor_parallel": 2}) for key in TENSOR),
    *((key, 1, NOT, {}) for key in SEQUENCE),
    *((key, "many", DEC, {}) for key in SEQUENCE),
    ("sequence_parallel_size", 2, C, ULYSSES),
    ("context_parallel_size", 2, C, {"sequence_parallel": {"degree": 2, "method": "auto"}}),
    *((key, False, NOT, {}) for key in MASTERS),
    *((key, True, UN, {}) for key in MASTERS),
    (BF16_STATES, False, NOT, {}),
    (BF16_STATES, True, CH, {"optimizer_state": {"dtype": "bf16"}}),
    ("bf16.loss_scale", 0, NOT, {}),
    ("bfloat16.enabled", True, C, BF16),
    ("bfloat16.enabled", False, NOT, {}),
    ("bfloat16.enabled", "auto", DEC, {}),
    ("fp16.loss_scale", 0, NOT, {}),
    ("fp16.loss_scale", 128, NOT, {}),
    ("torch_autocast.enabled", False, NOT, {}),
    ("torch_autocast.enabled", True, DEC, {}),
    ("torch_autocast.dtype", "bfloat16", C, {}),
    ("torch_autocast.lower_precision_safe_modules", ["torch.nn.Linear"], NOT, {}),
    ("data_types.grad_accum_dtype", "fp32", NOT, {}),
    ("data_types.grad_accum_dtype", "bf16", CH, {}),
    ("amp.enabled", False, NOT, {}),
    ("amp.enabled", True, DEC, {}),
    ("amp.opt_level", "O1", NOT, {}),
    (f"{AC}.cpu_checkpointing", False, NOT, {}),
    (f"{AC}.cpu_checkpointing", True, CH, CHECKPOINTED),
    (f"{AC}.partition_activations", False, NOT, {}),
    (f"{AC}.partition_activations", True, CH, {}),
    (f"{AC}.number_checkpoints", 4, NOT, {}),
    (f"{AC}.contiguous_memory_optimization", True, NOT, {}),
    (f"{AC}.synchronize_checkpoint_boundary", True, NOT, {}),
    (f"{AC}.profile", True, NOT, {}),
    *((key, False, NOT, {}) for key in SHARDING_KEYS if key != Z),
    *((key, "x", DEC, {}) for key in SHARDING_KEYS if key != Z),
    ("sparse_gradients", False, NOT, {}),
    ("sparse_gradients", True, UN, {}),
    ("fp32_allreduce", False, NOT, {}),
    ("fp32_allreduce", True, R, {"mixed_precision": {"reduce_dtype": "fp32"}}),
    (f"{Z}.stage", 0, C, COPIES),
    (f"{Z}.stage", 1, CH, KEEP),
    (f"{Z}.stage", 2, C, KEEP),
    (f"{Z}.stage", 3, C, AUTO),
    (f"{Z}.zero_hpz_partition_size", 1, NOT, {}),
    (f"{Z}.zero_hpz_partition_size", 4, C, {RESHARD: 4}),
    (f"{Z}.mics_shard_size", -1, NOT, {}),
    (f"{Z}.mics_shard_size", 4, C, NODES),
    (f"{Z}.mics_hierarchical_params_gather", True, NOT, {}),
    *((f"{Z}.{name}", {"device": "none", "pin_memory": True}, NOT, {}) for name in OFFLOADS),
    *((f"{Z}.{name}", {"device": "cpu"}, CH, UNPINNED) for name in PARAMETERS),
    *((f"{Z}.{name}", True, CH, {"cpu_offload": True}) for name in PARAMETERS),
    *((f"{Z}.{name}", value, CH, STATE) for name in STATES for value in (True, {"device": "cpu"})),
    *((f"{Z}.{name}", {"device": "nvme"}, UN, {}) for name in OFFLOADS),
    *((f"{Z}.{name}", True, C, {"state_dict_type": "full"}) for name in GATHERED),
    *((f"{Z}.{name}", False, C, {"state_dict_type": "sharded"}) for name in GATHERED),
    *((f"{Z}.{name}", True, UN, {}) for name in FEATURES),
    *((f"{Z}.{name}", None, NOT, {}) for name in FEATURES),
    ("bf16.enabled", True, C, BF16),
    ("bf16.enabled", False, NOT, {}),
    ("bf16.enabled", "auto", DEC, {}),
    ("fp16.enabled", True, C, FP16),
    ("fp16.enabled", False, NOT, {}),
    ("fp16.enabled", "auto", DEC, {}),
    ("communication_data_type", None, NOT, {}),
    ("communication_data_type", "bfp16", R, {"mixed_precision": {"reduce_dtype": "bf16"}}),
    ("gradient_clipping", 0, NOT, {}),
    ("gradient_clipping", 1.0, R, {}),
    ("gradient_clipping", "auto", DEC, {}),
    ("expert_parallel_size", "many", DEC, {}),
]
ALL = {"all_gather": True}
FP8_CASES = [
    ("backend", "AO", NOT, True),
    ("backend", "TE", CH, True),
    ("enable_fsdp_float8_all_gather", False, NOT, True),
    ("enable_fsdp_float8_all_gather", True, C, ALL),
]
REDUCED = {"communication_data_type": "fp32"}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
STATIC = {"fp16": {"enabled": True, "loss_scale": 128}}
SWITCHED = [(True, CH, KEEP), (False, C, COPIES)]
ALWAYS = [
    row.key
    for row in DEEPSPEED.rows
    if any(w in row.reason for w in ("no buckets", "loss scal", "own engine"))
]
FOR_TRAINING = [row.key for row in DEEPSPEED.rows if row.reason.startswith("not about sharding")]


def nested(key, value):
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def migrate_data(data):
    return migrate(dump(data), world_size=8, gpus_per_node=4)


def in_block(key, value, top=True):
    launcher = {"distributed_type": "FSDP"} if top else {}
    return migrate_data({**launcher, "fsdp_config": {"fsdp_debug": None, f"fsdp_{key}": value}})


def at_top(key, value, nest=False):
    data = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_use_orig_params": True}}
    return migrate_data({**data, key: {value: 1} if nest else value})


def of_fp8(mark, key, value, switch="fp8"):
    # In the order in which Accelerate writes its files: the switch is the last.
    return migrate_data(
        {
            "distributed_type": "FSDP",
            "fp8_config": {f"{mark}{key}": value},
            "fsdp_config": {"fsdp_use_orig_params": True},
            "mixed_precision": switch,
        }
    )


def in_degrees(key, value):
    data = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_use_orig_params": True}}
    other = {"parallelism_config_dp_debug": None}
    block = {**other, f"parallelism_config_{key}": value}
    return migrate(dump({**data, "parallelism_config": block}))


def in_arguments(key, value):
    data = {"fsdp_config": {"fsdp_use_orig_params": True}, key: value}
    return migrate_data({"training": data})


def in_loading(**block):
    return migrate_data({"model_init_kwargs": {"distributed_config": block}})


def in_strategy(key, value):
    return migrate_data({"a": {"strategy_config": nested(key, value)}})


def in_model_args(key, value):
    return migrate_data({"strategy_config": {"fsdp_size": 4}, "model_args": {key: value}})


def in_deepspeed(key, value):
    data = nested(key, value)
    # `stage` is given, as its default would be written out.
    return migrate_data(data | {Z: {"stage": 2} | data.get(Z, {})})


def check(report, dialect, key, status, becomes, default):
    assert report.dialect == dialect.name
    entry = entry_of(report, key)
    assert (entry.status, entry.settings) == (status, becomes)
    assert entry.reason
    assert bool(entry.options) == (status in (DEC, UN))
    if not key.endswith("state_dict_type"):
        assert settings_of(report) == {**default, **becomes}
    parse_config(settings_of(report))
    check_stable(report)


@pytest.mark.table(
    "reshard_after_forward-5-converted-becomes11",
    "state_dict_type-LOCAL_STATE_DICT-needs a decision-becomes23",
    "cpu_ram_efficient_loading-True-no longer needed-becomes28",
    "limit_all_gathers-True-no longer needed-becomes38",
)
@pytest.mark.parametrize(("key", "value", "status", "becomes"), BLOCK)
def test_block_of_accelerate_and_of_training_arguments(key, value, status, becomes):
    default = {"state_dict_type": "sharded" if key == "version" else "full"}
    name = f"fsdp_config.fsdp_{key}"
    check(in_block(key, value), ACCELERATE, name, status, becomes, default)
    report = in_block(key, value, top=False)
    # Transformers 5, which reads `version`, has one default.
    check(report, TRAINING_ARGUMENTS, name, status, becomes, {"state_dict_type": "full"})


@pytest.mark.parametrize(("key", "value", "status", "becomes"), TOP)
def test_top_of_accelerate(key, value, status, becomes):
    check(at_top(key, value), ACCELERATE, key, status, becomes, {"state_dict_type": "full"})


@pytest.mark.table("fsdp-hybrid_shard auto_wrap-converted-becomes4")
@pytest.mark.parametrize(("key", "value", "status", "becomes"), ARGUMENTS)
def test_training_arguments(key, value, status, becomes):
    report, default = in_arguments(key, value), {"state_dict_type": "full"}
    check(report, TRAINING_ARGUMENTS, f"training.{key}", status, becomes, default)


@pytest.mark.table("ep_size-4-converted-becomes0", "fsdp_mixed_precision-True-converted-becomes14")
@pytest.mark.parametrize(("key", "value", "status", "becomes"), LOADING)
def test_distributed_config_of_transformers(key, value, status, becomes):
    report, name = in_loading(**{key: value}), f"model_init_kwargs.distributed_config.{key}"
    check(report, TRAINING_ARGUMENTS, name, status, becomes, {"state_dict_type": "full"})


def test_old_switch_of_transformers_has_the_ranks_of_a_tensor_hold_experts():
    report = in_loading(enable_expert_parallel=True, tp_size=4, fsdp_size=2)
    both = {"expert_parallel": {"degree": 4}, SHARD: 8, "state_dict_type": "full"}
    assert settings_of(report) == both
    assert not report.having(DEC, UN)
    report = in_loading(enable_expert_parallel=True, tp_size=2, ep_size=4)
    assert settings_of(report)["expert_parallel"] == {"degree": 4}
    assert settings_of(report)["tensor_parallel"] == 2


@pytest.mark.table(
    "fsdp_size-8-converted-becomes1",
    "fsdp_size--1-no longer needed-becomes3",
    "wrap_policy.transformer_layer_cls_to_wrap-value11-renamed-becomes11",
    "forward_prefetch-2-kept-becomes28",
)
@pytest.mark.parametrize(("key", "value", "status", "becomes"), STRATEGY)
def test_roll(key, value, status, becomes):
    report = in_strategy(key, value)
    default = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
    given = becomes.get("mixed_precision", {})
    entry = entry_of(report, f"a.strategy_config.{key}")
    if given:
        assert entry.settings == {"mixed_precision": default | given}
        becomes = entry.settings
    both = {"mixed_precision": default | given, "async_save": True}
    check(report, ROLL, entry.key, status, becomes, both)


@pytest.mark.parametrize("on", [True, False])
def test_roll_says_in_two_keys_how_many_tiles(on):
    report = migrate_data({"strategy_config": {"apply_tiled_mlp": on, "tiled_num_shards": 8}})
    settings = entry_of(report, "strategy_config.apply_tiled_mlp").settings
    assert settings == ({"tiled_mlp": {"shards": 8}} if on else {})


@pytest.mark.parametrize(("key", "value", "status"), MODEL_ARGS)
def test_model_args_of_roll_stay(key, value, status):
    report = in_model_args(key, value)
    assert entry_of(report, f"model_args.{key}").status is status
    assert OmegaConf.create(report.text)["model_args"] == {key: value}
    assert settings_of(report).get("sequence_parallel") == (
        ULYSSES["sequence_parallel"] if value == 2 else None
    )


@pytest.mark.table(
    "tensor_parallel-value17-converted-becomes17",
    "tensor_parallel-2-converted-becomes22",
    "torch_autocast.enabled-True-needs a decision-becomes44",
    "zero_optimization.zero_hpz_partition_size-4-converted-becomes79",
)
@pytest.mark.parametrize(("key", "value", "status", "becomes"), DEEP)
def test_deepspeed(key, value, status, becomes):
    check(
        in_deepspeed(key, value),
        DEEPSPEED,
        key,
        status,
        becomes,
        {} if key == f"{Z}.stage" else KEEP,
    )


@pytest.mark.parametrize("pinned", ["offload_param", "offload_optimizer", None])
def test_parameters_in_cpu_memory_take_the_state_with_them(pinned):
    """One of both with pinned memory pins all there is."""
    names = ("offload_optimizer", "offload_param")
    zero = {name: {"device": "cpu", "pin_memory": name == pinned} for name in names}
    report = migrate_data({Z: {"stage": 3, **zero}})
    offload = {"cpu_offload": True} if pinned else UNPINNED
    assert settings_of(report) == {**AUTO, **offload}
    assert not report.having(DEC, UN)


@pytest.mark.parametrize("mark", ["", "fp8_"])
@pytest.mark.parametrize(("key", "value", "status", "fp8"), FP8_CASES)
def test_fp8_of_accelerate(mark, key, value, status, fp8):
    report = of_fp8(mark, key, value)
    entry = entry_of(report, f"fp8_config.{mark}{key}")
    assert (entry.status, settings_of(report)["fp8"]) == (status, fp8)
    off = of_fp8(mark, key, value, switch="bf16")
    assert "fp8" not in settings_of(off)
    assert not off.having(DEC, UN)


AROUND_ROLL = """
max_grad_norm: 1.0
a:
  model_args: {disable_gradient_checkpointing: false}
  training_args: {max_grad_norm: 0.5}
  strategy_args: {strategy_name: fsdp2_train, strategy_config: {fsdp_size: 4}}
b:
  model_args: {disable_gradient_checkpointing: true}
  strategy_args: {strategy_name: fsdp2_train, strategy_config: {fsdp_size: 4}}
"""
OTHER_ENGINE = """
a: {strategy_args: {strategy_name: megatron_train, strategy_config: {ep_size: 2}}}
b: {strategy_args: {strategy_name: fsdp2_train, strategy_config: {fsdp_size: 4}}}
"""


def test_what_stands_around_a_role_of_roll():
    report = migrate(AROUND_ROLL)
    new = OmegaConf.create(report.text)
    for role, norm, recomputed in (("a", 0.5, True), ("b", 1.0, False)):
        found = new[role].strategy_args
        assert found.algorithms.gradient_clipping.clipping_threshold == norm
        assert found.parallelism_config.fsdp2.activation_checkpointing is recomputed
    assert entry_of(report, "a.model_args.disable_gradient_checkpointing").status is C
    assert entry_of(report, "max_grad_norm").status is C


def test_a_role_with_another_engine_is_not_passed_over():
    assert [entry.key for entry in migrate(OTHER_ENGINE).having(UN)] == [
        "a.strategy_args.strategy_name"
    ]


def test_what_trainers_have_beside_the_block():
    """Precision and clipping are the trainer's; what the file itself says of them stays."""
    data = {Z: {"stage": 3}, "bf16": {"enabled": True}, "gradient_clipping": 0.5}
    new = OmegaConf.create(migrate_data(data).text)
    assert new.precision == "amp_bf16"
    clipping = {"clipping_type": "norm", "clipping_threshold": 0.5}
    assert new.algorithms == {"gradient_clipping": clipping}
    report = migrate_data({**data, "precision": "fp32"})
    assert OmegaConf.create(report.text).precision == "fp32"
    assert "has its own `precision`" in entry_of(report, "bf16.enabled").reason
    assert migrate(report.text).text == report.text


def test_reduction_of_deepspeed_follows_its_own_key():
    """Whichever of the two keys comes first."""
    switch = {"bf16": {"enabled": True}}
    for data in ({**REDUCED, **switch}, {**switch, **REDUCED}):
        report = migrate_data({Z: {"stage": 3}, **data})
        dtypes = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
        assert settings_of(report)["mixed_precision"] == dtypes


def test_deepspeed_without_a_stage_replicates():
    report = migrate_data({Z: {"overlap_comm": True}})
    assert settings_of(report) == COPIES
    assert all(entry.status is Status.ADDED for entry in report.entries if entry.settings)


def test_autocast_of_deepspeed_is_the_trainers():
    report = migrate_data({Z: {"stage": 3}, **AUTOCAST})
    assert settings_of(report) == {**AUTO, **FP16}
    assert OmegaConf.create(report.text).precision == "amp_fp16"


def test_a_static_loss_scale_is_asked_for_where_it_counts():
    report = migrate_data({Z: {"stage": 3}, **STATIC})
    assert entry_of(report, "fp16.loss_scale").status is DEC
    assert migrate_data({Z: {"stage": 3}, "fp16": {"loss_scale": 128}}).having(DEC) == []


@pytest.mark.parametrize("mixed", [True, False])
def test_roll_without_a_dtype(mixed):
    report = migrate_data({"strategy_config": {"fsdp_size": 4, "enable_mix_precision": mixed}})
    dtypes = {"param_dtype": "bf16", "reduce_dtype": "fp32" if mixed else "bf16"}
    assert settings_of(report)["mixed_precision"] == dtypes


@pytest.mark.parametrize(("value", "status", "becomes"), SWITCHED)
def test_old_switch_of_deepspeed(value, status, becomes):
    check(migrate_data({Z: value}), DEEPSPEED, Z, status, becomes, {})


def test_version_2_of_accelerate_sets_the_output_too():
    data = {"distributed_type": "FSDP", "mixed_precision": "bf16"}
    report = migrate_data({**data, "fsdp_config": {"fsdp_version": 2}})
    dtypes = dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype"), "bf16")
    assert settings_of(report)["mixed_precision"] == dtypes
    again = migrate_data({**data, "fsdp_config": {"fsdp_version": 1}})
    assert "output_dtype" not in settings_of(again)["mixed_precision"]


def test_ranks_of_accelerate_are_in_its_file():
    data = {
        "distributed_type": "FSDP",
        "num_processes": 16,
        "num_machines": 2,
        "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"},
    }
    assert settings_of(migrate(dump(data)))[SHARD] == 8
    assert settings_of(migrate(dump(data), gpus_per_node=4))[SHARD] == 4
    unknown = migrate(dump(data | {"num_machines": 3}))
    assert entry_of(unknown, "fsdp_config.fsdp_sharding_strategy").status is DEC


@pytest.mark.table(
    "dp_shard_size-1-converted-becomes3",
    "tp_size-2-converted-becomes5",
    "cp_size-2-converted-becomes7",
    "sp_size-2-converted-becomes10",
)
@pytest.mark.parametrize(("key", "value", "status", "becomes"), DEGREES)
def test_degrees_of_accelerate(key, value, status, becomes):
    name = f"parallelism_config.parallelism_config_{key}"
    report, default = in_degrees(key, value), {"state_dict_type": "full"}
    check(report, ACCELERATE, name, status, becomes, default)


CP = {"parallelism_config_dp_shard_size": 1, "parallelism_config_cp_size": 8}


def test_ranks_of_a_sequence_hold_shards_too():
    """Accelerate counts them apart, and so its own file has no contradiction."""
    report = migrate_data({"distributed_type": "FSDP", "parallelism_config": CP})
    assert settings_of(report)[SHARD] == 8
    assert not [entry.key for entry in report.entries if entry.status is DEC]


def test_settings_of_training_arguments_in_a_file():
    report = migrate_data({"training": {"fsdp": "full_shard auto_wrap", "fsdp_config": "a.json"}})
    assert entry_of(report, "training.fsdp_config").status is DEC


def test_nested_settings_have_to_be_moved():
    nested_report = in_arguments("fsdp", "full_shard auto_wrap")
    assert "'training.parallelism_config.fsdp2'" in nested_report.remarks[0]
    (lacking,) = at_top("mixed_precision", "bf16").remarks
    assert "write `model: {" in lacking


@pytest.mark.table(
    "zero_optimization.model_persistence_threshold",
    "zero_optimization.stage3_allgather_sequential",
    "zero_optimization.enable_sanity_checks",
    "fp16.consecutive_hysteresis",
)
@pytest.mark.parametrize("key", ALWAYS)
def test_what_deepspeed_tunes_is_not_needed(key):
    check(in_deepspeed(key, 5), DEEPSPEED, key, NOT, {}, KEEP)


def reports_of(dialect: Dialect) -> list[Report]:
    """One migration of every row of a table and more."""
    if dialect is ACCELERATE:
        reports = [in_block(key, value) for key, value, *_ in BLOCK]
        reports += [at_top(key, value) for key, value, *_ in TOP]
        reports += [at_top(key, "x") for key in LAUNCHING]
        reports.append(at_top("distributed_type", "FSDP"))
        reports += [of_fp8(mark, *case[:2]) for mark in ("", "fp8_") for case in FP8_CASES]
        reports += [at_top(*key.split(".", 1), nest=True) for key in SCALES]
        return reports + [in_degrees(key, value) for key, value, *_ in DEGREES]
    if dialect is TRAINING_ARGUMENTS:
        reports = [in_block(key, value, top=False) for key, value, *_ in BLOCK]
        reports += [in_arguments(key, value) for key, value, *_ in ARGUMENTS]
        reports += [in_arguments(key, value) for key, value in counted(TRAINING)]
        reports.append(in_arguments("optim", "adamw_bnb_8bit"))
        reports += [in_block("cpu_offload", switch, top=False) for switch in (True, False)]
        return reports + [in_loading(**{key: value}) for key, value, *_ in LOADING]
    if dialect is ROLL:
        reports = [in_strategy(key, value) for key, value, *_ in STRATEGY]
        reports.append(in_strategy("enable_mix_precision", False))
        reports += [in_model_args(key, value) for key, value, _ in MODEL_ARGS]
        off = {
            "model_args": {"disable_gradient_checkpointing": None},
            "training_args": {"max_grad_norm": 0},
            "max_grad_norm": 0,
        }
        reports.append(migrate_data({"strategy_config": {"fsdp_size": 4}, **off}))
        around = [nested(key, value) for key, value in counted(COUNTS)]
        around += [{row.key: 5} for row in ROLL.outside if row.key[:2] != "*."]
        reports += [migrate_data({"strategy_config": {"fsdp_size": 4}} | data) for data in around]
        return [*reports, migrate(OTHER_ENGINE), migrate(AROUND_ROLL)]
    reports = [in_deepspeed(key, value) for key, value, *_ in DEEP]
    reports += [in_deepspeed(key, 5) for key in ALWAYS]
    reports += [in_deepspeed(key, value) for key, value in counted(DEEPSPEED_KEYS)]
    adam = {"type": "AdamW", "params": {"lr": 2e-5}}
    reports += [in_deepspeed("optimizer", adam), in_deepspeed("optimizer", {"type": "Lamb"})]
    typed = ({key: {"type": "x"}} for key in FOR_TRAINING)
    reports += [migrate_data(data | {Z: {"stage": 2}}) for data in typed]
    reports += [migrate_data({Z: {"stage": 2}, **data}) for data in (AUTOCAST, STATIC)]
    return reports + [migrate_data({Z: value}) for value, *_ in SWITCHED]


@pytest.mark.table("dialect1", "dialect2")
@pytest.mark.parametrize("dialect", [ACCELERATE, TRAINING_ARGUMENTS, ROLL, DEEPSPEED])
def test_every_row_has_a_case(dialect: Dialect):
    assert rows_without_a_case(dialect, reports_of(dialect)) == []


@pytest.mark.table(
    "accelerate-no-shard-sft",
    "hf-trainer-choices",
    "hf-trainer-full-shard-alone",
    "roll-actor-critic",
)
@pytest.mark.parametrize("file", files("*.yaml"), ids=lambda file: file.stem)
def test_every_key_of_the_collection_is_in_the_report(file):
    report = migrate(text_of(file))
    assert missing(Document(text_of(file), file.name).data, report) == []
    parse_config(settings_of(report))
    check_stable(report)


@pytest.mark.matrix
def test_the_collection_has_what_its_tests_are_about():
    """Each dialect several times, and what a reader of YAML may trip over."""
    texts = [text_of(file) for file in files("**/*.yaml")]
    found = Counter(migrate(text).dialect for text in texts)
    assert found["composer"] > 10
    assert min(found[name] for name in ("accelerate", "huggingface", "roll")) >= 4
    assert found["none"] > 0
    whole = "\n".join(texts)
    strategies = ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD"]
    for part in (*strategies, "\r\n", "<<: *", "${variables.", "\nparameters:", "'8'", "é"):
        assert part in whole, part
    statuses = {entry.status for text in texts for entry in migrate(text).entries}
    assert statuses == set(Status)


ROLES = """\
actor_train:
  strategy_args: {strategy_name: fsdp2_train, strategy_config: {fsdp_size: 4}}
reference:
  strategy_args:
    strategy_name: fsdp2_infer
    strategy_config:
      param_dtype: fp16  # smaller
actor_infer:
  strategy_args:
    strategy_name: vllm
    strategy_config: {block_size: 16}
"""


def test_every_role_of_roll_is_migrated_and_other_engines_are_left():
    report = migrate(ROLES)
    new = OmegaConf.create(report.text)
    trained = new.actor_train.strategy_args.parallelism_config.fsdp2
    assert trained[SHARD] == 4
    assert "# smaller" in report.text
    frozen = new.reference.strategy_args.parallelism_config.fsdp2.mixed_precision
    assert frozen == {"param_dtype": "fp16", "reduce_dtype": "fp32"}
    assert new.actor_infer.strategy_args.strategy_config == {"block_size": 16}
    assert len(report.remarks) == 3
    check_stable(report)


def test_another_dialect_can_be_asked_for():
    """Accelerate's own keys, read as what they also are: arguments of transformers."""
    text = dump({"distributed_type": "FSDP", "fsdp_config": {"fsdp_min_num_params": 5}})
    assert migrate(text).dialect == "accelerate"
    assert migrate(text, dialect="huggingface").dialect == "huggingface"


VALUES = st.one_of(st.booleans(), st.none(), st.integers(-1, 5), st.sampled_from(["a", "bf16"]))
NAMES = sorted(
    {
        name
        for dialect in (ACCELERATE, TRAINING_ARGUMENTS, ROLL, DEEPSPEED)
        for row in dialect.rows
        for name in row.key.split(".")
    }
    | {"fsdp_config", "strategy_config", "fsdp_state_dict_type", "model"}
)
FLAT = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), st.one_of(VALUES, FLAT), min_size=1, max_size=6))
def test_no_key_is_missing(data):
    assume(sum(bool(data.get(key)) for key in SHARDING_KEYS) < 2)
    known = any(dialect.find(data) for dialect in DIALECTS.values())
    assume(known or not foreign_sign(data))
    report = migrate(dump(data))
    assert missing(data, report) == []
    check_stable(report)


def test_single_experts_of_roll_are_units_beside_their_blocks():
    policy = {"transformer_layer_cls_to_wrap": ["Layer"], "moe_experts": ["Expert"]}
    strategy = {"apply_expert_patch": True, "wrap_policy": policy}
    report = migrate_data({"a": {"strategy_config": strategy}})
    assert settings_of(report)["wrap_policy"] == {"classes": ["Layer", "Expert"]}
    assert settings_of(report)["unused_parameters"] is False


def test_arguments_of_transformers_5():
    """With `version: 2` inside, which Composer's block of this name has too."""
    block = {
        "version": 2,
        "reshard_after_forward": True,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "cpu_offload": True,
        "activation_checkpointing": True,
    }
    report = migrate(dump({"fsdp": True, "fsdp_config": block, "bf16": True, "max_steps": 100}))
    assert report.dialect == "huggingface"
    assert not report.having(Status.DECISION, Status.CHANGES)
    assert settings_of(report) == {
        "reshard_after_forward": "auto",
        "wrap_policy": {"classes": ["LlamaDecoderLayer"]},
        "cpu_offload": True,
        "activation_checkpointing": True,
        "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "bf16"},
        "state_dict_type": "full",
    }
    assert yaml.safe_load(report.text)["max_duration"] == "100ba"
    check_stable(report)
    off = migrate(dump({"fsdp": True, "fsdp_config": {**block, "cpu_offload": False}}))
    assert "cpu_offload" not in settings_of(off)
