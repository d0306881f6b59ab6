"""How many ranks read the same batch: those of a tensor group, and those that share sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.config.schema import FSDP2Config, parse_config
from composer_fsdp2.errors import ConfigError

__all__ = [
    "BESIDE",
    "EXPERT_KEY",
    "SEQUENCE_KEY",
    "TENSOR_KEY",
    "ranks_of_a_batch",
    "with_keys_inside",
    "written_group_size",
]

TENSOR_KEY = "tensor_parallel"
SEQUENCE_KEY = "sequence_parallel"
EXPERT_KEY = "expert_parallel"
BESIDE = {SEQUENCE_KEY: SEQUENCE_KEY, "ep": EXPERT_KEY}
"""keys of `parallelism_config` beside `fsdp2` -> the setting of FSDP2"""


def ranks_of_a_batch(settings: FSDP2Config) -> int:
    """Returns how many consecutive ranks read the same batch; 1: each rank reads its own."""
    tensor, sequence = settings.tensor_parallel, settings.sequence_parallel
    return (tensor.degree if tensor else 1) * (sequence.degree if sequence else 1)


def with_keys_inside(config: Mapping[Any, Any]) -> dict[Any, Any]:
    """Moves the keys of `BESIDE` from a `parallelism_config` into its `fsdp2`. Collective: no.

    Raises:
        ConfigError: a key stands in both places, or there is no `fsdp2`.
    """
    moved = dict(config)
    for key, inside in BESIDE.items():
        if (written := moved.pop(key, None)) is None:
            continue
        block = moved.get("fsdp2", False)
        block = {} if block is None else block
        if not isinstance(block, Mapping):
            raise ConfigError(
                f"parallelism_config has '{key}' without 'fsdp2' as a mapping beside it. "
                f"{_WHAT[key]} are divided between ranks that shard the model with FSDP2. Write "
                f"parallelism_config: {{fsdp2: {{}}, {key}: {{degree: 2}}}}."
            )
        if block.get(inside) is not None:
            raise ConfigError(
                f"Both '{key}' and 'fsdp2.{inside}' of parallelism_config are set. They "
                "are the same setting, and one of them would have no effect. Take one of them out."
            )
        moved["fsdp2"] = {**block, inside: written}
    return moved


_WHAT = {SEQUENCE_KEY: "Sequences", "ep": "Experts"}


def written_group_size(block: Any) -> int:
    """Returns the same for settings that are not parsed yet. Collective: no.

    Args:
        block: settings of FSDP2 as they are written; other keys are not looked at.

    Raises:
        ConfigError: what is written about tensor or sequence parallelism is wrong.
    """
    if not isinstance(block, Mapping):
        return 1
    written = {key: block[key] for key in (TENSOR_KEY, SEQUENCE_KEY) if block.get(key)}
    return ranks_of_a_batch(parse_config(written))
