"""Accelerate's files: FSDP, version 1 and 2, and what `distributed_type` says they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.config.fsdp1 import LATE_PREFETCH
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
    SHARDING_KEYS,
    add_precision,
    degree_rows,
    find_ranks,
    first_keys,
    is_names,
    is_nothing,
    is_plain_number,
    is_size,
    min_num_params,
    precision_row,
    sequence_rows,
    under,
    wrap_classes,
)

__all__ = [
    "ACCELERATE",
    "BLOCK",
    "DEGREES",
    "FLAT",
    "FSDP_ROWS",
    "TOP_ROWS",
    "UNSHARDED",
    "distributed_type",
    "finish_fsdp",
    "has_fsdp_block",
    "ignore_degrees",
    "is_launchers",
    "join_fp8",
    "launchers_site",
    "per_node",
    "shards_nothing",
]

BLOCK = "fsdp_config"
_PREFETCH = "FSDP2 prefetches the next unit from its own streams by itself"
_LATE = ("BACKWARD_POST", "NO_PREFETCH", 2, 3, "2", "3")
_UNREAD = "`distributed_type` says what is run, and that does not read it"
_SIZE = "parallelism_config_dp"

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
        {SHARD: 1, REPLICATE: -1, "reshard_after_forward": False},
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
        Row(key, CONVERTED, reason, when, settings)
        for key in _STRATEGY_KEYS
        for when, (settings, reason) in _STRATEGIES.items()
    ),
    Row(
        "reshard_after_forward",
        CONVERTED,
        "the top-level units keep their parameters until backward, which needs them first",
        ON,
        {"reshard_after_forward": "auto"},
    ),
    Row(
        "reshard_after_forward",
        KEPT,
        "means the same",
        ("false", False),
        {"reshard_after_forward": False},
    ),
    Row("version", NOT_NEEDED, "`parallelism_config.fsdp2` says it", (1, 2, "1", "2")),
    Row("auto_wrap_policy", NOT_NEEDED, "the units come from the model's hooks", (None, "")),
    Row(
        "auto_wrap_policy",
        NOT_NEEDED,
        "classes named here, or the model's own blocks, become units",
        ("TRANSFORMER_BASED_WRAP",),
    ),
    Row(
        "auto_wrap_policy",
        CONVERTED,
        "`wrap_policy.min_num_params` sets the size",
        ("SIZE_BASED_WRAP",),
    ),
    Row(
        "auto_wrap_policy",
        CHANGES,
        "one unit would gather the whole model at once; here the model's own blocks are units too",
        ("NO_WRAP",),
    ),
    Row("transformer_layer_cls_to_wrap", NOT_NEEDED, "names no class", is_nothing),
    Row(
        "transformer_layer_cls_to_wrap",
        RENAMED,
        "`wrap_policy.classes` names the classes of units",
        is_names,
        wrap_classes,
    ),
    Row("min_num_params", NOT_NEEDED, "0 sets no size", is_nothing),
    Row("min_num_params", RENAMED, "`wrap_policy.min_num_params`", is_plain_number, min_num_params),
    Row(
        "state_dict_type", CONVERTED, "one file", ("FULL_STATE_DICT",), {"state_dict_type": "full"}
    ),
    Row(
        "state_dict_type",
        CONVERTED,
        "a folder of shards",
        ("SHARDED_STATE_DICT",),
        {"state_dict_type": "sharded"},
    ),
    Row(
        "state_dict_type",
        DECISION,
        "local checkpoints hold FSDP1's flat parameters, which FSDP2 does not have",
        ("LOCAL_STATE_DICT",),
        options=("=SHARDED_STATE_DICT", "=FULL_STATE_DICT"),
    ),
    Row("offload_params", NOT_NEEDED, "false is what FSDP2 does", OFF),
    Row("offload_params", RENAMED, "`cpu_offload`", ON, {"cpu_offload": True}),
    Row("activation_checkpointing", KEPT, "off", OFF, {"activation_checkpointing": False}),
    Row(
        "activation_checkpointing",
        KEPT,
        "recomputes the units' activations",
        ON,
        {"activation_checkpointing": True},
    ),
    Row(
        "cpu_ram_efficient_loading",
        NOT_NEEDED,
        "`init_device: mixed` or `meta`, or `pretrained_weights`, builds no whole model on every "
        "rank",
    ),
    Row("sync_module_states", NOT_NEEDED, "every rank starts from rank 0's weights", ON),
    Row(
        "sync_module_states",
        CHANGES,
        "every rank starts from rank 0's weights, also where ranks were built differently",
        OFF,
    ),
    Row("use_orig_params", NOT_NEEDED, "FSDP2 keeps every parameter apart", ON),
    Row(
        "use_orig_params",
        CHANGES,
        "there are no flat parameters: the optimizer sees each parameter with its own shape",
        OFF,
    ),
    Row("forward_prefetch", NOT_NEEDED, _PREFETCH),
    *(
        row
        for key in ("backward_prefetch", "backward_prefetch_policy")
        for row in (
            Row(key, CONVERTED, LATE_PREFETCH, _LATE, {"backward_prefetch": 0}),
            Row(key, NOT_NEEDED, _PREFETCH),
        )
    ),
    Row("limit_all_gathers", NOT_NEEDED, "FSDP2 frees memory deterministically and needs no limit"),
    Row("ignored_modules", NOT_NEEDED, "null is none", is_nothing),
    Row(
        "ignored_modules",
        DECISION,
        "FSDP2 takes names of parameters instead of modules",
        options=("=null", "fsdp2.ignored_params=[<globs of names>]"),
    ),
    precision_row("mixed_precision_policy", "bf16", "bf16"),
    precision_row("mixed_precision_policy", "fp16", "fp16"),
    Row("mixed_precision_policy", NOT_NEEDED, "null is the run's precision", (None,)),
    Row("xla", NOT_NEEDED, "false: no XLA", OFF),
    Row("xla", UNSUPPORTED, "FSDP2 of torch does not run on XLA", options=("=false",)),
    Row("xla_fsdp_v2", NOT_NEEDED, "false: no XLA", OFF),
    Row(
        "xla_fsdp_v2",
        UNSUPPORTED,
        "FSDP2 of torch does not run on XLA",
        options=("=false",),
    ),
    Row("xla_fsdp_settings", NOT_NEEDED, "only for XLA"),
    Row("xla_fsdp_grad_ckpt", NOT_NEEDED, "only for XLA"),
)

_FP8 = {
    "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "bf16"},
    "fp8": True,
}
"""settings of a switch; `join_fp8` puts the details of other keys in it"""


TOP_ROWS = (
    *(
        Row(
            key,
            NOT_NEEDED,
            "`composer-fsdp2 train --ranks`, or the launcher, says how the ranks start",
        )
        for key in (
            *("debug", "distributed_type", "compute_environment", "downcast_bf16"),
            *("enable_cpu_affinity", "gpu_ids", "machine_rank", "main_process_ip"),
            *("main_process_port", "main_training_function", "rdzv_backend", "same_network"),
            *("tpu_env", "tpu_use_cluster", "tpu_use_sudo", "use_cpu"),
        )
    ),
    *(
        Row(
            key,
            NOT_NEEDED,
            "the launcher says how many ranks start; the degrees were worked out for this many",
        )
        for key in ("num_processes", "num_machines")
    ),
    *(Row(key, NOT_NEEDED, _UNREAD) for key in ("deepspeed_config", "megatron_lm_config")),
    Row("use_parallelism_config", NOT_NEEDED, "the degrees say it", (True, False)),
    precision_row("mixed_precision", "bf16", "bf16"),
    precision_row("mixed_precision", "fp16", "fp16"),
    Row(
        "mixed_precision",
        CONVERTED,
        "no mixed precision",
        ("no", False, None),
        {"mixed_precision": "FULL"},
        trainer={"precision": "fp32"},
    ),
    Row(
        "mixed_precision",
        CONVERTED,
        "linear layers of blocks multiply in fp8, by torchao; all else is in bf16, as Accelerate "
        "has it",
        ("fp8",),
        _FP8,
        trainer={"precision": "amp_bf16"},
    ),
    *(
        row
        for start in ("", "fp8_")
        for row in (
            Row(f"fp8_config.{start}backend", NOT_NEEDED, "torchao, as here", ("AO", "torchao")),
            Row(
                f"fp8_config.{start}backend",
                CHANGES,
                "torchao multiplies in fp8 here; another library scales otherwise",
                ("TE", "MSAMP", "MS-AMP", "AUTO", None),
            ),
            Row(
                f"fp8_config.{start}enable_fsdp_float8_all_gather",
                NOT_NEEDED,
                "off is the default",
                OFF,
            ),
            Row(
                f"fp8_config.{start}enable_fsdp_float8_all_gather",
                CONVERTED,
                "`fp8.all_gather`",
                ON,
                {"fp8": {"all_gather": True}},
            ),
            *(
                Row(f"fp8_config.{start}{name}", NOT_NEEDED, "torchao pads and scales by itself")
                for name in (
                    *("amax_compute_algo", "amax_compute_algorithm", "amax_history_len"),
                    *("amax_history_length", "format", "interval", "margin", "opt_level"),
                    *("override_linear_precision", "pad_inner_dim"),
                    *("use_autocast_during_eval", "use_during_eval"),
                )
            ),
        )
    ),
)
DEGREES = (
    Row(f"{_SIZE}_replicate_size", NOT_NEEDED, "one copy is the default", (1, None)),
    Row(f"{_SIZE}_replicate_size", RENAMED, f"`{REPLICATE}`", is_size, {REPLICATE: SAME}),
    Row(f"{_SIZE}_shard_size", RENAMED, f"`{SHARD}`", is_size, {SHARD: SAME}),
    Row(f"{_SIZE}_shard_size", CONVERTED, "a whole copy on every rank", (1,), {SHARD: 1}),
    *degree_rows("parallelism_config_tp_size", (1, None)),
    *sequence_rows("parallelism_config_cp_size"),
    *sequence_rows("parallelism_config_sp_size", method="ulysses"),
    *(
        Row(
            f"parallelism_config_{kind}_{name}",
            NOT_NEEDED,
            "how attention exchanges a sequence is ours",
        )
        for kind in ("cp", "sp")
        for name in ("attn_implementation", "backend", "comm_strategy", "seq_length")
    ),
    *(
        Row(
            f"parallelism_config_{kind}_seq_length_is_variable", NOT_NEEDED, "any length is divided"
        )
        for kind in ("cp", "sp")
    ),
)
"""Accelerate's block `parallelism_config`, which counts where `use_parallelism_config` is true."""


