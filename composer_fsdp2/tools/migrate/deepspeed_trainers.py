"""DeepSpeed inside another trainer's file: Accelerate, `TrainingArguments`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.tools.migrate.accelerate import (
    BLOCK,
    DEGREES,
    TOP_ROWS,
    distributed_type,
    ignore_degrees,
    is_launchers,
    join_fp8,
    launchers_site,
)
from composer_fsdp2.tools.migrate.arguments import CHECKPOINTING_ROWS, PRECISION_ROWS
from composer_fsdp2.tools.migrate.counts import (
    DEEPSPEED_KEYS,
    TRAINING,
    count_rows,
    finish_counts,
)
from composer_fsdp2.tools.migrate.deepspeed import (
    ALL_MOVES,
    DEEPSPEED,
    PRECISION_SWITCHES,
    STATE_MOVES,
    finish_deepspeed,
    join_offloads,
)
from composer_fsdp2.tools.migrate.report import (
    CHANGES,
    CONVERTED,
    NOT_NEEDED,
    UNSUPPORTED,
    Context,
    Dialect,
    Path,
    Row,
    Site,
)
from composer_fsdp2.tools.migrate.shared_rows import (
    STATE_ON_CPU,
    add_precision,
    find_ranks,
    first_keys,
    sequence_rows,
    stages,
    under,
)

__all__ = ["ACCELERATE_DEEPSPEED", "ARGUMENTS_DEEPSPEED"]

_CONFIG = "deepspeed_config"
_FILE = "config.deepspeed_config_file"
_ARGUMENT = "deepspeed"
_STRATEGY = "strategy_config"

# --- Accelerate: `distributed_type: DEEPSPEED`. ---


def _offload(part: str, reason: str, settings: Mapping[str, Any]) -> tuple[Row, ...]:
    key = f"offload_{part}_device"
    return (
        Row(key, NOT_NEEDED, "none is what FSDP2 does", ("none", None, False)),
        Row(key, CHANGES, reason, ("cpu",), settings),
        Row(key, UNSUPPORTED, "there is CPU memory, no NVMe", ("nvme",), options=("=none",)),
        Row(f"offload_{part}_nvme_path", NOT_NEEDED, "only for NVMe"),
    )


_PLUGIN = (
    *stages("zero_stage"),
    *_offload("optimizer", STATE_MOVES, STATE_ON_CPU),
    *_offload("param", ALL_MOVES, {"cpu_offload": True}),
    *(row for row in DEEPSPEED.rows if row.key == "gradient_clipping"),
    *count_rows({"gradient_accumulation_steps": "accumulation"}, ("auto", None)),
    Row(
        "zero3_init_flag",
        NOT_NEEDED,
        "`init_device: mixed` or `meta` builds no whole model on a rank",
    ),
    Row(
        "zero3_save_16bit_model",
        CONVERTED,
        "one file with whole weights",
        (True, "true"),
        {"state_dict_type": "full"},
    ),
    Row(
        "zero3_save_16bit_model",
        CONVERTED,
        "a folder of shards",
        (False, "false", None),
        {"state_dict_type": "sharded"},
    ),
    *(
        Row(key, NOT_NEEDED, "experts are gathered with the unit they are in")
        for key in ("deepspeed_moe_layer_cls_names", "transformer_moe_cls_names")
    ),
    Row("enable_msamp", NOT_NEEDED, "off is what is done here", (False, None)),
    Row(
        "enable_msamp",
        UNSUPPORTED,
        "MS-AMP keeps weights and state in fp8; here linear layers multiply in it",
        options=("=false", "fsdp2.fp8=true"),
    ),
    Row("msamp_opt_level", NOT_NEEDED, "only for MS-AMP"),
    Row(
        "seq_parallel_communication_data_type", NOT_NEEDED, "exchanged in the dtype of activations"
    ),
    *(
        Row(f"deepspeed_{key}", NOT_NEEDED, "the launcher says how the ranks start")
        for key in ("hostfile", "multinode_launcher", "exclusion_filter", "inclusion_filter")
    ),
)
_DEGREES = (
    *(
        Row(
            f"parallelism_config_{name}_size",
            NOT_NEEDED,
            "ZeRO shards over all ranks, those of a sequence among them",
        )
        for name in ("dp_shard", "dp_replicate")
    ),
    *(
        row
        for name in ("cp", "sp")
        for row in sequence_rows(f"parallelism_config_{name}_size", method="ulysses")
    ),
    *(
        row
        for row in DEGREES
        if not row.key.endswith(("_shard_size", "_replicate_size", "_cp_size", "_sp_size"))
    ),
)
"""Accelerate's degrees as DeepSpeed reads them"""
_LAUNCHER = (
    *(row for row in TOP_ROWS if row.key != _CONFIG),
    Row(BLOCK, NOT_NEEDED, "`distributed_type: DEEPSPEED` does not read it"),
)


