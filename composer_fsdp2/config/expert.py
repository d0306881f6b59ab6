"""Settings of expert parallelism."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from composer_fsdp2.config.parallel import Untried, check_untried, number_is_degree
from composer_fsdp2.config.placement import OptimizerState
from composer_fsdp2.config.setting import (
    NULL,
    ValueType,
    check_patterns,
    count,
    mapping,
    one_or_more,
    setting,
)

__all__ = ["EXPERT_PARALLEL", "ExpertSpec", "check_expert_parallel_together"]


_MODULES = ValueType(
    expected="auto, or a list of patterns",
    accepts=lambda value: isinstance(value, tuple),
    check_inside=check_patterns,
    parse=lambda key, raw, errors: () if raw == "auto" else one_or_more(key, raw, errors),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """How many ranks hold the experts of a layer between them, and which lists of experts."""

    degree: int = setting(
        1, count("ranks"), "ranks that hold the experts of a layer between them; 1 is none"
    )
    modules: tuple[str, ...] = setting(
        (),
        _MODULES,
        "lists of experts: globs of their names, or `re:` and a regular expression; `auto` is all",
    )


EXPERT_PARALLEL = mapping(
    ExpertSpec,
    expected="null, a number or a mapping",
    others=NULL,
    parse=number_is_degree,
    example="expert_parallel: {degree: 4}",
)


_UNTRIED: Untried = {
    "fp8": (bool, "scales would be those of one rank's tokens"),
    "compile": (bool, "how many tokens an expert gets is known on the host alone"),
    "tiled_mlp": (
        lambda given: given is not None,
        "ranks would exchange once for each tile, and have different numbers of them",
    ),
    "cpu_offload": (bool, "no run on several GPUs has shown it"),
    "ignored_params": (bool, "nobody would average their gradients"),
    "communication": (
        lambda given: given.allocate_from_process_group or given.symmetric_memory,
        "NCCL's own memory is that of one group of ranks",
    ),
    "unused_parameters": (
        lambda given: given is False,
        "an expert may get tokens on one rank alone",
    ),
    "optimizer_state": (
        lambda given: given != OptimizerState(),
        "checkpoints would show state of other ranks' experts in that form",
    ),
    "local_step": (
        lambda given: given is False,
        "torch's optimizers step no experts together with other weights",
    ),
}

check_expert_parallel_together = functools.partial(check_untried, "expert_parallel", _UNTRIED)
"""finds what has not been tried with it"""