_OWN = frozenset({row.key for row in FSDP_ROWS}) - {
    # Composer's block has keys of these names too.
    *("version", "sharding_strategy", "reshard_after_forward", "state_dict_type"),
    *("activation_checkpointing", "sync_module_states", "use_orig_params", "forward_prefetch"),
    *("backward_prefetch", "limit_all_gathers", "ignored_modules"),
}


FLAT = {f"fsdp_{row.key}": f"config.{row.key}" for row in FSDP_ROWS}
"""keys of the block that may stand without the block"""


def has_fsdp_block(data: Mapping[str, Any]) -> bool:
    """Whether there is a block `fsdp_config` that is not Composer's."""
    block = data.get(BLOCK)
    return isinstance(block, Mapping) and (
        "fsdp_version" in data or any(key.startswith("fsdp_") or key in _OWN for key in block)
    )


def distributed_type(data: Mapping[str, Any]) -> str:
    """Returns what Accelerate runs, in capitals; "" where the file does not say it."""
    kind = data.get("distributed_type")
    # Readers of YAML 1.1 take NO for false.
    return "NO" if kind is False else str("" if kind is None else kind).upper()


def is_launchers(data: Mapping[str, Any]) -> bool:
    """Whether a file without `distributed_type` has what only Accelerate's launcher writes."""
    word, block = data.get("mixed_precision", ""), data.get("deepspeed_config")
    zero = isinstance(block, Mapping) and "zero_stage" in block and not data.get(BLOCK)
    named = word is False or (
        isinstance(word, str) and word.lower() in ("no", "fp16", "bf16", "fp8")
    )
    arguments = any(key in data for key in ("fsdp", "bf16", "fp16"))
    fsdp = named and has_fsdp_block(data) and not arguments
    return "compute_environment" in data or zero or fsdp


