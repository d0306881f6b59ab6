"""Settings of tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from composer_fsdp2.config.messages import ascii_repr, invalid_value
from composer_fsdp2.config.setting import ValueType, setting
from composer_fsdp2.config.value_types import count, is_string, mapping

__all__ = ["STYLES", "TENSOR_PARALLEL", "TensorSpec", "check_tensor_parallel_together"]

STYLES = ("colwise", "colwise_rep", "rowwise", "whole")
"""how a layer of a `layer_plan` is divided"""

_NAMES_OF_DEGREE = ("degree", "tensor_parallel_degree")


def _is_plan(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in value)


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
                f"'{key}' gives {ascii_repr(pattern)} the style {shown}. It is not known how its "
                f"gradients add up, so it is refused. Write one of {', '.join(STYLES)}."
            )


_PLAN = ValueType(
    expected="a mapping of module names to styles",
    accepts=_is_plan,
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


def _with_composers_names(_key: str, raw: Any, _errors: list[str]) -> Any:
    """A number is the degree; `tensor_parallel_degree` is what Composer calls it."""
    if isinstance(raw, int) and not isinstance(raw, bool):
        return {"degree": raw}
    if not isinstance(raw, Mapping):
        return raw
    return {"degree" if key in _NAMES_OF_DEGREE else key: value for key, value in raw.items()}


TENSOR_PARALLEL = mapping(
    TensorSpec,
    expected="null, a number or a mapping",
    others=lambda value: value is None,
    parse=_with_composers_names,
    example="tensor_parallel: {degree: 2}",
)

_UNTRIED: Mapping[str, str] = {
    "activation_checkpointing": "recomputed layers would have to exchange again in the same order",
    "activation_cpu_offload": "what is offloaded belongs to divided layers",
    "chunked_loss": "its head may be divided",
    "compile": "the compiler has not been tried on divided layers",
    "cpu_offload": "divided layers exchange on the device",
    "data_parallel_replicate_degree": "copies have not been tried on a mesh with three axes",
    "fp8": "its scales would be those of one rank's part",
    "ignored_params": "they are in no unit",
    "pretrained_weights": "they are read as shards over one axis",
    "tiled_mlp": "each tile would exchange again",
}
"""Settings that have not been tried with tensor parallelism, and why they may be wrong."""


def check_tensor_parallel_together(values: Mapping[str, Any], errors: list[str]) -> None:
    """Refuses what has not been tried with it; see `_UNTRIED`."""
    spec = values["tensor_parallel"]
    if spec is None or spec.degree == 1:
        return
    for name, why in _UNTRIED.items():
        if values.get(name):
            errors.append(
                f"'{name}' and 'tensor_parallel' are both set. They have not been tried together: "
                f"{why}. Leave one of them out."
            )
