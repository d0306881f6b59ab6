"""ROLL's `strategy_config` of `fsdp2_train` and `fsdp2_infer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.config.precision import DTYPES
from composer_fsdp2.tools.migrate.report import SAME, Context, Dialect, Path, Row, Site, Status
from composer_fsdp2.tools.migrate.shared_rows import (
    REPLICATE,
    SHARD,
    add_dtypes,
    checkpointing_rows,
    clipping_rows,
    is_count,
    is_names,
    is_size,
    moved_rows,
    sequence_rows,
    wrap_classes,
)

__all__ = ["FOREIGN_ENGINE", "FOREIGN_OPTION", "ROLL", "dtype_row"]

_K, _R, _C = Status.KEPT, Status.RENAMED, Status.CONVERTED
_NOT, _CH, _DEC, _UN = Status.NOT_NEEDED, Status.CHANGES, Status.DECISION, Status.UNSUPPORTED
_BLOCK = "strategy_config"
_OFF = (False, None)
_SPELLINGS = {"half": "fp16", "float": "fp32"}


def _dtype(value: Any) -> Any:
    return _SPELLINGS.get(value.lower(), value) if isinstance(value, str) else value


def _is_dtype(value: Any) -> bool:
    """A dtype."""
    return isinstance(value, str) and _dtype(value) in DTYPES


def dtype_row(key: str, name: str, trainer: Any = None) -> Row:
    """Returns the row of one dtype of `mixed_precision`."""
    return Row(
        key,
        _R,
        f"`mixed_precision.{name}`",
        _is_dtype,
        lambda value: {"mixed_precision": {name: _dtype(value)}},
        trainer=trainer or {},
    )


def _precision(value: Any) -> dict[str, Any]:
    """ROLL computes under autocast in its `param_dtype`; LLM Foundry's default is bf16."""
    names = {"torch.float16": "amp_fp16", "torch.float32": "fp32"}
    name = names.get(str(DTYPES[_dtype(value)]))
    return {"precision": name} if name else {}


def _is_everyone(value: Any) -> bool:
    """Nothing or a number below 2."""
    return value is None or (isinstance(value, int) and value <= 1)


