"""Keys of DeepSpeed's `zero_optimization` that FSDP2 needs none of."""

from __future__ import annotations

__all__ = ["INTERNAL", "TUNING"]

TUNING = (
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
"""sizes and switches of its communication"""
INTERNAL = (
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
"""what only its own engine does"""
