"""Accelerate's FSDP files, version 1 and 2, and the `fsdp` settings of `TrainingArguments`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from composer_fsdp2.tools.migrate.report import (
    SAME,
    Context,
    Dialect,
    Entry,
    Ranks,
    Row,
    Site,
    Status,
)

__all__ = ["ACCELERATE", "TRAINING_ARGUMENTS"]

_K, _R, _C = Status.KEPT, Status.RENAMED, Status.CONVERTED
_NOT, _CH, _DEC, _UN = Status.NOT_NEEDED, Status.CHANGES, Status.DECISION, Status.UNSUPPORTED
_SHARD, _REPLICATE = "data_parallel_shard_degree", "data_parallel_replicate_degree"
_OFF = (False, None, "false")
_ON = (True, "true")
_BLOCK = "fsdp_config"
_PREFETCH = "FSDP2 prefetches the next unit from its own streams by itself"
_LAUNCHER = "`composer-fsdp2 train --ranks`, or the launcher, says how the ranks start"
_COUNTS = "the launcher says how many ranks start; the degrees were worked out for this many"
_SIZE = "parallelism_config_dp"


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


def _is_size(value: Any) -> bool:
    """A number above 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def _precision(key: str, dtype: str, value: Any) -> Row:
    return Row(
        key,
        _C,
        "parameters and gradient reduction in this dtype, as Accelerate has it; buffers keep their "
        "own dtype, which FSDP1 cast",
        (value,),
        {"mixed_precision": {"param_dtype": dtype, "reduce_dtype": dtype}},
        trainer={"precision": f"amp_{dtype}"},
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
# Version 1 reads either key; its newer releases write the second.
_STRATEGY_KEYS = ("sharding_strategy", "reshard_after_forward")

# Without the prefix `fsdp_`, which keys may have or lack.
_FSDP = (
    *(
        Row(key, _C, reason, when, settings)
        for key in _STRATEGY_KEYS
        for when, (settings, reason) in _STRATEGIES.items()
    ),
    Row(
        "reshard_after_forward",
        _C,
        "the top-level units keep their parameters until backward, which needs them first",
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
    Row("offload_params", _R, "`cpu_offload`", _ON, {"cpu_offload": True}),
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
    "rdzv_backend",
    "same_network",
    "tpu_env",
    "tpu_use_cluster",
    "tpu_use_sudo",
    "use_cpu",
)
_TOP = (
    *(Row(key, _NOT, _LAUNCHER) for key in _LAUNCHING),
    *(Row(key, _NOT, _COUNTS) for key in ("num_processes", "num_machines")),
    Row("use_parallelism_config", _NOT, "the degrees say it", (True, False)),
    _precision("mixed_precision", "bf16", "bf16"),
    _precision("mixed_precision", "fp16", "fp16"),
    Row(
        "mixed_precision",
        _C,
        "no mixed precision",
        ("no", False, None),
        {"mixed_precision": "FULL"},
        trainer={"precision": "fp32"},
    ),
    Row(
        "mixed_precision",
        _UN,
        "fp8 is not supported yet",
        ("fp8",),
        options=("mixed_precision=bf16",),
    ),
)
_DEGREES = (
    Row(f"{_SIZE}_replicate_size", _NOT, "one copy is the default", (1, None)),
    Row(f"{_SIZE}_replicate_size", _R, f"`{_REPLICATE}`", _is_size, {_REPLICATE: SAME}),
    Row(f"{_SIZE}_shard_size", _R, f"`{_SHARD}`", _is_size, {_SHARD: SAME}),
    Row(f"{_SIZE}_shard_size", _C, "a whole copy on every rank", (1,), {_SHARD: 1}),
    *(
        row
        for name, reason in (("tp", "tensor parallelism"), ("cp", "context parallelism"))
        for row in (
            Row(f"parallelism_config_{name}_size", _NOT, f"1: no {reason}", (1, None)),
            Row(
                f"parallelism_config_{name}_size",
                _UN,
                f"{reason} does not go with FSDP2 yet",
                _is_size,
                options=(f"parallelism_config_{name}_size=1",),
            ),
        )
    ),
    Row("parallelism_config_cp_comm_strategy", _NOT, "speaks of context parallelism alone"),
)
"""Accelerate's block `parallelism_config`, which counts where `use_parallelism_config` is true."""


def _under(prefix: str, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    return tuple(replace(row, key=f"{prefix}.{row.key}") for row in rows)


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
        degrees = data.get("parallelism_config")
        if isinstance(degrees, Mapping) and any(str(key).startswith(_SIZE) for key in degrees):
            keys["parallelism_config"] = "degrees"
        return [Site((), {**keys, _BLOCK: "config"})]
    names = {f"fsdp_{row.key}" for row in _FSDP}
    snippet = {key: f"config.{key.removeprefix('fsdp_')}" for key in data if key in names}
    if snippet and "min_num_params" in data:
        snippet["min_num_params"] = "config.min_num_params"
    return [Site((), snippet)] if snippet else []


def _find_ranks(data: Mapping[str, Any]) -> Ranks:
    ranks, nodes = data.get("num_processes"), data.get("num_machines", 1)
    if not (isinstance(ranks, int) and isinstance(nodes, int) and ranks > 0 and nodes > 0):
        return None, None
    return ranks, None if ranks % nodes else ranks // nodes


def _finish(context: Context) -> None:
    """One copy per node needs the node's size; defaults of Accelerate are written out."""
    given = any(key.startswith(f"degrees.{_SIZE}") for key in context.entries)
    for key in _STRATEGY_KEYS:
        strategy = context.entries.get(f"config.{key}")
        if strategy is not None and strategy.reason.startswith("one copy per node") and not given:
            _per_node(context, strategy, "FULL_SHARD")
    version2 = str(context.value("config.version", 1)) == "2"
    precision = context.entries.get("mixed_precision")
    if version2 and precision is not None:
        dtypes = precision.becomes.get("mixed_precision")
        if isinstance(dtypes, dict):
            # Version 2 of the file sets it too.
            dtypes["output_dtype"] = dtypes["param_dtype"]
    if "config.state_dict_type" not in context.entries:
        kind = "sharded" if version2 else "full"
        context.add("the default of Accelerate, written out", state_dict_type=kind)


def _per_node(context: Context, strategy: Entry, without: str) -> None:
    if not strategy.becomes:
        return
    if context.gpus_per_node:
        strategy.becomes |= {_SHARD: context.gpus_per_node, _REPLICATE: -1}
    else:
        strategy.decide(
            "one copy per node, and the number of GPUs per node is not known",
            "--gpus-per-node N",
            f"{strategy.key}={without}",
        )


ACCELERATE = Dialect(
    "accelerate",
    "Accelerate with FSDP",
    _find_accelerate,
    (*_TOP, *_under("config", _FSDP), *_under("degrees", _DEGREES)),
    finish=_finish,
    prefix="fsdp_",
    ranks=_find_ranks,
)


# --- TrainingArguments: `fsdp: "full_shard auto_wrap offload"` and `fsdp_config`. ---

_WORDS: dict[str, dict[str, Any]] = {
    "full_shard": {"reshard_after_forward": "auto"},
    "shard_grad_op": {"reshard_after_forward": False},
    "no_shard": {_SHARD: 1, _REPLICATE: -1, "reshard_after_forward": False},
    "hybrid_shard": {"reshard_after_forward": "auto"},
    "hybrid_shard_zero2": {"reshard_after_forward": False},
    "auto_wrap": {},
    "offload": {"cpu_offload": True},
}


def _words(value: Any) -> list[str]:
    words = value.split() if isinstance(value, str) else value
    return [str(word).lower() for word in words] if isinstance(words, list) else []


def _is_known(value: Any) -> bool:
    """Words that all mean something."""
    words = _words(value)
    return bool(words) and all(word in _WORDS for word in words)


def _is_unwrapped(value: Any) -> bool:
    """Words without `auto_wrap`."""
    return _is_known(value) and "auto_wrap" not in _words(value)


def _from_words(value: Any) -> dict[str, Any]:
    return {key: item for word in _words(value) for key, item in _WORDS.get(word, {}).items()}


_ONE_UNIT = (
    "without auto_wrap the model was one unit, gathered at once; here its blocks are units too, "
    "which takes less memory"
)
_ARGUMENTS = (
    Row("fsdp", _NOT, "no strategy is named", (None, "", False, [])),
    Row("fsdp", _CH, _ONE_UNIT, _is_unwrapped, _from_words),
    Row("fsdp", _C, "each word is one setting", _is_known, _from_words),
    Row("fsdp", _CH, f"true is full_shard; {_ONE_UNIT}", (True,), _WORDS["full_shard"]),
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
    _precision("bf16", "bf16", True),
    Row("bf16", _NOT, "off", _OFF),
    _precision("fp16", "fp16", True),
    Row("fp16", _NOT, "off", _OFF),
    Row(
        "file",
        _DEC,
        "the FSDP settings are in a file of their own",
        options=("put its content here as a mapping", "fsdp_config=null"),
    ),
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
    if _is_known(words) or _fsdp_block(data) is not None:
        known = {row.key.partition(".")[0] for row in _ARGUMENTS}
        keys = {key: key for key in data if key in known}
        if data.get(_BLOCK) is not None:
            keys[_BLOCK] = "config" if isinstance(data[_BLOCK], Mapping) else "file"
        return [Site(path, keys)]
    inner = [(key, value) for key, value in data.items() if isinstance(value, Mapping)]
    return [site for key, value in inner for site in _find_arguments(value, (*path, key))]


def _finish_arguments(context: Context) -> None:
    words = context.entries.get("fsdp")
    if words is not None and any(word.startswith("hybrid") for word in _words(words.value)):
        _per_node(context, words, "full_shard")
    _finish(context)


TRAINING_ARGUMENTS = Dialect(
    "huggingface",
    "Hugging Face TrainingArguments",
    _find_arguments,
    (*_ARGUMENTS, *_under("config", _FSDP)),
    finish=_finish_arguments,
    prefix="fsdp_",
)
