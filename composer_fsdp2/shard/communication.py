"""Switches of newer torch for how units communicate. All are off unless asked for."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.cuda import nccl
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2.config.placement import Communication
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.shard.averaging import leave_division_to_torch
from composer_fsdp2.torch_private.units import all_reduce_hook, param_groups

__all__ = [
    "METHODS",
    "VARIABLES",
    "Missing",
    "apply_communication",
    "check_communication",
    "missing_for",
    "nccl_version",
]


METHODS = {
    "reduce_scatter_buffers": "set_reduce_scatter_max_input_buffers",
    "separate_reduce_scatter_group": "set_separate_reduce_scatter_group",
    "allocate_from_process_group": "set_allocate_memory_from_process_group_for_comm",
    "sum_reductions": "set_force_sum_reduction_for_comms",
    "symmetric_memory": "set_symm_mem_for_comm",
}
"""methods of torch's `FSDPModule` by the setting that needs them, in the order of the calls: with
symmetric memory, torch looks at the group and the kind of reduction that were set before"""
_NCCL_ONLY = ("allocate_from_process_group", "symmetric_memory")


def check_communication(
    settings: Communication,
    device_type: str,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Refuses settings that this torch, this device or NCCL does not have. Collective: no.

    Args:
        settings: `communication` of the run.
        device_type: type of the device that computes.
        environment: variables that NCCL reads.

    Raises:
        ConfigError: naming the setting.
    """
    if settings.symmetric_memory and settings.allocate_from_process_group:
        raise ConfigError(
            "'communication.symmetric_memory' and 'communication.allocate_from_process_group' are "
            "both set. Each of them allocates the buffers of all-gathers, and there is one kind. "
            "Write symmetric_memory: true alone, or allocate_from_process_group: true alone."
        )
    buffers = settings.reduce_scatter_buffers or 1
    if settings.symmetric_memory and settings.sum_reductions and buffers > 1:
        raise ConfigError(
            f"'communication.reduce_scatter_buffers' is {buffers}, and 'symmetric_memory' and "
            "'sum_reductions' are set. Reductions in symmetric memory have one buffer, which is "
            "used again and again. Take reduce_scatter_buffers out, or sum_reductions."
        )
    for name in (name for name in METHODS if getattr(settings, name)):
        if not hasattr(FSDPModule, METHODS[name]):
            raise ConfigError(
                f"'communication.{name}' is set, and this torch has no `{METHODS[name]}`. It "
                "would have no effect. Take it out, or install a newer torch."
            )
        if name in _NCCL_ONLY and device_type != "cuda":
            raise ConfigError(
                f"'communication.{name}' is set in a run on {device_type}. Only NCCL allocates "
                "memory for collectives. Take it out, or train on GPUs."
            )
    for missing in missing_for(settings, environment, nccl_version()):
        if missing.needed:
            raise ConfigError(f"{missing.what}. {missing.advice}")


def nccl_version() -> tuple[int, ...] | None:
    """Returns NCCL's version, `None` where this torch has no NCCL. Collective: no."""
    if not dist.is_nccl_available():
        return None
    # A version of the library torch was built with, whether a group uses it or not.
    version: Any = nccl.version()
    return tuple(version)


def apply_communication(
    tops: Collection[FSDPModule], units: Collection[FSDPModule], settings: Communication
) -> None:
    """Calls torch's methods for the settings that are given.

    Collective: yes, with a separate group.

    Args:
        tops: units that lie in no other unit.
        units: all units of the model.
        settings: checked by `check_communication`.
    """
    arguments: dict[str, tuple[Any, ...]] = {
        "reduce_scatter_buffers": (settings.reduce_scatter_buffers,),
        "symmetric_memory": (),
    }
    for name in (name for name in METHODS if getattr(settings, name)):
        # A separate group is made once and shared by all units below.
        for unit in tops if name == "separate_reduce_scatter_group" else units:
            getattr(unit, METHODS[name])(*arguments.get(name, (True,)))
    # Torch then asks for a sum in every dtype, and divides by the number of ranks around it.
    if settings.sum_reductions:
        for group in (group for unit in units for group in param_groups(unit)):
            leave_division_to_torch(all_reduce_hook(group))


