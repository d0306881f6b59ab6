"""Settings of sequence parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from composer_fsdp2.config.setting import setting
from composer_fsdp2.config.value_types import choice, count, mapping

__all__ = ["SEQUENCE_PARALLEL", "SequenceSpec", "check_sequence_parallel_together"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """How many ranks divide each sequence, and what they exchange in attention."""

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


def _number_is_degree(_key: str, raw: Any, _errors: list[str]) -> Any:
    is_number = isinstance(raw, int) and not isinstance(raw, bool)
    return {"degree": raw} if is_number else raw


SEQUENCE_PARALLEL = mapping(
    SequenceSpec,
    expected="null, a number or a mapping",
    others=lambda value: value is None,
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
