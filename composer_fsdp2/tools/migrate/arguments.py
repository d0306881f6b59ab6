"""The `fsdp` and `fsdp_config` of Hugging Face's `TrainingArguments`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.tools.migrate.accelerate import (
    BLOCK,
    FLAT,
    FSDP_ROWS,
    finish_fsdp,
    has_fsdp_block,
    per_node,
)
from composer_fsdp2.tools.migrate.counts import (
    DEFAULT_WRITTEN,
    TRAINING,
    add_beside,
    count_rows,
    finish_counts,
)
from composer_fsdp2.tools.migrate.report import (
    CHANGES,
    CONVERTED,
    DECISION,
    NOT_NEEDED,
    RENAMED,
    SAME,
    Context,
    Dialect,
    Entry,
    Path,
    Row,
    Site,
)
from composer_fsdp2.tools.migrate.shared_rows import (
    OFF,
    ON,
    REPLICATE,
    SHARD,
    add_precision,
    checkpointing_rows,
    clipping_rows,
    clipping_to,
    degree_rows,
    expert_rows,
    first_keys,
    is_names,
    is_nothing,
    is_plain_number,
    is_size,
    min_num_params,
    parallel_rows,
    precision_row,
    under,
    wrap_classes,
)

__all__ = ["CHECKPOINTING_ROWS", "PRECISION_ROWS", "TRAINING_ARGUMENTS"]


_WORDS: dict[str, dict[str, Any]] = {
    "full_shard": {"reshard_after_forward": "auto"},
    "shard_grad_op": {"reshard_after_forward": False},
    "no_shard": {SHARD: 1, REPLICATE: -1, "reshard_after_forward": False},
    "hybrid_shard": {"reshard_after_forward": "auto"},
    "hybrid_shard_zero2": {"reshard_after_forward": False},
    "auto_wrap": {},
    "offload": {"cpu_offload": True},
}


def _words(value: Any) -> list[str]:
    words = value.split() if isinstance(value, str) else value
    return [str(word).lower() for word in words] if isinstance(words, list) else []


def _strategies(value: Any) -> list[str]:
    return [word for word in _words(value) if "shard" in word]


def _is_known(value: Any) -> bool:
    """Words that all mean something."""
    return bool(_words(value)) and _WORDS.keys() >= {*_words(value)}


def _is_unwrapped(value: Any) -> bool:
    """Words without `auto_wrap`."""
    return _is_known(value) and "auto_wrap" not in _words(value)


def _is_contradicting(value: Any) -> bool:
    """Words that name several strategies."""
    return len(set(_strategies(value))) > 1


def _from_words(value: Any) -> dict[str, Any]:
    return {key: item for word in _words(value) for key, item in _WORDS.get(word, {}).items()}


_ONE_UNIT = (
    "without auto_wrap the model was one unit, gathered at once; here its blocks are units too, "
    "which takes less memory"
)
CHECKPOINTING_ROWS = (
    *checkpointing_rows("gradient_checkpointing"),
    Row(
        "gradient_checkpointing_kwargs",
        NOT_NEEDED,
        "checkpointing is torch's non-reentrant one",
    ),
)
"""of `TrainingArguments`, whatever shards"""


PRECISION_ROWS = tuple(
    row
    for key in ("bf16", "fp16")
    for row in (precision_row(key, key, True), Row(key, NOT_NEEDED, "off", OFF))
)
"""of `TrainingArguments`, whatever shards"""


def _size_rows(key: str, setting: str, without: str) -> tuple[Row, ...]:
    return (
        Row(key, NOT_NEEDED, without, (1, None)),
        Row(key, RENAMED, f"`{setting}`", is_size, {setting: SAME}),
    )


_DISTRIBUTED = "distributed_config"
_CPU_OFFLOAD = (
    Row("cpu_offload", NOT_NEEDED, "off is the default", OFF),
    Row("cpu_offload", CONVERTED, "`cpu_offload`", ON, {"cpu_offload": True}),
)
_LOADING = (
    *degree_rows("tp_size", (1, None)),
    *_size_rows("size", SHARD, "what the other sizes leave, as here"),
    *_size_rows("dp_replicate_size", REPLICATE, "one copy is the default"),
    *expert_rows("ep_size"),
    *parallel_rows("pp_size", "pipeline parallelism"),
    Row("enable_expert_parallel", NOT_NEEDED, "no expert parallelism is asked for", OFF),
    Row(
        "enable_expert_parallel",
        DECISION,
        "neither `ep_size` nor `tp_size` says how many ranks hold the experts",
        ON,
        options=("fsdp2.expert_parallel=2", "=false"),
    ),
    Row("ep_implementation", NOT_NEEDED, "each rank sends its own tokens, all to all"),
    Row("enable_sequence_parallel", NOT_NEEDED, "transformers ignores the key"),
    Row("mixed_precision", NOT_NEEDED, "off is the default", OFF),
    Row(
        "mixed_precision",
        CONVERTED,
        "parameters in bf16, reduction in fp32",
        ON,
        {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}},
        trainer={"precision": "amp_bf16"},
    ),
    *_CPU_OFFLOAD,
    *(
        row
        for key in ("tp_plan", "plan", "ep_plan")
        for row in (
            Row(key, NOT_NEEDED, "layers and experts are found in the model", (None,)),
            Row(key, DECISION, "layers are divided as their model says", options=("=null",)),
        )
    ),
)
"""of transformers' `DistributedConfig`, an argument of `from_pretrained`"""
_ARGUMENTS = (
    Row("fsdp", NOT_NEEDED, "no strategy is named", (None, "", False, [])),
    Row(
        "fsdp",
        DECISION,
        "it names several strategies, and a run has one",
        _is_contradicting,
        options=("=full_shard auto_wrap", "=shard_grad_op auto_wrap"),
    ),
    Row("fsdp", CHANGES, _ONE_UNIT, _is_unwrapped, _from_words),
    Row("fsdp", CONVERTED, "each word is one setting", _is_known, _from_words),
    Row("fsdp", CHANGES, f"true is full_shard; {_ONE_UNIT}", (True,), _WORDS["full_shard"]),
    Row(
        "fsdp_transformer_layer_cls_to_wrap",
        RENAMED,
        "`wrap_policy.classes` names the classes of units",
        is_names,
        wrap_classes,
    ),
    Row("fsdp_transformer_layer_cls_to_wrap", NOT_NEEDED, "names no class", is_nothing),
    Row("fsdp_min_num_params", NOT_NEEDED, "0 sets no size", is_nothing),
    Row(
        "fsdp_min_num_params",
        RENAMED,
        "`wrap_policy.min_num_params`",
        is_plain_number,
        min_num_params,
    ),
    Row("fsdp_version", NOT_NEEDED, "`parallelism_config.fsdp2` says it", (1, 2, "1", "2", None)),
    *PRECISION_ROWS,
    *CHECKPOINTING_ROWS,
    *clipping_rows("max_grad_norm"),
    *count_rows(TRAINING),
    *under(_DISTRIBUTED, _LOADING),
)


