"""Describes the run of a configuration in lines for `doctor`."""

from __future__ import annotations

import dataclasses
from typing import Any

from composer_fsdp2.config.schema import FSDP2Config, known_settings, values_of
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.shard.precision import compute_dtype, resolve_precision
from composer_fsdp2.tools.doctor import REPLICATE, SHARD, Run, mesh_of

__all__ = ["describe_run"]

_SHOWN_GROUPS = 4
# Described in lines of their own.
_OWN_LINES = {
    f"{SHARD}_degree",
    f"{REPLICATE}_degree",
    "reshard_after_forward",
    "mixed_precision",
    "state_dict_type",
}
_RESHARDS: dict[Any, str] = {
    "auto": "top-level units keep their parameters until backward, all others free them",
    True: "every unit frees its parameters after forward and gathers them again in backward",
    False: "every unit keeps its parameters from forward to backward",
}
_INIT = {
    "cpu": "every rank builds the whole model in its CPU memory",
    "mixed": "rank 0 builds the whole model in its CPU memory, the others nothing",
    "meta": "no rank builds the whole model",
}
_STATE_DICTS = {
    "sharded": "a checkpoint is a folder, to which every rank writes its part",
    "full": "a checkpoint is one file, for which rank 0 gathers everything",
}


def describe_run(run: Run) -> list[tuple[str, str]]:
    """Lines of a label and a text."""
    nodes = "1 node" if run.nodes == 1 else f"{run.nodes} nodes"
    where = "GPUs" if run.on_gpus else "the CPU (--gpus-per-node N: elsewhere, on GPUs)"
    lines = [("asks for", run.asks), ("ranks", f"{run.ranks} on {nodes}, on {where}")]
    if not run.shards or run.settings is None:
        return lines
    reshard = run.settings.reshard_after_forward
    lines += _describe_mesh(run)
    text = _RESHARDS.get(reshard, f"after forward, groups of {reshard} ranks keep one copy")
    lines.append(("reshard", f"{_plain(reshard)}: {text}"))
    lines.append(("precision", _describe_precision(run)))
    kind = run.settings.state_dict_type
    lines.append(("state_dict_type", f"{kind}: {_STATE_DICTS[kind]}"))
    init = run.value("model.init_device")
    lines.append(("init_device", f"{init}: {_INIT[init]}" if init in _INIT else str(init)))
    return lines + _describe_others(run.settings)


def _describe_mesh(run: Run) -> list[tuple[str, str]]:
    try:
        shape = mesh_of(run)
    except ConfigError:
        return [("mesh", "none fits the ranks")]
    assert shape is not None
    if shape.tensor > 1:
        whole = shape.shard * shape.tensor
        groups = f"each layer on {_grouped(run.ranks, shape.tensor)}"
        return [
            ("mesh", shape.describe()),
            ("", groups),
            ("", f"each copy on {_grouped(run.ranks, whole)}"),
        ]
    sizes = [f"{SHARD} {shape.shard}"]
    if shape.replicate is not None:
        sizes.insert(0, f"{REPLICATE} {shape.replicate}")
    return [("mesh", " x ".join(sizes)), ("", f"each copy on {_grouped(run.ranks, shape.shard)}")]


def _grouped(ranks: int, size: int) -> str:
    """Ranks next to each other that belong together."""
    starts = range(0, ranks, size)
    groups = [_span(start, size) for start in starts[:_SHOWN_GROUPS]]
    more = ", ..." if len(starts) > _SHOWN_GROUPS else ""
    share = f"{size} ranks" if size > 1 else "1 rank"
    return f"{share}: {', '.join(groups)}{more}"


def _span(start: int, size: int) -> str:
    return f"{start}" if size == 1 else f"{start}-{start + size - 1}"


def _describe_precision(run: Run) -> str:
    assert run.settings is not None
    mixed = run.settings.mixed_precision
    try:
        policy = resolve_precision(mixed, compute_dtype(run.value("precision")))
    except ConfigError:
        return f"{run.value('precision')}: not supported"
    dtypes = [
        "the parameters' own dtype" if dtype is None else str(dtype).removeprefix("torch.")
        for dtype in (policy.param_dtype, policy.reduce_dtype or policy.param_dtype)
    ]
    name = mixed if isinstance(mixed, str) else "as written"
    return (
        f"{run.value('precision')}, mixed_precision {name}: computes in {dtypes[0]}, reduces "
        f"gradients in {dtypes[1]}"
    )


def _describe_others(settings: FSDP2Config) -> list[tuple[str, str]]:
    """Settings without a line of their own that are not at their default."""
    known = known_settings()
    return [
        (name, _plain(value))
        for name, value in values_of(settings).items()
        if name not in _OWN_LINES and value != known[name].default
    ]


def _plain(value: Any) -> str:
    """As YAML would have it, without the fields of nested settings that say nothing."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_plain, value))}]"
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        inner = [f"{k}: {_plain(v)}" for k, v in fields.items() if v not in (None, ())]
        return f"{{{', '.join(inner)}}}"
    return str(value)
