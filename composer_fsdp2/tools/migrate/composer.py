"""Composer and LLM Foundry: FSDP1 blocks, the `FSDP_VERSION=2` style, and our own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.config.fsdp1 import (
    FSDP1_KEPT,
    FSDP1_KEYS,
    FSDP1_LATE_PREFETCH,
    FSDP1_NOT_NEEDED,
    FSDP1_NOT_SUPPORTED,
    LATE_PREFETCH,
    convert_fsdp1,
)
from composer_fsdp2.config.schema import known_settings
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.tools.migrate.report import (
    CHANGES,
    CONVERTED,
    DECISION,
    KEPT,
    NOT_NEEDED,
    SAME,
    UNSUPPORTED,
    Context,
    Dialect,
    Path,
    Row,
    Site,
    value_at,
)
from composer_fsdp2.tools.migrate.shared_rows import REPLICATE, SHARD, composer_rows

__all__ = ["FSDP1", "FSDP2", "FSDP_VERSION_2", "MIXED", "is_ours"]


def _same(*names: str) -> tuple[Row, ...]:
    return tuple(Row(name, KEPT, "means the same", settings={name: SAME}) for name in names)


def _without_dropped(value: Mapping[str, Any]) -> dict[str, Any]:
    dropped = ("keep_low_precision_grads", "cast_root_forward_inputs")
    remaining = {key: item for key, item in value.items() if key not in dropped}
    return {"mixed_precision": remaining}


def _has_dropped_dtypes(value: Any) -> bool:
    """A mapping with keys that FSDP2 does not have."""
    return isinstance(value, Mapping) and value != _without_dropped(value)["mixed_precision"]


_PRECISION = (
    Row(
        "mixed_precision",
        KEPT,
        "means the same: parameters and their gathering in the parameters' own dtype",
        ("FULL",),
        {"mixed_precision": SAME},
    ),
    Row(
        "mixed_precision",
        CHANGES,
        "the same dtypes for parameters and gradients; buffers keep theirs (rotary tables fp32), "
        "which FSDP1 cast to the compute dtype, as `buffer_dtype` does",
        ("DEFAULT", "PURE"),
        {"mixed_precision": SAME},
    ),
    Row(
        "mixed_precision",
        CHANGES,
        "FSDP2 reduces in reduce_dtype alone, and casts the inputs of the top-level units",
        _has_dropped_dtypes,
        _without_dropped,
    ),
    Row("mixed_precision", KEPT, "means the same", settings={"mixed_precision": SAME}),
)

_CHANGED = {
    ("activation_checkpointing_reentrant", True): "checkpointing is torch's non-reentrant one: the "
    "same gradients, but hooks in a checkpointed block see the recomputation inside backward",
    ("te_checkpoint_wrapper", True): "checkpointing is torch's own; TransformerEngine's fp8 state "
    "is recomputed by it",
    ("sync_module_states", False): "every rank starts from rank 0's weights, also where ranks "
    "were built differently",
    ("use_orig_params", False): "there are no flat parameters: the optimizer sees each parameter "
    "with its own name and shape, which matters to rules by name and to norms of single parameters",
}
"""values of keys that FSDP2 does not need, whose effect changes"""
_ROWS = (
    # Settings of `sharding_strategy`, degrees and `state_dict_type` come from `convert_fsdp1`.
    Row(
        "sharding_strategy",
        CONVERTED,
        "reshard_after_forward: auto frees all units but the top-level ones, as FSDP1 did",
        ("FULL_SHARD",),
    ),
    Row(
        "sharding_strategy",
        CONVERTED,
        "reshard_after_forward: false keeps the parameters between forward and backward",
        ("SHARD_GRAD_OP",),
    ),
    Row("sharding_strategy", CONVERTED, "one copy per node, sharded within it", ("HYBRID_SHARD",)),
    Row(
        "sharding_strategy",
        CONVERTED,
        "one copy per node; parameters are kept between forward and backward",
        ("_HYBRID_SHARD_ZERO2",),
    ),
    Row(
        "sharding_strategy",
        CONVERTED,
        "a whole copy on every rank: shard degree 1, which is replication and not ZeRO-2",
        ("NO_SHARD",),
    ),
    *_PRECISION,
    Row("state_dict_type", KEPT, "means the same", ("full", "sharded"), {"state_dict_type": SAME}),
    Row(
        "state_dict_type",
        DECISION,
        "local checkpoints hold FSDP1's flat parameters, which FSDP2 does not have",
        ("local",),
        options=("=sharded", "=full"),
    ),
    Row("cpu_offload", NOT_NEEDED, "false is what FSDP2 does", (False, None)),
    *_same(*(key for key in FSDP1_KEPT if key != "mixed_precision")),
    *(
        row
        for key, (harmless, instead) in FSDP1_NOT_SUPPORTED.items()
        for row in (
            Row(key, NOT_NEEDED, "changes nothing", (harmless, None)),
            Row(
                key,
                UNSUPPORTED if harmless is False else DECISION,
                f"has no equal in FSDP2: {instead}",
                options=(f"={'null' if harmless is None else str(harmless).lower()}",),
            ),
        )
    ),
    *(Row(key, CHANGES, reason, (value,)) for (key, value), reason in _CHANGED.items()),
    Row(
        "backward_prefetch",
        CONVERTED,
        LATE_PREFETCH,
        FSDP1_LATE_PREFETCH,
        {"backward_prefetch": 0},
    ),
    *(
        Row(key, NOT_NEEDED, reason)
        for key, reason in FSDP1_NOT_NEEDED.items()
        if key in FSDP1_KEYS
    ),
    Row("version", NOT_NEEDED, "`parallelism_config.fsdp2` says it", (1,)),
)
"""All keys of Composer's `FSDPConfig`, relative to the block."""

