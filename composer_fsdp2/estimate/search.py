"""Searches settings of a run by what they are predicted to take.

[Note: parts] Of each way to treat activations, two sizes of a microbatch are traced, and of each
way to shard, one. Other combinations are the sum: a layout adds the same bytes whatever activations
are. The best ones are then traced themselves, and only what was traced is shown.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from composer_fsdp2.estimate.clock import Gpu, step_times
from composer_fsdp2.estimate.forecast import Forecast
from composer_fsdp2.estimate.report import HEADROOM
from composer_fsdp2.text import size_text

__all__ = ["OFFLOAD", "Choice", "SearchResult", "mesh_degrees", "search", "search_lines", "written"]

CHECKPOINTING: tuple[Any, ...] = (False, {"mode": "selective"}, True)
OFFLOAD = ("none", "optimizer", "all")
"""settings of CPU offload that a search tries"""


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


def written(choice: Choice) -> dict[str, Any]:
    """Returns the choice as keys of `parallelism_config.fsdp2`."""
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
        keys["optimizer_state"] = {"device": "cpu"}
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
        self, measure: Callable[[Choice], Forecast], ranks: int, sizes: Sequence[int], gpu: Gpu
    ) -> None:
        self._gpu, self._sizes = gpu, sizes
        self._base = Choice(shard=ranks, replicate=1, reshard="auto", checkpointing=2, rows=1)
        self.traced = functools.cache(measure)
        """returns the forecast of a choice, which is traced once"""

    def __call__(self, choice: Choice) -> tuple[float, float]:
        """Returns bytes and seconds."""
        base, level = self._base, replace(self._base, checkpointing=choice.checkpointing)
        placed = replace(base, shard=choice.shard, replicate=choice.replicate, frozen=choice.frozen)
        layout, first = (self.traced(replace(placed, reshard=choice.reshard)), self.traced(level))
        size = first.peak_bytes + layout.peak_bytes - self.traced(base).peak_bytes
        if choice.rows > 1:
            more = self.traced(replace(level, rows=self._sizes[1])).peak_bytes - first.peak_bytes
            size += more * (choice.rows - 1) / (self._sizes[1] - 1)
        size -= sum(layout.held[kind] for kind in _ON_HOST[choice.offload])
        compute = step_times(first, self._gpu).compute
        # A microbatch gathers and reduces the same bytes, whatever its size.
        beside = step_times(layout, self._gpu).beside / choice.rows
        return size, _SLOWER[choice.offload] * max(compute, beside)


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
    """
    room = memory_gib * 2**30 * (1 - HEADROOM)
    sizes = [2**power for power in range(most_rows.bit_length()) if most_rows % 2**power == 0]
    guess = _Guesses(measure, ranks, sizes, gpu)
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
    guesses = [(*guess(choice), choice) for choice in choices]
    best: list[SearchResult] = []
    lost: list[tuple[Choice, str]] = []
    for size, seconds, choice in sorted(guesses, key=lambda row: row[1]):
        if len(best) == count:
            lost.append((choice, f"it takes about {seconds:.3f} s"))
            break
        # A guess may be a little too large.
        size = guess.traced(choice).peak_bytes if size <= room * 1.05 else size
        if size > room:
            lost.append((choice, f"it takes {size_text(size)} of {size_text(room)}"))
        else:
            forecast = guess.traced(choice)
            seconds = step_times(forecast, gpu).step * _SLOWER[choice.offload]
            best.append(SearchResult(choice=choice, forecast=forecast, seconds=seconds))
    return sorted(best, key=lambda result: result.seconds), lost


def search_lines(best: Sequence[SearchResult], lost: Sequence[tuple[Choice, str]]) -> Iterator[str]:
    """Yields the best choices, and the ones that came next or would be quicker."""
    for number, result in enumerate(best, 1):
        size = size_text(result.forecast.peak_bytes)
        yield f"{number}. {result.seconds:8.3f} s {size:>10}  {result.choice}"
    if not best:
        yield "Nothing fits."
    for choice, why in [*lost[:2], *lost[2:][-1:]]:
        yield f"   not {choice}: {why}"
