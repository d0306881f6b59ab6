"""A callback that logs what FSDP2 communicates and holds in every batch."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from composer.callbacks.speed_monitor import get_gpu_flops_available
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from torch import nn

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.parallel.parallelism import experts_of
from composer_fsdp2.prepare.measured_step import MONITOR, Traffic, show
from composer_fsdp2.step.run import Run, run_of
from composer_fsdp2.text import plain_name
from composer_fsdp2.torch_private.members import check_private_members
from composer_fsdp2.torch_private.tensors import local_part

if TYPE_CHECKING:
    pass

__all__ = ["FSDP2Monitor"]


log = logging.getLogger(__name__)


class FSDP2Monitor(Callback):
    """Logs after every batch the bytes that FSDP2 communicated and held on this rank.

    Metrics, each left out where it cannot be known:

    - `fsdp2/gathered_bytes`, `fsdp2/reduced_bytes`: whole tensors in the dtype that is sent,
      padding included; reduced are reduce-scatter and all-reduce.
    - `fsdp2/collectives`: their number.
    - `fsdp2/peak_unsharded_bytes`: the most that gathered units took at one time.
    - `fsdp2/peak_allocated_bytes`: of the CUDA allocator, since the process started.
    - `fsdp2/expert_load/LAYER`: with `expert_parallel`, tokens of the expert with the most of them
      over the mean of the layer's experts, on all ranks together.
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
        flops: Any = gpu_flops_available
        is_number = isinstance(flops, int | float) and not isinstance(flops, bool)
        if flops is not None and not (is_number and flops > 0):
            raise ConfigError(
                f"gpu_flops_available of {MONITOR} is {flops!r}, which is no positive number. "
                "MFU is a fraction of it. Write the FLOP/s of one device, such as 989.5e+12, or "
                "leave it out to have it looked up."
            )
        self.gpu_flops_available = gpu_flops_available
        self._traffic: Any = None
        """a `Traffic`, once there is a model to listen to"""

    def after_load(self, state: State, logger: Logger) -> None:
        """Checks that there is something to log, and shows the plan.

        Raises:
            ConfigError: the model is not sharded by FSDP2.
            PatchError: this torch does not tell what a unit gathers.
        """
        check_private_members([MONITOR])
        # With `load_monolith_rank0_only` the model is sharded only after a checkpoint was loaded.
        run = run_of(state.model)
        if run is None:
            raise ConfigError(
                f"The callback FSDP2Monitor (`{MONITOR}`) is on, but the model is not sharded by "
                "FSDP2. There are no units to count the traffic of, so it would log nothing. Write "
                "parallelism_config: {fsdp2: {}}, or remove the callback."
            )
        if dist.get_global_rank() == 0:
            show(describe_sharding(state.model, run))
        if self.gpu_flops_available is None:
            self.gpu_flops_available = get_gpu_flops_available(state)
        self._traffic = Traffic(run)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Starts to listen to the units; a training that failed may have left the listener."""
        self.close(state, logger)
        self._traffic.run.listen(self._traffic)

    def batch_start(self, state: State, logger: Logger) -> None:
        """Counts from here; units that are gathered now count in the peak."""
        self._traffic.begin()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Logs the counts of the batch. With one rank there is no traffic.

        Collective: yes, over the default group, with `expert_parallel`.
        """
        metrics: dict[str, float] = dict(self._traffic.counts) if dist.get_world_size() > 1 else {}
        if state.device.name == "gpu":
            metrics["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        seconds = state.timestamp.batch_wct.total_seconds()
        flops = getattr(state.model, "flops_per_batch", None)
        if flops is not None and self.gpu_flops_available and seconds:
            metrics["mfu"] = float(flops(state.batch)) / (seconds * self.gpu_flops_available)
        layers = {name: experts_of(module) for name, module in state.model.named_modules()}
        experts = {name: layer for name, layer in layers.items() if layer is not None}
        if experts:
            # How unevenly the tokens were shared between the experts of each layer; 1 is even.
            tokens = torch.cat([layer.take_load() for layer in experts.values()])
            dist.all_reduce(tokens)
            parts = tokens.split([layer.count for layer in experts.values()])
            loads = [part.max() / part.sum().clamp(min=1) * len(part) for part in parts]
            for name, load in zip(experts, torch.stack(loads).tolist(), strict=True):
                metrics[f"expert_load/{plain_name(name)}"] = load
        logger.log_metrics({f"fsdp2/{name}": value for name, value in metrics.items()})

    def fit_end(self, state: State, logger: Logger) -> None:
        """Stops to hear of the units."""
        self.close(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        """Stops to hear of the units, after a training that failed too."""
        if self._traffic is not None:
            self._traffic.run.stop_listening(self._traffic)


def describe_sharding(model: nn.Module, run: Run) -> str:
    """Returns a line about the plan and about this rank's part of the model."""
    units = [unit for unit in run.plan.units if unit.params]
    local = sum(local_part(param).nbytes for param in model.parameters())
    reshard = Counter(str(unit.reshard_after_forward).lower() for unit in units)
    return (
        f"FSDP2: {len(units)} units, {sum(unit.numel for unit in units):,} parameters, "
        f"{local / 2**20:,.1f} MiB of them on this rank, "
        f"mesh {run.shape.describe()}, "
        f"reshard_after_forward {', '.join(f'{how} in {n}' for how, n in reshard.items())}"
    )