_TP = "*.tp_config"
"""in tables: LLM Foundry's block of this name, or Composer's `tp`"""


def _names_strategy(value: Any) -> bool:
    """A mapping with `strategy`."""
    return isinstance(value, Mapping) and value.get("strategy") is not None


def _is_block(value: Any) -> bool:
    """A mapping."""
    return isinstance(value, Mapping)


def _is_version2(block: Any) -> bool:
    return _is_block(block) and str(block.get("version")) == "2"


def _has_version2(data: Mapping[str, Any]) -> bool:
    """Whether a mapping has a block of version 2 that is not one of `TrainingArguments`."""
    return _is_version2(data.get("fsdp_config")) and not data.get("fsdp")


_STRATEGY = (
    "strategies of LLM Foundry are refused beside FSDP2, because weights outside of their layers "
    "drift apart; without `strategy` its degree is `tensor_parallel`"
)
_WITHOUT = ("take strategy out of it",)
_OUTSIDE = (
    Row("*.model.init_device", KEPT, "built on rank 0 and spread from there", ("mixed",)),
    Row("*.model.init_device", KEPT, "built shard by shard, without whole parameters", ("meta",)),
    Row(
        "*.model.init_device", KEPT, "built whole on every rank; `meta` takes less memory", ("cpu",)
    ),
    Row(
        "*.optimizer.name",
        KEPT,
        "is composer_fsdp2.Muon here: each matrix is whole on one rank, and embeddings, heads, "
        "norms and biases get AdamW in the same optimizer",
        ("muon",),
    ),
    Row(
        "*.optimizer.name",
        CHANGES,
        "was not written for this plugin's shards; `optimizer: {name: muon}` is "
        "composer_fsdp2.Muon, exact on any number of ranks",
        ("dion", "dist_muon", "distributed_muon", "muon_adamw", "normuon", "torch_muon"),
    ),
    Row(
        "*.tp_config",
        NOT_NEEDED,
        "no tensor parallelism is asked for; left as it is",
        (None, False, {}),
    ),
    Row("*.tp_config", DECISION, _STRATEGY, _names_strategy, options=_WITHOUT),
    Row("*.tp_config", KEPT, "is `tensor_parallel` of FSDP2", _is_block),
    Row(
        "*.parallelism_config.tp",
        NOT_NEEDED,
        "no tensor parallelism is asked for",
        (None, False, {}),
    ),
    Row("*.parallelism_config.tp", DECISION, _STRATEGY, _names_strategy, options=_WITHOUT),
    Row("*.parallelism_config.tp", KEPT, "is `tensor_parallel` of FSDP2"),
)
"""LLM Foundry's own keys around the block; they stay where they are."""


