"""Configurations as their users write them, each with what it means, decided by hand.

What is expected comes from what the other trainer does with the file, not from the tables of
`migrate`. A file is right if its new settings, those beside them and the keys that are left to
the user are exactly these.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from composer_fsdp2.cli.main import app
from composer_fsdp2.config.schema import parse_config
from composer_fsdp2.tools.migrate.engine import migrate
from tests.support.migrating import check_stable

SHARD, REPLICATE = "data_parallel_shard_degree", "data_parallel_replicate_degree"
RESHARD, AC = "reshard_after_forward", "activation_checkpointing"
FULL, SHARDED = {"state_dict_type": "full"}, {"state_dict_type": "sharded"}
AUTO, KEEP = {RESHARD: "auto"}, {RESHARD: False}
COPIES = {SHARD: 1, REPLICATE: -1, RESHARD: False}
STATE_ON_CPU = {"optimizer_state": {"device": "cpu"}}


def reduced(dtype: str, **more: str) -> dict[str, Any]:
    """Parameters and reductions in one dtype."""
    return {"mixed_precision": {"param_dtype": dtype, "reduce_dtype": dtype, **more}}


def units(*names: str) -> dict[str, Any]:
    return {"wrap_policy": {"classes": list(names)}}


def clipped(norm: float) -> dict[str, Any]:
    threshold = {"clipping_type": "norm", "clipping_threshold": norm}
    return {"algorithms": {"gradient_clipping": threshold}}


def sequence(degree: int, method: str) -> dict[str, Any]:
    return {"sequence_parallel": {"degree": degree, "method": method}}


BF16, FP16 = {"precision": "amp_bf16"}, {"precision": "amp_fp16"}
FP32 = {"precision": "fp32"}
SAVED = {"async_save": True}
ROLL = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}, **SAVED}


@dataclass(frozen=True, kw_only=True)
class Public:
    """A file and what becomes of it."""

    text: str
    dialect: str
    fsdp2: dict[str, Any]
    beside: dict[str, Any] = field(default_factory=dict)
    """settings of the trainer, where the block is"""
    place: str = ""
    """mapping that holds the block"""
    left: tuple[str, ...] = ()
    """keys that the user has to decide about"""
    files: dict[str, Any] = field(default_factory=dict)
    """JSON that the file names"""
    ranks: int = 8


LAUNCHER = """
compute_environment: LOCAL_MACHINE
debug: false
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
num_machines: 1
num_processes: {ranks}
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
EIGHT, FOUR, TWO = (LAUNCHER.format(ranks=ranks) for ranks in (8, 4, 2))

CASES: dict[str, Public] = {}

# --- Accelerate, FSDP. ---

