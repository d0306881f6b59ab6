"""Accelerate's files that run neither FSDP nor DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.tools.migrate.accelerate import BLOCK, distributed_type
from composer_fsdp2.tools.migrate.report import Dialect, Row, Status

__all__ = ["UNSHARDED", "shards_nothing"]

_K, _DEC, _UN = Status.KEPT, Status.DECISION, Status.UNSUPPORTED


def shards_nothing(data: Mapping[str, Any]) -> bool:
    """Whether a file of Accelerate's says that it runs neither FSDP nor DeepSpeed."""
    return distributed_type(data) not in ("", "FSDP", "DEEPSPEED")


_COPIES = (
    "a whole copy on every rank, which Composer does without any such block; "
    "`parallelism_config: {fsdp2: {}}` would shard it"
)
_PLAIN = (
    *("NO", False, "MULTI_CPU", "MULTI_GPU", "MULTI_HPU", "MULTI_MLU", "MULTI_MUSA"),
    *("MULTI_NPU", "MULTI_SDAA", "MULTI_XPU", "MULTI_NEURON"),
)
_UNREAD = "`distributed_type` says what is run, and that does not read it; left as it is"

UNSHARDED = Dialect(
    "accelerate-unsharded",
    "Accelerate, neither FSDP nor DeepSpeed",
    lambda _data, _path: None,
    (),
    (
        Row("distributed_type", _K, _COPIES, _PLAIN),
        Row(
            "distributed_type",
            _UN,
            "tensor and pipeline parallelism of Megatron-LM have no equal here",
            ("MEGATRON_LM",),
            options=("stay with Megatron-LM, or write `parallelism_config: {fsdp2: {}}` yourself",),
        ),
        Row(
            "distributed_type",
            _UN,
            "FSDP2 of torch does not run on it",
            ("TPU", "XLA"),
            options=("stay with Accelerate, or write `parallelism_config: {fsdp2: {}}` yourself",),
        ),
        Row(
            "distributed_type",
            _DEC,
            "is not known here",
            options=("distributed_type=FSDP", "distributed_type=DEEPSPEED", "distributed_type=NO"),
        ),
        *(Row(key, _K, _UNREAD) for key in (BLOCK, "deepspeed_config", "megatron_lm_config")),
    ),
)
"""holds no site to replace; `shards_nothing` recognises it"""
