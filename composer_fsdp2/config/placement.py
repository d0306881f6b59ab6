"""Where shards are kept, and how they are sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from composer_fsdp2.config.setting import setting
from composer_fsdp2.config.value_types import BOOLEAN, count, mapping, null_or

__all__ = ["COMMUNICATION", "CPU_OFFLOAD", "CPUOffload", "Communication"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CPUOffload:
    """How shards of parameters, gradients and optimizer state are kept in CPU memory."""

    pin_memory: bool = setting(
        True,
        BOOLEAN,
        "pins the memory, so that copies overlap with computation; other programs cannot use "
        "pinned memory: `false` where memory is scarce",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Switches of newer torch; asking an older one for them is an error."""

    reduce_scatter_buffers: int | None = setting(
        None,
        null_or(count("buffers")),
        "number of units whose gradients may be reduced at the same time; torch's own is 1, which "
        "waits for the unit before",
    )
    separate_reduce_scatter_group: bool = setting(
        False, BOOLEAN, "a communicator of its own, so that reduce-scatter and all-gather overlap"
    )
    allocate_from_process_group: bool = setting(
        False, BOOLEAN, "takes buffers from NCCL's own allocator"
    )
    sum_reductions: bool = setting(
        False,
        BOOLEAN,
        "reduces gradients by sums alone, and divides them in a step of its own; NCCL knows fast "
        "ways for sums that it has not for averages",
    )
    symmetric_memory: bool = setting(
        False,
        BOOLEAN,
        "keeps the buffers of all-gathers in symmetric memory (NCCL 2.27); with `sum_reductions` "
        "those of reduce-scatters as well",
    )


def _no_switches(_key: str, raw: Any, _errors: list[str]) -> Any:
    return {} if raw is None else raw


CPU_OFFLOAD = mapping(
    CPUOffload,
    expected="true, false or a mapping",
    others=lambda value: isinstance(value, bool),
    example="cpu_offload: {pin_memory: false}",
)
COMMUNICATION = mapping(
    Communication, parse=_no_switches, example="communication: {reduce_scatter_buffers: 2}"
)
