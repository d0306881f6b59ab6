"""DeepSpeed's JSON: ZeRO 1, 2 and 3."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from composer_fsdp2.tools.migrate.counts import (
    DEEPSPEED_KEYS,
    count_rows,
    finish_counts,
    optimizer_rows,
)
from composer_fsdp2.tools.migrate.report import (
    CHANGES,
    CONVERTED,
    DECISION,
    NOT_NEEDED,
    RENAMED,
    UNSUPPORTED,
    Context,
    Dialect,
    Entry,
    Path,
    Row,
    Site,
)
from composer_fsdp2.tools.migrate.shared_rows import (
    REPLICATE,
    SHARD,
    SHARDING_KEYS,
    STATE_ON_CPU,
    add_precision,
    block_rows,
    clipping_rows,
    expert_rows,
    first_keys,
    is_size,
    parallel_rows,
    sequence_rows,
    stages,
)

__all__ = [
    "ALL_MOVES",
    "DEEPSPEED",
    "PRECISION_SWITCHES",
    "STATE_MOVES",
    "finish_deepspeed",
    "join_offloads",
]

_ZERO = "zero_optimization"
_SWITCH = "zero_switch"
"""the same key where it holds true or false, an old way to write stage 1 or 0"""
_WHOLE = {SHARD: 1, REPLICATE: -1, "reshard_after_forward": False}


def _is_nowhere(value: Any) -> bool:
    """An offloading block that names no device."""
    device = value.get("device", "none") if isinstance(value, Mapping) else value
    return device in (None, False, "none")


def _is_elsewhere(value: Any) -> bool:
    """An offloading block that names a device other than CPU memory and NVMe."""
    return not (isinstance(value, Mapping) and value.get("device") == "nvme")


def _is_in_cpu_memory(value: Any) -> bool:
    """An offloading block, or an old switch, that names the CPU."""
    return value is True or (isinstance(value, Mapping) and value.get("device") == "cpu")


def _is_pinned(value: Any) -> bool:
    # DeepSpeed's default is not to pin; ours is, as torch's.
    return not isinstance(value, Mapping) or value.get("pin_memory", False)


STATE_MOVES = (
    "the optimizer's state is in CPU memory between steps; master weights stay on the GPU, where "
    "the optimizer steps, and DeepSpeed steps on the CPU"
)
ALL_MOVES = "`cpu_offload` keeps parameters, gradients and optimizer state in CPU memory together"


def _offload(
    name: str, reason: str, settings: Mapping[str, Any] | Callable[[Any], dict[str, Any]]
) -> tuple[Row, ...]:
    key = f"{_ZERO}.{name}"
    return (
        Row(key, NOT_NEEDED, "none is what FSDP2 does", _is_nowhere),
        Row(key, CHANGES, reason, _is_in_cpu_memory, settings),
        Row(
            key,
            DECISION,
            "names a device that is not known here",
            _is_elsewhere,
            options=("={device: cpu}", "=null"),
        ),
        Row(key, UNSUPPORTED, "there is CPU memory, no NVMe", options=("=null",)),
    )


_OTHERS = tuple(key for key in SHARDING_KEYS if key != _ZERO)
"""keys of other trainers, each of which would be a second way to shard"""
_AUTOCAST_DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16"}
_ACCUMULATED = "gradients are accumulated in the shards' own dtype, which is fp32"


_CHECKPOINTING = "activation_checkpointing"
_SWITCHES = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled", "torch_autocast.enabled")
PRECISION_SWITCHES = (*_SWITCHES, "amp.enabled")
_OWN_SCALE = "Composer's own loss scaling is used, with `precision: amp_fp16`"
_SCALES = (
    *("auto_cast", "consecutive_hysteresis", "hysteresis", "initial_scale_power"),
    *("loss_scale_window", "min_loss_scale"),
)

_TUNING = (
    "allgather_bucket_size",
    "allgather_partitions",
    "allgather_sequential",
    "contiguous_gradients",
    "max_live_parameters",
    "max_reuse_distance",
    "model_persistence_threshold",
    "module_granularity_threshold",
    "overlap_comm",
    "param_persistence_threshold",
    "prefetch_bucket_size",
    "reduce_bucket_size",
    "reduce_scatter",
    "round_robin_gradients",
    "stage3_allgather_sequential",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold",
    "stage3_param_persistence_threshold",
    "stage3_partition_stream_chunk_size",
    "stage3_prefetch_bucket_size",
    "stage3_use_all_reduce_for_fetch_params",
    "sub_group_size",
    "use_all_reduce_for_fetch_params",
    "use_multi_rank_bucket_allreduce",
)
"""sizes and switches of DeepSpeed's communication"""
_INTERNAL = (
    "cpu_offload_use_pin_memory",
    "elastic_checkpoint",
    "enable_sanity_checks",
    "ignore_unused_parameters",
    "leaf_module",
    "legacy_stage1",
    "load_from_fp32_weights",
    "log_trace_cache_warnings",
    "memory_efficient_linear",
    "override_module_apply",
    "pipeline_loading_checkpoint",
    "save_muon_momentum_buffer_in_memory",
)
"""keys of features that only DeepSpeed's engine has"""