CASES.update(
    {
        "accelerate fsdp1": Public(
            text=f"""{EIGHT}
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: FULL_SHARD
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
  fsdp_version: 1
mixed_precision: bf16
""",
            dialect="accelerate",
            fsdp2={AC: False, **AUTO, **FULL, **reduced("bf16")},
            beside=BF16,
        ),
        "accelerate fsdp2": Public(
            text=f"""{EIGHT}
# Requires accelerate 1.7.0 or higher
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
mixed_precision: bf16
""",
            dialect="accelerate",
            fsdp2={AC: False, **AUTO, **FULL, **reduced("bf16", output_dtype="bf16")},
            beside=BF16,
        ),
        "accelerate context parallel, 2 GPUs": Public(
            text=f"""{TWO}
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
mixed_precision: bf16
parallelism_config:
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: 1
  parallelism_config_tp_size: 1
  parallelism_config_cp_size: 2
""",
            dialect="accelerate",
            fsdp2={
                **{AC: True, **AUTO, **FULL, **reduced("bf16", output_dtype="bf16")},
                **{SHARD: 2, **sequence(2, "auto")},
            },
            beside=BF16,
            ranks=2,
        ),
        "accelerate cp.yaml": Public(
            text="""
distributed_type: FSDP
num_processes: 8
mixed_precision: bf16
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
use_parallelism_config: true
parallelism_config:
  parallelism_config_dp_shard_size: 1
  parallelism_config_cp_size: 8
  parallelism_config_cp_comm_strategy: alltoall
""",
            dialect="accelerate",
            fsdp2={
                **{**AUTO, **SHARDED, **reduced("bf16", output_dtype="bf16")},
                **{SHARD: 8, **sequence(8, "auto")},
            },
            beside=BF16,
        ),
        "accelerate parallelism_config": Public(
            text="""
distributed_type: FSDP
mixed_precision: bf16
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_cp_size: 2
  parallelism_config_tp_size: 2
""",
            dialect="accelerate",
            fsdp2={
                **{**KEEP, **SHARDED, **reduced("bf16", output_dtype="bf16")},
                **{**units("LlamaDecoderLayer"), SHARD: 4, REPLICATE: 2},
                **{"tensor_parallel": 2, **sequence(2, "auto")},
            },
            beside=BF16,
            ranks=16,
        ),
        "accelerate, degrees switched off": Public(
            text="""
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_state_dict_type: SHARDED_STATE_DICT}
use_parallelism_config: false
parallelism_config: {parallelism_config_dp_shard_size: 2, parallelism_config_cp_size: 4}
""",
            dialect="accelerate",
            fsdp2=SHARDED,
            beside=FP32,
        ),
        "accelerate, hybrid on two nodes": Public(
            text="""
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: 2
num_processes: 16
machine_rank: 0
main_process_ip: 10.0.0.1
main_process_port: 29500
mixed_precision: fp16
fsdp_config:
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 2000
  fsdp_offload_params: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_use_orig_params: false
""",
            dialect="accelerate",
            fsdp2={
                **{**AUTO, SHARD: 8, REPLICATE: -1, "cpu_offload": True, **SHARDED},
                **{"wrap_policy": {"min_num_params": 2000}, **reduced("fp16")},
            },
            beside=FP16,
            ranks=16,
        ),
        "accelerate fp8 by torchao": Public(
            text=f"""{EIGHT}
distributed_type: FSDP
mixed_precision: fp8
fp8_config:
  fp8_backend: AO
  fp8_enable_fsdp_float8_all_gather: true
  fp8_pad_inner_dim: true
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
""",
            dialect="accelerate",
            fsdp2={
                **{**AUTO, **SHARDED, **reduced("bf16", output_dtype="bf16")},
                "fp8": {"all_gather": True},
            },
            beside=BF16,
        ),
        "accelerate fp8 by transformer engine": Public(
            text="""
distributed_type: FSDP
mixed_precision: fp8
fp8_config:
  amax_compute_algo: max
  amax_history_len: 1024
  backend: TE
  fp8_format: HYBRID
  interval: 1
  margin: 0
  override_linear_precision: false
  use_autocast_during_eval: false
fsdp_config:
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_state_dict_type: FULL_STATE_DICT
""",
            dialect="accelerate",
            fsdp2={**KEEP, **FULL, **reduced("bf16"), "fp8": True},
            beside=BF16,
        ),
        "accelerate, defaults of transformers in the block": Public(
            text="""
fsdp: full_shard auto_wrap
fsdp_config:
  min_num_params: 0
  xla: false
  xla_fsdp_v2: false
  xla_fsdp_grad_ckpt: false
  fsdp_transformer_layer_cls_to_wrap: [Qwen2DecoderLayer]
bf16: true
max_grad_norm: 1.0
gradient_checkpointing: true
""",
            dialect="huggingface",
            fsdp2={**AUTO, **FULL, **units("Qwen2DecoderLayer"), **reduced("bf16"), AC: True},
            beside={**BF16, **clipped(1.0)},
        ),
    }
)

# --- Accelerate, DeepSpeed. ---

