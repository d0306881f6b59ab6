"""One line an interval on the console of `composer-fsdp2 train`, in place of Composer's twenty.

The keys `progress_bar`, `log_to_console` and `console_log_interval` keep their meaning, and
`python_log_level` is `warning` where it is not written. Composer's
console logger prints every metric on a line of its own, on every rank; here rank 0 prints one line
with loss, speed, MFU, memory and time left. A progress bar in a file or a pipe is a line for every
step, so there it becomes lines at the interval.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from composer.core import State, Time, Timestamp, TimeUnit
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist
from tqdm import tqdm

from composer_fsdp2.trainer.extensions.step_record import peak_memory

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
    # LLM Foundry's own default is debug: more lines than a short run has batches.
    cfg = {**cfg, "python_log_level": cfg.get("python_log_level", "warning")}
    has_bar, has_lines = bool(cfg.get("progress_bar", False)), cfg.get("log_to_console", True)
    shows_bar = has_bar and sys.stderr.isatty()
    if not has_lines and shows_bar == has_bar:
        return cfg
    interval = cfg.get(_INTERVAL, "1ba" if has_lines else "10ba")
    loggers = {**(cfg.get("loggers") or {}), NAME: {"interval": interval}}
    return {**cfg, "progress_bar": shows_bar, "log_to_console": False, "loggers": loggers}


class LineConsole(LoggerDestination):
    """Prints a line on rank 0: place, loss, speed, MFU, memory and time left.

    What cannot be known is left out: MFU where no callback logs it, the time left before there are
    two lines.

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
        self._before = self._started = _Moment(Timestamp(), 0.0)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keeps the newest value of every metric."""
        self._metrics.update(metrics)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Takes the time from here, and says where a resumed run goes on."""
        self._before = self._started = _Moment(state.timestamp, _share_done(state))
        if batch := state.timestamp.batch.value:
            _show(f"goes on after batch {batch}")

    def batch_end(self, state: State, logger: Logger) -> None:
        """Prints after the first batch and at the interval."""
        batch = int(state.timestamp.batch)
        first = batch == int(self._started.time.batch) + 1
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
        if state.timestamp.batch > self._before.time.batch:
            self._print(state)

    def eval_end(self, state: State, logger: Logger) -> None:
        """Prints the metrics of the evaluation."""
        prefix = f"metrics/{state.dataloader_label}/"
        metrics = [
            f"{key.removeprefix(prefix)} {float(value):.4g}"
            for key, value in self._metrics.items()
            if key.startswith(prefix)
        ]
        _show("   ".join([f"{_place(state)}   evaluated on {state.dataloader_label}", *metrics]))

    def _print(self, state: State) -> None:
        now, before = _Moment(state.timestamp, _share_done(state)), self._before
        self._before, started = now, self._started
        parts = [_place(state)]
        if (loss := self._metrics.get("loss/train/total")) is not None:
            parts.append(f"loss {float(loss):.4g}")
        seconds = now.seconds - before.seconds
        tokens, samples = (
            int(now.time.get(unit)) - int(before.time.get(unit))
            for unit in (TimeUnit.TOKEN, TimeUnit.SAMPLE)
        )
        if seconds > 0:
            speed = f"{tokens / seconds:,.0f} tokens/s"
            parts.append(speed if tokens else f"{samples / seconds:,.1f} samples/s")
        mfu = next((self._metrics[name] for name in _MFU if name in self._metrics), None)
        if mfu is not None:
            parts.append(f"MFU {float(mfu):.1%}")
        parts.append(f"memory {peak_memory(state) / 1e9:.1f} GB")
        if before is not started and now.done > started.done:
            rate = (now.done - started.done) / (now.seconds - started.seconds)
            parts.append(f"{tqdm.format_interval((1 - now.done) / rate)} left")
        _show("   ".join(parts))


class _Moment(NamedTuple):
    """Holds the progress of a run at one time."""

    time: Timestamp
    done: float
    """share of the run, from 0 to 1; 0 where its duration is not known"""

    @property
    def seconds(self) -> float:
        """Returns the time of training: Composer leaves evaluations out."""
        return self.time.total_wct.total_seconds()


def _share_done(state: State) -> float:
    total = state.max_duration
    if total is None or not total.value:
        return 0.0
    done = float(state.timestamp.get(total.unit).value)
    if total.unit == TimeUnit.EPOCH and state.dataloader_len is not None:
        done += int(state.timestamp.batch_in_epoch) / int(state.dataloader_len)
    return min(done / total.value, 1.0)


def _place(state: State) -> str:
    total = state.max_duration
    batch = int(state.timestamp.batch)
    if total is None or total.unit == TimeUnit.BATCH:
        return f"batch {batch}" + (f"/{total.value}" if total is not None else "")
    done, unit = int(state.timestamp.get(total.unit).value), total.unit.name.lower()
    # Epochs are counted when they are over; one reads the one that is running.
    running = total.unit == TimeUnit.EPOCH and int(state.timestamp.batch_in_epoch) > 0
    return f"batch {batch}   {unit} {done + running}/{total.value}"


def _show(text: str) -> None:
    """Prints on rank 0, and does not tear a progress bar."""
    if dist.get_global_rank() == 0:
        tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()
