"""Searches settings of a run by what they are predicted to take.

[Note: parts] Of each way to treat activations, two sizes of a microbatch are traced, and of each
way to shard, one. Other combinations are the sum: a layout adds the same bytes whatever activations
are. The best ones are then traced themselves, and only what was traced is shown.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.estimate.clock import Gpu, step_times
from composer_fsdp2.estimate.forecast import Forecast
from composer_fsdp2.estimate.report import HEADROOM
from composer_fsdp2.text import size_text

__all__ = ["OFFLOAD", "Choice", "SearchResult", "mesh_degrees", "search", "search_lines", "written"]

CHECKPOINTING: tuple[Any, ...] = (False, {"mode": "selective"}, True)
OFFLOAD = ("none", "optimizer", "all")
"""settings of CPU offload that a search tries"""
_SHOWN_REFUSALS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Holds the settings of one run that a search varies."""

    shard: int
    replicate: int
    reshard: bool | int | str
    checkpointing: int
    """place in `CHECKPOINTING`"""
    rows: int
    """samples of a microbatch"""
    offload: str = "none"
    frozen: str = "shard"

    def __str__(self) -> str:
        recomputed = ("none", "selective", "all")[self.checkpointing]
        text = (
            f"shard {self.shard} x replicate {self.replicate}, reshard "
            f"{str(self.reshard).lower()}, recompute {recomputed}, microbatch {self.rows}"
        )
        text += f", offload {self.offload}" * (self.offload != "none")
        return text + ", frozen replicate" * (self.frozen == "replicate")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Holds a choice with its forecast."""

    choice: Choice
    forecast: Forecast
    seconds: float


def written(choice: Choice, optimizer_state: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the choice as keys of `parallelism_config.fsdp2`.

    Args:
        choice: settings that replace those of the run.
        optimizer_state: that of the run, whose dtype or bits stay.
    """
    keys: dict[str, Any] = {
        "data_parallel_shard_degree": choice.shard,
        "data_parallel_replicate_degree": choice.replicate if choice.replicate > 1 else None,
        "reshard_after_forward": choice.reshard,
        "activation_checkpointing": CHECKPOINTING[choice.checkpointing],
        "frozen": choice.frozen,
    }
    if choice.offload == "all":
        keys["cpu_offload"] = True
    elif choice.offload == "optimizer":
        keys["optimizer_state"] = {**(optimizer_state or {}), "device": "cpu"}
    return keys


def mesh_degrees(ranks: int, per_node: int) -> list[tuple[int, int, bool | int | str]]:
    """Returns shards, replicas and resharding, for every number of shards that fills nodes."""
    shards = [
        shard
        for shard in range(1, ranks + 1)
        if ranks % shard == 0 and (shard % per_node == 0 or per_node % shard == 0)
    ]
    return [
        (shard, ranks // shard, reshard)
        for shard in shards
        for reshard in ("auto", False, *([per_node] if shard > per_node else []))
    ]


class _Guesses:
    """Guesses memory and time of a choice; see [Note: parts]."""

    def __init__(
        self,
        measure: Callable[[Choice], Forecast],
        bases: Sequence[Choice],
        sizes: Sequence[int],
        gpu: Gpu,
    ) -> None:
        self._measure, self._gpu, self._sizes = measure, gpu, sizes
        self._forecasts: dict[Choice, Forecast | None] = {}
        self.refusals: dict[Choice, ConfigError | PlanError] = {}
        self._base = next((base for base in bases if self.traced(base)), bases[0])
        if self._base in self.refusals:
            raise self.refusals[self._base]

    def traced(self, choice: Choice) -> Forecast | None:
        """Returns the forecast of a choice, which is traced once; `None` if the run refuses it."""
        if choice not in self._forecasts:
            try:
                self._forecasts[choice] = self._measure(choice)
            except (ConfigError, PlanError) as error:
                self._forecasts[choice], self.refusals[choice] = None, error
        return self._forecasts[choice]

    def __call__(self, choice: Choice) -> tuple[float, float] | None:
        """Returns bytes and seconds; `None` if the run refuses a part of the choice."""
        base, level = self._base, replace(self._base, checkpointing=choice.checkpointing)
        placed = replace(base, shard=choice.shard, replicate=choice.replicate, frozen=choice.frozen)
        rows = self._sizes[1] if choice.rows > 1 else base.rows
        parts = (replace(placed, reshard=choice.reshard), level, replace(level, rows=rows), base)
        layout, first, several, whole = map(self.traced, parts)
        if layout is None or first is None or several is None or whole is None:
            return None
        size = first.peak_bytes + layout.peak_bytes - whole.peak_bytes
        if rows > 1:
            more = several.peak_bytes - first.peak_bytes
            size += more * (choice.rows - 1) / (rows - 1)
        size -= sum(layout.held[kind] for kind in _ON_HOST[choice.offload])
        compute = step_times(first, self._gpu).compute
        # A microbatch gathers and reduces the same bytes, whatever its size.
        beside = step_times(layout, self._gpu).beside / choice.rows
        return size, _SLOWER[choice.offload] * max(compute, beside)

    def reasons(self) -> list[tuple[Choice, str]]:
        """Returns a refused choice for each of the first errors."""
        texts = {choice: " ".join(str(error).split()) for choice, error in self.refusals.items()}
        first = {text: choice for choice, text in reversed(texts.items())}
        return [(choice, text) for text, choice in first.items()][-_SHOWN_REFUSALS:]


_ON_HOST: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "optimizer": ("optimizer",),
    "all": ("optimizer", "parameters", "gradients"),
}
_SLOWER: Mapping[str, float] = {"none": 1.0, "optimizer": 1.1, "all": 1.5}
"""a step whose state comes from CPU memory; nobody has measured it"""


