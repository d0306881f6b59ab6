"""Settings of tensor, sequence and expert parallelism."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from composer_fsdp2.config.blocks import Float8Spec
from composer_fsdp2.config.messages import ascii_repr, invalid_value, one_of
from composer_fsdp2.config.placement import OptimizerState
from composer_fsdp2.config.setting import (
    NULL,
    ValueType,
    check_patterns,
    choice,
    count,
    is_string,
    mapping,
    one_or_more,
    setting,
)
from composer_fsdp2.errors import ConfigError

__all__ = [
    "EXPERT_PARALLEL",
    "SEQUENCE_PARALLEL",
    "STYLES",
    "TENSOR_PARALLEL",
    "ExpertSpec",
    "SequenceSpec",
    "TensorSpec",
    "check_expert_parallel_together",
    "check_sequence_parallel_together",
    "check_strategy",
    "check_tensor_parallel_together",
]

STYLES = ("colwise", "colwise_rep", "rowwise", "whole")
"""how a layer of a `layer_plan` is divided"""

_NAMES_OF_DEGREE = ("degree", "tensor_parallel_degree")


def _parse_plan(_key: str, raw: Any, _errors: list[str]) -> Any:
    if raw is None:
        return ()
    return tuple(raw.items()) if isinstance(raw, Mapping) else raw


def _check_plan(key: str, plan: tuple[tuple[Any, Any], ...], errors: list[str]) -> None:
    for pattern, style in plan:
        if not is_string(pattern):
            errors.append(invalid_value(key, pattern, "names of modules, or globs"))
        if not isinstance(style, str) or style not in STYLES:
            shown = ascii_repr(style) if isinstance(style, str) else type(style).__name__
            errors.append(
                f"{key}: {ascii_repr(pattern)}: {shown} is invalid. Expected "
                f"{one_of(STYLES)}. It must be known how outputs and gradients add up."
            )


_PLAN = ValueType(
    expected="a mapping of module names to styles",
    accepts=lambda value: (
        isinstance(value, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in value)
    ),
    parse=_parse_plan,
    check_inside=_check_plan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """How many ranks divide each layer, and which layers."""

    degree: int = setting(1, count("ranks"), "ranks that divide a layer; 1 is none")
    layer_plan: tuple[tuple[str, str], ...] = setting(
        (),
        _PLAN,
        "names or globs of layers, and `colwise`, `rowwise`, `colwise_rep` (the ranks exchange the "
        "output) or `whole`; goes before the plan that the model has or that is known for it",
    )


def _number_is_degree(_key: str, raw: Any, _errors: list[str]) -> Any:
    """Parses a number as the degree of a mapping."""
    return {"degree": raw} if type(raw) is int else raw


def _with_composers_names(key: str, raw: Any, errors: list[str]) -> Any:
    """Takes a number for the degree, and `tensor_parallel_degree`, which is Composer's name."""
    raw = _number_is_degree(key, raw, errors)
    if not isinstance(raw, Mapping) or "degree" in raw:  # both names are refused as an unknown key
        return raw
    return {"degree" if key in _NAMES_OF_DEGREE else key: value for key, value in raw.items()}


TENSOR_PARALLEL = mapping(
    TensorSpec,
    expected="null, a number or a mapping",
    others=NULL,
    parse=_with_composers_names,
    example="tensor_parallel: {degree: 2}",
)

_Untried = Mapping[str, tuple[Callable[[Any], bool], str]]
"""settings that are untried beside another setting: which values, and what may go wrong"""

_UNTRIED_WITH_BOTH: _Untried = {
    "communication": (
        lambda given: given.allocate_from_process_group or given.symmetric_memory,
        "NCCL's own memory is that of one group of ranks",
    ),
    "cpu_offload": (bool, "no run on several GPUs has shown it"),
    "ignored_params": (bool, "nobody would average their gradients"),
    "frozen": (
        lambda given: given == "replicate",
        "ranks would keep other parts of what they divide",
    ),
}
"""with tensor and with expert parallelism"""
_UNTRIED_WITH_TENSORS: _Untried = {
    **_UNTRIED_WITH_BOTH,
    "fp8": (
        lambda given: isinstance(given, Float8Spec) and given.all_gather,
        "scales would be those of one rank's part",
    ),
    "optimizer_state": (
        lambda given: given.bits is not None,
        "blocks of 8 bits would end where layers are divided",
    ),
}


