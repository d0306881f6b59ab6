"""Settings of expert parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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


def _parse_modules(key: str, raw: Any, errors: list[str]) -> Any:
    return () if raw == "auto" else one_or_more(key, raw, errors)


_MODULES = ValueType(
    expected="auto, or a list of patterns",
    accepts=lambda value: isinstance(value, tuple),
    check_inside=check_patterns,
    parse=_parse_modules,
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


def _number_is_degree(_key: str, raw: Any, _errors: list[str]) -> Any:
    is_number = isinstance(raw, int) and not isinstance(raw, bool)
    return {"degree": raw} if is_number else raw


EXPERT_PARALLEL = mapping(
    ExpertSpec,
    expected="null, a number or a mapping",
    others=NULL,
    parse=_number_is_degree,
    example="expert_parallel: {degree: 4}",
)


def _divides(given: Any) -> bool:
    return given is not None and given.degree > 1


_UNTRIED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
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
"""Settings that have not been tried with expert parallelism: which values, and what may go wrong"""


def check_expert_parallel_together(values: Mapping[str, Any], errors: list[str]) -> None:
    """Refuses what has not been tried with it; see `_UNTRIED`."""
    if not _divides(values["expert_parallel"]):
        return
    for name, (is_untried, why) in _UNTRIED.items():
        if is_untried(values[name]):
            errors.append(
                f"'{name}' is {_shown(values[name])} beside 'expert_parallel', which has not been "
                f"tried: {why}. The run might train another model. Leave one of them out."
            )


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "set"