_ROWS = (
    *stages(f"{_ZERO}.stage"),
    Row(
        _SWITCH,
        CHANGES,
        "true is ZeRO-1; gradients are sharded too, as in ZeRO-2",
        (True,),
        {"reshard_after_forward": False},
    ),
    Row(_SWITCH, CONVERTED, "a whole copy on every rank", (False,), _WHOLE),
    Row(f"{_ZERO}.zero_hpz_partition_size", NOT_NEEDED, "1 is off", (0, 1)),
    Row(
        f"{_ZERO}.zero_hpz_partition_size",
        CONVERTED,
        "after forward each group of so many ranks keeps a copy",
        is_size,
        lambda value: {"reshard_after_forward": value},
    ),
    Row(f"{_ZERO}.mics_shard_size", NOT_NEEDED, "off", (-1, 0)),
    Row(
        f"{_ZERO}.mics_shard_size",
        CONVERTED,
        "MiCS shards within groups and replicates between them, which is HSDP",
        is_size,
        lambda value: {SHARD: value, REPLICATE: -1},
    ),
    Row(f"{_ZERO}.mics_hierarchical_params_gather", NOT_NEEDED, "gathering is NCCL's"),
    *(
        row
        for name in ("offload_param", "cpu_offload_params", "cpu_offload_param")
        for row in _offload(
            name,
            ALL_MOVES,
            lambda value: {"cpu_offload": True if _is_pinned(value) else {"pin_memory": False}},
        )
    ),
    *(
        row
        for name in ("offload_optimizer", "cpu_offload")
        for row in _offload(name, STATE_MOVES, STATE_ON_CPU)
    ),
    *(
        Row(f"{_ZERO}.{name}", NOT_NEEDED, "FSDP2 communicates unit by unit; there are no buckets")
        for name in _TUNING
    ),
    *(Row(f"{_ZERO}.{name}", NOT_NEEDED, "only for DeepSpeed's own engine") for name in _INTERNAL),
    *(
        Row(f"{_ZERO}.{name}", CONVERTED, reason, (value,), {"state_dict_type": kind})
        for name in (
            "gather_16bit_weights_on_model_save",
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
        )
        for value, kind, reason in (
            (True, "full", "one file with whole weights"),
            (False, "sharded", "a folder of shards"),
        )
    ),
    *(
        row
        for name, reason in (
            ("zero_quantized_weights", "weights are gathered in the compute dtype"),
            ("zero_quantized_nontrainable_weights", "frozen weights are not quantised"),
            ("zero_quantized_gradients", "gradients are reduced in `reduce_dtype`"),
            ("zeropp_loco_param", "gradients are reduced without compression"),
            ("zenflow", "the optimizer runs on the GPU, in step with training"),
        )
        for row in (
            Row(f"{_ZERO}.{name}", NOT_NEEDED, "off is what FSDP2 does", (False, None)),
            Row(f"{_ZERO}.{name}", UNSUPPORTED, reason, options=("=null",)),
        )
    ),
    *(
        row
        for name, dtype in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16"))
        for row in (
            Row(
                f"{name}.enabled",
                CONVERTED,
                "parameters and reduction in this dtype, over master weights in fp32; under "
                "autocast operations like softmax stay in fp32",
                (True,),
                {"mixed_precision": {"param_dtype": dtype, "reduce_dtype": dtype}},
                trainer={"precision": f"amp_{dtype}"},
            ),
            Row(f"{name}.enabled", NOT_NEEDED, "off", (False, None)),
            Row(
                f"{name}.enabled",
                DECISION,
                "the trainer that reads the file fills it in",
                ("auto",),
                options=("=true", "=false"),
            ),
        )
    ),
    *(
        Row(f"{block}.{name}", NOT_NEEDED, "only for DeepSpeed's own engine")
        for block in ("bf16", "bfloat16")
        for name in ("immediate_grad_update", "check_grad_overflow", "check_overflow")
    ),
    *(
        Row(f"bf16.{name}", NOT_NEEDED, "bf16 needs no loss scale")
        for name in (*_SCALES, "loss_scale")
    ),
    *(
        row
        for name in ("bf16.bf16_master_weights_and_grads", "fp16.fp16_master_weights_and_grads")
        for row in (
            Row(name, NOT_NEEDED, "off: master weights in fp32, as here", (False, None)),
            Row(name, UNSUPPORTED, "master weights are in fp32", options=("=false",)),
        )
    ),
    Row("bf16.bf16_optimizer_states", NOT_NEEDED, "off: states in fp32, as here", (False, None)),
    Row(
        "bf16.bf16_optimizer_states",
        CHANGES,
        "states in bf16 too, rounded up or down by chance, so that small changes add up",
        (True,),
        {"optimizer_state": {"dtype": "bf16"}},
    ),
    *(Row(f"fp16.{name}", NOT_NEEDED, _OWN_SCALE) for name in _SCALES),
    Row("fp16.loss_scale", NOT_NEEDED, _OWN_SCALE, (0, 0.0, None, "auto")),
    Row(
        "fp16.loss_scale",
        DECISION,
        "a static scale; Composer finds its own scale while it trains",
        options=("=0",),
    ),
    Row("torch_autocast.enabled", NOT_NEEDED, "off", (False, None)),
    Row(
        "torch_autocast.enabled",
        CHANGES,
        "autocast by the trainer's precision; all modules are gathered and reduced in its dtype, "
        "DeepSpeed's only those of `lower_precision_safe_modules`",
        (True,),
        {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "bf16"}},
        trainer={"precision": "amp_bf16"},
    ),
    Row(
        "torch_autocast.dtype", CONVERTED, "the dtype of `torch_autocast`", tuple(_AUTOCAST_DTYPES)
    ),
    Row(
        "torch_autocast.lower_precision_safe_modules", NOT_NEEDED, "every module is, under autocast"
    ),
    Row("data_types.grad_accum_dtype", NOT_NEEDED, _ACCUMULATED, ("fp32", "float32", None)),
    Row(
        "data_types.grad_accum_dtype",
        CHANGES,
        _ACCUMULATED,
        ("bf16", "bfloat16", "fp16", "float16"),
    ),
    Row("amp.enabled", NOT_NEEDED, "off", (False, None)),
    Row(
        "amp.enabled",
        DECISION,
        "apex's mixed precision is not torch's",
        options=("=false", "bf16.enabled=true"),
    ),
    Row("amp.opt_level", NOT_NEEDED, "only for apex"),
    *(row for key in ("tensor_parallel", "autotp_size", "tp_size") for row in block_rows(key)),
    *parallel_rows("sequence_parallel", "sequence parallelism"),
    *sequence_rows("sequence_parallel_size", (0, 1, None), "ulysses"),
    *sequence_rows("context_parallel_size", (0, 1, None)),
    *expert_rows("expert_parallel_size"),
    *parallel_rows("pipeline", "pipeline parallelism"),
    *parallel_rows("pipeline_parallel_size", "pipeline parallelism"),
    Row(
        f"{_CHECKPOINTING}.cpu_checkpointing",
        NOT_NEEDED,
        "false is what is done here",
        (False, None),
    ),
    Row(
        f"{_CHECKPOINTING}.cpu_checkpointing",
        CHANGES,
        "what checkpointed blocks save is kept in CPU memory; blocks are checkpointed for that, "
        "where DeepSpeed leaves it to the model's own calls",
        (True,),
        {"activation_checkpointing": True, "activation_cpu_offload": True},
    ),
    Row(
        f"{_CHECKPOINTING}.partition_activations",
        NOT_NEEDED,
        "false is what is done",
        (False, None),
    ),
    Row(
        f"{_CHECKPOINTING}.partition_activations",
        CHANGES,
        "ranks of tensor parallelism would share activations out; each rank keeps its own here",
        (True,),
    ),
    *(
        Row(f"{_CHECKPOINTING}.{name}", NOT_NEEDED, "only for DeepSpeed's own checkpointing")
        for name in (
            "contiguous_memory_optimization",
            "number_checkpoints",
            "synchronize_checkpoint_boundary",
            "profile",
        )
    ),
    *(
        Row(name, NOT_NEEDED, "only for DeepSpeed's own engine")
        for name in (
            "aio",
            "disable_allgather",
            "gradient_predivide_factor",
            "seq_parallel_communication_data_type",
            "zero_allow_untested_optimizer",
            "zero_force_ds_cpu_optimizer",
        )
    ),
    *(
        row
        for key in _OTHERS
        for row in (
            Row(key, NOT_NEEDED, "nothing", (None, False, "")),
            Row(
                key,
                DECISION,
                "DeepSpeed's settings stand beside it; a run is sharded by one of them",
                options=("=null", "give the file without DeepSpeed's settings"),
            ),
        )
    ),
    Row("sparse_gradients", NOT_NEEDED, "gradients are dense", (False, None)),
    Row("sparse_gradients", UNSUPPORTED, "gradients are dense", options=("=false",)),
    Row(
        "fp32_allreduce", NOT_NEEDED, "off: gradients are reduced in their own dtype", (False, None)
    ),
    Row(
        "fp32_allreduce",
        RENAMED,
        "`mixed_precision.reduce_dtype`",
        (True,),
        {"mixed_precision": {"reduce_dtype": "fp32"}},
    ),
    Row("communication_data_type", NOT_NEEDED, "follows from the precision", (None,)),
    Row(
        "communication_data_type",
        RENAMED,
        "`mixed_precision.reduce_dtype`",
        ("fp32", "fp16", "bf16", "bfp16"),
        lambda value: {"mixed_precision": {"reduce_dtype": value.lower().replace("bfp", "bf")}},
    ),
    *clipping_rows("gradient_clipping"),
    Row(
        "gradient_clipping",
        DECISION,
        "the trainer that reads the file fills it in",
        ("auto",),
        options=("=1.0", "=null"),
    ),
)

