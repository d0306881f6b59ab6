"""Writes a forecast as text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from composer_fsdp2.estimate.clock import Gpu, step_times
from composer_fsdp2.estimate.forecast import Forecast
from composer_fsdp2.text import size_text

__all__ = ["comparison_lines", "fits", "forecast_lines", "verdict"]

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


def fits(found: Forecast, memory_gib: float) -> bool:
    """Whether a step fits in the memory of a GPU; see `HEADROOM`."""
    return found.peak_bytes <= memory_gib * 2**30 * (1 - HEADROOM)


def forecast_lines(
    found: Forecast, gpu: Gpu | None = None, memory_gib: float | None = None
) -> Iterator[str]:
    """Yields the lines of a forecast.

    Args:
        found: of a step.
        gpu: for times; none are shown without.
        memory_gib: of a GPU; nothing is compared with it if it is not known.
    """
    nodes = -(-found.ranks // found.ranks_per_node)
    yield f"\nOne step of a rank ({found.ranks} ranks on {nodes} node{'s' * (nodes != 1)}):"
    yield from _memory(found)
    if memory_gib is not None:
        yield verdict(found, memory_gib)
    if found.sent:
        many = "es" * (found.microbatches != 1)
        yield f"Sent in a step of {found.microbatches} microbatch{many}, as whole tensors:"
        for sent in found.sent:
            yield _row(sent.kind, sent.size_bytes) + f"  {sent.calls} times, {sent.axis}"
    if gpu is not None and found.flops:
        times = step_times(found, gpu)
        yield (
            f"Time at half of {gpu.flops / 1e12:g} TFLOP/s, {gpu.inside / 1e9:g} GB/s inside a "
            f"node and {gpu.across / 1e9:g} across: compute {times.compute:.3f} s, collectives "
            f"beside it {times.beside:.3f} s and between {times.between:.3f} s, step "
            f"{times.step:.3f} s."
        )
    for note in found.notes:
        yield f"note: {note}"


def _memory(found: Forecast) -> Iterator[str]:
    for kind, size in found.held.items():
        if size:
            yield _row(NAMES[kind], size) + "  in CPU memory" * (kind in found.on_host)
    if found.kept is None:
        return
    for kind in ("activations", "logits"):
        if found.kept.get(kind, 0) > 0:
            yield _row(f"{NAMES[kind]}, after forward", found.kept[kind])
    yield _row("gathered units at most", found.gathered_bytes)
    yield _row("peak", found.peak_bytes) + f"  {found.moment}"
    for kind, name in NAMES.items():
        if found.peak.get(kind):
            yield _row(f"  {name}", found.peak[kind])


def verdict(found: Forecast, memory_gib: float) -> str:
    """Returns whether a step fits in a GPU, as a sentence."""
    word, size = "does not fit", size_text(found.peak_bytes)
    if fits(found, memory_gib):
        word = "is not known to fit" if found.kept is None else "fits"
    return (
        f"It {word} in {memory_gib:g} GiB: a step takes {size}, and CUDA, NCCL and gaps between "
        f"tensors about {memory_gib * HEADROOM:.0f} GiB."
    )


def _row(name: str, size: float) -> str:
    return f"  {name:<36}{size_text(size):>11}"


def comparison_lines(key: str, found: Sequence[tuple[str, Forecast]], gpu: Gpu) -> Iterator[str]:
    """Yields a table with a line for each value of a setting.

    Args:
        key: the setting.
        found: values as they are written, with their forecasts.
        gpu: for times.
    """
    width = max(len(key), *(len(value) for value, _ in found))
    head = ("peak", "state", "activations", "gathered", "sent", "across", "step")
    yield f"{key:<{width}}" + "".join(f"{name:>12}" for name in head)
    for value, one in found:
        kept, wires = one.kept or {}, [(s.wire_bytes, s.axis.nodes > 1) for s in one.sent]
        sizes = (
            one.peak_bytes,
            sum(one.held.values()),
            sum(max(0, kept.get(kind, 0)) for kind in ("activations", "logits")),
            one.gathered_bytes,
            sum(size for size, _ in wires),
            sum(size for size, is_across in wires if is_across),
        )
        cells = [*map(size_text, sizes), f"{step_times(one, gpu).step:.3f} s"]
        yield f"{value:<{width}}" + "".join(f"{cell:>12}" for cell in cells)