# --- Requirements of `communication.symmetric_memory` on NCCL: version and variables. Pure. ---
#
# [Note: symmetric memory] NCCL maps such a buffer on every rank at the same offset, and has
# kernels that read and write the others' directly. The memory has to be that of `cuMemCreate`,
# the buffer is registered as a window, and GPUs have to reach each other. Its reductions are sums
# alone. Between the GPUs of one NVLink domain all-gathers can go through copy engines and leave
# all multiprocessors to the computation; NCCL does that if it was told to use none of them:
# `NCCL_CTA_POLICY=2`, or `cta_policy` in the options of the process group, which Composer does
# not set.
#
# Source: NCCL's notes on 2.27 (windows, https://github.com/NVIDIA/nccl/releases/tag/v2.27.3-1)
# and 2.28 (copy engines, https://github.com/NVIDIA/nccl/pull/1811), and the docstring of torch's
# `FSDPModule.set_symm_mem_for_comm`.


_SWITCHED_OFF = {
    "NCCL_CUMEM_ENABLE": ("0", "memory that can be mapped on other ranks"),
    "NCCL_WIN_ENABLE": ("0", "the registration of windows"),
    "NCCL_P2P_DISABLE": ("1", "access from one GPU to another"),
}
"""variables, the value that switches something off, and the name of that thing"""
_POLICY = "NCCL_CTA_POLICY"
VARIABLES = (_POLICY, *_SWITCHED_OFF)
"""variables of the environment that are read here"""

_WINDOWS, _COPY_ENGINES = (2, 27), (2, 28)
_ZERO = frozenset({"2", "ZERO"})


@dataclass(frozen=True, slots=True)
class Missing:
    """Names something that NCCL lacks here, and a cure."""

    what: str
    advice: str
    needed: bool
    """false where symmetric memory works without, and is slower"""


def missing_for(
    settings: Communication,
    environment: Mapping[str, str],
    nccl: tuple[int, ...] | None,
    *,
    one_node: bool = True,
) -> list[Missing]:
    """Returns what NCCL lacks for symmetric memory; things it does not work without come first.

    Args:
        settings: `communication` of the run.
        environment: at least those of `VARIABLES` that are set.
        nccl: the version of NCCL; `None` where nobody knows.
        one_node: whether the shards of a replica are on one node; copy engines reach no further.
    """
    if not settings.symmetric_memory:
        return []
    version = ".".join(map(str, nccl or ()))
    missing: list[Missing] = []
    if nccl is not None and nccl < _WINDOWS:
        missing.append(
            Missing(
                f"'communication.symmetric_memory' is set, and torch has NCCL {version} here. The "
                "first gather would fail, because symmetric memory came with NCCL 2.27",
                "Take it out, or install a newer torch.",
                needed=True,
            )
        )
    missing += [
        Missing(
            f"'communication.symmetric_memory' is set, and {name}={value} takes {feature} away. "
            "The first gather would fail",
            f"unset {name}, or take 'symmetric_memory' out.",
            needed=True,
        )
        for name, (value, feature) in _SWITCHED_OFF.items()
        if environment.get(name) == value
    ]
    if one_node and nccl is not None and _WINDOWS <= nccl < _COPY_ENGINES:
        missing.append(
            Missing(
                f"'communication.symmetric_memory' is set, and NCCL {version} has no gathers "
                "through copy engines: they take multiprocessors from the computation",
                "Install a torch with NCCL 2.28 or newer to free them.",
                needed=False,
            )
        )
    elif one_node and environment.get(_POLICY, "").upper() not in _ZERO:
        missing.append(
            Missing(
                f"'communication.symmetric_memory' is set, and {_POLICY} is not 2. Gathers take "
                "multiprocessors from the computation; with it, they go through copy engines "
                "within a node",
                f"export {_POLICY}=2 on every node before the run starts.",
                needed=False,
            )
        )
    return missing
