"""Trainers by reinforcement: ROLL's `strategy_config`, and verl's settings of its FSDP engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.config.wrapping import DTYPES
from composer_fsdp2.tools.migrate.report import (
    CHANGES,
    CONVERTED,
    DECISION,
    KEPT,
    NOT_NEEDED,
    RENAMED,
    SAME,
    UNSUPPORTED,
    Context,
    Dialect,
    Path,
    Row,
    Site,
)
from composer_fsdp2.tools.migrate.shared_rows import (
    OFFLOADED,
    REPLICATE,
    SHARD,
    STATE_ON_CPU,
    add_dtypes,
    checkpointing_rows,
    clipping_rows,
    expert_rows,
    is_count,
    is_names,
    is_number,
    is_size,
    min_num_params,
    moved_rows,
    sequence_rows,
    wrap_classes,
)

__all__ = ["ROLL", "VERL"]

_OFF = (False, None)


def _dtype(value: Any) -> Any:
    spellings = {"half": "fp16", "float": "fp32"}
    return spellings.get(value.lower(), value) if isinstance(value, str) else value


def _is_dtype(value: Any) -> bool:
    """A dtype."""
    return isinstance(value, str) and _dtype(value) in DTYPES


def _dtype_row(key: str, name: str, trainer: Any = None) -> Row:
    """Returns the row of one dtype of `mixed_precision`."""
    return Row(
        key,
        RENAMED,
        f"`mixed_precision.{name}`",
        _is_dtype,
        lambda value: {"mixed_precision": {name: _dtype(value)}},
        trainer=trainer or {},
    )


def _precision(value: Any) -> dict[str, Any]:
    """Returns the precision of ROLL's autocast, which is its `param_dtype`; bf16 is the default."""
    names = {"torch.float16": "amp_fp16", "torch.float32": "fp32"}
    name = names.get(str(DTYPES[_dtype(value)]))
    return {"precision": name} if name else {}


def _is_everyone(value: Any) -> bool:
    """Nothing or a number below 2."""
    return value is None or (isinstance(value, int) and value <= 1)