def launchers_site(data: Mapping[str, Any], rows: tuple[Row, ...], block: str) -> Site:
    """Returns the site of the launcher's keys, and of the blocks with degrees and settings."""
    blocks = {"parallelism_config": "degrees", block: "config"}
    keys = {key: key for key in data if key in first_keys(rows)}
    return Site((), keys | {key: first for key, first in blocks.items() if key in data})


def _site(data: Mapping[str, Any], _: Path) -> Site | None:
    kind = distributed_type(data)
    if kind or is_launchers(data):
        is_fsdp = kind == "FSDP" or (not kind and data.get(BLOCK))
        return launchers_site(data, TOP_ROWS, BLOCK) if is_fsdp else None
    # The block's own keys without the block, as a part of a file.
    snippet = {key: FLAT[key] for key in data if key in FLAT}
    if any(data.get(key) for key in SHARDING_KEYS) or not snippet.keys() - {"fsdp_version"}:
        return None
    size = {"min_num_params": "config.min_num_params"} if "min_num_params" in data else {}
    return Site((), snippet | size)


def _finish(context: Context) -> None:
    finish_fsdp(context)
    ignore_degrees(context)
    add_precision(context, ("mixed_precision", "config.mixed_precision_policy"), "Accelerate")


def join_fp8(context: Context) -> None:
    """Writes details of fp8 to the entry of its switch; without a switch they say nothing."""
    entries = [entry for entry in context.entries.values() if "fp8" in entry.becomes]
    switch = next((entry for entry in entries if entry.becomes["fp8"] is True), None)
    for entry in entries:
        if switch is None:
            entry.become(NOT_NEEDED, "fp8 is off")
        elif entry is not switch:
            switch.becomes["fp8"] = entry.becomes.pop("fp8")


