"""Accelerate's files: FSDP, version 1 and 2, and what `distributed_type` says they are."""

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
from composer_fsdp2.tools.migrate.sequence import count_among_shards, sequence_rows
from composer_fsdp2.tools.migrate.tensor import asks_for_nothing, degree_rows
from composer_fsdp2.tools.migrate.training import FP8, backend_rows, gather_rows, join_fp8

__all__ = [
    "ACCELERATE",
    "BLOCK",
    "DEGREES",
    "FSDP_ROWS",
    "OFF",
    "ON",
    "SHARDING_KEYS",
    "TOP_ROWS",
    "add_precision",
    "distributed_type",
    "find_ranks",
    "finish_fsdp",
    "fsdp_block",
    "ignore_degrees",
    "is_launchers",
    "is_names",
    "is_nothing",
    "is_number",
    "is_size",
    "min_num_params",
    "parallel_rows",
    "per_node",
    "precision_row",
    "under",
    "wrap_classes",
]

_K, _R, _C = Status.KEPT, Status.RENAMED, Status.CONVERTED
_NOT, _CH, _DEC, _UN = Status.NOT_NEEDED, Status.CHANGES, Status.DECISION, Status.UNSUPPORTED
_SHARD, _REPLICATE = "data_parallel_shard_degree", "data_parallel_replicate_degree"
OFF = (False, None, "false")
ON = (True, "true")
BLOCK = "fsdp_config"
SHARDING_KEYS = (
    *(BLOCK, "fsdp", "deepspeed", "deepspeed_config", "strategy_config", "zero_optimization"),
)
"""each of them says by itself how a run is sharded"""
_PREFETCH = "FSDP2 prefetches the next unit from its own streams by itself"
_LAUNCHER = "`composer-fsdp2 train --ranks`, or the launcher, says how the ranks start"
_COUNTS = "the launcher says how many ranks start; the degrees were worked out for this many"
_UNREAD_HERE = "`distributed_type` says what is run, and that does not read it"
_SIZE = "parallelism_config_dp"
_PRECISIONS = ("no", "fp16", "bf16", "fp8")


def wrap_classes(value: Any) -> dict[str, Any]:
    """Classes of units, in a list or with commas between them."""
    names = value.split(",") if isinstance(value, str) else value
    return {"wrap_policy": {"classes": [str(name).strip() for name in names]}}


def min_num_params(value: Any) -> dict[str, Any]:
    """The size of units."""
    return {"wrap_policy": {"min_num_params": int(float(value))}}


def is_number(value: Any) -> bool:
    """A number above 0."""
    try:
        return int(float(value)) > 0
    except (TypeError, ValueError):
        return False


def is_nothing(value: Any) -> bool:
    """Nothing, 0 or an empty list."""
    return value in (None, "", 0, "0", [])


def is_names(value: Any) -> bool:
    """A name or several."""
    return isinstance(value, str | list) and bool(value)