def _site(data: Mapping[str, Any], path: Path) -> Site | None:
    """Returns the site of `fsdp`, a block of it or `distributed_config`; others make none."""
    words, block = data.get("fsdp"), data.get(_DISTRIBUTED)
    is_said = words is True or (bool(words) and isinstance(words, str | list))
    is_said |= bool(block) and isinstance(block, Mapping)
    # `fsdp` in such a block is Composer's.
    is_inside = path[-1:] in ((BLOCK,), ("parallelism_config",))
    if is_inside or not (is_said or has_fsdp_block(data)):
        return None
    keys = {key: FLAT[key] for key in data if key in FLAT}
    keys |= {key: key for key in data if key in first_keys(_ARGUMENTS)}
    return Site(path, keys | ({BLOCK: "config"} if data.get(BLOCK) is not None else {}))


def _finish(context: Context) -> None:
    entries = context.entries
    _finish_experts(entries)
    trainer = "transformers" if "config.version" in entries else "Accelerate"
    version2 = finish_fsdp(context, trainer)
    words, switch = entries.get("fsdp"), entries.get("config.offload_params")
    if words and version2:
        # Version 2 reads `reshard_after_forward` instead of the words of a strategy.
        if words.status is CHANGES:
            words.status, words.reason = CONVERTED, "with version 2 blocks are units, as here"
        named = [word for word in _strategies(words.value) if word != "full_shard"]
        if "config.reshard_after_forward" in entries:
            words.becomes = {k: v for k, v in words.becomes.items() if k == "cpu_offload"}
            words.reason += "; with version 2 `reshard_after_forward` says when units are freed"
        elif named and not words.is_open:
            words.decide(
                f"with version 2 `{named[0]}` says nothing, and `reshard_after_forward` is missing",
                f"{words.key}=full_shard auto_wrap",
                "write reshard_after_forward in fsdp_config: true frees units after forward",
            )
    elif words and any(word.startswith("hybrid") for word in _words(words.value)):
        per_node(context, words, "full_shard")
    if words and switch and switch.value in (False, "false") and "cpu_offload" in words.becomes:
        for entry in (words, switch):
            entry.decide(
                f"`{words.key}` asks for offload and `{switch.key}` switches it off",
                f"{switch.key}=true",
                f"write {words.key} without the word offload",
            )
    blocks = ("config.mixed_precision_policy", f"{_DISTRIBUTED}.mixed_precision")
    add_precision(context, ("bf16", "fp16", *blocks), "the Trainer of transformers")
    finish_counts(context, TRAINING)
    if "learning_rate" in entries and "max_grad_norm" not in entries:
        add_beside(context, DEFAULT_WRITTEN, **clipping_to(1.0))


def _finish_experts(entries: Mapping[str, Entry]) -> None:
    """Converts `tp_size` to experts where `enable_expert_parallel` is true."""
    keys = ("enable_expert_parallel", "ep_size", "tp_size", "size")
    switch, experts, tensor, shards = (entries.get(f"{_DISTRIBUTED}.{key}") for key in keys)
    named = next((entry for entry in (experts, tensor) if entry and entry.value is not None), None)
    if switch is None or not switch.is_open or switch.value not in ON or named is None:
        return
    switch.become(NOT_NEEDED, f"`{named.path[-1]}` says how many ranks hold the experts")
    if tensor is not None and named is tensor and is_size(tensor.value):
        reason = "these ranks hold experts alone; here each of them reads a batch of its own"
        tensor.become(CHANGES, reason, expert_parallel={"degree": tensor.value})
        if shards and is_size(shards.value):
            both = shards.value * tensor.value
            shards.become(CONVERTED, "the ranks of `tp_size` hold shards too", **{SHARD: both})


TRAINING_ARGUMENTS = Dialect(
    "huggingface",
    "Hugging Face TrainingArguments",
    _site,
    (*_ARGUMENTS, *under("config", (*FSDP_ROWS, *_CPU_OFFLOAD))),
    finish=_finish,
    prefix="fsdp_",
    files=frozenset({"config"}),
)
