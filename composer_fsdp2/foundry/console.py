"""One line an interval on the console of `composer-fsdp2 train`, in place of Composer's twenty.

The keys `progress_bar`, `log_to_console` and `console_log_interval` keep their meaning. Composer's
console logger prints every metric on a line of its own, on every rank; here rank 0 prints one line
with loss, speed, MFU, memory and time left. A progress bar in a file or a pipe is a line for every
step, so there it becomes lines at the interval.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from composer.callbacks.speed_monitor import get_gpu_flops_available
from composer.core import State, Time, TimeUnit
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist
from tqdm import tqdm

__all__ = ["NAME", "LineConsole", "one_line_console"]

NAME = "composer_fsdp2_console"
"""in LLM Foundry's registries of loggers and of config transforms"""

_INTERVAL = "console_log_interval"
_MFU = ("throughput/device/mfu", "fsdp2/mfu")


def one_line_console(cfg: dict[str, Any]) -> dict[str, Any]:
    """Puts `LineConsole` in place of Composer's console logger, and of a bar nobody could see.

    Collective: no.

    Args:
        cfg: the whole training config, plain values; stays as it is.
    """
    has_bar, has_lines = bool(cfg.get("progress_bar", False)), cfg.get("log_to_console", True)
    shows_bar = has_bar and sys.stderr.isatty()
    if not has_lines and shows_bar == has_bar:
        return cfg
    interval = cfg.get(_INTERVAL, "1ba" if has_lines else "10ba")
    loggers = {**(cfg.get("loggers") or {}), NAME: {"interval": interval}}
    return {**cfg, "progress_bar": shows_bar, "log_to_console": False, "loggers": loggers}