_ROLL_ROWS = (
    Row(
        "fsdp_size",
        CONVERTED,
        "ranks that share one copy; what the run has beyond it are copies (HSDP)",
        is_size,
        lambda value: {SHARD: value, REPLICATE: -1},
    ),
    Row("fsdp_size", NOT_NEEDED, "1 or less is all ranks, the default", _is_everyone),
    _dtype_row("param_dtype", "param_dtype", _precision),
    _dtype_row("reduce_dtype", "reduce_dtype"),
    Row(
        "async_save_ckpt",
        RENAMED,
        "`async_save`",
        (True, False),
        {"async_save": SAME},
    ),
    Row(
        "reshard_after_forward",
        CONVERTED,
        "the top-level units keep their parameters until backward, as ROLL's root does",
        (True, None),
        {"reshard_after_forward": "auto"},
    ),
    Row("reshard_after_forward", KEPT, "means the same", settings={"reshard_after_forward": SAME}),
    Row("offload_policy", NOT_NEEDED, "false is what FSDP2 does", _OFF),
    Row("offload_policy", CONVERTED, "called cpu_offload", (True,), {"cpu_offload": True}),
    Row(
        "wrap_policy.transformer_layer_cls_to_wrap",
        RENAMED,
        "`wrap_policy.classes`",
        is_names,
        wrap_classes,
    ),
    Row(
        "wrap_policy.transformer_layer_cls_to_wrap",
        NOT_NEEDED,
        "the model's own blocks",
        (None, []),
    ),
    Row("wrap_policy.min_num_params", NOT_NEEDED, "ROLL reads no size"),
    Row(
        "wrap_policy.moe_experts",
        NOT_NEEDED,
        "ROLL wraps single experts only with apply_expert_patch; they belong to their layer's unit",
    ),
    Row(
        "wrap_policy.wrap_embeddings",
        NOT_NEEDED,
        "off: embeddings belong to the top-level unit; ROLL makes untied ones a unit all the same",
        _OFF,
    ),
    Row(
        "wrap_policy.wrap_embeddings",
        RENAMED,
        "`wrap_policy.embeddings`",
        (True,),
        {"wrap_policy": {"embeddings": True}},
    ),
    Row("wrap_policy.wrap_lm_output", NOT_NEEDED, "off is the default", _OFF),
    Row(
        "wrap_policy.wrap_lm_output",
        RENAMED,
        "`wrap_policy.lm_head`",
        (True,),
        {"wrap_policy": {"lm_head": True}},
    ),
    Row("apply_expert_patch", NOT_NEEDED, "off is what is done here", _OFF),
    Row(
        "apply_expert_patch",
        UNSUPPORTED,
        "experts without a token on a rank are not run there, so single experts cannot be units; "
        "whole layers are, which takes more memory while one is gathered",
        options=("=false",),
    ),
    *expert_rows("ep_size"),
    Row("efsdp_size", NOT_NEEDED, "all ranks with the same experts shard them between them"),
    Row("moe_use_grouped_mm", NOT_NEEDED, "off is what is done here", _OFF),
    Row(
        "moe_use_grouped_mm",
        UNSUPPORTED,
        "experts are multiplied as the model does it, not by one grouped kernel",
        options=("=false",),
    ),
    Row("forward_prefetch", NOT_NEEDED, "torch's own prefetch", (*_OFF, 0)),
    Row("forward_prefetch", CONVERTED, "one unit ahead", (True,), {"forward_prefetch": 1}),
    Row("forward_prefetch", KEPT, "units ahead", is_count, {"forward_prefetch": SAME}),
    Row("backward_prefetch", NOT_NEEDED, "torch's own prefetch", (*_OFF, 0)),
    Row("backward_prefetch", CONVERTED, "one unit ahead", (True,), {"backward_prefetch": 1}),
    Row("backward_prefetch", KEPT, "units ahead", is_count, {"backward_prefetch": SAME}),
    Row("enable_mix_precision", CONVERTED, "gradients are reduced in fp32", (True, None)),
    Row("enable_mix_precision", CONVERTED, "gradients are reduced in bf16", (False,)),
    Row("reduce_scatter_during_grad_accumulation", NOT_NEEDED, "as here", (True, None)),
    Row(
        "reduce_scatter_during_grad_accumulation",
        CONVERTED,
        "gradients are reduced in the last microbatch alone",
        (False,),
        {"gradient_sync": "last"},
    ),
    Row("save_only_model", NOT_NEEDED, "off is what is done here", _OFF),
    Row(
        "save_only_model",
        CHANGES,
        "write LLM Foundry's `save_weights_only: true` beside the block",
        (True,),
    ),
    Row("init_tokenizer_processor", NOT_NEEDED, "the run's `tokenizer` says it"),
    Row("apply_tiled_mlp", NOT_NEEDED, "off is what is done here", _OFF),
    Row(
        "apply_tiled_mlp",
        RENAMED,
        "`tiled_mlp`, with `tiled_num_shards` or ROLL's 4 as `shards`",
        (True,),
        {"tiled_mlp": {"shards": 4}},
    ),
    Row("tiled_num_shards", NOT_NEEDED, "only for the tiled MLP"),
    Row("model_type", NOT_NEEDED, "only for the tiled MLP"),
    *sequence_rows("ulysses_size", method="ulysses"),
)


_ROLL_AROUND = (
    *sequence_rows("model_args.ulysses_size", method="ulysses"),
    *checkpointing_rows("model_args.disable_gradient_checkpointing", on=False),
    *clipping_rows("training_args.max_grad_norm"),
    *clipping_rows("max_grad_norm"),
)


def _roll_site(data: Mapping[str, Any], path: Path) -> Site | None:
    is_fsdp = str(data.get("strategy_name", "fsdp2")).startswith("fsdp2")
    is_block = isinstance(data.get("strategy_config"), Mapping)
    return Site(path, {"strategy_config": ""}) if is_fsdp and is_block else None


