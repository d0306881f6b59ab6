"""DeepSpeed's JSON: ZeRO 1, 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.migrate.report import ANY, Context, Dialect, Row, Site, Status

__all__ = ["DEEPSPEED"]

_C, _NOT, _CH = Status.CONVERTED, Status.NOT_NEEDED, Status.CHANGES
_DEC, _UN = Status.DECISION, Status.UNSUPPORTED
_SHARD, _REPLICATE = "data_parallel_shard_degree", "data_parallel_replicate_degree"
_BUCKETS = "FSDP2 communicates unit by unit; there are no buckets"
_ZERO = "zero_optimization"


def _is_rank_count(value: Any) -> bool:
    """A number above 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def _switch(name: str, dtype: str) -> tuple[Row, ...]:
    precision = {"mixed_precision": {"param_dtype": dtype, "reduce_dtype": dtype}}
    reason = "parameters and reduction in this dtype; write the trainer's `precision` too"
    return (
        Row(f"{name}.enabled", _C, reason, (True,), precision),
        Row(f"{name}.enabled", _NOT, "off", (False, None)),
        Row(f"{name}.enabled", _DEC, "a trainer fills it in", ("auto",), options=("true", "false")),
    )


def _offload(name: str) -> tuple[Row, ...]:
    key = f"{_ZERO}.{name}"
    return (
        Row(key, _NOT, "none is what FSDP2 does", ({"device": "none"}, None, {}, False)),
        Row(key, _UN, "parameters and optimizer stay on the GPU", options=(f"{name}=null",)),
    )


_ROWS = (
    Row(f"{_ZERO}.stage", _C, "ZeRO-3", (3,), {"reshard_after_forward": "auto"}),
    Row(
        f"{_ZERO}.stage",
        _C,
        "ZeRO-2: gradients and optimizer are sharded, parameters kept until after backward",
        (2,),
        {"reshard_after_forward": False},
    ),
    Row(
        f"{_ZERO}.stage",
        _CH,
        "gradients are sharded too, as in ZeRO-2: less memory, the same result",
        (1,),
        {"reshard_after_forward": False},
    ),
    Row(
        f"{_ZERO}.stage",
        _C,
        "a whole copy on every rank",
        (0,),
        {_SHARD: 1, _REPLICATE: -1, "reshard_after_forward": False},
    ),
    Row(f"{_ZERO}.zero_hpz_partition_size", _NOT, "1 is off", (1,)),
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
    *_offload("offload_param"),
    *_offload("offload_optimizer"),
    *(
        Row(f"{_ZERO}.{name}", _NOT, _BUCKETS)
        for name in (
            "allgather_bucket_size",
            "allgather_partitions",
            "contiguous_gradients",
            "overlap_comm",
            "reduce_bucket_size",
            "reduce_scatter",
            "round_robin_gradients",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_param_persistence_threshold",
            "stage3_prefetch_bucket_size",
            "sub_group_size",
        )
    ),
    Row(
        f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
        _C,
        "one file with whole weights",
        (True,),
        {"state_dict_type": "full"},
    ),
    Row(
        f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
        _C,
        "a folder of shards",
        (False,),
        {"state_dict_type": "sharded"},
    ),
    *(
        Row(
            f"{_ZERO}.{name}",
            _UN,
            "weights and gradients are not quantised",
            (True,),
            options=(f"{name}=false",),
        )
        for name in ("zero_quantized_weights", "zero_quantized_gradients")
    ),
    *(
        Row(f"{_ZERO}.{name}", _NOT, "off is what FSDP2 does", (False,))
        for name in ("zero_quantized_weights", "zero_quantized_gradients")
    ),
    *_switch("bf16", "bf16"),
    *_switch("fp16", "fp16"),
    *(
        Row(f"fp16.{name}", _NOT, "Composer's own loss scaling is used, with `precision: amp_fp16`")
        for name in (
            "auto_cast",
            "hysteresis",
            "initial_scale_power",
            "loss_scale",
            "loss_scale_window",
            "min_loss_scale",
        )
    ),
    Row("gradient_clipping", _NOT, "0 clips nothing", (0, 0.0)),
    Row(
        "gradient_clipping",
        _DEC,
        "clipping belongs to the trainer: `algorithms: {gradient_clipping: {clipping_type: norm, "
        "clipping_threshold: <value>}}`",
        ANY,
        options=("gradient_clipping=null once the trainer has it",),
    ),
)


def _find(data: Mapping[str, Any]) -> list[Site]:
    if not isinstance(data.get(_ZERO), Mapping):
        return []
    known = {row.key.partition(".")[0] for row in _ROWS}
    keys = [_ZERO, *(key for key in data if key in known and key != _ZERO)]
    return [Site((), {key: key for key in data if key in keys})]


def _finish(context: Context) -> None:
    """ZeRO++ reshards to its group whatever the stage says."""
    stage = context.entries.get(f"{_ZERO}.stage")
    group = context.entries.get(f"{_ZERO}.zero_hpz_partition_size")
    if stage is not None and group is not None and group.becomes:
        stage.becomes.pop("reshard_after_forward", None)


DEEPSPEED = Dialect("deepspeed", "DeepSpeed ZeRO", _find, _ROWS, (), _finish)