def _fsdp1_site(data: Mapping[str, Any], path: Path) -> Site | None:
    """Returns the site in a run, or in the run that another file holds, as under `parameters`.

    A block is FSDP1's where it is not of version 2, also where it is no mapping. Tensor parallelism
    beside it becomes a setting of FSDP2.
    """
    versioned, block = data.get("fsdp_config"), data.get("parallelism_config")
    if versioned is not None and not _is_version2(versioned):
        if "parallelism_config" in data:
            raise ConfigError(
                "The configuration has both 'fsdp_config' and 'parallelism_config'. A run follows "
                "one of them and would ignore the other. Move what you need to "
                "'parallelism_config' and remove 'fsdp_config'."
            )
        return Site(path, {"fsdp_config": "", **_tensor_key(data, "tp_config")})
    if not isinstance(block, Mapping) or block.get("fsdp") is None or _is_version2(block["fsdp"]):
        return None
    keys = {"fsdp": "", **_tensor_key(block, "tp")}
    return Site((*path, "parallelism_config"), keys, ("fsdp2",))


def _tensor_key(data: Mapping[str, Any], name: str) -> dict[str, str]:
    return {name: _TP} if data.get(name) else {}


def _finish_fsdp1(context: Context) -> None:
    """Takes the settings from the conversion that runs use, so that both mean the same."""
    strategy = context.entries.get("sharding_strategy")
    for name, value in _converted(context).items():
        entry = context.entries.get(name)
        if entry is not None and (
            entry.status in (DECISION, NOT_NEEDED) or entry.becomes.get(name) == value
        ):
            continue
        if entry is not None and entry.value == value:
            entry.becomes = {name: entry.becomes.get(name, SAME)}  # `--set` is not in the text
        elif name == "state_dict_type":
            context.add("FSDP1's default was full, FSDP2's is sharded", **{name: value})
        elif entry is not None and value is not None:
            entry.become(CONVERTED, "follows from sharding_strategy", **{name: value})
        elif strategy is not None and strategy.status is not DECISION:
            strategy.becomes[name] = value


def _finish_without_defaults(context: Context) -> None:
    """Finishes keys of FSDP1 in a block for FSDP2, where defaults are those of FSDP2."""
    settings, strategy = _converted(context), context.entries.get("sharding_strategy")
    if strategy is not None and strategy.status is CONVERTED:
        # A degree that stands in the block itself is written where it stands.
        strategy.becomes |= {
            name: settings[name]
            for name in ("reshard_after_forward", SHARD, REPLICATE)
            if settings.get(name) is not None and context.value(name) != settings[name]
        }


def _converted(context: Context) -> dict[str, Any]:
    """Returns FSDP2's settings for the keys at hand; none where they are a decision."""
    _drop_monolith(context, "full")
    strategy = context.entries.get("sharding_strategy")
    per_node = "HYBRID" in str(context.value("sharding_strategy")).upper()
    if strategy and per_node and context.value(REPLICATE) is None and not context.gpus_per_node:
        strategy.decide(
            "one copy per node, and the number of GPUs per node is not known",
            "--gpus-per-node N",
            "sharding_strategy=FULL_SHARD",
        )
    config = {
        name: entry.value
        for name, entry in context.entries.items()
        if name in ("sharding_strategy", "state_dict_type", SHARD, REPLICATE)
        and not entry.is_open
        and entry.status is not NOT_NEEDED
    }
    try:
        return convert_fsdp1(
            config,
            world_size=context.world_size,
            local_world_size=context.gpus_per_node or 1,
        ).settings
    except ConfigError as error:
        context.entries["sharding_strategy"].decide(
            str(error), f"{SHARD}=null", f"{REPLICATE}=null", "sharding_strategy=FULL_SHARD"
        )
        return {}


def _drop_monolith(context: Context, default: str) -> None:
    entry = context.entries.get("load_monolith_rank0_only")
    kind, named = context.value("state_dict_type", default), context.entries.get("state_dict_type")
    if entry and entry.value is True and str(kind).lower() == "sharded":
        entry.become(NOT_NEEDED, "has no effect on sharded checkpoints")
    elif entry and entry.value is True and named and named.is_open:
        entry.decide("needs full checkpoints, and their kind is open", f"{named.key}=full")


FSDP1 = Dialect(
    "composer",
    "Composer / LLM Foundry with FSDP1",
    _fsdp1_site,
    (*_ROWS, *composer_rows(_TP)),
    _OUTSIDE,
    finish=_finish_fsdp1,
)


# --- Composer's `FSDP_VERSION=2`, which drops most keys with a warning. ---


def _version2_site(data: Mapping[str, Any], path: Path) -> Site | None:
    site = _fsdp1_site(data, path)
    if site is None:
        return None
    block = value_at(data, (*site.parent[len(path) :], next(iter(site.keys))))
    fsdp2_keys = {"reshard_after_forward", "device_mesh"}
    return site if isinstance(block, Mapping) and fsdp2_keys & block.keys() else None


