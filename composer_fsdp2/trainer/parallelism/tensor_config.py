"""`parallelism_config.tp`, which is the setting `tensor_parallel` under FSDP2."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from composer.utils.parallelism import TPConfig
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from composer_fsdp2.config.parallel import check_strategy
from composer_fsdp2.config.schema import FSDP2Config, parse_config
from composer_fsdp2.errors import ConfigError

__all__ = ["with_tensor_parallel"]


def with_tensor_parallel(settings: FSDP2Config, tp: Any) -> FSDP2Config:
    """Makes `parallelism_config.tp` the setting `tensor_parallel`."""
    if settings.tensor_parallel is not None:
        raise ConfigError(
            "Both 'tp' and 'fsdp2.tensor_parallel' of parallelism_config are set. They are the "
            "same setting, and one of them would have no effect. Take one of them out."
        )
    if isinstance(tp, TPConfig):
        if tp.device_mesh is not None:
            raise ConfigError(
                "TPConfig has a device_mesh. FSDP2 and tensor parallelism need axes of one mesh, "
                "which is built from the degrees. Leave device_mesh out."
            )
        tp = {"degree": tp.tensor_parallel_degree, "layer_plan": tp.layer_plan}
    check_strategy(tp)
    parsed = parse_config({"tensor_parallel": _with_words(tp)}).tensor_parallel
    return dataclasses.replace(settings, tensor_parallel=parsed)


def _with_words(tp: Any) -> Any:
    """Writes torch's styles as words where they mean the same; others stay, and are refused."""
    plan = tp.get("layer_plan") if isinstance(tp, Mapping) else None
    if not isinstance(plan, Mapping):
        return tp
    return {**tp, "layer_plan": {name: _word_of(style) for name, style in plan.items()}}


def _word_of(style: Any) -> Any:
    usual = {
        "colwise": ColwiseParallel(),
        "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
        "rowwise": RowwiseParallel(),
    }
    for word, known in usual.items():
        if type(style) is type(known) and vars(style) == vars(known):
            return word
    return style
