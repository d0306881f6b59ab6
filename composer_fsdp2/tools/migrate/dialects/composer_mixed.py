"""Our own blocks with keys of FSDP1 in them, such as `{version: 2, sharding_strategy: ...}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.config.schema import known_settings
from composer_fsdp2.tools.migrate.composer import FSDP1, finish_without_defaults
from composer_fsdp2.tools.migrate.report import SAME, Dialect, Path, Row, Site, Status

__all__ = ["MIXED"]

_SHARED = ("forward_prefetch", "backward_prefetch")
"""keys of both, a number of units ahead in FSDP2"""


def _is_count(value: Any) -> bool:
    """A number of units."""
    return isinstance(value, int) and not isinstance(value, bool)


def _rows() -> tuple[Row, ...]:
    """FSDP1's rows for keys that FSDP2 has not, behind those of FSDP2's own keys."""
    own = [name for name in known_settings() if name not in _SHARED]
    counts = [Row(key, Status.KEPT, "means the same", _is_count, {key: SAME}) for key in _SHARED]
    return (
        *counts,
        *(Row(name, Status.KEPT, "means the same", settings={name: SAME}) for name in own),
        *(row for row in FSDP1.rows if row.key not in own and row.key != "version"),
        Row(
            "version",
            Status.NOT_NEEDED,
            "`parallelism_config.fsdp2` says it",
            (1, 2, "1", "2"),
        ),
    )


def _is_mixed(block: Any) -> bool:
    """Whether a block for FSDP2 holds what only another dialect knows."""
    if not isinstance(block, Mapping):
        return block is not None
    known = {*known_settings(), "version"}
    return (
        any(key not in known for key in block)
        or isinstance(block.get("version"), str)
        or any(key in block and not _is_count(block[key]) for key in _SHARED)
    )


def _site(data: Mapping[str, Any], path: Path) -> Site | None:
    versioned, block = data.get("fsdp_config"), data.get("parallelism_config")
    if isinstance(versioned, Mapping) and str(versioned.get("version")) == "2":
        return Site(path, {"fsdp_config": ""}) if _is_mixed(versioned) else None
    if isinstance(block, Mapping) and "fsdp2" in block and _is_mixed(block["fsdp2"]):
        return Site((*path, "parallelism_config"), {"fsdp2": ""}, ("fsdp2",))
    return None


MIXED = Dialect(
    "fsdp2-mixed",
    "FSDP2 with keys of FSDP1",
    _site,
    _rows(),
    FSDP1.outside,
    finish=finish_without_defaults,
)
