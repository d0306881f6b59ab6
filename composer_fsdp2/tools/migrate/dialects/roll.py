"""ROLL's `strategy_config` of `fsdp2_train` and `fsdp2_infer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.config.precision import DTYPES
from composer_fsdp2.tools.migrate.report import SAME, Context, Dialect, Row, Site, Status
from composer_fsdp2.tools.migrate.sequence import add_degree, moved_rows, sequence_rows
from composer_fsdp2.tools.migrate.training import (
    add_checkpointing,
    add_clipping,
    find_around,
    moved_training_rows,
)

__all__ = ["FOREIGN_ENGINE", "FOREIGN_OPTION", "ROLL", "dtype_row"]

_K, _R, _C = Status.KEPT, Status.RENAMED, Status.CONVERTED
_NOT, _CH, _DEC, _UN = Status.NOT_NEEDED, Status.CHANGES, Status.DECISION, Status.UNSUPPORTED
_SHARD, _REPLICATE = "data_parallel_shard_degree", "data_parallel_replicate_degree"
_BLOCK = "strategy_config"
_OFF = (False, None)
_SPELLINGS = {"half": "fp16", "float": "fp32"}
_DEFAULTS = {"param_dtype": "bf16", "reduce_dtype": "fp32"}


def _is_dtype(value: Any) -> bool:
    """A dtype."""
    return isinstance(value, str) and _SPELLINGS.get(value.lower(), value) in DTYPES


def _dtype(name: str) -> Any:
    return lambda value: {"mixed_precision": {name: _SPELLINGS.get(value.lower(), value)}}  # pyright: ignore[reportUnknownLambdaType]


def dtype_row(key: str, name: str) -> Row:
    """The row of one dtype of `mixed_precision`."""
    return Row(key, _R, f"`mixed_precision.{name}`", _is_dtype, _dtype(name))


def _is_count(value: Any) -> bool:
    """A number of units."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_size(value: Any) -> bool:
    """A number above 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def _is_everyone(value: Any) -> bool:
    """Nothing or a number below 2."""
    return value is None or (isinstance(value, int) and value <= 1)


def _names(value: Any) -> dict[str, Any]:
    return {"wrap_policy": {"classes": [value] if isinstance(value, str) else list(value)}}


def _is_names(value: Any) -> bool:
    """A name or several."""
    return isinstance(value, str | list) and bool(value)


_ROWS = (
    Row(
        "fsdp_size",
        _C,
        "ranks that share one copy; what the run has beyond it are copies (HSDP)",
        _is_size,
        lambda value: {_SHARD: value, _REPLICATE: -1},
    ),
    Row("fsdp_size", _NOT, "1 or less is all ranks, the default", _is_everyone),
    dtype_row("param_dtype", "param_dtype"),
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
        _is_names,
        _names,
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
    Row("forward_prefetch", _K, "units ahead", _is_count, {"forward_prefetch": SAME}),
    Row("backward_prefetch", _NOT, "torch's own prefetch", (*_OFF, 0)),
    Row("backward_prefetch", _C, "one unit ahead", (True,), {"backward_prefetch": 1}),
    Row("backward_prefetch", _K, "units ahead", _is_count, {"backward_prefetch": SAME}),
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


def _find(data: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[Site]:
    block, name = data.get(_BLOCK), data.get("strategy_name", "fsdp2")
    if isinstance(block, Mapping) and str(name).startswith("fsdp2"):
        return [Site(path, {_BLOCK: ""})]
    inner = [(key, value) for key, value in data.items() if isinstance(value, Mapping)]
    return [site for key, value in inner for site in _find(value, (*path, key))]


def _finish(context: Context) -> None:
    size = context.entries.get("fsdp_size")
    if size is not None and size.becomes and size.value == context.world_size:
        size.become(_C, "all ranks share one copy", **{_SHARD: size.value})
    tiled, shards = context.entries.get("apply_tiled_mlp"), context.entries.get("tiled_num_shards")
    if tiled is not None and tiled.becomes and shards is not None:
        tiled.become(_R, "`tiled_num_shards` is `shards`", tiled_mlp={"shards": shards.value})
    _ignore_experts(context)
    add_degree(
        context, "ulysses_size", find_around(context, ("model_args", "ulysses_size"))[1], "ulysses"
    )
    add_checkpointing(context, "model_args", "disable_gradient_checkpointing", on=False)
    add_clipping(context, ("training_args", "max_grad_norm"), ("max_grad_norm",))
    mixed = context.value("enable_mix_precision", True)
    defaults = _DEFAULTS if mixed is not False else {**_DEFAULTS, "reduce_dtype": "bf16"}
    missing = {name: dtype for name, dtype in defaults.items() if name not in context.entries}
    if missing:
        context.add("the default of ROLL, written out", mixed_precision=missing)
    _add_precision(context)


def _ignore_experts(context: Context) -> None:
    """How experts are sharded is asked where there are ranks that share them out."""
    size, experts = context.entries.get("efsdp_size"), context.value("ep_size", 1)
    if size is not None and experts not in (1, None):
        size.decide(
            "ranks that share the experts of one rank; experts are not spread over ranks here",
            f"{size.key}=null",
        )


def _add_precision(context: Context) -> None:
    """ROLL computes under autocast in its `param_dtype`; LLM Foundry's default is bf16."""
    entry = context.entries.get("param_dtype")
    dtype = (
        None if entry is None else DTYPES.get(_SPELLINGS.get(str(entry.value), str(entry.value)))
    )
    name = {"torch.float16": "amp_fp16", "torch.float32": "fp32"}.get(str(dtype))
    if entry is not None and entry.becomes and name and not context.has_beside("precision"):
        entry.beside = {"precision": name}


FOREIGN_ENGINE = "this model is divided by another engine, which has no equal here"
FOREIGN_OPTION = "leave it to that engine, or give it settings of FSDP first"


def _is_megatron(value: Any) -> bool:
    """A strategy of Megatron."""
    return isinstance(value, str) and value.startswith("megatron")


_FREEZE = "frozen parameters are sharded like the others; freezing stays with the trainer"

ROLL = Dialect(
    "roll",
    "ROLL with FSDP2",
    _find,
    _ROWS,
    (
        *moved_rows("*.ulysses_size"),
        *moved_training_rows(
            ("*.model_args.disable_gradient_checkpointing",), ("*.max_grad_norm",)
        ),
        Row("*.strategy_name", _UN, FOREIGN_ENGINE, _is_megatron, options=(FOREIGN_OPTION,)),
        Row("*.freeze_module_prefix", _K, _FREEZE),
    ),
    _finish,
)