def search(
    measure: Callable[[Choice], Forecast],
    *,
    ranks: int,
    per_node: int,
    most_rows: int,
    gpu: Gpu,
    memory_gib: float,
    offloads: Sequence[str] = OFFLOAD,
    frozen: Sequence[str] = ("shard",),
    count: int = 5,
) -> tuple[list[SearchResult], list[tuple[Choice, str]]]:
    """Returns the best choices that fit, and the reasons against other choices.

    A choice that other settings of the run refuse is left out, with the error as its reason.

    Args:
        measure: traces a step of a choice, which takes seconds.
        ranks: that hold the model; those of a tensor group count once.
        per_node: ranks of a node, counted likewise.
        most_rows: samples of a rank in a step: the largest microbatch.
        gpu: ranks choices by seconds.
        memory_gib: memory of a GPU in GiB, of which a part stays free.
        offloads: kinds of state in CPU memory that the run allows, the cheapest first.
        frozen: values of the setting that the run allows.
        count: choices that are returned at most.

    Raises:
        PlanError: every choice is refused.
        ConfigError: likewise.
    """
    room = memory_gib * 2**30 * (1 - HEADROOM)
    sizes = [2**power for power in range(most_rows.bit_length()) if most_rows % 2**power == 0]
    choices = [
        Choice(
            shard=shard,
            replicate=replicate,
            reshard=reshard,
            checkpointing=checkpointing,
            rows=rows,
            offload=offload,
            frozen=place,
        )
        for (shard, replicate, reshard), checkpointing, rows, offload, place in itertools.product(
            mesh_degrees(ranks, per_node), range(len(CHECKPOINTING)), sizes, offloads, frozen
        )
        if (place, offload) != ("replicate", "all")
    ]
    base = {"reshard": "auto", "rows": 1, "offload": offloads[0], "frozen": frozen[0]}
    # The last has the most shards, and recomputes all.
    bases = [choice for choice in reversed(choices) if choice == replace(choice, **base)]
    guess = _Guesses(measure, bases, sizes, gpu)
    guesses = [(*parts, choice) for choice in choices if (parts := guess(choice))]
    best: list[SearchResult] = []
    lost: list[tuple[Choice, str]] = []
    for size, seconds, choice in sorted(guesses, key=lambda row: row[1]):
        if len(best) == count:
            lost.append((choice, f"it takes about {seconds:.3f} s"))
            break
        # A guess may be a little too large.
        forecast = guess.traced(choice) if size <= room * 1.05 else None
        size = size if forecast is None else forecast.peak_bytes
        if size > room:
            lost.append((choice, f"it takes {size_text(size)} of {size_text(room)}"))
        elif forecast is not None:
            seconds = step_times(forecast, gpu).step * _SLOWER[choice.offload]
            best.append(SearchResult(choice=choice, forecast=forecast, seconds=seconds))
    lost = [*lost[:2], *lost[2:][-1:], *guess.reasons()]
    return sorted(best, key=lambda result: result.seconds), lost


def search_lines(best: Sequence[SearchResult], lost: Sequence[tuple[Choice, str]]) -> Iterator[str]:
    """Yields the best choices, and the ones that came next or would be quicker."""
    for number, result in enumerate(best, 1):
        size = size_text(result.forecast.peak_bytes)
        yield f"{number}. {result.seconds:8.3f} s {size:>10}  {result.choice}"
    if not best:
        yield "Nothing fits."
    for choice, why in lost:
        yield f"   not {choice}: {why}"
