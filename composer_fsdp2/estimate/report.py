"""Writes a forecast as text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from composer_fsdp2.config.schema import FSDP2Config
from composer_fsdp2.estimate.clock import Gpu, Times, preparing_seconds, step_times
from composer_fsdp2.estimate.forecast import Forecast
from composer_fsdp2.text import size_text

__all__ = [
    "Batch",
    "answer_lines",
    "comparison_lines",
    "fits",
    "forecast_lines",
    "preparing_text",
    "verdict",
]

_MANY_SHARDS = 512
"""shard ranks over which the time of preparing is said"""

NAMES = {
    "parameters": "parameters",
    "buffers": "buffers",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "gathered": "gathered units",
    "activations": "activations",
    "logits": "logits and loss",
    "backward": "gradients on their way, temporary",
    "step": "the optimizer's step",
    "other": "batch",
}
"""kinds of memory, in the order of the table"""
HEADROOM = 0.08
"""share of a GPU's memory for CUDA, NCCL and gaps between tensors, which no trace has"""


def fits(forecast: Forecast, memory_gib: float) -> bool:
    """Whether a step fits in the memory of a GPU; see `HEADROOM`."""
    return forecast.peak_bytes <= memory_gib * 2**30 * (1 - HEADROOM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows that a step of the run reads."""

    rows: int
    """of the whole step"""
    microbatch: int
    """rows of a rank at a time"""
    length: int
    """tokens of a row"""


def answer_lines(
    forecast: Forecast,
    settings: FSDP2Config,
    batch: Batch,
    gpu: Gpu | None = None,
    memory_gib: float | None = None,
    *,
    first: str = "",
) -> Iterator[str]:
    """Yields the short answer: whether the step fits, its tokens, its seconds, a change to try.

    Args:
        forecast: bytes and FLOPs of the step.
        settings: of the forecast; changes to them are proposed.
        batch: rows of the step over all ranks, rows of a microbatch, tokens of a row.
        gpu: gives seconds and tokens a second; neither is shown without it.
        memory_gib: memory of a GPU in GiB; `None` leaves out whether the step fits.
        first: a change to try before all that follow from the bytes.
    """
    size, moment = size_text(forecast.peak_bytes), f"most in {forecast.moment}"
    times = step_times(forecast, gpu) if gpu is not None and forecast.flops else None
    if memory_gib is None:
        yield f"A step takes {size}, {moment}. Give --gpu to see whether that fits, and seconds."
    else:
        yield verdict(forecast, memory_gib)
    tokens = batch.rows * batch.length
    nodes = -(-forecast.ranks // forecast.ranks_per_node)
    many = "es" * (forecast.microbatches != 1)
    yield (
        f"Tokens: {tokens:,} a step, on each of {forecast.ranks} ranks ({nodes} "
        f"node{'s' * (nodes != 1)}) {forecast.microbatches} microbatch{many} of {batch.microbatch} "
        f"x {batch.length:,}."
    )
    if times is not None and gpu is not None:
        most = max(forecast.sent, key=lambda sent: sent.wire_bytes, default=None)
        waits = f"{times.exposed:.3f} s in which collectives are waited for"
        if most is not None and times.exposed > 0.1 * times.step:
            waits += f", most of all {most.kind} of {most.axis}"
        yield (
            f"Seconds: {times.step:.3f} a step, {tokens / times.step / forecast.ranks:,.0f} tokens "
            f"a second and GPU: {times.compute:.3f} s of compute at half of {gpu.flops / 1e12:g} "
            f"TFLOP/s, {waits}."
        )
    if memory_gib is None:
        return
    if change := first or _change(forecast, settings, batch, times, memory_gib):
        yield f"Try first: {change}"


def _change(
    forecast: Forecast, settings: FSDP2Config, batch: Batch, times: Times | None, memory_gib: float
) -> str | None:
    """Returns a setting that relieves the scarcest of memory and time, and why."""
    if forecast.kept is None:
        return None
    if not fits(forecast, memory_gib):
        parts = {
            "state": sum(forecast.peak.get(k, 0) for k in ("parameters", "gradients", "optimizer")),
            "activations": forecast.peak.get("activations", 0),
            "logits and gradients on their way": sum(
                forecast.peak.get(kind, 0) for kind in ("logits", "backward")
            ),
            "gathered units": forecast.peak.get("gathered", 0),
        }
        name = max(parts, key=parts.__getitem__)
        why = f"{name} take {parts[name] / forecast.peak_bytes:.0%} of the peak."
        shard = "data_parallel_shard_degree: -1 and data_parallel_replicate_degree: null"
        logits = name.startswith("logits")
        changes = (
            (name == "activations" and not settings.activation_checkpointing)
            and "activation_checkpointing: true",
            (logits and settings.chunked_loss is None) and "chunked_loss: true",
            ((logits or name == "activations") and batch.microbatch > 1)
            and f"device_train_microbatch_size: {batch.microbatch // 2}",
            (name == "state" and (settings.data_parallel_replicate_degree or 1) != 1) and shard,
            name == "state" and f"more ranks (--gpus {2 * forecast.ranks}), or cpu_offload: true",
            name == "activations" and "sequence_parallel: {degree: 2}",
            "tp: {degree: 2}, or ep beside it for experts",
        )
        return f"{next(filter(None, changes))}; {why}"
    room = memory_gib * 2**30 * (1 - HEADROOM) - forecast.peak_bytes
    activations = sum(forecast.peak.get(kind, 0) for kind in ("activations", "logits", "backward"))
    waits = times is not None and times.exposed > 0.1 * times.step
    if waits and forecast.microbatches > 1 and activations < room:
        return (
            f"device_train_microbatch_size: {2 * batch.microbatch}, which halves gathers and "
            f"reductions, for about {size_text(activations)} more."
        )
    if (
        waits
        and forecast.ranks > forecast.ranks_per_node
        and not settings.data_parallel_replicate_degree
    ):
        more = sum(forecast.held.values()) * (forecast.ranks / forecast.ranks_per_node - 1)
        if more < room:
            return (
                f"data_parallel_shard_degree: {forecast.ranks_per_node} and "
                "data_parallel_replicate_degree: -1, which gather inside a node alone, for "
                f"{size_text(more)} more."
            )
    if settings.activation_checkpointing is True and room > forecast.peak_bytes:
        return (
            "activation_checkpointing: {mode: selective}, or false: a step computes less, and "
            f"{size_text(room)} are free."
        )
    return None


def forecast_lines(forecast: Forecast, gpu: Gpu | None = None) -> Iterator[str]:
    """Yields the lines of a forecast; seconds only with a `gpu`."""
    nodes = -(-forecast.ranks // forecast.ranks_per_node)
    yield f"\nOne step of a rank ({forecast.ranks} ranks on {nodes} node{'s' * (nodes != 1)}):"
    yield from (
        _row(NAMES[kind], size) + "  in CPU memory" * (kind in forecast.on_host)
        for kind, size in forecast.held.items()
        if size
    )
    if (kept := forecast.kept) is not None:
        for kind in ("activations", "logits"):
            if kept.get(kind, 0) > 0:
                yield _row(f"{NAMES[kind]}, after forward", kept[kind])
        yield _row("gathered units at most", forecast.gathered_bytes)
        yield _row("peak", forecast.peak_bytes) + f"  {forecast.moment}"
        peak = forecast.peak
        yield from (_row(f"  {name}", peak[k]) for k, name in NAMES.items() if peak.get(k))
    if forecast.sent:
        many = "es" * (forecast.microbatches != 1)
        yield f"Sent in a step of {forecast.microbatches} microbatch{many}, as whole tensors:"
        for sent in forecast.sent:
            yield _row(sent.kind, sent.size_bytes) + f"  {sent.calls} times, {sent.axis}"
    if gpu is not None and forecast.flops:
        times = step_times(forecast, gpu)
        yield (
            f"Time at half of {gpu.flops / 1e12:g} TFLOP/s, {gpu.inside / 1e9:g} GB/s inside a "
            f"node and {gpu.across / 1e9:g} across: compute {times.compute:.3f} s, collectives "
            f"beside it {times.beside:.3f} s and between {times.between:.3f} s, step "
            f"{times.step:.3f} s."
        )
    for note in forecast.notes:
        yield f"note: {note}"


def preparing_text(units: int, shard_ranks: int) -> str | None:
    """Returns a sentence about the time that many shard ranks take; `None` for few ranks."""
    if shard_ranks < _MANY_SHARDS:
        return None
    seconds, few = (preparing_seconds(units, ranks) for ranks in (shard_ranks, 64))
    return (
        f"To prepare {units} units over {shard_ranks:,} shard ranks takes torch 2.7 about "
        f"{seconds:.1f} CPU seconds on each rank, over 64 ranks {few:.1f}."
    )


def verdict(forecast: Forecast, memory_gib: float) -> str:
    """Returns whether a step fits in a GPU, as a sentence."""
    word, size = "does not fit", size_text(forecast.peak_bytes)
    if fits(forecast, memory_gib):
        word = "is not known to fit" if forecast.kept is None else "fits"
    return (
        f"It {word} in {memory_gib:g} GiB: a step takes {size} (2 % off where a GPU was measured), "
        f"and CUDA, NCCL and gaps between tensors about {memory_gib * HEADROOM:.0f} GiB."
    )


def _row(name: str, size: float) -> str:
    return f"  {name:<36}{size_text(size):>11}"


def comparison_lines(
    key: str, forecasts: Sequence[tuple[str, Forecast]], gpu: Gpu
) -> Iterator[str]:
    """Yields a table with a line for each value of a setting.

    Args:
        key: the setting, dotted as on the command line.
        forecasts: values as they are written, with their forecasts.
        gpu: gives the seconds of the last column.
    """
    width = max(len(key), *(len(value) for value, _ in forecasts))
    head = ("peak", "state", "activations", "gathered", "sent", "across", "step")
    yield f"{key:<{width}}" + "".join(f"{name:>12}" for name in head)
    for value, forecast in forecasts:
        after_forward, wires = (
            forecast.kept or {},
            [(s.wire_bytes, s.axis.nodes > 1) for s in forecast.sent],
        )
        sizes = (
            forecast.peak_bytes,
            sum(forecast.held.values()),
            sum(max(0, after_forward.get(kind, 0)) for kind in ("activations", "logits")),
            forecast.gathered_bytes,
            sum(size for size, _ in wires),
            sum(size for size, is_across in wires if is_across),
        )
        cells = [*map(size_text, sizes), f"{step_times(forecast, gpu).step:.3f} s"]
        yield f"{value:<{width}}" + "".join(f"{cell:>12}" for cell in cells)
