"""Accelerate's FSDP files, version 1 and 2, and the `fsdp` settings of `TrainingArguments`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.migrate.report import SAME, Context, Dialect, Row, Site, Status

__all__ = ["ACCELERATE", "TRAINING_ARGUMENTS"]

_K, _R, _C = Status.KEPT, Status.RENAMED, Status.CONVERTED
_NOT, _CH, _DEC, _UN = Status.NOT_NEEDED, Status.CHANGES, Status.DECISION, Status.UNSUPPORTED
_SHARD, _REPLICATE = "data_parallel_shard_degree", "data_parallel_replicate_degree"
_OFF = (False, None, "false")
_ON = (True, "true")
_BLOCK = "fsdp_config"
_PREFETCH = "FSDP2 prefetches the next unit from its own streams by itself"
_LAUNCHER = "`composer-fsdp2 train --ranks`, or the launcher, says how the ranks start"


def _classes(value: Any) -> dict[str, Any]:
    names = value.split(",") if isinstance(value, str) else value
    return {"wrap_policy": {"classes": [str(name).strip() for name in names]}}


def _min_num_params(value: Any) -> dict[str, Any]:
    return {"wrap_policy": {"min_num_params": int(float(value))}}


def _is_number(value: Any) -> bool:
    """A number above 0."""
    try:
        return int(float(value)) > 0
    except (TypeError, ValueError):
        return False


def _is_nothing(value: Any) -> bool:
    """Nothing, 0 or an empty list."""
    return value in (None, "", 0, "0", [])


def _is_names(value: Any) -> bool:
    """A name or several."""
    return isinstance(value, str | list) and bool(value)


def _precision(dtype: str) -> dict[str, Any]:
    return {"mixed_precision": {"param_dtype": dtype, "reduce_dtype": dtype}}


_PRECISION_REASON = (
    "parameters and gradient reduction in this dtype, as Accelerate sets it; write the trainer's "
    "`precision` too"
)
_STRATEGIES = {
    ("FULL_SHARD", 1, "1"): (
        {"reshard_after_forward": "auto"},
        "units are freed after forward, but for the top-level ones",
    ),
    ("SHARD_GRAD_OP", 2, "2"): (
        {"reshard_after_forward": False},
        "parameters are kept between forward and backward",
    ),
    ("NO_SHARD", 3, "3"): (
        {_SHARD: 1, _REPLICATE: -1, "reshard_after_forward": False},
        "a whole copy on every rank: replication, not ZeRO-2",
    ),
    ("HYBRID_SHARD", 4, "4"): ({"reshard_after_forward": "auto"}, "one copy per node"),
    ("HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2", 5, "5"): (
        {"reshard_after_forward": False},
        "one copy per node; parameters are kept between forward and backward",
    ),
}

# Without the prefix `fsdp_`, which keys may have or lack.
_FSDP = (
    *(
        Row("sharding_strategy", _C, reason, when, settings)
        for when, (settings, reason) in _STRATEGIES.items()
    ),
    Row(
        "reshard_after_forward",
        _C,
        "true keeps the top-level units, as Accelerate leaves it to torch",
        _ON,
        {"reshard_after_forward": "auto"},
    ),
    Row(
        "reshard_after_forward",
        _K,
        "means the same",
        ("false", False),
        {"reshard_after_forward": False},
    ),
    Row(
        "reshard_after_forward",
        _C,
        "version 1's name for it",
        ("FULL_SHARD",),
        {"reshard_after_forward": "auto"},
    ),
    Row(
        "reshard_after_forward",
        _C,
        "version 1's name for it",
        ("SHARD_GRAD_OP",),
        {"reshard_after_forward": False},
    ),
    Row("version", _NOT, "`parallelism_config.fsdp2` says it", (1, 2, "1", "2")),
    Row("auto_wrap_policy", _NOT, "the units come from the model's hooks", (None, "")),
    Row(
        "auto_wrap_policy",
        _NOT,
        "classes named here, or the model's own blocks, become units",
        ("TRANSFORMER_BASED_WRAP",),
    ),
    Row(
        "auto_wrap_policy",
        _C,
        "`wrap_policy.min_num_params` sets the size",
        ("SIZE_BASED_WRAP",),
    ),
    Row(
        "auto_wrap_policy",
        _CH,
        "one unit would gather the whole model at once; here the model's own blocks are units too",
        ("NO_WRAP",),
    ),
    Row("transformer_layer_cls_to_wrap", _NOT, "names no class", _is_nothing),
    Row(
        "transformer_layer_cls_to_wrap",
        _R,
        "`wrap_policy.classes` names the classes of units",
        _is_names,
        _classes,
    ),
    Row("min_num_params", _NOT, "0 sets no size", _is_nothing),
    Row("min_num_params", _R, "`wrap_policy.min_num_params`", _is_number, _min_num_params),
    Row("state_dict_type", _C, "one file", ("FULL_STATE_DICT",), {"state_dict_type": "full"}),
    Row(
        "state_dict_type",
        _C,
        "a folder of shards",
        ("SHARDED_STATE_DICT",),
        {"state_dict_type": "sharded"},
    ),
    Row(
        "state_dict_type",
        _DEC,
        "local checkpoints hold FSDP1's flat parameters, which FSDP2 has not",
        ("LOCAL_STATE_DICT",),
        options=("fsdp_state_dict_type=SHARDED_STATE_DICT", "fsdp_state_dict_type=FULL_STATE_DICT"),
    ),
    Row("offload_params", _NOT, "false is what FSDP2 does", _OFF),
    Row(
        "offload_params",
        _UN,
        "parameters and optimizer stay on the GPU",
        _ON,
        options=("fsdp_offload_params=false",),
    ),
    Row("activation_checkpointing", _K, "off", _OFF, {"activation_checkpointing": False}),
    Row(
        "activation_checkpointing",
        _K,
        "recomputes the units' activations",
        _ON,
        {"activation_checkpointing": True},
    ),
    Row(
        "cpu_ram_efficient_loading",
        _NOT,
        "`init_device: mixed` or `meta`, or `pretrained_weights`, builds no whole model on every "
        "rank",
    ),
    Row("sync_module_states", _NOT, "every rank starts from rank 0's weights", _ON),
    Row(
        "sync_module_states",
        _CH,
        "every rank starts from rank 0's weights, also where ranks were built differently",
        _OFF,
    ),
    Row("use_orig_params", _NOT, "FSDP2 keeps every parameter apart", _ON),
    Row(
        "use_orig_params",
        _CH,
        "there are no flat parameters: the optimizer sees each parameter with its own shape",
        _OFF,
    ),
    Row("forward_prefetch", _NOT, _PREFETCH),
    Row("backward_prefetch", _NOT, _PREFETCH),
    Row("backward_prefetch_policy", _NOT, _PREFETCH),
    Row("limit_all_gathers", _NOT, "FSDP2 frees memory deterministically and needs no limit"),
    Row("ignored_modules", _NOT, "null is none", _is_nothing),
    Row(
        "ignored_modules",
        _DEC,
        "FSDP2 takes names of parameters instead of modules",
        options=("fsdp_ignored_modules=null", "fsdp2.ignored_params=[<globs of names>]"),
    ),
    Row("xla", _NOT, "false: no XLA", _OFF),
    Row("xla", _UN, "FSDP2 of torch does not run on XLA", options=("xla=false",)),
    Row("xla_fsdp_v2", _NOT, "false: no XLA", _OFF),
    Row("xla_fsdp_v2", _UN, "FSDP2 of torch does not run on XLA", options=("xla_fsdp_v2=false",)),
    Row("xla_fsdp_settings", _NOT, "speaks of XLA alone"),
    Row("xla_fsdp_grad_ckpt", _NOT, "speaks of XLA alone"),
)

_LAUNCHING = (
    "debug",
    "distributed_type",
    "compute_environment",
    "downcast_bf16",
    "enable_cpu_affinity",
    "gpu_ids",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "main_training_function",
    "num_machines",
    "num_processes",
    "rdzv_backend",
    "same_network",
    "tpu_env",
    "tpu_use_cluster",
    "tpu_use_sudo",
    "use_cpu",
)
_TOP = (
    *(Row(key, _NOT, _LAUNCHER) for key in _LAUNCHING),
    Row("mixed_precision", _C, _PRECISION_REASON, ("bf16",), _precision("bf16")),
    Row("mixed_precision", _C, _PRECISION_REASON, ("fp16",), _precision("fp16")),
    Row(
        "mixed_precision",
        _C,
        "no mixed precision",
        ("no", False, None),
        {"mixed_precision": "FULL"},
    ),
    Row("mixed_precision", _UN, "fp8 is not supported yet", ("fp8",), options=("bf16",)),
)


def _under(prefix: str, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    return tuple(
        Row(f"{prefix}.{row.key}", row.status, row.reason, row.when, row.settings, row.options)
        for row in rows
    )


def _fsdp_block(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A block `fsdp_config` that is not Composer's."""
    block = data.get(_BLOCK)
    if not isinstance(block, Mapping):
        return None
    own = {row.key for row in _FSDP} - {"version"}
    if any(key.startswith("fsdp_") or key in ("xla", "min_num_params") for key in block):
        return block
    return block if "transformer_layer_cls_to_wrap" in block and own else None