CASES.update(
    {
        "accelerate zero3": Public(
            text=f"""{EIGHT}
deepspeed_config:
  deepspeed_multinode_launcher: standard
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
mixed_precision: bf16
""",
            dialect="accelerate-deepspeed",
            fsdp2={**AUTO, **FULL, **reduced("bf16")},
            beside=BF16,
        ),
        "accelerate zero2, clipped": Public(
            text=f"""{EIGHT}
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 1
  gradient_clipping: 1.0
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: false
  zero_stage: 2
distributed_type: DEEPSPEED
mixed_precision: 'no'
""",
            dialect="accelerate-deepspeed",
            fsdp2={**KEEP, "mixed_precision": "FULL"},
            beside={**FP32, **clipped(1.0)},
        ),
        "accelerate alst_ulysses_4gpu": Public(
            text=f"""{FOUR}
deepspeed_config:
  zero_stage: 3
  seq_parallel_communication_data_type: bf16
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: false
  zero3_save_16bit_model: false
distributed_type: DEEPSPEED
mixed_precision: bf16
parallelism_config:
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: 2  # Enables 2D parallelism with SP
  parallelism_config_tp_size: 1
  parallelism_config_sp_size: 2  # Sequence parallel size
  parallelism_config_sp_backend: deepspeed
  parallelism_config_sp_seq_length_is_variable: true
  parallelism_config_sp_attn_implementation: flash_attention_2
""",
            dialect="accelerate-deepspeed",
            fsdp2={**AUTO, **SHARDED, **reduced("bf16"), **sequence(2, "ulysses")},
            beside=BF16,
            ranks=4,
        ),
        "accelerate alst_ulysses_4gpu, when it was called context parallelism": Public(
            text=f"""{FOUR}
deepspeed_config: {{zero_stage: 3, zero3_init_flag: false, zero3_save_16bit_model: false}}
distributed_type: DEEPSPEED
mixed_precision: bf16
parallelism_config:
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: 2
  parallelism_config_cp_size: 2
  parallelism_config_cp_backend: deepspeed
  parallelism_config_cp_seq_length_is_variable: true
  parallelism_config_cp_attn_implementation: flash_attention_2
""",
            dialect="accelerate-deepspeed",
            fsdp2={**AUTO, **SHARDED, **reduced("bf16"), **sequence(2, "ulysses")},
            beside=BF16,
            ranks=4,
        ),
        "accelerate, optimizer on the CPU": Public(
            text="""
distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 4
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: false
  zero_stage: 2
mixed_precision: fp16
num_processes: 8
""",
            dialect="accelerate-deepspeed",
            fsdp2={**KEEP, **STATE_ON_CPU, **reduced("fp16")},
            beside=FP16,
        ),
        "accelerate, all on the CPU": Public(
            text="""
distributed_type: DEEPSPEED
deepspeed_config:
  offload_optimizer_device: cpu
  offload_param_device: cpu
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
mixed_precision: bf16
""",
            dialect="accelerate-deepspeed",
            fsdp2={**AUTO, **FULL, "cpu_offload": True, **reduced("bf16")},
            beside=BF16,
        ),
    }
)

# --- DeepSpeed's own JSON. ---

