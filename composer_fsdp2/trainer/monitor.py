"""A callback that logs what FSDP2 communicates and holds in every batch."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import Counter
from typing import Any

import torch
from composer.callbacks.speed_monitor import get_gpu_flops_available
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.runtime.traffic import TrafficMeter
from composer_fsdp2.shard.torch_private.watching import watching
from composer_fsdp2.trainer.sharding import Sharding, sharding_of

__all__ = ["NAME", "FSDP2Monitor"]

NAME = "fsdp2_monitor"
"""in LLM Foundry's registry of callbacks"""

log = logging.getLogger(__name__)


class FSDP2Monitor(Callback):
    """Logs after every batch what FSDP2 communicated and held on this rank.

    Metrics, each left out where it cannot be known:

    - `fsdp2/gathered_bytes`, `fsdp2/reduced_bytes`: whole tensors in the dtype that is sent,
      padding included; reduced are reduce-scatter and all-reduce.
    - `fsdp2/collectives`: their number.
    - `fsdp2/peak_unsharded_bytes`: the most that gathered units took at one time.
    - `fsdp2/exposed_communication_seconds`: how long computation waited for collectives (CUDA).
    - `fsdp2/peak_allocated_bytes`: of the CUDA allocator, since the process started.
    - `fsdp2/mfu`: as SpeedMonitor defines it, of this rank and the last batch.

    What runs between batches, such as an evaluation, is not counted. On rank 0 a line about the
    plan is shown when the Trainer is built.

    Args:
        gpu_flops_available: peak of one device in FLOP/s, for MFU; looked up in Composer's table by
            default.

    Raises:
        ConfigError: `gpu_flops_available` is no positive number.

    Source: MFU is that of PaLM, appendix B, https://arxiv.org/abs/2204.02311, as Composer computes
    it: https://github.com/mosaicml/composer/blob/v0.32.1/composer/callbacks/speed_monitor.py

    Example:
        >>> from composer_fsdp2 import FSDP2Monitor
        >>> FSDP2Monitor(gpu_flops_available=989.5e12).gpu_flops_available
        989500000000000.0
    """

    def __init__(self, gpu_flops_available: float | None = None) -> None:
        if gpu_flops_available is not None:
            _check_flops(gpu_flops_available)
        self.gpu_flops_available = gpu_flops_available
        self._meter: TrafficMeter | None = None
        self._watching = contextlib.ExitStack()

    def after_load(self, state: State, logger: Logger) -> None:
        """Checks that there is something to log, and shows the plan.

        Raises:
            ConfigError: the model is not sharded by FSDP2.
        """
        # With `load_monolith_rank0_only` the model is sharded only after a checkpoint was loaded.
        sharding = sharding_of(state.model)
        if sharding is None:
            raise ConfigError(
                f"The callback FSDP2Monitor (`{NAME}`) is on, but the model is not sharded by "
                "FSDP2. There are no units to count the traffic of, so it would log nothing. Write "
                "parallelism_config: {fsdp2: {}}, or remove the callback."
            )
        if dist.get_global_rank() == 0:
            _show(describe_sharding(state.model, sharding))
        if self.gpu_flops_available is None:
            self.gpu_flops_available = get_gpu_flops_available(state)
        self._meter = TrafficMeter(state.model, sharding.plan)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Starts to watch; until then, and after the training, nothing is slowed down."""
        assert self._meter is not None
        self._watching.close()  # a training that failed did not
        self._watching.enter_context(self._meter.following())
        self._watching.enter_context(watching(self._meter))

    def batch_start(self, state: State, logger: Logger) -> None:
        """Counts from here."""
        assert self._meter is not None
        self._meter.begin()

    def after_backward(self, state: State, logger: Logger) -> None:
        """FSDP has given up what it gathered and nobody used."""
        assert self._meter is not None
        self._meter.settle()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Logs what was counted."""
        assert self._meter is not None
        found = {**_traffic(self._meter), **_memory(state), **self._efficiency(state)}
        logger.log_metrics({f"fsdp2/{name}": value for name, value in found.items()})

    def fit_end(self, state: State, logger: Logger) -> None:
        """Stops watching."""
        self._watching.close()

    def close(self, state: State, logger: Logger) -> None:
        """Stops watching, after a training that failed too."""
        self._watching.close()

    def _efficiency(self, state: State) -> dict[str, float]:
        """MFU, where the model knows its FLOPs and the device its peak."""
        seconds = state.timestamp.batch_wct.total_seconds()
        count = getattr(state.model, "flops_per_batch", None)
        if count is None or not self.gpu_flops_available or not seconds:
            return {}
        return {"mfu": float(count(state.batch)) / (seconds * self.gpu_flops_available)}


def _check_flops(flops: Any) -> None:
    if isinstance(flops, bool) or not isinstance(flops, int | float) or not flops > 0:
        raise ConfigError(
            f"gpu_flops_available of {NAME} is {flops!r}, which is no positive number. MFU is a "
            "fraction of it. Write the FLOP/s of one device, such as 989.5e+12, or leave it out to "
            "have it looked up."
        )


def describe_sharding(model: nn.Module, sharding: Sharding) -> str:
    """A line about the plan and about what this rank holds of the model."""
    units = [unit for unit in sharding.plan.units if unit.params]
    local = sum(_local_bytes(param) for param in model.parameters())
    reshard = Counter(str(unit.reshard_after_forward).lower() for unit in units)
    return (
        f"FSDP2: {len(units)} units, {sum(unit.numel for unit in units):,} parameters, "
        f"{local / 2**20:,.1f} MiB of them on this rank, "
        f"mesh {sharding.shape.describe()}, "
        f"reshard_after_forward {', '.join(f'{how} in {n}' for how, n in reshard.items())}"
    )


def _local_bytes(param: torch.Tensor) -> int:
    return (param.to_local() if isinstance(param, DTensor) else param).nbytes


def _show(line: str) -> None:
    """The callback was asked for, so it is shown even where nobody set up logging."""
    if log.isEnabledFor(logging.INFO):
        log.info(line)
    else:
        print(line, file=sys.stderr, flush=True)


def _traffic(meter: TrafficMeter) -> dict[str, float]:
    """Returns the meter's counts; none where it saw no collective, as with one rank."""
    if not meter.collectives:
        return {}
    found: dict[str, float] = {
        "gathered_bytes": meter.gathered_bytes,
        "reduced_bytes": meter.reduced_bytes,
        "collectives": meter.collectives,
        "peak_unsharded_bytes": meter.peak_unsharded_bytes,
    }
    exposed = meter.exposed_seconds()
    return found if exposed is None else {**found, "exposed_communication_seconds": exposed}


def _memory(state: State) -> dict[str, float]:
    if state.device.name != "gpu":
        return {}
    return {"peak_allocated_bytes": torch.cuda.max_memory_allocated()}
