"""ROLL's `strategy_config`, one for each model that it trains."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from composer_fsdp2.config.wrapping import DTYPES
from composer_fsdp2.tools.migrate.counts import TRAINING, count_rows, finish_counts
from composer_fsdp2.tools.migrate.report import (
    CHANGES,
    CONVERTED,
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
    REPLICATE,
    SHARD,
    checkpointing_rows,
    clipping_rows,
    expert_rows,
    is_count,
    is_names,
    is_size,
    sequence_rows,
    wrap_classes,
)

__all__ = ["COUNTS", "ROLL"]

_OFF = (False, None)
_BLOCKS, _EXPERTS = "wrap_policy.transformer_layer_cls_to_wrap", "wrap_policy.moe_experts"
"""keys that name the classes of blocks and of single experts"""


def _dtype(value: Any) -> Any:
    spellings = {"half": "fp16", "float": "fp32"}
    return spellings.get(value.lower(), value) if isinstance(value, str) else value


def _is_dtype(value: Any) -> bool:
    """A dtype."""
    return isinstance(value, str) and _dtype(value) in DTYPES


def _dtype_row(key: str, name: str, trainer: Callable[[Any], dict[str, Any]] | None = None) -> Row:
    """Returns the row of one dtype of `mixed_precision`."""
    return Row(
        key,
        RENAMED,
        f"`mixed_precision.{name}`",
        _is_dtype,
        lambda value: {"mixed_precision": {name: _dtype(value)}},
        trainer=trainer or {},
    )


_AUTOCAST: Mapping[str, dict[str, Any]] = {
    "torch.float16": {"precision": "amp_fp16"},
    "torch.float32": {"precision": "fp32"},
}
"""of ROLL, whose dtype is its `param_dtype`; bf16 is the default"""


def _is_everyone(value: Any) -> bool:
    """Nothing or a number below 2."""
    return value is None or (isinstance(value, int) and value <= 1)


_ROWS = (
    Row(
        "fsdp_size",
        CONVERTED,
        "ranks that share one copy; what the run has beyond it are copies (HSDP)",
        is_size,
        lambda value: {SHARD: value, REPLICATE: -1},
    ),
    Row("fsdp_size", NOT_NEEDED, "1 or less is all ranks, the default", _is_everyone),
    _dtype_row(
        "param_dtype",
        "param_dtype",
        lambda value: _AUTOCAST.get(str(DTYPES[_dtype(value)]), {}),
    ),
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
        _BLOCKS,
        RENAMED,
        "`wrap_policy.classes`",
        is_names,
        wrap_classes,
    ),
    Row(
        _BLOCKS,
        NOT_NEEDED,
        "the model's own blocks",
        (None, []),
    ),
    Row("wrap_policy.min_num_params", NOT_NEEDED, "ROLL reads no size"),
    Row(
        _EXPERTS,
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
    Row("apply_expert_patch", NOT_NEEDED, "no class of experts is named", (True,)),
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


# Others of its `training_args` are the pipeline's, or have no effect.
_COUNTED = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps"),
    *("num_train_epochs", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2"),
    *("adam_epsilon", "warmup_steps", "warmup_ratio", "lr_scheduler_type"),
)
COUNTS = {
    **{f"training_args.{key}": TRAINING[key] for key in _COUNTED},
    "infer_batch_size": "evaluated",
    "model_args.freeze_module_prefix": "frozen",
}
_STEP = (
    "a step of the pipeline is rollout_batch_size x num_return_sequences x ppo_epochs / "
    "`global_train_batch_size` batches (`ba`) of Composer: write `{}` in those"
)
_OF_PIPELINE = {
    "max_steps": "max_duration",
    "save_steps": "save_interval",
    "eval_steps": "eval_interval",
    "logging_steps": "console_log_interval",
}

_AROUND = (
    *count_rows(COUNTS),
    *sequence_rows("model_args.ulysses_size", method="ulysses"),
    *checkpointing_rows("model_args.disable_gradient_checkpointing", on=False),
    *clipping_rows("training_args.max_grad_norm"),
    *clipping_rows("max_grad_norm"),
)


def _site(data: Mapping[str, Any], path: Path) -> Site | None:
    is_fsdp = str(data.get("strategy_name", "fsdp2")).startswith("fsdp2")
    is_block = isinstance(data.get("strategy_config"), Mapping)
    return Site(path, {"strategy_config": ""}) if is_fsdp and is_block else None


def _finish_experts(context: Context) -> None:
    """Makes single experts units, where the file names their class beside that of blocks."""
    patch, experts = (context.entries.get(key) for key in ("apply_expert_patch", _EXPERTS))
    blocks = context.entries.get(_BLOCKS)
    if patch is None or patch.value is not True or experts is None or not experts.value:
        return
    if any("expert_parallel" in entry.becomes for entry in context.entries.values()):
        patch.become(NOT_NEEDED, "ranks hold experts between them")
        return
    if blocks is None or not blocks.becomes:
        patch.become(UNSUPPORTED, f"needs the classes of blocks too, in {_BLOCKS}")
        return
    classes = [wrap_classes(e.value)["wrap_policy"]["classes"] for e in (blocks, experts)]
    blocks.becomes = {"wrap_policy": {"classes": [*dict.fromkeys(classes[0] + classes[1])]}}
    experts.become(RENAMED, "among `wrap_policy.classes`")
    reason = (
        "each expert is a unit, which every rank has to call in every step: Mixtral, Qwen3-MoE and "
        "OLMoE of transformers 4 do; for others take the class of experts out, or write `ep`"
    )
    patch.become(CONVERTED, reason, unused_parameters=False)


def _finish(context: Context) -> None:
    _finish_experts(context)
    # The ranks are the GPUs that the role is given.
    ranks, device_mapping = None, context.around("device_mapping")[1]
    range_text = str(device_mapping).replace(" ", "")
    if isinstance(device_mapping, list):
        ranks = len(device_mapping)
    elif numbers := re.fullmatch(r"list\(range\((?:(\d+),)?(\d+)\)\)", range_text):
        ranks = int(numbers[2]) - int(numbers[1] or 0)
    finish_counts(context, COUNTS, ranks, around=True)
    if context.value("async_save_ckpt") is None:
        context.add("ROLL saves beside training unless a file says otherwise", async_save=True)
    tiled, shards = context.entries.get("apply_tiled_mlp"), context.value("tiled_num_shards")
    if tiled is not None and tiled.becomes and shards is not None:
        tiled.become(RENAMED, "`tiled_num_shards` is `shards`", tiled_mlp={"shards": shards})
    reduce = "bf16" if context.value("enable_mix_precision") is False else "fp32"
    defaults = {"param_dtype": "bf16", "reduce_dtype": reduce}
    written = [e.becomes.get("mixed_precision", {}) for e in context.entries.values()]
    missing = {k: v for k, v in defaults.items() if not any(k in dtypes for dtypes in written)}
    if missing:
        context.add("the default of ROLL, written out", mixed_precision=missing)


_MOVED = "written beside the sharding of this model: {}; remove it here"
ROLL = Dialect(
    "roll",
    "ROLL with FSDP2",
    _site,
    _ROWS,
    (
        # What became of keys around, which stay.
        *(
            Row(f"*.{row.key}", CONVERTED, _MOVED.format(row.reason), row.when)
            if row.settings or row.trainer
            else replace(
                row,
                key=f"*.{row.key}",
                options=("write another value", "remove it") if row.options else (),
            )
            for row in _AROUND
        ),
        Row(
            "*.strategy_name",
            UNSUPPORTED,
            "this model is divided by another engine, which has no equal here",
            ("megatron_train", "megatron_infer"),
            options=("leave it to that engine, or give it settings of FSDP first",),
        ),
        *(Row(key, CHANGES, _STEP.format(name)) for key, name in _OF_PIPELINE.items()),
        Row("output_dir", CHANGES, "write `save_folder`, where checkpoints are saved"),
    ),
    _AROUND,
    _finish,
)
