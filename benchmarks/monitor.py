"""CPU time that `FSDP2Monitor` adds to the step of `step.py`, finer than a percent.

Method: one process, one thread, a group of two ranks that moves no data (`fake`), the model of
`step.py`. What the callback does depends on the units and not on the batch, so it is measured in
short steps, of 8 tokens: every other one is monitored, and which of a pair comes first is swapped
every time. `cost_seconds` is the median over the pairs of the difference of process CPU times;
`step_seconds` the median of steps on the batch of `step.py`, none of them monitored; the figure is
1 + cost / step, with the standard error of the cost, by resampling, over the same step. A monitored
step has Composer's events of a batch and logs to memory; starting and stopping to watch, once in a
training, is not counted. The garbage collector is off. The collectives cost nothing here, which
makes the share of the callback larger. The weights are those of no training: the other rank's are
whatever memory held. `--peer off` monitors no step and shows the noise.

Goal: ratio <= 1.01.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import shapes
import torch
from composer.core import State
from composer.devices import DeviceCPU
from composer.loggers import InMemoryLogger, Logger

from composer_fsdp2 import FSDP2Monitor

GOAL = 1.01
STEPS = 15


class Trainee:
    """A sharded model and its callback, on for single steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = shapes.LlamaLike()
        shapes.prepare(self.model, ("Block",))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.tokens = torch.randint(0, 2048, (1, 9))
        self.monitor = FSDP2Monitor()
        self.state = State(rank_zero_seed=0, run_name="step", model=self.model, device=DeviceCPU())
        memory = InMemoryLogger()
        self.logger = Logger(self.state, destinations=memory)
        memory.init(self.state, self.logger)
        self.monitor.after_load(self.state, self.logger)

    def plain(self) -> float:
        """One optimizer step; returns its CPU seconds."""
        start = time.process_time()
        self.step()
        return time.process_time() - start

    def monitored(self) -> float:
        """The same, and what the callback does in a batch."""
        given = (self.state, self.logger)
        self.monitor.fit_start(*given)
        start = time.process_time()
        self.monitor.batch_start(*given)
        self.step()
        self.monitor.batch_end(*given)
        elapsed = time.process_time() - start
        self.monitor.fit_end(*given)
        return elapsed

    def step(self) -> None:
        self.model(self.tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def emit_cost(
    figure: str, peer: str, ours: Callable[[], float], trainee: Trainee, pairs: int, warmup: int
) -> None:
    """Prints the line: what a step of ours costs more than a plain one of a trainee."""
    shapes.paired(ours, trainee.plain, warmup)
    gc.collect()
    gc.disable()
    with_it, without = shapes.paired(ours, trainee.plain, pairs)
    costs = [a - b for a, b in zip(with_it, without, strict=True)]
    trainee.tokens = torch.randint(0, 2048, (4, 129))
    step = statistics.median(trainee.plain() for _ in range(STEPS))
    cost = statistics.median(costs)
    value = {
        "ratio": 1 + cost / step,
        "standard_error": shapes.standard_error(costs) / step,
        "cost_seconds": cost,
        "short_step_seconds": statistics.median(without),
        "step_seconds": step,
    }
    shapes.emit(figure, {"peer": peer, "pairs": pairs, **value}, GOAL)


def measure(peer: str, pairs: int, warmup: int) -> None:
    """Prints the line."""
    trainee = Trainee()
    ours = trainee.monitored if peer == "on" else trainee.plain
    emit_cost("monitor", peer, ours, trainee, pairs, warmup)


def run(measure: Callable[[str, int, int], None], description: str | None) -> None:
    """The command of a figure of this kind."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", choices=["on", "off"], default="on")
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    with shapes.fake_group(2):
        measure(options.peer, options.pairs, options.warmup)


if __name__ == "__main__":
    run(measure, __doc__)
