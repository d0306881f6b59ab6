"""Settings of where shards and optimizer state are kept, and how shards are sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from composer_fsdp2.config.setting import (
    BOOLEAN,
    ValueType,
    choice,
    count,
    mapping,
    null_or,
    setting,
)

__all__ = [
    "COMMUNICATION",
    "CPU_OFFLOAD",
    "OPTIMIZER_STATE",
    "CPUOffload",
    "Communication",
    "OptimizerState",
    "check_state_together",
]


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
    """Switches of newer torch's FSDP2; on an older torch they are refused."""

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
        "reduces gradients by sums alone, and divides them in a step of its own; NCCL has "
        "faster algorithms for sums than for averages",
    )
    symmetric_memory: bool = setting(
        False,
        BOOLEAN,
        "keeps the buffers of all-gathers in symmetric memory (NCCL 2.27); with `sum_reductions` "
        "those of reduce-scatters as well",
    )


CPU_OFFLOAD = mapping(
    CPUOffload,
    expected="true, false or a mapping",
    others=BOOLEAN,
    example="cpu_offload: {pin_memory: false}",
)
COMMUNICATION = mapping(
    Communication, empty=(None,), example="communication: {reduce_scatter_buffers: 2}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """How moments are kept between steps; parameters of less than 4,096 elements keep theirs."""

    dtype: Literal["bf16", "fp32"] | None = setting(
        None,
        null_or(choice("bf16", "fp32")),
        "`bf16` keeps 16 bits, rounded up or down by chance, so that small changes add up; `fp32` "
        "is for parameters in fp32, and null is the optimizer's own",
    )
    bits: int | None = setting(
        None,
        null_or(ValueType(expected="8", accepts=lambda value: type(value) is int and value == 8)),
        "keeps 8 bits and one exponent for each 256 elements of a row; needs no other package",
    )
    device: Literal["cpu", "gpu"] = setting(
        "gpu",
        choice("cpu", "gpu"),
        "`cpu` keeps state in pinned CPU memory while parameters stay on the GPU, where the "
        "optimizer steps; `gpu` keeps state beside the parameters",
    )


def _check_options(key: str, value: OptimizerState, errors: list[str]) -> None:
    if value.bits is not None and value.dtype is not None:
        errors.append(
            f"'{key}' has both bits: 8 and dtype: {value.dtype}. State is kept in one of the two "
            f"forms. Write {key}: {{bits: 8}} or {key}: {{dtype: {value.dtype}}}."
        )


def check_state_together(values: Mapping[str, Any], errors: list[str]) -> None:
    """Refuses a policy of optimizer state where no step on local shards could read the state."""
    is_set = values["optimizer_state"] != OptimizerState()
    if is_set and values["local_step"] is False:
        errors.append(
            "'optimizer_state' is set and 'local_step' is false. State in another form can be "
            "stepped on local shards only. Write local_step: auto, or leave it out."
        )
    if is_set and values["cpu_offload"]:
        errors.append(
            "'optimizer_state' and 'cpu_offload' are both set. cpu_offload keeps the state in CPU "
            "memory already, and the optimizer steps there. Take cpu_offload out and write "
            "optimizer_state: {device: cpu} for state alone, or take optimizer_state out."
        )


OPTIMIZER_STATE = mapping(
    OptimizerState,
    empty=(None,),
    check_options=_check_options,
    example="optimizer_state: {dtype: bf16}",
)