_ROWS = (
    Row(
        "fsdp_size",
        _C,
        "ranks that share one copy; what the run has beyond it are copies (HSDP)",
        is_size,
        lambda value: {SHARD: value, REPLICATE: -1},
    ),
    Row("fsdp_size", _NOT, "1 or less is all ranks, the default", _is_everyone),
    dtype_row("param_dtype", "param_dtype", _precision),
    dtype_row("reduce_dtype", "reduce_dtype"),
    Row(
        "async_save_ckpt",
        _R,
        "`async_save`",
        (True, False),
        {"async_save": SAME},
    ),
    Row(
        "reshard_after_forward",
        _C,
        "the top-level units keep their parameters until backward, as ROLL's root does",
        (True, None),
        {"reshard_after_forward": "auto"},
    ),
    Row("reshard_after_forward", _K, "means the same", settings={"reshard_after_forward": SAME}),
    Row("offload_policy", _NOT, "false is what FSDP2 does", _OFF),
    Row("offload_policy", _C, "called cpu_offload", (True,), {"cpu_offload": True}),
    Row(
        "wrap_policy.transformer_layer_cls_to_wrap",
        _R,
        "`wrap_policy.classes`",
        is_names,
        wrap_classes,
    ),
    Row("wrap_policy.transformer_layer_cls_to_wrap", _NOT, "the model's own blocks", (None, [])),
    Row("wrap_policy.min_num_params", _NOT, "ROLL reads no size"),
    Row(
        "wrap_policy.moe_experts",
        _NOT,
        "ROLL wraps single experts only with apply_expert_patch; they belong to their layer's unit",
    ),
    Row(
        "wrap_policy.wrap_embeddings",
        _NOT,
        "off: embeddings belong to the top-level unit; ROLL makes untied ones a unit all the same",
        _OFF,
    ),
    Row(
        "wrap_policy.wrap_embeddings",
        _R,
        "`wrap_policy.embeddings`",
        (True,),
        {"wrap_policy": {"embeddings": True}},
    ),
    Row("wrap_policy.wrap_lm_output", _NOT, "off is the default", _OFF),
    Row(
        "wrap_policy.wrap_lm_output",
        _R,
        "`wrap_policy.lm_head`",
        (True,),
        {"wrap_policy": {"lm_head": True}},
    ),
    Row("apply_expert_patch", _NOT, "off is what is done here", _OFF),
    Row(
        "apply_expert_patch",
        _UN,
        "experts without a token on a rank are not run there, so single experts cannot be units; "
        "whole layers are, which takes more memory while one is gathered",
        options=("apply_expert_patch=false",),
    ),
    Row("ep_size", _NOT, "no expert parallelism", (1, None)),
    Row("ep_size", _UN, "experts are not spread over ranks", options=("ep_size=1",)),
    Row("efsdp_size", _NOT, "ROLL reads it only with ep_size above 1"),
    Row("moe_use_grouped_mm", _NOT, "off is what is done here", _OFF),
    Row(
        "moe_use_grouped_mm",
        _UN,
        "experts are multiplied as the model does it, not by one grouped kernel",
        options=("moe_use_grouped_mm=false",),
    ),
    Row("forward_prefetch", _NOT, "torch's own prefetch", (*_OFF, 0)),
    Row("forward_prefetch", _C, "one unit ahead", (True,), {"forward_prefetch": 1}),
    Row("forward_prefetch", _K, "units ahead", is_count, {"forward_prefetch": SAME}),
    Row("backward_prefetch", _NOT, "torch's own prefetch", (*_OFF, 0)),
    Row("backward_prefetch", _C, "one unit ahead", (True,), {"backward_prefetch": 1}),
    Row("backward_prefetch", _K, "units ahead", is_count, {"backward_prefetch": SAME}),
    Row("enable_mix_precision", _C, "gradients are reduced in fp32", (True, None)),
    Row("enable_mix_precision", _C, "gradients are reduced in bf16", (False,)),
    Row("reduce_scatter_during_grad_accumulation", _NOT, "as here", (True, None)),
    Row(
        "reduce_scatter_during_grad_accumulation",
        _C,
        "gradients are reduced in the last microbatch alone",
        (False,),
        {"gradient_sync": "last"},
    ),
    Row("save_only_model", _NOT, "off is what is done here", _OFF),
    Row(
        "save_only_model",
        _CH,
        "write LLM Foundry's `save_weights_only: true` beside the block",
        (True,),
    ),
    Row("init_tokenizer_processor", _NOT, "the run's `tokenizer` says it"),
    Row("apply_tiled_mlp", _NOT, "off is what is done here", _OFF),
    Row(
        "apply_tiled_mlp",
        _R,
        "`tiled_mlp`, with `tiled_num_shards` or ROLL's 4 as `shards`",
        (True,),
        {"tiled_mlp": {"shards": 4}},
    ),
    Row("tiled_num_shards", _NOT, "only for the tiled MLP"),
    Row("model_type", _NOT, "only for the tiled MLP"),
    *sequence_rows("ulysses_size", method="ulysses"),
)


_AROUND = (
    *sequence_rows("model_args.ulysses_size", method="ulysses"),
    *checkpointing_rows("model_args.disable_gradient_checkpointing", on=False),
    *clipping_rows("training_args.max_grad_norm"),
    *clipping_rows("max_grad_norm"),
)


def _site(data: Mapping[str, Any], path: Path) -> Site | None:
    is_fsdp = str(data.get("strategy_name", "fsdp2")).startswith("fsdp2")
    return Site(path, {_BLOCK: ""}) if is_fsdp and isinstance(data.get(_BLOCK), Mapping) else None


def _finish(context: Context) -> None:
    tiled, shards = context.entries.get("apply_tiled_mlp"), context.value("tiled_num_shards")
    if tiled is not None and tiled.becomes and shards is not None:
        tiled.become(_R, "`tiled_num_shards` is `shards`", tiled_mlp={"shards": shards})
    experts = context.entries.get("efsdp_size")
    if experts is not None and context.value("ep_size", 1) not in (1, None):
        experts.decide(
            "ranks that share the experts of one rank; experts are not spread over ranks here",
            f"{experts.key}=null",
        )
    reduce = "bf16" if context.value("enable_mix_precision") is False else "fp32"
    add_dtypes(context, "ROLL", param_dtype="bf16", reduce_dtype=reduce)


FOREIGN_ENGINE = "this model is divided by another engine, which has no equal here"
FOREIGN_OPTION = "leave it to that engine, or give it settings of FSDP first"


def _is_megatron(value: Any) -> bool:
    """A strategy of Megatron."""
    return isinstance(value, str) and value.startswith("megatron")


_FREEZE = "frozen parameters are sharded like the others; freezing stays with the trainer"

ROLL = Dialect(
    "roll",
    "ROLL with FSDP2",
    _site,
    _ROWS,
    (
        *moved_rows(_AROUND),
        Row("*.strategy_name", _UN, FOREIGN_ENGINE, _is_megatron, options=(FOREIGN_OPTION,)),
        Row("*.freeze_module_prefix", _K, _FREEZE),
    ),
    _AROUND,
    _finish,
)