OVERLAPPED = {"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 5e8}
BATCHES = {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10}

CASES.update(
    {
        "deepspeed zero2": Public(
            text=json.dumps(
                {
                    **BATCHES,
                    "bf16": {"enabled": True},
                    "zero_optimization": {"stage": 2, "allgather_partitions": True, **OVERLAPPED},
                    "gradient_clipping": 1.0,
                }
            ),
            dialect="deepspeed",
            fsdp2={**KEEP, **reduced("bf16")},
            beside={**BF16, **clipped(1.0)},
        ),
        "deepspeed zero2 offload": Public(
            text=json.dumps(
                {
                    **BATCHES,
                    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
                    "zero_optimization": {
                        "stage": 2,
                        "offload_optimizer": {"device": "cpu", "pin_memory": True},
                        **OVERLAPPED,
                    },
                }
            ),
            dialect="deepspeed",
            fsdp2={**KEEP, **STATE_ON_CPU, **reduced("fp16")},
            beside=FP16,
        ),
        "deepspeed zero3 offload": Public(
            text=json.dumps(
                {
                    "bf16": {"enabled": True},
                    "zero_optimization": {
                        "stage": 3,
                        "offload_optimizer": {"device": "cpu", "pin_memory": True},
                        "offload_param": {"device": "cpu", "pin_memory": True},
                        "sub_group_size": 1e9,
                        "stage3_prefetch_bucket_size": 5e8,
                        "stage3_param_persistence_threshold": 1e6,
                        "stage3_max_live_parameters": 1e9,
                        "stage3_max_reuse_distance": 1e9,
                        "stage3_gather_16bit_weights_on_model_save": True,
                        **OVERLAPPED,
                    },
                }
            ),
            dialect="deepspeed",
            fsdp2={**AUTO, **FULL, "cpu_offload": True, **reduced("bf16")},
            beside=BF16,
        ),
        "deepspeed zero-infinity": Public(
            text=json.dumps(
                {
                    "bf16": {"enabled": True},
                    "zero_optimization": {
                        "stage": 3,
                        "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"},
                        "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"},
                    },
                    "aio": {"block_size": 262144, "queue_depth": 32},
                }
            ),
            dialect="deepspeed",
            fsdp2={**AUTO, **reduced("bf16")},
            beside=BF16,
            left=("zero_optimization.offload_optimizer", "zero_optimization.offload_param"),
        ),
        "deepspeed zero2, old names": Public(
            text=json.dumps(
                {
                    "bfloat16": {"enabled": True},
                    "zero_optimization": {"stage": 2, "cpu_offload": True},
                    "zero_allow_untested_optimizer": True,
                }
            ),
            dialect="deepspeed",
            fsdp2={**KEEP, **STATE_ON_CPU, **reduced("bf16")},
            beside=BF16,
        ),
        "deepspeed, state in bf16": Public(
            text=json.dumps(
                {
                    "bf16": {
                        "enabled": True,
                        "bf16_master_weights_and_grads": True,
                        "bf16_optimizer_states": True,
                    },
                    "zero_optimization": {"stage": 3},
                }
            ),
            dialect="deepspeed",
            fsdp2={**AUTO, "optimizer_state": {"dtype": "bf16"}, **reduced("bf16")},
            beside=BF16,
            left=("bf16.bf16_master_weights_and_grads",),
        ),
        "deepspeed zero++": Public(
            text=json.dumps(
                {
                    "bf16": {"enabled": True},
                    "communication_data_type": "fp32",
                    "zero_optimization": {
                        "stage": 3,
                        "zero_hpz_partition_size": 8,
                        "zero_quantized_weights": False,
                        "zero_quantized_gradients": True,
                    },
                }
            ),
            dialect="deepspeed",
            fsdp2={
                RESHARD: 8,
                "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"},
            },
            beside=BF16,
            left=("zero_optimization.zero_quantized_gradients",),
            ranks=16,
        ),
        "deepspeed zero1, bf16 with the keys of fp16": Public(
            text=json.dumps(
                {
                    **BATCHES,
                    "bf16": {
                        "enabled": True,
                        "loss_scale": 0,
                        "loss_scale_window": 1000,
                        "initial_scale_power": 16,
                        "hysteresis": 2,
                        "min_loss_scale": 1,
                    },
                    "zero_optimization": {"stage": 1},
                }
            ),
            dialect="deepspeed",
            fsdp2={**KEEP, **reduced("bf16")},
            beside=BF16,
        ),
    }
)

# --- TrainingArguments. ---

