"""Values of single settings of a run, and checks of settings that cannot stand together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.config.setting import ValueType
from composer_fsdp2.config.value_types import (
    check_patterns,
    is_number,
    null_or,
    parse_list,
    with_methods,
)

__all__ = [
    "DEGREE",
    "LOAD_PLANNER",
    "LOCAL_STEP",
    "SAVE_PLANNER",
    "UNITS_AHEAD",
    "UNUSED",
    "check_degrees",
    "check_monolith",
]

DEGREE = ValueType(
    expected="a positive number of ranks, or -1 for all that are left",
    accepts=lambda value: is_number(value) or (type(value) is int and value == -1),
)
UNITS_AHEAD = ValueType(
    expected="a number of units ahead, or 0 for torch's own prefetch",
    accepts=lambda value: is_number(value, least=0),
)


def _check_unused(key: str, value: Any, errors: list[str]) -> None:
    if isinstance(value, tuple):
        check_patterns(key, value, errors)


UNUSED = ValueType(
    expected="auto, true, false, or a list of patterns",
    accepts=lambda value: isinstance(value, bool | tuple) or value == "auto",
    check_inside=_check_unused,
    parse=parse_list,
)


LOAD_PLANNER = null_or(
    with_methods("a LoadPlanner", "set_up_planner", "create_local_plan", "load_bytes")
)
SAVE_PLANNER = null_or(
    with_methods("a SavePlanner", "set_up_planner", "create_local_plan", "resolve_data")
)


def check_degrees(values: Mapping[str, Any], errors: list[str]) -> None:
    """Refuses two degrees that both take the ranks that are left."""
    names = ("data_parallel_shard_degree", "data_parallel_replicate_degree")
    if all(values[name] == -1 for name in names):
        errors.append(
            "'data_parallel_shard_degree' and 'data_parallel_replicate_degree' are both -1. "
            "Only one of them can take the ranks the other leaves. Give one of them a number."
        )


def check_monolith(values: Mapping[str, Any], errors: list[str]) -> None:
    """Refuses a setting for full checkpoints in a run with sharded ones."""
    if values["load_monolith_rank0_only"] is True and values["state_dict_type"] == "sharded":
        errors.append(
            "'load_monolith_rank0_only' is true while 'state_dict_type' is sharded. Only a full "
            "checkpoint can be read by rank 0 alone, so it would have no effect. "
            "Write state_dict_type: full, or leave load_monolith_rank0_only out."
        )


LOCAL_STEP = ValueType(
    expected="auto, true or false",
    accepts=lambda value: isinstance(value, bool) or value == "auto",
    choices=("auto",),
)