def _finish_roll(context: Context) -> None:
    tiled, shards = context.entries.get("apply_tiled_mlp"), context.value("tiled_num_shards")
    if tiled is not None and tiled.becomes and shards is not None:
        tiled.become(RENAMED, "`tiled_num_shards` is `shards`", tiled_mlp={"shards": shards})
    reduce = "bf16" if context.value("enable_mix_precision") is False else "fp32"
    add_dtypes(context, "ROLL", param_dtype="bf16", reduce_dtype=reduce)


_FOREIGN_ENGINE = "this model is divided by another engine, which has no equal here"
_FOREIGN_OPTION = "leave it to that engine, or give it settings of FSDP first"


ROLL = Dialect(
    "roll",
    "ROLL with FSDP2",
    _roll_site,
    _ROLL_ROWS,
    (
        *moved_rows(_ROLL_AROUND),
        Row(
            "*.strategy_name",
            UNSUPPORTED,
            _FOREIGN_ENGINE,
            ("megatron_train", "megatron_infer"),
            options=(_FOREIGN_OPTION,),
        ),
        Row(
            "*.freeze_module_prefix",
            KEPT,
            "frozen parameters are sharded like the others; freezing stays with the trainer",
        ),
    ),
    _ROLL_AROUND,
    _finish_roll,
)


# --- verl: the engine of its SFT trainer, and the models of its RL trainers. ---

_DEGREE = "ulysses_sequence_parallel_size"
_OWN = ("model_dtype", "param_offload", "optimizer_offload", "offload_policy", "fsdp_size")
"""keys of a block that no other trainer's has"""


def _is_low(value: Any) -> bool:
    """A dtype of 16 bits."""
    return str(value).lower() in ("bf16", "bfloat16", "fp16", "float16", "half")


