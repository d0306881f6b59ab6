"""Switches of newer torch for how units communicate. All are off unless asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.distributed.fsdp import FSDPModule

from composer_fsdp2.config.placement import Communication
from composer_fsdp2.errors import ConfigError

__all__ = ["METHODS", "apply_communication", "check_communication"]

METHODS = {
    "reduce_scatter_buffers": "set_reduce_scatter_max_input_buffers",
    "separate_reduce_scatter_group": "set_separate_reduce_scatter_group",
    "allocate_from_process_group": "set_allocate_memory_from_process_group_for_comm",
    "symmetric_memory": "set_symm_mem_for_comm",
}
"""methods of torch's `FSDPModule` by the setting that needs them"""
_NCCL_ONLY = ("allocate_from_process_group", "symmetric_memory")


def _asked(settings: Communication) -> list[str]:
    return [name for name in METHODS if getattr(settings, name)]


def check_communication(settings: Communication, device_type: str) -> None:
    """Refuses what this torch or this device has not. Collective: no.

    Raises:
        ConfigError: naming the setting.
    """
    for name in _asked(settings):
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


def apply_communication(
    tops: Iterable[FSDPModule], units: Iterable[FSDPModule], settings: Communication
) -> None:
    """Sets what was asked for.

    Collective: yes, with a separate group.

    Args:
        tops: units that lie in no other.
        units: all of them.
        settings: checked by `check_communication`.
    """
    arguments: dict[str, tuple[Any, ...]] = {
        "reduce_scatter_buffers": (settings.reduce_scatter_buffers,),
        "symmetric_memory": (),
    }
    for name in _asked(settings):
        # A separate group is made once and shared by all units below.
        for unit in tops if name == "separate_reduce_scatter_group" else units:
            getattr(unit, METHODS[name])(*arguments.get(name, (True,)))