_VERSION2_ROWS = (
    Row(
        "reshard_after_forward",
        CONVERTED,
        "torch's true keeps the top-level unit, which is called auto here",
        (True,),
        {"reshard_after_forward": "auto"},
    ),
    Row("reshard_after_forward", KEPT, "means the same", settings={"reshard_after_forward": SAME}),
    Row("device_mesh", NOT_NEEDED, "null is all ranks", (None,)),
    Row(
        "device_mesh",
        DECISION,
        "the mesh is built from degrees",
        options=(f"fsdp2.{SHARD}=N", f"fsdp2.{REPLICATE}=N", "=null"),
    ),
    *_PRECISION,
    *_same("activation_checkpointing", "activation_cpu_offload", "verbose"),
    *_same("load_monolith_rank0_only", "state_dict_type"),
    Row("sync_module_states", NOT_NEEDED, "every rank starts from rank 0's weights"),
    *(
        Row(key, NOT_NEEDED, "Composer ignored it under FSDP_VERSION=2, with a warning")
        for key in sorted(
            {row.key for row in _ROWS}
            - {
                *("activation_checkpointing", "activation_cpu_offload", "load_monolith_rank0_only"),
                *("mixed_precision", "state_dict_type", "sync_module_states", "verbose", "version"),
            }
        )
    ),
    *composer_rows(_TP),
)


def _finish_version2(context: Context) -> None:
    _drop_monolith(context, "sharded")
    if "state_dict_type" not in context.entries:
        context.add("the default of FSDP_VERSION=2, written out", state_dict_type="sharded")


FSDP_VERSION_2 = Dialect(
    "composer-fsdp2",
    "Composer with FSDP_VERSION=2",
    _version2_site,
    _VERSION2_ROWS,
    _OUTSIDE,
    finish=_finish_version2,
)


# --- Our own blocks with keys of FSDP1, such as `{version: 2, sharding_strategy: ...}`. ---

_SHARED = ("forward_prefetch", "backward_prefetch")
"""keys of both, a number of units ahead in FSDP2"""


def _is_count(value: Any) -> bool:
    """A number of units, or null."""
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


_OWN = [name for name in known_settings() if name not in _SHARED]


def _is_mixed(block: Any) -> bool:
    """Whether a block for FSDP2 holds what only another dialect knows."""
    if not isinstance(block, Mapping):
        return block is not None
    fsdp2_keys = {*known_settings(), "version"}
    return (
        any(key not in fsdp2_keys for key in block)
        or isinstance(block.get("version"), str)
        or any(key in block and not _is_count(block[key]) for key in _SHARED)
    )


def _mixed_site(data: Mapping[str, Any], path: Path) -> Site | None:
    versioned, block = data.get("fsdp_config"), data.get("parallelism_config")
    if _has_version2(data):
        return Site(path, {"fsdp_config": ""}) if _is_mixed(versioned) else None
    if isinstance(block, Mapping) and _is_mixed(block.get("fsdp2")):
        return Site((*path, "parallelism_config"), {"fsdp2": ""}, ("fsdp2",))
    return None


MIXED = Dialect(
    "fsdp2-mixed",
    "FSDP2 with keys of FSDP1",
    _mixed_site,
    (
        *(Row(key, KEPT, "means the same", _is_count, {key: SAME}) for key in _SHARED),
        *_same(*_OWN),
        # FSDP1's rows are for keys that FSDP2 has not.
        *(row for row in FSDP1.rows if row.key not in _OWN and row.key != "version"),
        Row("version", NOT_NEEDED, "`parallelism_config.fsdp2` says it", (1, 2, "1", "2")),
    ),
    FSDP1.outside,
    finish=_finish_without_defaults,
)


# --- Ours: nothing to do. ---


FSDP2 = Dialect("fsdp2", "composer-fsdp2", lambda _data, _path: None, (), _OUTSIDE)
"""holds no site to replace; `is_ours` recognises it"""


def is_ours(data: Any) -> bool:
    """Whether a mapping, at any depth, holds settings for us already."""
    if not isinstance(data, Mapping):
        return False
    block = data.get("parallelism_config")
    is_here = isinstance(block, Mapping) and "fsdp2" in block
    return is_here or _has_version2(data) or any(map(is_ours, data.values()))