_VERL_ROWS = (
    *sequence_rows(_DEGREE, method="ulysses"),
    *sequence_rows(f"config.{_DEGREE}", method="ulysses"),
    Row(
        "config.strategy", NOT_NEEDED, "`parallelism_config.fsdp2` says it", ("fsdp", "fsdp2", None)
    ),
    Row("config._target_", NOT_NEEDED, "names verl's own class"),
    Row("config.fsdp_size", NOT_NEEDED, "all ranks share one copy, the default", (-1, None)),
    Row(
        "config.fsdp_size",
        CONVERTED,
        "ranks that share one copy; what the run has beyond it are copies (HSDP)",
        is_count,
        lambda value: {SHARD: value, REPLICATE: -1},
    ),
    Row("config.reshard_after_forward", NOT_NEEDED, "the default of verl", (None,)),
    Row(
        "config.reshard_after_forward",
        KEPT,
        "means the same",
        (True, False),
        {"reshard_after_forward": SAME},
    ),
    Row("config.offload_policy", NOT_NEEDED, "off is the default", _OFF),
    Row("config.offload_policy", RENAMED, "`cpu_offload`", (True,), {"cpu_offload": True}),
    Row("config.cpu_offload", NOT_NEEDED, "off is the default", _OFF),
    Row("config.cpu_offload", RENAMED, "`cpu_offload`", (True,), {"cpu_offload": True}),
    Row(
        "config.offload_params", NOT_NEEDED, "`cpu_offload` offloads parameters too", (True, *_OFF)
    ),
    Row("config.param_offload", NOT_NEEDED, "off is what is done here", _OFF),
    Row(
        "config.param_offload",
        CHANGES,
        "verl moves weights to the CPU while it generates and back to train, and nothing generates "
        "here between steps; for less memory in training write `cpu_offload: true`",
        (True,),
    ),
    Row("config.optimizer_offload", NOT_NEEDED, "off is what is done here", _OFF),
    Row(
        "config.optimizer_offload",
        CONVERTED,
        "the optimizer's state is in CPU memory between steps",
        (True,),
        STATE_ON_CPU,
    ),
    Row("config.forward_prefetch", NOT_NEEDED, "torch's own prefetch", _OFF),
    Row("config.forward_prefetch", CONVERTED, "one unit ahead", (True,), {"forward_prefetch": 1}),
    Row("config.use_orig_params", NOT_NEEDED, "FSDP2 keeps the original parameters"),
    Row(
        "config.model_dtype",
        NOT_NEEDED,
        "weights are in fp32, as here",
        ("fp32", "float32", "float", None),
    ),
    Row(
        "config.model_dtype",
        DECISION,
        "verl keeps the weights themselves in 16 bits, which loses small steps; here they are as "
        "the model gives them, and 16 bits are for computing",
        _is_low,
        options=("=fp32",),
    ),
    Row("config.dtype", NOT_NEEDED, "null is bf16", (None,)),
    _dtype_row("config.dtype", "param_dtype"),
    _dtype_row("config.mixed_precision.param_dtype", "param_dtype"),
    _dtype_row("config.mixed_precision.reduce_dtype", "reduce_dtype"),
    Row("config.mixed_precision.buffer_dtype", NOT_NEEDED, "buffers keep their dtype"),
    Row("config.wrap_policy.disable", NOT_NEEDED, "off is what is done here", _OFF),
    Row("config.wrap_policy.min_num_params", NOT_NEEDED, "0 sets no size", (0, None)),
    Row(
        "config.wrap_policy.min_num_params",
        RENAMED,
        "`wrap_policy.min_num_params`",
        is_number,
        min_num_params,
    ),
    Row(
        "config.wrap_policy.transformer_layer_cls_to_wrap",
        RENAMED,
        "`wrap_policy.classes`",
        is_names,
        wrap_classes,
    ),
    Row(
        "config.wrap_policy.transformer_layer_cls_to_wrap",
        NOT_NEEDED,
        "the model's blocks",
        (None, []),
    ),
    Row("config.use_torch_compile", NOT_NEEDED, "compiles the entropy of a policy, not the model"),
    *(
        Row(f"config.{name}", NOT_NEEDED, "about the loss of a policy, not about sharding")
        for name in ("entropy_from_logits_with_chunking", "entropy_checkpointing")
    ),
    *(
        Row(f"config.{name}", NOT_NEEDED, "the run's own `seed` and settings of torch say it")
        for name in ("seed", "full_determinism")
    ),
    Row("config.grad_offload", NOT_NEEDED, "only for Megatron"),
    *(
        Row(f"config.{name}", NOT_NEEDED, "LLM Foundry's batch sizes and the model say it")
        for name in (
            *("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu"),
            *("infer_max_token_len_per_gpu", "infer_micro_batch_size_per_gpu"),
            *("use_fused_kernels", "use_remove_padding"),
        )
    ),
    Row("config.forward_only", NOT_NEEDED, "off is what is done here", _OFF),
    Row(
        "config.forward_only",
        DECISION,
        "a model that is not trained needs no shards of an optimizer, and no run here",
        (True,),
        options=("=false", "take the whole model out"),
    ),
)


_VERL_AROUND = (
    *sequence_rows(_DEGREE, method="ulysses"),
    Row(
        "model.enable_activation_offload",
        CONVERTED,
        "what checkpointed blocks save is kept in CPU memory",
        (True,),
        OFFLOADED,
    ),
    *checkpointing_rows("model.enable_gradient_checkpointing"),
    *clipping_rows("grad_clip"),
    *clipping_rows("optim.clip_grad"),
)


def _verl_site(data: Mapping[str, Any], path: Path) -> Site | None:
    """Returns the site of a model with verl's keys in a block, or of an engine with its degree."""
    block, degree = data.get("fsdp_config"), {_DEGREE: _DEGREE} if _DEGREE in data else {}
    if isinstance(block, Mapping) and any(key in block for key in _OWN):
        return Site(path, {"fsdp_config": "config", **degree})
    if path and degree and any(key in data for key in _OWN):
        return Site(path[:-1], {path[-1]: "config"})
    return None


VERL = Dialect(
    "verl",
    "verl with FSDP",
    _verl_site,
    _VERL_ROWS,
    (
        *moved_rows(_VERL_AROUND),
        Row(
            "*.strategy",
            UNSUPPORTED,
            _FOREIGN_ENGINE,
            ("megatron", "veomni", "torchtitan", "mindspeed", "automodel"),
            options=(_FOREIGN_OPTION,),
        ),
    ),
    _VERL_AROUND,
    lambda context: add_dtypes(context, "verl", param_dtype="bf16", reduce_dtype="fp32"),
)