def is_size(value: Any) -> bool:
    """A number above 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def precision_row(key: str, dtype: str, value: Any) -> Row:
    """The row of a precision, which the trainer has to know too."""
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
FSDP_ROWS = (
    *(
        Row(key, _C, reason, when, settings)
        for key in _STRATEGY_KEYS
        for when, (settings, reason) in _STRATEGIES.items()
    ),
    Row(
        "reshard_after_forward",
        _C,
        "the top-level units keep their parameters until backward, which needs them first",
        ON,
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
    Row("transformer_layer_cls_to_wrap", _NOT, "names no class", is_nothing),
    Row(
        "transformer_layer_cls_to_wrap",
        _R,
        "`wrap_policy.classes` names the classes of units",
        is_names,
        wrap_classes,
    ),
    Row("min_num_params", _NOT, "0 sets no size", is_nothing),
    Row("min_num_params", _R, "`wrap_policy.min_num_params`", is_number, min_num_params),
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
        "local checkpoints hold FSDP1's flat parameters, which FSDP2 does not have",
        ("LOCAL_STATE_DICT",),
        options=("fsdp_state_dict_type=SHARDED_STATE_DICT", "fsdp_state_dict_type=FULL_STATE_DICT"),
    ),
    Row("offload_params", _NOT, "false is what FSDP2 does", OFF),
    Row("offload_params", _R, "`cpu_offload`", ON, {"cpu_offload": True}),
    Row("activation_checkpointing", _K, "off", OFF, {"activation_checkpointing": False}),
    Row(
        "activation_checkpointing",
        _K,
        "recomputes the units' activations",
        ON,
        {"activation_checkpointing": True},
    ),
    Row(
        "cpu_ram_efficient_loading",
        _NOT,
        "`init_device: mixed` or `meta`, or `pretrained_weights`, builds no whole model on every "
        "rank",
    ),
    Row("sync_module_states", _NOT, "every rank starts from rank 0's weights", ON),
    Row(
        "sync_module_states",
        _CH,
        "every rank starts from rank 0's weights, also where ranks were built differently",
        OFF,
    ),
    Row("use_orig_params", _NOT, "FSDP2 keeps every parameter apart", ON),
    Row(
        "use_orig_params",
        _CH,
        "there are no flat parameters: the optimizer sees each parameter with its own shape",
        OFF,
    ),
    Row("forward_prefetch", _NOT, _PREFETCH),
    Row("backward_prefetch", _NOT, _PREFETCH),
    Row("backward_prefetch_policy", _NOT, _PREFETCH),
    Row("limit_all_gathers", _NOT, "FSDP2 frees memory deterministically and needs no limit"),
    Row("ignored_modules", _NOT, "null is none", is_nothing),
    Row(
        "ignored_modules",
        _DEC,
        "FSDP2 takes names of parameters instead of modules",
        options=("fsdp_ignored_modules=null", "fsdp2.ignored_params=[<globs of names>]"),
    ),
    Row("cpu_offload_pin_memory", _NOT, "pinned memory, as here", ON),
    Row("cpu_offload_pin_memory", _NOT, "null is pinned memory, as here", (None,)),
    Row(
        "cpu_offload_pin_memory",
        _C,
        "`cpu_offload.pin_memory`",
        (False, "false"),
        {"cpu_offload": {"pin_memory": False}},
    ),
    precision_row("mixed_precision_policy", "bf16", "bf16"),
    precision_row("mixed_precision_policy", "fp16", "fp16"),
    Row("mixed_precision_policy", _NOT, "null is the run's precision", (None,)),
    Row("final_state_dict_type", _NOT, "the last checkpoint is like the others"),
    Row("xla", _NOT, "false: no XLA", OFF),
    Row("xla", _UN, "FSDP2 of torch does not run on XLA", options=("xla=false",)),
    Row("xla_fsdp_v2", _NOT, "false: no XLA", OFF),
    Row("xla_fsdp_v2", _UN, "FSDP2 of torch does not run on XLA", options=("xla_fsdp_v2=false",)),
    Row("xla_fsdp_settings", _NOT, "only for XLA"),
    Row("xla_fsdp_grad_ckpt", _NOT, "only for XLA"),
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
_FP8 = (
    *("amax_compute_algo", "amax_compute_algorithm", "amax_history_len", "amax_history_length"),
    *("format", "interval", "margin", "opt_level", "override_linear_precision"),
    *("pad_inner_dim", "use_autocast_during_eval", "use_during_eval"),
)
TOP_ROWS = (
    *(Row(key, _NOT, _LAUNCHER) for key in _LAUNCHING),
    *(Row(key, _NOT, _COUNTS) for key in ("num_processes", "num_machines")),
    *(Row(key, _NOT, _UNREAD_HERE) for key in ("deepspeed_config", "megatron_lm_config")),
    Row("use_parallelism_config", _NOT, "the degrees say it", (True, False)),
    precision_row("mixed_precision", "bf16", "bf16"),
    precision_row("mixed_precision", "fp16", "fp16"),
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
        _C,
        "linear layers of blocks multiply in fp8, by torchao; all else is in bf16, as Accelerate "
        "has it",
        ("fp8",),
        FP8,
        trainer={"precision": "amp_bf16"},
    ),
    *(
        row
        for start in ("", "fp8_")
        for row in (
            *backend_rows(f"fp8_config.{start}backend"),
            *gather_rows(f"fp8_config.{start}enable_fsdp_float8_all_gather"),
            *(
                Row(f"fp8_config.{start}{name}", _NOT, "torchao pads and scales by itself")
                for name in _FP8
            ),
        )
    ),
)
DEGREES = (
    Row(f"{_SIZE}_replicate_size", _NOT, "one copy is the default", (1, None)),
    Row(f"{_SIZE}_replicate_size", _R, f"`{_REPLICATE}`", is_size, {_REPLICATE: SAME}),
    Row(f"{_SIZE}_shard_size", _R, f"`{_SHARD}`", is_size, {_SHARD: SAME}),
    Row(f"{_SIZE}_shard_size", _C, "a whole copy on every rank", (1,), {_SHARD: 1}),
    *degree_rows("parallelism_config_tp_size", (1, None)),
    *sequence_rows("parallelism_config_cp_size"),
    *sequence_rows("parallelism_config_sp_size", method="ulysses"),
    *(
        Row(f"parallelism_config_{kind}_{name}", _NOT, "how attention exchanges a sequence is ours")
        for kind in ("cp", "sp")
        for name in ("attn_implementation", "backend", "comm_strategy", "seq_length")
    ),
    *(
        Row(f"parallelism_config_{kind}_seq_length_is_variable", _NOT, "any length is divided")
        for kind in ("cp", "sp")
    ),
)
"""Accelerate's block `parallelism_config`, which counts where `use_parallelism_config` is true."""