def _accelerate_site(data: Mapping[str, Any], _: Path) -> Site | None:
    kind, block = distributed_type(data), data.get(_CONFIG)
    is_zero = kind == "DEEPSPEED" or (not kind and block and is_launchers(data))
    return launchers_site(data, _LAUNCHER, _CONFIG) if is_zero else None


def _finish_accelerate(context: Context) -> None:
    ignore_degrees(context)
    join_fp8(context)
    precision, file = context.value("mixed_precision"), context.entries.get(_FILE)
    if any(key.startswith(f"{_FILE}.") for key in context.entries):
        filled = {"gradient_clipping": context.value("config.gradient_clipping")}
        if precision is not None:
            filled |= {f"{name}.enabled": precision == name for name in ("bf16", "fp16")}
        finish_deepspeed(context, f"{_FILE}.", filled)
    else:
        join_offloads(context.entries.values())
        if "config.zero_stage" not in context.entries and file is None:
            context.add("Accelerate's default is stage 2", reshard_after_forward=False)
    counts = {"config.gradient_accumulation_steps": "accumulation"}
    finish_counts(context, counts | {f"{_FILE}.{k}": v for k, v in DEEPSPEED_KEYS.items()})
    if file is None or not file.is_open:
        switches = tuple(f"{_FILE}.{key}" for key in PRECISION_SWITCHES)
        add_precision(context, ("mixed_precision", *switches), "Accelerate")


ACCELERATE_DEEPSPEED = Dialect(
    "accelerate-deepspeed",
    "Accelerate with DeepSpeed",
    _accelerate_site,
    (
        *_LAUNCHER,
        *under("degrees", _DEGREES),
        *under("config", _PLUGIN),
        *under(_FILE, DEEPSPEED.rows),
    ),
    finish=_finish_accelerate,
    ranks=find_ranks,
    files=frozenset({_FILE}),
    nested=False,
)


# --- `deepspeed:` and `deepspeed_config:` of TrainingArguments and older Composer. ---


_AROUND = (
    *count_rows(TRAINING),
    *PRECISION_ROWS,
    *CHECKPOINTING_ROWS,
    Row(
        "max_grad_norm",
        NOT_NEEDED,
        "`gradient_clipping` of DeepSpeed's settings clips; `auto` there takes this value",
    ),
)


def _arguments_site(data: Mapping[str, Any], path: Path) -> Site | None:
    """Returns the site of DeepSpeed's settings or their file, or of ROLL's way to ask for them."""
    block = data.get(_STRATEGY)
    zero = isinstance(block, Mapping) and "zero_optimization" in block
    if block and (zero or str(data.get("strategy_name", "")).startswith("deepspeed")):
        return Site(path, {_STRATEGY: _ARGUMENT})
    present = [key for key in (_CONFIG, _ARGUMENT, "fsdp", BLOCK) if data.get(key)]
    blocks = (key for key in present if key in (_CONFIG, _ARGUMENT))
    name = next((key for key in blocks if isinstance(data[key], str | Mapping | list)), None)
    if name is None:
        return None
    if others := [".".join((*path, key)) for key in present if key != name]:
        raise ConfigError(
            f"The configuration has both '{'.'.join((*path, name))}' and '{others[0]}'. A run is "
            "sharded by one of them, and it is not clear by which. Remove the other one."
        )
    keys = {key: key for key in data if key in first_keys(_AROUND)}
    return Site(path, {**keys, name: _ARGUMENT})


def _finish_arguments(context: Context) -> None:
    file = context.entries.get(_ARGUMENT)
    if not (file and file.is_open):
        filled = {"gradient_clipping": context.parent.get("max_grad_norm")}
        for name, other in (("bf16", "fp16"), ("fp16", "bf16")):
            # A run that names one of both has the other one off.
            setting = context.value(name, False if context.value(other) is True else None)
            filled[f"{name}.enabled"] = setting if isinstance(setting, bool) else None
        finish_deepspeed(context, f"{_ARGUMENT}.", filled)
        switches = (f"{_ARGUMENT}.{key}" for key in PRECISION_SWITCHES)
        add_precision(context, ("bf16", "fp16", *switches), "the Trainer of transformers")
    finish_counts(
        context,
        TRAINING | {f"{_ARGUMENT}.{k}": v for k, v in DEEPSPEED_KEYS.items()},
        scheduler=context.entries.get(f"{_ARGUMENT}.scheduler"),
    )


ARGUMENTS_DEEPSPEED = Dialect(
    "huggingface-deepspeed",
    "Hugging Face TrainingArguments with DeepSpeed",
    _arguments_site,
    (*_AROUND, *under(_ARGUMENT, DEEPSPEED.rows)),
    finish=_finish_arguments,
    files=frozenset({_ARGUMENT}),
)