ZERO2 = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, **OVERLAPPED, "round_robin_gradients": True},
}
ZERO3 = {
    **ZERO2,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": False,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
ARGUMENTS = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
trust_remote_code: true
do_train: true
output_dir: saves/llama3-8b/full/sft
logging_steps: 10
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
"""

CASES.update(
    {
        "training arguments, full_shard": Public(
            text="""
output_dir: out
per_device_train_batch_size: 2
bf16: true
fsdp: full_shard auto_wrap
fsdp_config:
  transformer_layer_cls_to_wrap: [LlamaDecoderLayer]
  backward_prefetch: backward_pre
  use_orig_params: true
gradient_checkpointing: false
max_grad_norm: 0.3
""",
            dialect="huggingface",
            fsdp2={**AUTO, **FULL, **units("LlamaDecoderLayer"), **reduced("bf16"), AC: False},
            beside={**BF16, **clipped(0.3)},
        ),
        "training arguments, no clipping": Public(
            text="""
training:
  fsdp: [shard_grad_op, auto_wrap, offload]
  fsdp_config: {min_num_params: 100000000}
  fp16: true
  max_grad_norm: 0
  gradient_checkpointing: true
  gradient_checkpointing_kwargs: {use_reentrant: false}
""",
            dialect="huggingface",
            place="training",
            fsdp2={
                **{**KEEP, "cpu_offload": True, **FULL, AC: True},
                **{"wrap_policy": {"min_num_params": 100_000_000}, **reduced("fp16")},
            },
            beside=FP16,
        ),
        "training arguments, zero2": Public(
            text=f"""{ARGUMENTS}
deepspeed: examples/deepspeed/ds_z2_config.json
bf16: true
max_grad_norm: 0.5
""",
            files={"examples/deepspeed/ds_z2_config.json": ZERO2},
            dialect="huggingface-deepspeed",
            fsdp2={**KEEP, **reduced("bf16")},
            beside={**BF16, **clipped(0.5)},
        ),
        "training arguments, zero3, checkpointing on": Public(
            text=f"""{ARGUMENTS}
deepspeed: examples/deepspeed/ds_z3_config.json
fp16: true
max_grad_norm: 1.0
gradient_checkpointing: true
""",
            files={"examples/deepspeed/ds_z3_config.json": ZERO3},
            dialect="huggingface-deepspeed",
            fsdp2={**AUTO, **FULL, **reduced("fp16"), AC: True},
            beside={**FP16, **clipped(1.0)},
        ),
        "training arguments, zero3 offload, checkpointing off": Public(
            text=f"""{ARGUMENTS}
deepspeed: ds_z3_offload_config.json
bf16: true
max_grad_norm: 1.0
gradient_checkpointing: false
""",
            files={
                "ds_z3_offload_config.json": {
                    **ZERO3,
                    "zero_optimization": {
                        **{"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
                        "offload_optimizer": {"device": "cpu", "pin_memory": True},
                        "offload_param": {"device": "cpu", "pin_memory": True},
                    },
                }
            },
            dialect="huggingface-deepspeed",
            fsdp2={**AUTO, **FULL, **reduced("bf16"), "cpu_offload": True, AC: False},
            beside={**BF16, **clipped(1.0)},
        ),
        "deepspeed without clipping of its own": Public(
            text="""
deepspeed: {zero_optimization: {stage: 2}, bf16: {enabled: true}}
max_grad_norm: 1.0
gradient_checkpointing: true
""",
            dialect="huggingface-deepspeed",
            fsdp2={**KEEP, **reduced("bf16"), AC: True},
            beside=BF16,
        ),
    }
)

# --- ROLL. ---

CASES.update(
    {
        "roll": Public(
            text="""
actor_train:
  model_args: {disable_gradient_checkpointing: false, dtype: bf16, ulysses_size: 2}
  training_args: {learning_rate: 1.0e-6, max_grad_norm: 0.5}
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config:
      fsdp_size: 16
      param_dtype: bf16
      reduce_dtype: float32
      reshard_after_forward: true
      offload_policy: false
      wrap_policy: {min_num_params: 0}
actor_infer:
  strategy_args: {strategy_name: vllm, strategy_config: {block_size: 16}}
""",
            dialect="roll",
            place="actor_train.strategy_args",
            fsdp2={
                "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "float32"},
                **{SHARD: 16, REPLICATE: -1, **AUTO, AC: True, **sequence(2, "ulysses"), **SAVED},
            },
            beside=clipped(0.5),
            ranks=32,
        ),
        "roll with megatron elsewhere": Public(
            text="""
actor_train:
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {tensor_model_parallel_size: 2, use_distributed_optimizer: true}
critic:
  model_args: {disable_gradient_checkpointing: true}
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config: {fsdp_size: 1, param_dtype: bf16, offload_policy: true}
""",
            dialect="roll",
            place="critic.strategy_args",
            fsdp2={**ROLL, "cpu_offload": True, AC: False},
            left=("actor_train.strategy_args.strategy_name",),
        ),
    }
)


def _at(data: Any, place: str) -> Any:
    for name in filter(None, place.split(".")):
        data = data[name]
    return data


@pytest.mark.matrix
@pytest.mark.parametrize("name", CASES)
def test_becomes_what_its_trainer_does(name: str, tmp_path: Path):
    case = CASES[name]
    for file, data in case.files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(json.dumps(data))
    report = migrate(case.text, folder=tmp_path, world_size=case.ranks)
    found = _at(yaml.safe_load(report.text), case.place)
    settings = found["parallelism_config"]["fsdp2"]
    parse_config(settings)
    assert report.dialect == case.dialect
    assert settings == case.fsdp2
    names = ("precision", "algorithms")
    assert {name: found[name] for name in names if name in found} == case.beside
    assert tuple(entry.key for entry in report.entries if entry.is_open) == case.left
    assert not [entry.key for entry in report.entries if "is not a key" in entry.reason]
    check_stable(report)


def test_there_are_forty():
    assert len(CASES) + len(FOREIGN) >= 40


# --- Trainers that no dialect is about. ---

FOREIGN = {
    "llama-factory v1": """
model: Qwen/Qwen3-0.6B
trust_remote_code: true
model_class: llm
dist_config:
  name: fsdp2
  dcp_path: null
train_dataset: data/v1_sft_demo.yaml
micro_batch_size: 1
bf16: false
""",
    "nemo": """
trainer: {devices: 8, num_nodes: 1, precision: bf16, gradient_clip_val: 1.0}
model:
  mcore_gpt: true
  micro_batch_size: 4
  tensor_model_parallel_size: 1
  pipeline_model_parallel_size: 1
  sequence_parallel: false
""",
    "nemo automodel": """
distributed:
  _target_: nemo_automodel.components.distributed.fsdp2.FSDP2Manager
  dp_size: none
  tp_size: 1
  cp_size: 1
model: {pretrained_model_name_or_path: meta-llama/Llama-3.2-1B}
""",
    "nemo rl": """
policy:
  train_global_batch_size: 512
  dtensor_cfg: {enabled: true, cpu_offload: false, tensor_parallel_size: 1}
  max_grad_norm: 1.0
""",
    "megatron inside roll": """
actor_train:
  model_args: {disable_gradient_checkpointing: false, dtype: bf16}
  strategy_args:
    strategy_name: megatron_train
    strategy_config:
      tensor_model_parallel_size: 1
      expert_model_parallel_size: 1
      use_distributed_optimizer: true
      recompute_granularity: full
actor_infer:
  strategy_args: {strategy_name: vllm, strategy_config: {block_size: 16}}
""",
    "lightning": """
trainer:
  accelerator: gpu
  devices: 8
  strategy:
    class_path: lightning.pytorch.strategies.FSDPStrategy
    init_args: {activation_checkpointing_policy: null}
""",
    "torchtitan, as YAML": """
parallelism: {data_parallel_replicate_degree: 1, data_parallel_shard_degree: -1}
activation_checkpoint: {mode: selective}
""",
    "olmo": """
run_name: OLMo-7B
distributed_strategy: fsdp
""",
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", FOREIGN)
def test_a_trainer_that_is_not_known_is_said(name: str, tmp_path: Path):
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(FOREIGN[name])
    ran = CliRunner().invoke(app, ["migrate", str(old), "-o", str(new)])
    assert ran.exit_code == 2
    assert "dialect" in ran.output
    assert "not known" in ran.output.replace("\n", " ")
    assert not new.exists()


UNSHARDED = {
    "foundry without sharding": "model: {name: mpt_causal_lm}\nmax_duration: 1ba\n",
    "training arguments": "training: {bf16: true, per_device_train_batch_size: 1}\n",
    "a name": "run_name: fsdp2-test\noutput_dir: out/megatron\ntokenizer: {kwargs: {}}\n",
    "a server": "rollout: {name: vllm, tensor_parallel_size: 4}\n",
    "lightning, one copy a rank": "trainer: {accelerator: gpu, devices: 8, strategy: ddp}\n",
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", UNSHARDED)
def test_a_file_that_says_nothing_about_sharding_is_left(name: str):
    report = migrate(UNSHARDED[name])
    assert report.dialect == "none"
    assert report.text == UNSHARDED[name]