def parallel_rows(key: str, what: str) -> tuple[Row, ...]:
    """Rows of a kind of parallelism that FSDP2 runs have not."""
    return (
        Row(key, _NOT, f"no {what} is asked for", asks_for_nothing),
        Row(key, _UN, f"{what} does not go with FSDP2 yet", options=(f"{key}=null",)),
    )


def under(prefix: str, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """A table inside a block."""
    return tuple(replace(row, key=f"{prefix}.{row.key}") for row in rows)


_OWN = frozenset({row.key for row in FSDP_ROWS}) - {
    # Composer's block has keys of these names too.
    *("version", "sharding_strategy", "reshard_after_forward", "state_dict_type"),
    *("activation_checkpointing", "sync_module_states", "use_orig_params", "forward_prefetch"),
    *("backward_prefetch", "limit_all_gathers", "ignored_modules"),
}


def fsdp_block(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A block `fsdp_config` that is not Composer's."""
    block = data.get(BLOCK)
    if not isinstance(block, Mapping):
        return None
    foreign = any(key.startswith("fsdp_") or key in _OWN for key in block)
    return block if foreign or "fsdp_version" in data else None


def distributed_type(data: Mapping[str, Any]) -> str:
    """Returns what Accelerate runs, in capitals; "" where the file does not say it."""
    kind = data.get("distributed_type")
    # Readers of YAML 1.1 take NO for false.
    return "NO" if kind is False else "" if kind is None else str(kind).upper()


def is_launchers(data: Mapping[str, Any]) -> bool:
    """Whether a file without `distributed_type` has what only Accelerate's launcher writes."""
    word = data.get("mixed_precision", "")
    block = data.get("deepspeed_config")
    zero = isinstance(block, Mapping) and "zero_stage" in block and not data.get(BLOCK)
    named = word is False or (isinstance(word, str) and word.lower() in _PRECISIONS)
    foreign = zero or fsdp_block(data) is not None
    arguments = any(key in data for key in ("fsdp", "bf16", "fp16"))
    return "compute_environment" in data or zero or (named and foreign and not arguments)


def _find_accelerate(data: Mapping[str, Any]) -> list[Site]:
    known = {row.key.partition(".")[0] for row in TOP_ROWS}
    kind, block = distributed_type(data), data.get(BLOCK)
    if kind or is_launchers(data):
        if kind != "FSDP" and (kind or not block):
            return []
        keys = {key: key for key in data if key in known}
        if "parallelism_config" in data:
            keys["parallelism_config"] = "degrees"
        return [Site((), {**keys, BLOCK: "config"} if BLOCK in data else keys)]
    names = {f"fsdp_{row.key}" for row in FSDP_ROWS}
    snippet = {key: f"config.{key.removeprefix('fsdp_')}" for key in data if key in names}
    whole = any(data.get(key) for key in SHARDING_KEYS)
    if BLOCK in data or whole or not snippet.keys() - {"fsdp_version"}:
        return []
    if "min_num_params" in data:
        snippet["min_num_params"] = "config.min_num_params"
    return [Site((), snippet)]


def find_ranks(data: Mapping[str, Any]) -> Ranks:
    """Ranks in all and per node, as the launcher's keys say it."""
    ranks, nodes = data.get("num_processes"), data.get("num_machines", 1)
    if not (isinstance(ranks, int) and isinstance(nodes, int) and ranks > 0 and nodes > 0):
        return None, None
    return ranks, None if ranks % nodes else ranks // nodes


def _finish_accelerate(context: Context) -> None:
    finish_fsdp(context, "config.version")
    ignore_degrees(context)
    keys = ("mixed_precision", "config.mixed_precision_policy")
    add_precision(context, keys, "Accelerate")


def ignore_degrees(context: Context) -> None:
    """Drops the degrees of a file that switches them off."""
    if context.value("use_parallelism_config") is False:
        for key, entry in context.entries.items():
            if key.startswith("degrees."):
                entry.become(_NOT, "use_parallelism_config is false: it is not read")


def finish_fsdp(context: Context, *version_keys: str) -> bool:
    """One copy per node needs the node's size; defaults of Accelerate are written out.

    Returns:
        Whether it is version 2.
    """
    version2 = any(str(context.value(key)) == "2" for key in version_keys)
    if version2:
        _ignore_version1(context)
    given = any(key.startswith(f"degrees.{_SIZE}") for key in context.entries)
    for key in _STRATEGY_KEYS:
        strategy = context.entries.get(f"config.{key}")
        if strategy is not None and strategy.reason.startswith("one copy per node") and not given:
            per_node(context, strategy, "FULL_SHARD")
    count_among_shards(context)
    join_fp8(context)
    _choose_pinned(context)
    precision = context.entries.get("mixed_precision")
    if version2 and precision is not None:
        dtypes = precision.becomes.get("mixed_precision")
        if isinstance(dtypes, dict):
            # Version 2 of the file sets it too.
            dtypes["output_dtype"] = dtypes["param_dtype"]
    if "config.state_dict_type" not in context.entries:
        kind = "sharded" if version2 else "full"
        context.add("the default of Accelerate, written out", state_dict_type=kind)
    return version2


def _choose_pinned(context: Context) -> None:
    """Memory that is not pinned is that of what is offloaded."""
    pinned = context.entries.get("config.cpu_offload_pin_memory")
    if pinned is None or not pinned.becomes:
        return
    offloads = [e for e in context.entries.values() if e.becomes.get("cpu_offload") is True]
    for entry in offloads:
        entry.becomes["cpu_offload"] = dict(pinned.becomes["cpu_offload"])
    if not offloads:
        pinned.become(_NOT, "nothing is offloaded")


_VERSION1_ALONE = {
    "sharding_strategy": "`fsdp_reshard_after_forward`, true by default, says when units are freed",
    "use_orig_params": "FSDP2 keeps every parameter apart",
    "sync_module_states": "every rank starts from rank 0's weights",
}


def _ignore_version1(context: Context) -> None:
    """Accelerate reads some keys in version 1 alone, and words for true and false in 2."""
    for key, instead in _VERSION1_ALONE.items():
        entry = context.entries.get(f"config.{key}")
        if entry is not None:
            entry.become(_NOT, f"Accelerate ignores it with fsdp_version: 2; {instead}")
    entry = context.entries.get("config.reshard_after_forward")
    if entry is not None and entry.value not in (*OFF, *ON):
        options = (f"{entry.key}=true", f"{entry.key}=false")
        entry.decide(
            "with fsdp_version: 2 it is true or false, and Accelerate refuses it", *options
        )


def per_node(context: Context, strategy: Entry, without: str) -> None:
    """One copy per node, where the size of a node is known."""
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


def add_precision(context: Context, keys: tuple[str, ...], trainer: str) -> None:
    """Writes out a precision that the file leaves to its trainer, whose default is another one."""
    said = [context.entries[key] for key in keys if key in context.entries]
    if any(entry.is_open or entry.beside for entry in said) or context.has_beside("precision"):
        return
    reason = f"without a precision {trainer} computes in fp32, and LLM Foundry in amp_bf16"
    context.added.append(
        Entry(
            (*context.site.parent, "precision"),
            None,
            Status.ADDED,
            reason,
            {},
            beside={"precision": "fp32"},
        )
    )


ACCELERATE = Dialect(
    "accelerate",
    "Accelerate with FSDP",
    _find_accelerate,
    (*TOP_ROWS, *under("config", FSDP_ROWS), *under("degrees", DEGREES)),
    finish=_finish_accelerate,
    prefix="fsdp_",
    ranks=find_ranks,
)
