"""verl's settings of its FSDP engine: of the SFT trainer, and of the models of its RL trainers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.tools.migrate.dialects.roll import (
    FOREIGN_ENGINE,
    FOREIGN_OPTION,
    dtype_row,
)
from composer_fsdp2.tools.migrate.report import SAME, Context, Dialect, Path, Row, Site, Status
from composer_fsdp2.tools.migrate.shared_rows import (
    OFFLOADED,
    REPLICATE,
    SHARD,
    STATE_ON_CPU,
    add_dtypes,
    checkpointing_rows,
    clipping_rows,
    is_count,
    is_names,
    is_number,
    min_num_params,
    moved_rows,
    sequence_rows,
    wrap_classes,
)

__all__ = ["VERL"]

_R, _C, _CH = Status.RENAMED, Status.CONVERTED, Status.CHANGES
_NOT, _DEC, _UN = Status.NOT_NEEDED, Status.DECISION, Status.UNSUPPORTED
_OFF = (False, None)
_DEGREE = "ulysses_sequence_parallel_size"
_BLOCK = "fsdp_config"
_OWN = ("model_dtype", "param_offload", "optimizer_offload", "offload_policy", "fsdp_size")
"""keys of a block that no other trainer's has"""
_DTYPES = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16"}
_FULL = ("fp32", "float32", "float", None)


def _is_low(value: Any) -> bool:
    """A dtype of 16 bits."""
    return str(value).lower() in _DTYPES


_BATCH = "LLM Foundry's batch sizes and the model say it"
_LOSS = "about the loss of a policy, not about sharding"

_ROWS = (
    *sequence_rows(_DEGREE, method="ulysses"),
    *sequence_rows(f"config.{_DEGREE}", method="ulysses"),
    Row("config.strategy", _NOT, "`parallelism_config.fsdp2` says it", ("fsdp", "fsdp2", None)),
    Row("config._target_", _NOT, "names verl's own class"),
    Row("config.fsdp_size", _NOT, "all ranks share one copy, the default", (-1, None)),
    Row(
        "config.fsdp_size",
        _C,
        "ranks that share one copy; what the run has beyond it are copies (HSDP)",
        is_count,
        lambda value: {SHARD: value, REPLICATE: -1},
    ),
    Row("config.reshard_after_forward", _NOT, "the default of verl", (None,)),
    Row(
        "config.reshard_after_forward",
        Status.KEPT,
        "means the same",
        (True, False),
        {"reshard_after_forward": SAME},
    ),
    Row("config.offload_policy", _NOT, "off is the default", _OFF),
    Row("config.offload_policy", _R, "`cpu_offload`", (True,), {"cpu_offload": True}),
    Row("config.cpu_offload", _NOT, "off is the default", _OFF),
    Row("config.cpu_offload", _R, "`cpu_offload`", (True,), {"cpu_offload": True}),
    Row("config.offload_params", _NOT, "`cpu_offload` offloads parameters too", (True, *_OFF)),
    Row("config.param_offload", _NOT, "off is what is done here", _OFF),
    Row(
        "config.param_offload",
        _CH,
        "verl moves weights to the CPU while it generates and back to train, and nothing generates "
        "here between steps; for less memory in training write `cpu_offload: true`",
        (True,),
    ),
    Row("config.optimizer_offload", _NOT, "off is what is done here", _OFF),
    Row(
        "config.optimizer_offload",
        _C,
        "the optimizer's state is in CPU memory between steps",
        (True,),
        STATE_ON_CPU,
    ),
    Row("config.forward_prefetch", _NOT, "torch's own prefetch", _OFF),
    Row("config.forward_prefetch", _C, "one unit ahead", (True,), {"forward_prefetch": 1}),
    Row("config.use_orig_params", _NOT, "FSDP2 keeps the original parameters"),
    Row("config.model_dtype", _NOT, "weights are in fp32, as here", _FULL),
    Row(
        "config.model_dtype",
        _DEC,
        "verl keeps the weights themselves in 16 bits, which loses small steps; here they are as "
        "the model gives them, and 16 bits are for computing",
        _is_low,
        options=("model_dtype=fp32",),
    ),
    Row("config.dtype", _NOT, "null is bf16", (None,)),
    dtype_row("config.dtype", "param_dtype"),
    dtype_row("config.mixed_precision.param_dtype", "param_dtype"),
    dtype_row("config.mixed_precision.reduce_dtype", "reduce_dtype"),
    Row("config.mixed_precision.buffer_dtype", _NOT, "buffers keep their dtype"),
    Row("config.wrap_policy.disable", _NOT, "off is what is done here", _OFF),
    Row("config.wrap_policy.min_num_params", _NOT, "0 sets no size", (0, None)),
    Row(
        "config.wrap_policy.min_num_params",
        _R,
        "`wrap_policy.min_num_params`",
        is_number,
        min_num_params,
    ),
    Row(
        "config.wrap_policy.transformer_layer_cls_to_wrap",
        _R,
        "`wrap_policy.classes`",
        is_names,
        wrap_classes,
    ),
    Row("config.wrap_policy.transformer_layer_cls_to_wrap", _NOT, "the model's blocks", (None, [])),
    Row("config.use_torch_compile", _NOT, "compiles the entropy of a policy, not the model"),
    Row("config.entropy_from_logits_with_chunking", _NOT, _LOSS),
    Row("config.entropy_checkpointing", _NOT, _LOSS),
    *(
        Row(f"config.{name}", _NOT, "the run's own `seed` and settings of torch say it")
        for name in ("seed", "full_determinism")
    ),
    Row("config.grad_offload", _NOT, "only for Megatron"),
    *(
        Row(f"config.{name}", _NOT, _BATCH)
        for name in (
            *("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu"),
            *("infer_max_token_len_per_gpu", "infer_micro_batch_size_per_gpu"),
            *("use_fused_kernels", "use_remove_padding"),
        )
    ),
    Row("config.forward_only", _NOT, "off is what is done here", _OFF),
    Row(
        "config.forward_only",
        _DEC,
        "a model that is not trained needs no shards of an optimizer, and no run here",
        (True,),
        options=("forward_only=false", "take the whole model out"),
    ),
)


_AROUND = (
    *sequence_rows(_DEGREE, method="ulysses"),
    Row(
        "model.enable_activation_offload",
        _C,
        "what checkpointed blocks save is kept in CPU memory",
        (True,),
        OFFLOADED,
    ),
    *checkpointing_rows("model.enable_gradient_checkpointing"),
    *clipping_rows("grad_clip"),
    *clipping_rows("optim.clip_grad"),
)
_ENGINES = ("megatron", "veomni", "torchtitan", "mindspeed", "automodel")


def _site(data: Mapping[str, Any], path: Path) -> Site | None:
    """A model with a block `fsdp_config` of verl's keys, or an engine with its degree."""
    block = data.get(_BLOCK)
    if isinstance(block, Mapping) and any(key in block for key in _OWN):
        return Site(path, {_BLOCK: "config", **({_DEGREE: _DEGREE} if _DEGREE in data else {})})
    if path and _DEGREE in data and any(key in data for key in _OWN):
        return Site(path[:-1], {path[-1]: "config"})
    return None


def _finish(context: Context) -> None:
    add_dtypes(context, "verl", param_dtype="bf16", reduce_dtype="fp32")


VERL = Dialect(
    "verl",
    "verl with FSDP",
    _site,
    _ROWS,
    (
        *moved_rows(_AROUND),
        Row("*.strategy", _UN, FOREIGN_ENGINE, _ENGINES, options=(FOREIGN_OPTION,)),
    ),
    _AROUND,
    _finish,
)