def ignore_degrees(context: Context) -> None:
    """Drops the degrees of a file that switches them off."""
    is_off = context.value("use_parallelism_config") is False
    for key, entry in context.entries.items():
        if is_off and key.startswith("degrees."):
            entry.become(NOT_NEEDED, "use_parallelism_config is false: it is not read")


_VERSION1_ALONE = {
    "sharding_strategy": "`fsdp_reshard_after_forward`, true by default, says when units are freed",
    "use_orig_params": "FSDP2 keeps every parameter apart",
    "sync_module_states": "every rank starts from rank 0's weights",
}


def finish_fsdp(context: Context, trainer: str = "Accelerate") -> bool:
    """Resolves copies per node and settings of two keys; writes out defaults.

    Args:
        context: entries of the place that holds the settings.
        trainer: whose defaults they are.

    Returns:
        Whether it is version 2.
    """
    entries = context.entries
    version2 = any(str(context.value(key)) == "2" for key in ("config.version", "fsdp_version"))
    # Version 2 of Accelerate ignores what version 1 alone reads, and refuses its words.
    for key, instead in _VERSION1_ALONE.items() if version2 else ():
        if entry := entries.get(f"config.{key}"):
            entry.become(NOT_NEEDED, f"Accelerate ignores it with fsdp_version: 2; {instead}")
    reshard = entries.get("config.reshard_after_forward")
    if version2 and reshard and reshard.value not in (*OFF, *ON):
        reshard.decide(
            "with fsdp_version: 2 it is true or false, and Accelerate refuses it",
            f"{reshard.key}=true",
            f"{reshard.key}=false",
        )
    has_degree = any(key.startswith(f"degrees.{_SIZE}") for key in entries)
    for strategy in (entries.get(f"config.{key}") for key in _STRATEGY_KEYS):
        if strategy and strategy.reason.startswith("one copy per node") and not has_degree:
            per_node(context, strategy, "FULL_SHARD")
    # Accelerate counts ranks that divide a sequence apart from those that hold shards:
    # `dp_shard_size` 2 beside `cp_size` 4 are 8 shards.
    divided = [e.settings for e in entries.values() if "sequence_parallel" in e.settings]
    shards = entries.get(f"degrees.{_SIZE}_shard_size")
    if divided and shards and SHARD in shards.settings:
        degree = divided[0]["sequence_parallel"]["degree"]
        reason = f"`{SHARD}`; the {degree} ranks of a sequence hold shards too, and count here"
        shards.become(CONVERTED, reason, **{SHARD: shards.settings[SHARD] * degree})
    join_fp8(context)
    precision = entries.get("mixed_precision")
    dtypes = precision.becomes.get("mixed_precision") if precision else None
    if version2 and isinstance(dtypes, dict):
        # Version 2 casts the output too.
        dtypes["output_dtype"] = dtypes["param_dtype"]
    if "config.state_dict_type" not in entries:
        # Transformers 5 has one default for both versions.
        is_sharded = version2 and trainer == "Accelerate"
        context.add(
            f"the default of {trainer}, written out",
            state_dict_type="sharded" if is_sharded else "full",
        )
    return version2