_TRAINING_KEYS = (
    *("scheduler", "wall_clock_breakdown", "dump_state"),
    *("tensorboard", "wandb", "csv_monitor", "comet", "monitor_config", "flops_profiler"),
    *("comms_logger", "memory_breakdown", "elasticity", "autotuning", "data_efficiency"),
    *("curriculum_learning", "progressive_layer_drop", "compression_training", "timers"),
    *("sparse_attention", "dataloader_drop_last", "compile", "nebula"),
    *("checkpoint_engine", "data_post_process_func", "eigenvalue", "graph_harvesting"),
    *("hybrid_engine", "quantize_training"),
    *("use_node_local_storage", "vocabulary_size", "weight_quantization"),
    *("use_data_before_expert_parallelism", "max_train_batch_size", "prescale_gradients"),
)
"""keys about training that neither count nor shard"""
_TRAINING_ROWS = (
    *count_rows(DEEPSPEED_KEYS, ("auto", None)),
    *optimizer_rows("optimizer"),
    *(
        Row(key, CHANGES, "not about sharding: write it as LLM Foundry has it, where it is wanted")
        for key in ("optimizer", *_TRAINING_KEYS)
    ),
    *(
        Row(
            key,
            CHANGES,
            "not about sharding; `composer-fsdp2 checkpoint convert` reads the weights of a "
            "checkpoint of DeepSpeed",
        )
        for key in ("checkpoint", "load_universal_checkpoint")
    ),
)