class LineConsole(LoggerDestination):
    """Prints a line on rank 0: place, loss, speed, MFU, memory and time left.

    What cannot be known is left out: MFU without a GPU of Composer's table, the time left before
    there are two lines.

    Args:
        interval: between two lines, as `console_log_interval`: a number of epochs, or a text such
            as 10ba.
    """

    def __init__(self, interval: int | str = "1ba") -> None:
        self.interval = Time.from_input(interval, TimeUnit.EPOCH)
        if self.interval.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH):
            raise ValueError(
                f"{_INTERVAL} is {interval!r}, and only batches and epochs are counted. Nothing "
                "would be shown. Write a number and a unit: 10ba, 1ep."
            )
        self._metrics: dict[str, Any] = {}
        self._before: _Moment | None = None
        self._started: _Moment | None = None
        self._outside_seconds = 0.0
        self._paused_at: float | None = None
        self._flops: float | None = None

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keeps the newest value of every metric."""
        self._metrics.update(metrics)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Takes the time from here, and says where a resumed run goes on."""
        self._before = self._started = self._moment(state)
        if batch := state.timestamp.batch.value:
            _show(f"goes on after batch {batch}")

    def batch_end(self, state: State, logger: Logger) -> None:
        """Prints after the first batch and at the interval."""
        batch = int(state.timestamp.batch)
        first = self._started is not None and batch == self._started.batch + 1
        due = self.interval.unit == TimeUnit.BATCH and batch % int(self.interval) == 0
        if first or due:
            self._print(state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Prints at the interval."""
        counts_epochs = self.interval.unit == TimeUnit.EPOCH
        if counts_epochs and int(state.timestamp.epoch) % int(self.interval) == 0:
            self._print(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Prints the last batch, unless that has a line."""
        if self._before is not None and int(state.timestamp.batch) > self._before.batch:
            self._print(state)

    # What is not training does not slow training down.
    def eval_start(self, state: State, logger: Logger) -> None:
        """Stops the clock."""
        self._paused_at = time.monotonic()

    def eval_end(self, state: State, logger: Logger) -> None:
        """Prints what the evaluation found, and starts the clock again."""
        if self._paused_at is not None:
            self._outside_seconds += time.monotonic() - self._paused_at
            self._paused_at = None
        prefix = f"metrics/{state.dataloader_label}/"
        found = {
            key.removeprefix(prefix): value
            for key, value in self._metrics.items()
            if key.startswith(prefix)
        }
        parts = [f"{name} {_number(value)}" for name, value in found.items()]
        _show("   ".join([f"{_place(state)}   evaluated on {state.dataloader_label}", *parts]))

    def _print(self, state: State) -> None:
        now, before = self._moment(state), self._before
        self._before = now
        parts = [_place(state)]
        loss = self._metrics.get("loss/train/total")
        if loss is not None:
            parts.append(f"loss {_number(loss)}")
        if before is not None:
            parts += _speed(before, now)
        parts += self._efficiency(state, before, now)
        parts.append(f"memory {_memory_bytes(state) / 1e9:.1f} GB")
        if self._started is not None and before is not None and before is not self._started:
            parts += _left(self._started, now)
        _show("   ".join(parts))

    def _moment(self, state: State) -> _Moment:
        return _Moment(state, time.monotonic() - self._outside_seconds)

    def _efficiency(self, state: State, before: _Moment | None, now: _Moment) -> list[str]:
        """MFU as a callback has logged it, or computed where model and GPU are known."""
        logged = next((self._metrics[name] for name in _MFU if name in self._metrics), None)
        if logged is not None:
            return [f"MFU {float(logged):.1%}"]
        count = getattr(state.model, "flops_per_batch", None)
        if count is None or before is None or not torch.cuda.is_available():
            return []
        if self._flops is None:
            self._flops = float(get_gpu_flops_available(state) or 0)
        seconds = (now.seconds - before.seconds) / max(now.batch - before.batch, 1)
        if not self._flops or seconds <= 0:
            return []
        return [f"MFU {float(count(state.batch)) / (seconds * self._flops):.1%}"]


class _Moment:
    """How far a run was at one time; the seconds are those of training."""

    def __init__(self, state: State, seconds: float) -> None:
        self.seconds = seconds
        self.batch = int(state.timestamp.batch)
        self.tokens = int(state.timestamp.token)
        self.samples = int(state.timestamp.sample)
        self.done = _share_done(state)


def _share_done(state: State) -> float | None:
    """The share of the run that is done, from 0 to 1; epochs count by their batches."""
    total = state.max_duration
    if total is None:
        return None
    done = float(state.timestamp.get(total.unit).value)
    if total.unit == TimeUnit.EPOCH and state.dataloader_len is not None:
        done += int(state.timestamp.batch_in_epoch) / int(state.dataloader_len)
    return min(done / total.value, 1.0) if total.value else None


def _place(state: State) -> str:
    total = state.max_duration
    batch = int(state.timestamp.batch)
    if total is None or total.unit == TimeUnit.BATCH:
        return f"batch {batch}" + (f"/{total.value}" if total is not None else "")
    done, unit = int(state.timestamp.get(total.unit).value), total.unit.name.lower()
    # Epochs are counted when they are over; one reads the one that is running.
    running = total.unit == TimeUnit.EPOCH and int(state.timestamp.batch_in_epoch) > 0
    return f"batch {batch}   {unit} {done + running}/{total.value}"


def _speed(before: _Moment, now: _Moment) -> list[str]:
    seconds = now.seconds - before.seconds
    if seconds <= 0:
        return []
    if now.tokens > before.tokens:
        return [f"{(now.tokens - before.tokens) / seconds:,.0f} tokens/s"]
    return [f"{(now.samples - before.samples) / seconds:,.1f} samples/s"]


def _left(started: _Moment, now: _Moment) -> list[str]:
    if started.done is None or now.done is None or now.done <= started.done:
        return []
    rate = (now.done - started.done) / (now.seconds - started.seconds)
    return [f"{_duration((1 - now.done) / rate)} left"]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"


def _memory_bytes(state: State) -> int:
    """The most that this rank has held: of its GPU, or of CPU memory."""
    if state.device.name == "gpu" and torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    # macOS counts in bytes, Linux in kilobytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _number(value: Any) -> str:
    return f"{float(value):.4g}"


def _show(text: str) -> None:
    """Prints on rank 0, and does not tear a progress bar."""
    if dist.get_global_rank() == 0:
        tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()