def _check_untried(
    key: str, untried: _Untried, values: Mapping[str, Any], errors: list[str]
) -> None:
    """Refuses settings that have not been tried beside a degree above 1 of the setting `key`."""
    for name, (is_untried, why) in untried.items():
        if values[key] is not None and values[key].degree > 1 and is_untried(values[name]):
            shown = ascii_repr(values[name]) if isinstance(values[name], bool) else "set"
            errors.append(
                f"'{name}' is {shown} beside '{key}', which has not been tried: {why}. The run "
                "might train another model. Leave one of them out."
            )


check_tensor_parallel_together = functools.partial(
    _check_untried, "tensor_parallel", _UNTRIED_WITH_TENSORS
)
"""finds what has not been tried with it"""


def check_strategy(tp: Any) -> None:
    """Refuses LLM Foundry's strategies.

    After 20 steps of SGD on 4 ranks, the weights outside of the plan of `ffn` differ by 0.25.

    Raises:
        ConfigError: a strategy is named.
    """
    if isinstance(tp, Mapping) and tp.get("strategy") is not None:
        degree = next((tp[name] for name in _NAMES_OF_DEGREE if name in tp), 2)
        raise ConfigError(
            f"Tensor parallelism has the strategy {ascii_repr(tp['strategy'])}. LLM Foundry's "
            "strategies give the ranks of a group different data, and weights outside of the "
            "divided layers drift apart. Take 'strategy' out: "
            f"tensor_parallel: {{degree: {ascii_repr(degree)}}} divides MLPs and attention, with "
            "a layer_plan where the model is not known."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """Settings of sequence parallelism: how many ranks split each sequence, and how they attend."""

    degree: int = setting(1, count("ranks"), "ranks that divide each sequence; 1 is none")
    method: str = setting(
        "auto",
        choice("auto", "ulysses", "gather_kv"),
        "`ulysses` exchanges the sequence for heads, `gather_kv` gathers keys and values; `auto` "
        "takes what sends fewer bytes and the number of heads allows",
    )
    documents: str = setting(
        "as_model",
        choice("as_model", "apart"),
        "of rows whose `position_ids` begin again: `as_model` sees other documents of a row where "
        "the model does so in one process, `apart` never",
    )


SEQUENCE_PARALLEL = mapping(
    SequenceSpec,
    expected="null, a number or a mapping",
    others=NULL,
    parse=_number_is_degree,
    example="sequence_parallel: {degree: 4}",
)


def check_sequence_parallel_together(values: Mapping[str, Any], errors: list[str]) -> None:
    """Refuses graphs that could not be made: ranks exchange in the attention of each block."""
    spec = values["sequence_parallel"]
    if spec is None or spec.degree == 1 or not values["compile"]:
        return
    if getattr(values["compile"], "fullgraph", False):
        errors.append(
            "'compile.fullgraph' is true beside 'sequence_parallel'. Ranks exchange in the "
            "attention of each block, where a graph ends, so the first batch would fail. Leave "
            "fullgraph out."
        )
    if getattr(values["activation_checkpointing"], "mode", "full") == "selective":
        errors.append(
            "'compile' and 'activation_checkpointing.mode: selective' are set beside "
            "'sequence_parallel'. Blocks are compiled inside of what runs again there, and torch "
            "compiles nothing while it selects. Write mode: full, or leave compile out."
        )


# --- Experts. ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """Settings of expert parallelism: ranks that hold the experts of a layer, and which lists."""

    degree: int = setting(
        1, count("ranks"), "ranks that hold the experts of a layer between them; 1 is none"
    )
    modules: tuple[str, ...] = setting(
        (),
        ValueType(
            expected="auto, or a list of patterns",
            accepts=lambda value: isinstance(value, tuple),
            check_inside=check_patterns,
            parse=lambda key, raw, errors: () if raw == "auto" else one_or_more(key, raw, errors),
        ),
        "lists of experts: globs of their names, or `re:` and a regular expression; `auto` is all",
    )


EXPERT_PARALLEL = mapping(
    ExpertSpec,
    expected="null, a number or a mapping",
    others=NULL,
    parse=_number_is_degree,
    example="expert_parallel: {degree: 4}",
)


_UNTRIED_WITH_EXPERTS: _Untried = {
    **_UNTRIED_WITH_BOTH,
    "fp8": (bool, "scales would be those of one rank's tokens"),
    "compile": (bool, "how many tokens an expert gets is known on the host alone"),
    "tiled_mlp": (
        lambda given: given is not None,
        "ranks would exchange once for each tile, and have different numbers of them",
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

check_expert_parallel_together = functools.partial(
    _check_untried, "expert_parallel", _UNTRIED_WITH_EXPERTS
)
"""finds what has not been tried with it"""