def _find_accelerate(data: Mapping[str, Any]) -> list[Site]:
    known = {row.key for row in _TOP}
    launcher = "distributed_type" in data or "compute_environment" in data
    if launcher and isinstance(data.get(_BLOCK), Mapping):
        keys = {key: key for key in data if key in known}
        return [Site((), {**keys, _BLOCK: "config"})]
    names = {f"fsdp_{row.key}" for row in _FSDP}
    snippet = {key: f"config.{key.removeprefix('fsdp_')}" for key in data if key in names}
    if snippet and "min_num_params" in data:
        snippet["min_num_params"] = "config.min_num_params"
    return [Site((), snippet)] if snippet else []


def _finish(context: Context) -> None:
    """One copy per node needs the node's size; checkpoints keep their kind."""
    strategy = context.entries.get("config.sharding_strategy")
    if strategy is not None and "node" in strategy.reason:
        if context.gpus_per_node:
            strategy.becomes |= {_SHARD: context.gpus_per_node, _REPLICATE: -1}
        else:
            strategy.decide(
                "one copy per node, and the number of GPUs per node is not known",
                "--gpus-per-node N",
                f"{strategy.key}=FULL_SHARD",
            )
    version2 = str(context.value("config.version", 1)) == "2"
    if "config.state_dict_type" not in context.entries:
        kind = "sharded" if version2 else "full"
        context.add("state_dict_type", kind, "the default of Accelerate, written out")


