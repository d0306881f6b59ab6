"""Keys of training that shard nothing and have a twin here: checkpointing, clipping and fp8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.tools.migrate.report import Context, Entry, Row, Status

__all__ = [
    "FP8",
    "OFFLOADED_ROWS",
    "add_checkpointing",
    "add_clipping",
    "backend_rows",
    "checkpointing_rows",
    "clipping_rows",
    "find_around",
    "gather_rows",
    "join_fp8",
    "moved_training_rows",
]

_R, _C = Status.RENAMED, Status.CONVERTED
_NOT, _CH = Status.NOT_NEEDED, Status.CHANGES
_AC, _OFFLOAD = "activation_checkpointing", "activation_cpu_offload"
_OFF = (False, None, "false")
_ON = (True, "true")
_OFFLOADED = {_AC: True, _OFFLOAD: True}


def _is_norm(value: Any) -> bool:
    """A number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _clipping(value: Any) -> dict[str, Any]:
    threshold = {"clipping_type": "norm", "clipping_threshold": value}
    return {"algorithms": {"gradient_clipping": threshold}}


def clipping_rows(key: str) -> tuple[Row, ...]:
    """Rows of a key that is the largest norm of gradients."""
    reason = "LLM Foundry's algorithm for the norm over all ranks"
    return (
        Row(key, _NOT, "0 clips nothing", (0, 0.0, None)),
        Row(key, _R, reason, _is_norm, trainer=_clipping),
    )


def checkpointing_rows(key: str, on: bool = True) -> tuple[Row, ...]:
    """Rows of a key that switches the recomputation of activations.

    Args:
        key: of the dialect.
        on: its value that switches recomputation on; the other one switches it off.
    """
    reason = f"`{_AC}`" if on else f"`{_AC}`, the other way round"
    return (
        Row(key, _R, reason, (on,), {_AC: True}),
        Row(key, _R, reason, (not on,), {_AC: False}),
        Row(key, _NOT, "null leaves it to the trainer", (None,)),
    )


OFFLOADED_ROWS = (
    Row(
        "gradient_checkpointing",
        _C,
        f"`{_AC}` with what is kept in CPU memory",
        ("offload", "unsloth"),
        _OFFLOADED,
    ),
    Row(
        "gradient_checkpointing",
        _CH,
        f"`{_AC}` with what is kept in CPU memory, where axolotl writes it to a disk",
        ("offload_disk",),
        _OFFLOADED,
    ),
    Row("activation_offloading", _NOT, "off is the default", _OFF),
    Row(
        "activation_offloading",
        _CH,
        "what checkpointed blocks save is kept in CPU memory; blocks are checkpointed for that",
        (True, "legacy", "hidden_states", "disk"),
        _OFFLOADED,
    ),
)
"""of axolotl and TRL"""

# --- fp8. ---

FP8 = {
    "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "bf16"},
    "fp8": True,
}
"""settings of a switch; `join_fp8` puts the details of other keys in it"""


def gather_rows(key: str) -> tuple[Row, ...]:
    """Rows of a key that sends weights in fp8."""
    return (
        Row(key, _NOT, "off is the default", _OFF),
        Row(key, _C, "`fp8.all_gather`", _ON, {"fp8": {"all_gather": True}}),
    )


def backend_rows(key: str) -> tuple[Row, ...]:
    """Rows of a key that names a library for fp8."""
    other = "torchao multiplies in fp8 here; another library scales otherwise"
    return (
        Row(key, _NOT, "torchao, as here", ("AO", "torchao")),
        Row(key, _CH, other, ("TE", "MSAMP", "MS-AMP", "AUTO", None)),
    )


def join_fp8(context: Context) -> None:
    """Writes details of fp8 where its switch is; without one they say nothing."""
    entries = context.entries.values()
    switch = next((entry for entry in entries if entry.becomes.get("fp8") is True), None)
    details = [entry for entry in entries if isinstance(entry.becomes.get("fp8"), Mapping)]
    for entry in details:
        if switch is None:
            entry.become(_NOT, "fp8 is off")
        else:
            before = switch.becomes["fp8"]
            switch.becomes["fp8"] = (before if before is not True else {}) | entry.becomes.pop(
                "fp8"
            )


# --- Keys that stand elsewhere than the sharding. ---


def find_around(context: Context, *places: tuple[str, ...]) -> tuple[str, Any]:
    """The first value that the mappings around a site have at one of some places.

    Args:
        context: of the site; its own mapping comes first, the whole file last.
        places: keys from such a mapping.

    Returns:
        The key with dots, and its value; "" and `None` if there is none.
    """
    parent = context.site.parent
    for length in range(len(parent), -1, -1):
        for place in places:
            data: Any = context.data
            for name in (*parent[:length], *place):
                data = data.get(name) if isinstance(data, Mapping) else None
            if data is not None:
                return ".".join((*parent[:length], *place)), data
    return "", None


def add_checkpointing(context: Context, *place: str, on: bool) -> None:
    """Writes out checkpointing that a key around the site switches."""
    key, value = find_around(context, place)
    if isinstance(value, bool):
        context.add(f"`{key}` says it", **{_AC: value is on})


def add_clipping(context: Context, *places: tuple[str, ...]) -> None:
    """Writes out clipping that a key around the site asks for."""
    key, norm = find_around(context, *places)
    if _is_norm(norm):
        path = (*context.site.parent, "algorithms")
        clipping = _clipping(norm)
        context.added.append(
            Entry(path, None, Status.ADDED, f"`{key}` says it", {}, beside=clipping)
        )


def moved_training_rows(switches: tuple[str, ...], norms: tuple[str, ...]) -> tuple[Row, ...]:
    """Rows of keys that stay where they are and were written out beside the sharding.

    Args:
        switches: keys about activations.
        norms: keys about clipping.
    """
    stays = "beside the sharding of this model; remove it here"
    return (
        *(Row(key, _C, f"becomes `{_AC}` {stays}", (True, False)) for key in switches),
        *(
            Row(key, _C, f"becomes `algorithms.gradient_clipping` {stays}", _is_norm)
            for key in norms
        ),
    )
