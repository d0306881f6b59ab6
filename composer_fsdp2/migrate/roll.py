"""ROLL's `strategy_config` of `fsdp2_train` and `fsdp2_infer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.core.config import DTYPES
from composer_fsdp2.migrate.report import SAME, Context, Dialect, Row, Site, Status

__all__ = ["ROLL"]

_K, _R, _C = Status.KEPT, Status.RENAMED, Status.CONVERTED
_NOT, _CH, _DEC, _UN = Status.NOT_NEEDED, Status.CHANGES, Status.DECISION, Status.UNSUPPORTED
_SHARD, _REPLICATE = "data_parallel_shard_degree", "data_parallel_replicate_degree"
_BLOCK = "strategy_config"
_OFF = (False, None)


def _is_dtype(value: Any) -> bool:
    """A dtype."""
    return isinstance(value, str) and value in DTYPES


def _dtype(name: str) -> Any:
    return lambda value: {"mixed_precision": {name: value}}


def _is_size(value: Any) -> bool:
    """A number above 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


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
    Row(
        "fsdp_size",
        _C,
        "a whole copy on every rank",
        (1,),
        {_SHARD: 1, _REPLICATE: -1},
    ),
    Row("fsdp_size", _NOT, "all ranks, the default", (-1, None)),
    Row("param_dtype", _R, "`mixed_precision.param_dtype`", _is_dtype, _dtype("param_dtype")),
    Row("reduce_dtype", _R, "`mixed_precision.reduce_dtype`", _is_dtype, _dtype("reduce_dtype")),
    Row(
        "reshard_after_forward",
        _C,
        "true keeps the top-level units, as torch does by itself",
        (True,),
        {"reshard_after_forward": "auto"},
    ),
    Row("reshard_after_forward", _K, "means the same", settings={"reshard_after_forward": SAME}),
    Row("offload_policy", _NOT, "false is what FSDP2 does", _OFF),
    Row(
        "offload_policy",
        _UN,
        "parameters and optimizer stay on the GPU",
        options=("offload_policy=false",),
    ),
    Row(
        "wrap_policy.transformer_layer_cls_to_wrap",
        _R,
        "`wrap_policy.classes`",
        _is_names,
        _names,
    ),
    Row("wrap_policy.moe_experts", _R, "`wrap_policy.classes`", _is_names, _names),
    Row("wrap_policy.wrap_embeddings", _NOT, "off is the default", _OFF),
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
        "experts that get no token on a rank are not run there; units of single experts would wait "
        "for each other",
        options=("apply_expert_patch=false", "wrap whole decoder layers"),
    ),
    Row("apply_tiled_mlp", _NOT, "off is what is done here", _OFF),
    Row("apply_tiled_mlp", _UN, "the MLP is not tiled", options=("apply_tiled_mlp=false",)),
    Row("ulysses_size", _NOT, "no sequence is split", (1, None)),
    Row("ulysses_size", _UN, "sequences are not split over ranks", options=("ulysses_size=1",)),
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


_ULYSSES = "sequences are not split over ranks; ROLL's own key is left where it is"
_FREEZE = "frozen parameters are sharded like the others; freezing stays with the trainer"

ROLL = Dialect(
    "roll",
    "ROLL with FSDP2",
    _find,
    _ROWS,
    (
        Row("*.ulysses_size", _NOT, "no sequence is split", (1, None)),
        Row("*.ulysses_size", _UN, _ULYSSES, options=("remove it",)),
        Row("*.freeze_module_prefix", _K, _FREEZE),
    ),
    _finish,
)