ACCELERATE = Dialect(
    "accelerate",
    "Accelerate with FSDP",
    _find_accelerate,
    (*_TOP, *_under("config", _FSDP)),
    finish=_finish,
    prefix="fsdp_",
)


# --- TrainingArguments: `fsdp: "full_shard auto_wrap offload"` and `fsdp_config`. ---

_WORDS: dict[str, dict[str, Any]] = {
    "full_shard": {"reshard_after_forward": "auto"},
    "shard_grad_op": {"reshard_after_forward": False},
    "no_shard": {_SHARD: 1, _REPLICATE: -1, "reshard_after_forward": False},
    "hybrid_shard": {"reshard_after_forward": "auto"},
    "hybrid_shard_zero2": {"reshard_after_forward": False},
    "auto_wrap": {},
}


def _words(value: Any) -> list[str]:
    words = value.split() if isinstance(value, str) else value
    return [str(word).lower() for word in words] if isinstance(words, list) else []


def _is_known(value: Any) -> bool:
    """Words without `offload`."""
    words = _words(value)
    return bool(words) and all(word in _WORDS for word in words)


def _offloads(value: Any) -> bool:
    """Words with `offload`."""
    words = _words(value)
    return "offload" in words and all(word in _WORDS or word == "offload" for word in words)


def _from_words(value: Any) -> dict[str, Any]:
    return {key: item for word in _words(value) for key, item in _WORDS.get(word, {}).items()}


_ARGUMENTS = (
    Row("fsdp", _NOT, "no strategy is named", (None, "", False, [])),
    Row("fsdp", _C, "each word is one setting", _is_known, _from_words),
    Row("fsdp", _C, "version 2's switch", (True,), {"reshard_after_forward": "auto"}),
    Row(
        "fsdp",
        _UN,
        "`offload`: parameters and optimizer stay on the GPU; the other words are not written "
        "either until that is settled",
        _offloads,
        options=("fsdp=<the words without offload>",),
    ),
    Row(
        "fsdp_transformer_layer_cls_to_wrap",
        _R,
        "`wrap_policy.classes` names the classes of units",
        _is_names,
        _classes,
    ),
    Row("fsdp_transformer_layer_cls_to_wrap", _NOT, "names no class", _is_nothing),
    Row("fsdp_min_num_params", _NOT, "0 sets no size", _is_nothing),
    Row("fsdp_min_num_params", _R, "`wrap_policy.min_num_params`", _is_number, _min_num_params),
    Row("bf16", _C, _PRECISION_REASON, (True,), _precision("bf16")),
    Row("bf16", _NOT, "off", _OFF),
    Row("fp16", _C, _PRECISION_REASON, (True,), _precision("fp16")),
    Row("fp16", _NOT, "off", _OFF),
    Row(
        "gradient_checkpointing",
        _R,
        "`activation_checkpointing`",
        (True, False),
        {"activation_checkpointing": SAME},
    ),
    Row(
        "gradient_checkpointing_kwargs",
        _NOT,
        "checkpointing is torch's non-reentrant one",
    ),
)


def _find_arguments(data: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[Site]:
    """Mappings at any depth that hold `fsdp` or a block of it, and not only the precision."""
    words = data.get("fsdp")
    named = _is_known(words) or _offloads(words)
    if named or _fsdp_block(data) is not None:
        known = {row.key.partition(".")[0] for row in _ARGUMENTS}
        keys = {key: key for key in data if key in known}
        if isinstance(data.get(_BLOCK), Mapping):
            keys[_BLOCK] = "config"
        return [Site(path, keys)]
    inner = [(key, value) for key, value in data.items() if isinstance(value, Mapping)]
    return [site for key, value in inner for site in _find_arguments(value, (*path, key))]


def _finish_arguments(context: Context) -> None:
    words = context.entries.get("fsdp")
    if words is not None and any(word.startswith("hybrid") for word in _words(words.value)):
        if context.gpus_per_node and words.becomes:
            words.becomes |= {_SHARD: context.gpus_per_node, _REPLICATE: -1}
        elif words.becomes:
            words.decide(
                "one copy per node, and the number of GPUs per node is not known",
                "--gpus-per-node N",
                f"{words.key}=full_shard",
            )
    _finish(context)


TRAINING_ARGUMENTS = Dialect(
    "huggingface",
    "Hugging Face TrainingArguments",
    _find_arguments,
    (*_ARGUMENTS, *_under("config", _FSDP)),
    finish=_finish_arguments,
    prefix="fsdp_",
)
