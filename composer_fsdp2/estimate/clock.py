"""Predicts the time of a step from its bytes and FLOPs. Pure.

[Note: time] Compute takes FLOPs / (peak x MFU). A collective takes its bytes on the wire in a ring,
divided by the bandwidth of a GPU inside its node, or across nodes where its ranks lie on several,
and a latency for each call. Gathers and reductions of FSDP2 run beside compute, so only what is
longer is exposed. Exchanges of tensor, sequence and expert parallelism and of the optimizer stand
in its way. The constants are those that vendors publish: compare layouts with them, not clocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.estimate.forecast import Forecast

__all__ = ["GPUS", "Gpu", "Times", "gpu_named", "preparing_seconds", "step_times"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Holds published figures of a GPU and its connections."""

    memory_gib: float
    flops: float
    """dense, in bf16"""
    inside: float
    """bytes a second in one direction to the other GPUs of a node"""
    across: float = 50e9
    """bytes a second of a GPU to other nodes: 400 Gbit/s"""
    latency: float = 20e-6
    """seconds of a collective without bytes"""


GPUS: Mapping[str, Gpu] = {
    "A100-40GB": Gpu(memory_gib=39.4, flops=312e12, inside=300e9, across=25e9),
    "A100-80GB": Gpu(memory_gib=79.2, flops=312e12, inside=300e9, across=25e9),
    "H100": Gpu(memory_gib=79.1, flops=989.5e12, inside=450e9),
    "H200": Gpu(memory_gib=139.8, flops=989.5e12, inside=450e9),
    "B200": Gpu(memory_gib=178.4, flops=2250e12, inside=900e9),
    "L40S": Gpu(memory_gib=44.4, flops=362e12, inside=32e9, across=25e9),
}
"""by the names that `--gpu` takes"""

_BESIDE_COMPUTE = {"dp_shard", "dp_replicate", "efsdp", "reshard", "all ranks"}
_OF_FSDP = {"all-gather", "reduce-scatter", "all-reduce"}


def gpu_named(name: str) -> Gpu:
    """Returns the figures of a GPU.

    Raises:
        ConfigError: nobody has written them down.
    """
    for gpu_name, gpu in GPUS.items():
        if gpu_name.lower() == name.lower():
            return gpu
    raise ConfigError(
        f"--gpu is '{name}', whose memory and speed are not known here. Nothing could be compared "
        f"with them. Write one of {', '.join(GPUS)}, or leave it out and give --gpu-memory."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one step of a rank."""

    compute: float
    beside: float
    """of collectives that run beside compute"""
    between: float
    """of collectives for which compute waits"""

    @property
    def exposed(self) -> float:
        """Returns the time in which nothing is computed."""
        return max(0.0, self.beside - self.compute) + self.between

    @property
    def step(self) -> float:
        """Returns the whole."""
        return self.compute + self.exposed


def step_times(forecast: Forecast, gpu: Gpu, mfu: float = 0.5) -> Times:
    """Predicts the time of a step; see [Note: time]. Collective: no.

    Args:
        forecast: bytes and FLOPs of the step.
        gpu: peak FLOP/s, bytes a second inside and across nodes, seconds a call.
        mfu: share of the peak FLOP/s that the kernels reach, between 0 and 1.
    """
    seconds = {True: 0.0, False: 0.0}
    for sent in forecast.sent:
        speed = gpu.inside if sent.axis.nodes == 1 else gpu.across
        is_beside = sent.kind in _OF_FSDP and sent.axis.name in _BESIDE_COMPUTE
        seconds[is_beside] += sent.wire_bytes / speed + sent.calls * gpu.latency
    return Times(
        compute=forecast.flops / (gpu.flops * mfu), beside=seconds[True], between=seconds[False]
    )


def preparing_seconds(units: int, shard_ranks: int) -> float:
    """Predicts the CPU seconds in which `fully_shard` of torch 2.7 makes units. Pure.

    For each unit torch compares all ranks of the group with each other. It also cuts each parameter
    into a piece for each rank, twice: a unit is taken to have 9 parameters, as a layer of Llama.

    Source: `benchmarks/scale.py` finds where the time goes. The first is
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/distributed_c10d.py#L5390,
    which newer torch does not do, and the second
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_common.py#L121.

    Args:
        units: number of calls of `fully_shard`.
        shard_ranks: ranks over which each parameter is cut.
    """
    return units * (5.1e-9 * shard_ranks**2 + 9 * 2 * 1.3e-6 * shard_ranks)
