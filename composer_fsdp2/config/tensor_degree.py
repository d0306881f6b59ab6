"""The degree of tensor parallelism of settings that are not parsed yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.config.schema import parse_config

__all__ = ["TENSOR_KEY", "written_degree"]

TENSOR_KEY = "tensor_parallel"


def written_degree(block: Any) -> int:
    """Returns how many ranks divide a layer, 1 where none do. Collective: no.

    Args:
        block: settings of FSDP2 as they are written; other keys are not looked at.

    Raises:
        ConfigError: what is written about tensor parallelism is wrong.
    """
    if not isinstance(block, Mapping) or not block.get(TENSOR_KEY):
        return 1
    spec = parse_config({TENSOR_KEY: block[TENSOR_KEY]}).tensor_parallel
    return 1 if spec is None else spec.degree
