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
"""keys of `parallelism_config` beside `fsdp2`, and the settings of FSDP2 that they are"""


def ranks_of_a_batch(settings: FSDP2Config) -> int:
    """Returns how many ranks, next to each other, read the same batch; 1 is each its own."""
    tensor, sequence = settings.tensor_parallel, settings.sequence_parallel
    return (tensor.degree if tensor else 1) * (sequence.degree if sequence else 1)


def with_keys_inside(config: Mapping[Any, Any]) -> dict[Any, Any]:
    """Moves the keys of `BESIDE` from a `parallelism_config` into its `fsdp2`. Collective: no.

    Raises:
        ConfigError: a key stands in both places, or there is no `fsdp2`.
    """
    moved = dict(config)
    for key, inside in BESIDE.items():
        moved = _moved(moved, key, inside)
    return moved


def _moved(config: Mapping[Any, Any], written: str, inside: str) -> dict[Any, Any]:
    moved = {key: value for key, value in config.items() if key != written}
    if config.get(written) is None:
        return moved
    block = moved.get("fsdp2")
    block = {} if block is None and "fsdp2" in moved else block
    if not isinstance(block, Mapping):
        raise ConfigError(
            f"parallelism_config has '{written}' without 'fsdp2' as a mapping beside it. "
            f"{_WHAT[written]} are divided between ranks that shard the model with FSDP2. Write "
            f"parallelism_config: {{fsdp2: {{}}, {written}: {{degree: 2}}}}."
        )
    if block.get(inside) is not None:
        raise ConfigError(
            f"Both '{written}' and 'fsdp2.{inside}' of parallelism_config are set. They "
            "are the same setting, and one of them would have no effect. Take one of them out."
        )
    return {**moved, "fsdp2": {**block, inside: config[written]}}


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
