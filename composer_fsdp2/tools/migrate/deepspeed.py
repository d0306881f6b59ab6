"""DeepSpeed's JSON: ZeRO 1, 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.tools.migrate.report import Context, Dialect, Row, Site, Status

__all__ = ["DEEPSPEED"]

_R, _C = Status.RENAMED, Status.CONVERTED
_NOT, _CH = Status.NOT_NEEDED, Status.CHANGES
_DEC, _UN = Status.DECISION, Status.UNSUPPORTED
_SHARD, _REPLICATE = "data_parallel_shard_degree", "data_parallel_replicate_degree"
_BUCKETS = "FSDP2 communicates unit by unit; there are no buckets"
_ZERO = "zero_optimization"
_SWITCH = "zero_switch"
"""the same key where it holds true or false, an old way to write stage 1 or 0"""
_TWO = {"reshard_after_forward": False}
_WHOLE = {_SHARD: 1, _REPLICATE: -1, "reshard_after_forward": False}


def _is_rank_count(value: Any) -> bool:
    """A number above 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def _is_on(value: Any) -> bool:
    """A number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_nowhere(value: Any) -> bool:
    """An offloading block that names no device."""
    device = value.get("device", "none") if isinstance(value, Mapping) else value
    return device in (None, False, "none")


def _is_in_cpu_memory(value: Any) -> bool:
    """An offloading block, or an old switch, that names the CPU."""
    return value is True or (isinstance(value, Mapping) and value.get("device") == "cpu")


def _cpu_offload(value: Any) -> dict[str, Any]:
    # DeepSpeed's default is not to pin; ours is, as torch's.
    pinned = not isinstance(value, Mapping) or value.get("pin_memory", False)
    return {"cpu_offload": True if pinned else {"pin_memory": False}}


def _switch(name: str) -> tuple[Row, ...]:
    reason = (
        "parameters and reduction in this dtype, over master weights in fp32; under autocast "
        "operations like softmax stay in fp32"
    )
    return (
        Row(
            f"{name}.enabled",
            _C,
            reason,
            (True,),
            {"mixed_precision": {"param_dtype": name, "reduce_dtype": name}},
            trainer={"precision": f"amp_{name}"},
        ),
        Row(f"{name}.enabled", _NOT, "off", (False, None)),
        Row(
            f"{name}.enabled",
            _DEC,
            "the trainer that reads the file fills it in",
            ("auto",),
            options=(f"{name}.enabled=true", f"{name}.enabled=false"),
        ),
    )


def _offload(name: str) -> tuple[Row, ...]:
    key = f"{_ZERO}.{name}"
    return (
        Row(key, _NOT, "none is what FSDP2 does", _is_nowhere),
        Row(
            key,
            _CH,
            "`cpu_offload` keeps parameters, gradients and optimizer state in CPU memory together",
            _is_in_cpu_memory,
            _cpu_offload,
        ),
        Row(key, _UN, "there is CPU memory, no NVMe", options=(f"{key}=null",)),
    )


def _unless_off(name: str, reason: str) -> tuple[Row, ...]:
    """Rows of a feature that FSDP2 has not."""
    key = f"{_ZERO}.{name}"
    return (
        Row(key, _NOT, "off is what FSDP2 does", (False, None)),
        Row(key, _UN, reason, options=(f"{key}=null",)),
    )


def _gathered(name: str) -> tuple[Row, ...]:
    key = f"{_ZERO}.{name}"
    return (
        Row(key, _C, "one file with whole weights", (True,), {"state_dict_type": "full"}),
        Row(key, _C, "a folder of shards", (False,), {"state_dict_type": "sharded"}),
    )


def _clipping(value: Any) -> dict[str, Any]:
    threshold = {"clipping_type": "norm", "clipping_threshold": value}
    return {"algorithms": {"gradient_clipping": threshold}}


_TUNING = (
    "allgather_bucket_size",
    "allgather_partitions",
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
    "use_multi_rank_bucket_allreduce",
)
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
_DTYPES = ("fp32", "fp16", "bf16", "bfp16")

_ROWS = (
    Row(f"{_ZERO}.stage", _C, "ZeRO-3", (3,), {"reshard_after_forward": "auto"}),
    Row(
        f"{_ZERO}.stage",
        _C,
        "ZeRO-2: gradients and optimizer are sharded, parameters kept until after backward",
        (2,),
        _TWO,
    ),
    Row(
        f"{_ZERO}.stage",
        _CH,
        "gradients are sharded too, as in ZeRO-2: less memory, the same result",
        (1,),
        _TWO,
    ),
    Row(
        f"{_ZERO}.stage",
        _C,
        "a whole copy on every rank",
        (0,),
        _WHOLE,
    ),
    Row(_SWITCH, _CH, "true is ZeRO-1; gradients are sharded too, as in ZeRO-2", (True,), _TWO),
    Row(_SWITCH, _C, "a whole copy on every rank", (False,), _WHOLE),
    Row(f"{_ZERO}.zero_hpz_partition_size", _NOT, "1 is off", (0, 1)),
    Row(
        f"{_ZERO}.zero_hpz_partition_size",
        _C,
        "after forward each group of so many ranks keeps a copy",
        _is_rank_count,
        lambda value: {"reshard_after_forward": value},
    ),
    Row(f"{_ZERO}.mics_shard_size", _NOT, "off", (-1, 0)),
    Row(
        f"{_ZERO}.mics_shard_size",
        _C,
        "MiCS shards within groups and replicates between them, which is HSDP",
        _is_rank_count,
        lambda value: {_SHARD: value, _REPLICATE: -1},
    ),
    Row(f"{_ZERO}.mics_hierarchical_params_gather", _NOT, "gathering is NCCL's"),
    *(
        row
        for name in ("offload_param", "offload_optimizer", "cpu_offload", "cpu_offload_param")
        for row in _offload(name)
    ),
    *(Row(f"{_ZERO}.{name}", _NOT, _BUCKETS) for name in _TUNING),
    *(Row(f"{_ZERO}.{name}", _NOT, "speaks of DeepSpeed's own engine") for name in _INTERNAL),
    *_gathered("gather_16bit_weights_on_model_save"),
    *_gathered("stage3_gather_16bit_weights_on_model_save"),
    *_gathered("stage3_gather_fp16_weights_on_model_save"),
    *_unless_off("zero_quantized_weights", "weights are gathered in the compute dtype"),
    *_unless_off("zero_quantized_nontrainable_weights", "frozen weights are not quantised"),
    *_unless_off("zero_quantized_gradients", "gradients are reduced in `reduce_dtype`"),
    *_unless_off("zeropp_loco_param", "gradients are reduced without compression"),
    *_unless_off("zenflow", "the optimizer runs on the GPU, in step with training"),
    *_switch("bf16"),
    *_switch("fp16"),
    Row("bf16.immediate_grad_update", _NOT, "speaks of DeepSpeed's own engine"),
    *(
        Row(f"fp16.{name}", _NOT, "Composer's own loss scaling is used, with `precision: amp_fp16`")
        for name in (
            "auto_cast",
            "consecutive_hysteresis",
            "hysteresis",
            "initial_scale_power",
            "loss_scale",
            "loss_scale_window",
            "min_loss_scale",
        )
    ),
    Row("communication_data_type", _NOT, "follows from the precision", (None,)),
    Row(
        "communication_data_type",
        _R,
        "`mixed_precision.reduce_dtype`",
        _DTYPES,
        lambda value: {"mixed_precision": {"reduce_dtype": value.lower().replace("bfp", "bf")}},
    ),
    Row("gradient_clipping", _NOT, "0 clips nothing", (0, 0.0, None)),
    Row(
        "gradient_clipping",
        _R,
        "LLM Foundry's algorithm for the norm over all ranks",
        _is_on,
        trainer=_clipping,
    ),
    Row(
        "gradient_clipping",
        _DEC,
        "the trainer that reads the file fills it in",
        ("auto",),
        options=("gradient_clipping=1.0", "gradient_clipping=null"),
    ),
)


def _find(data: Mapping[str, Any]) -> list[Site]:
    if not isinstance(data.get(_ZERO), Mapping | bool):
        return []
    known = {row.key.partition(".")[0] for row in _ROWS} | {_ZERO}
    keys = {key: key for key in data if key in known}
    if isinstance(data[_ZERO], bool):
        keys[_ZERO] = _SWITCH
    return [Site((), keys)]


def _finish(context: Context) -> None:
    """ZeRO++ reshards to its group whatever the stage says; a missing stage is 0."""
    stage = context.entries.get(f"{_ZERO}.stage")
    if stage is None and _SWITCH not in context.entries:
        context.add("DeepSpeed's default is stage 0, a whole copy on every rank", **_WHOLE)
    group = context.entries.get(f"{_ZERO}.zero_hpz_partition_size")
    if stage is not None and group is not None and group.becomes:
        stage.becomes.pop("reshard_after_forward", None)
    if "communication_data_type" in context.entries:
        reduced = context.entries["communication_data_type"].becomes
        for name in ("bf16.enabled", "fp16.enabled"):
            if reduced and name in context.entries:
                context.entries[name].becomes.get("mixed_precision", {}).pop("reduce_dtype", None)


DEEPSPEED = Dialect("deepspeed", "DeepSpeed ZeRO", _find, _ROWS, (), _finish)