def _site(data: Mapping[str, Any], _: Path) -> Site | None:
    blocks = [data.get(name) for name in ("bf16", "bfloat16", "fp16", "amp")]
    switched = any(isinstance(block, Mapping) and "enabled" in block for block in blocks)
    tensor, rows = data.get("tensor_parallel"), {*first_keys(_ROWS), _ZERO}
    batches = {"train_batch_size", "train_micro_batch_size_per_gpu"} & data.keys()
    if not (
        switched
        # Keys that no other dialect has.
        or {_ZERO, "autotp_size", "torch_autocast", "zero_allow_untested_optimizer"} & data.keys()
        or (isinstance(tensor, Mapping) and "autotp_size" in tensor)
        or (batches and (rows - {"gradient_clipping", *_OTHERS}) & data.keys())
    ):
        return None
    switch = {_ZERO: _SWITCH} if isinstance(data.get(_ZERO), bool) else {}
    # LLM Foundry has blocks of these names too, with a name in place of a type.
    others = {
        key
        for key in ("optimizer", "scheduler")
        if not (isinstance(block := data.get(key), Mapping) and "type" in block)
    }
    rows |= first_keys(_TRAINING_ROWS) - others
    return Site((), {key: key for key in data if key in rows} | switch)


def _finish(context: Context) -> None:
    finish_deepspeed(context, "", {})
    finish_counts(context, DEEPSPEED_KEYS)
    add_precision(context, PRECISION_SWITCHES, "DeepSpeed")