def per_node(context: Context, strategy: Entry, without: str) -> None:
    """Makes one copy per node, where the size of a node is known."""
    if strategy.becomes and context.gpus_per_node:
        strategy.becomes |= {SHARD: context.gpus_per_node, REPLICATE: -1}
    elif strategy.becomes:
        strategy.decide(
            "one copy per node, and the number of GPUs per node is not known",
            "--gpus-per-node N",
            f"{strategy.key}={without}",
        )


ACCELERATE = Dialect(
    "accelerate",
    "Accelerate with FSDP",
    _site,
    (*TOP_ROWS, *under("config", FSDP_ROWS), *under("degrees", DEGREES)),
    finish=_finish,
    prefix="fsdp_",
    ranks=find_ranks,
    nested=False,
)


# --- Files that run neither FSDP nor DeepSpeed. ---


def shards_nothing(data: Mapping[str, Any]) -> bool:
    """Whether a file of Accelerate's says that it runs neither FSDP nor DeepSpeed."""
    return distributed_type(data) not in ("", "FSDP", "DEEPSPEED")


UNSHARDED = Dialect(
    "accelerate-unsharded",
    "Accelerate, neither FSDP nor DeepSpeed",
    lambda _data, _path: None,
    (),
    (
        Row(
            "distributed_type",
            KEPT,
            "a whole copy on every rank, which Composer does without any such block; "
            "`parallelism_config: {fsdp2: {}}` would shard it",
            (
                *("NO", False, "MULTI_CPU", "MULTI_GPU", "MULTI_HPU", "MULTI_MLU", "MULTI_MUSA"),
                *("MULTI_NPU", "MULTI_SDAA", "MULTI_XPU", "MULTI_NEURON"),
            ),
        ),
        Row(
            "distributed_type",
            UNSUPPORTED,
            "tensor and pipeline parallelism of Megatron-LM have no equal here",
            ("MEGATRON_LM",),
            options=("stay with Megatron-LM, or write `parallelism_config: {fsdp2: {}}` yourself",),
        ),
        Row(
            "distributed_type",
            UNSUPPORTED,
            "FSDP2 of torch does not run on it",
            ("TPU", "XLA"),
            options=("stay with Accelerate, or write `parallelism_config: {fsdp2: {}}` yourself",),
        ),
        Row(
            "distributed_type",
            DECISION,
            "is not known here",
            options=("=FSDP", "=DEEPSPEED", "=NO"),
        ),
        *(
            Row(key, KEPT, f"{_UNREAD}; left as it is")
            for key in (BLOCK, "deepspeed_config", "megatron_lm_config")
        ),
    ),
)
"""holds no site to replace; `shards_nothing` recognises it"""