def finish_deepspeed(context: Context, prefix: str, filled: Mapping[str, Any]) -> None:
    """Resolves keys that depend on each other.

    Args:
        context: entries of the place that holds the settings.
        prefix: where DeepSpeed's table is in the dialect's, with a dot at its end.
        filled: values of the trainer around, which it fills in for keys that say `auto`; `None`
            for those it does not know.
    """
    items = context.entries.items()
    entries = {k.removeprefix(prefix): entry for k, entry in items if k.startswith(prefix)}
    for key, value in filled.items():
        row = next((row for row in _ROWS if row.key == key and row.matches(value)), None)
        is_auto = key in entries and entries[key].value == "auto"
        if is_auto and value is not None and row is not None and row.status is not DECISION:
            entries[key].follow(row, value)
            entries[key].reason += f"; the trainer fills in {value}"
    zero, stage = entries.get(_ZERO), entries.get(f"{_ZERO}.stage")
    if stage is None and _SWITCH not in entries and not (zero and zero.is_open):
        context.add("DeepSpeed's default is stage 0, a whole copy on every rank", **_WHOLE)
    group = entries.get(f"{_ZERO}.zero_hpz_partition_size")
    if stage and group and group.becomes:
        # ZeRO++ reshards to its group whatever the stage says.
        stage.becomes.pop("reshard_after_forward", None)
    # `torch_autocast` says in two keys what it does.
    autocast, dtype = (entries.get(f"torch_autocast.{name}") for name in ("enabled", "dtype"))
    if autocast and autocast.becomes and (dtype is None or dtype.is_open):
        reason = "its dtype is not known"
        autocast.decide(reason, "write torch_autocast.dtype", f"{autocast.key}=false")
    elif autocast and autocast.becomes and dtype:
        name = _AUTOCAST_DTYPES[str(dtype.value).lower()]
        autocast.becomes = {"mixed_precision": {"param_dtype": name, "reduce_dtype": name}}
        autocast.beside = {"precision": f"amp_{name}"}
    join_offloads(entries.values())
    reduced = [entries.get(key) for key in ("communication_data_type", "fp32_allreduce")]
    for switch in (entries[name] for name in _SWITCHES if name in entries):
        if any(entry and entry.becomes for entry in reduced):
            switch.becomes.get("mixed_precision", {}).pop("reduce_dtype", None)
    scale, switch = entries.get("fp16.loss_scale"), entries.get("fp16.enabled")
    if scale and scale.is_open and (switch is None or switch.value in (False, None)):
        scale.become(NOT_NEEDED, "fp16 is off")


def join_offloads(entries: Collection[Entry]) -> None:
    """Lets the offload of parameters hold the optimizer's state too, pinned if one of them is."""
    offloads = [entry for entry in entries if "cpu_offload" in entry.becomes]
    states = [entry for entry in entries if entry.becomes == STATE_ON_CPU]
    if any(_is_pinned(entry.value) for entry in (*offloads, *states)):
        for entry in offloads:
            entry.becomes["cpu_offload"] = True
    for entry in states if offloads else ():
        entry.become(CHANGES, ALL_MOVES)


DEEPSPEED = Dialect(
    "deepspeed",
    "DeepSpeed ZeRO",
    _site,
    (*_ROWS, *_TRAINING_ROWS),
    finish=_finish,
    nested=False,
)
