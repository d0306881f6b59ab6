"""Compares two runs of one job step by step. Pure: starts nothing and trains nothing.

[Note: same start] `init_device: meta` draws a weight when its unit is made real, and FSDP1, FSDP2
and DDP do that in different orders: the same seed gives other weights. `cpu` and `mixed` draw all
of them in the order of the model, and rank 0's count. So `mixed` replaces `meta`, and `cpu`
for both where there is no FSDP, which LLM Foundry demands. Dropout needs nothing: the Trainer seeds
each rank again after the model is sharded, and activations are whole whatever shards the weights.
"""

from __future__ import annotations

import copy
import csv
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.text import size_text

__all__ = [
    "QUANTITIES",
    "SHORT",
    "TOLERANCES",
    "WARM_UP",
    "WRITERS",
    "Job",
    "RunComparison",
    "Speed",
    "Step",
    "check_room",
    "check_same",
    "differences",
    "overrides_for",
    "plan_jobs",
    "read_peaks",
    "read_steps",
    "relative_difference",
    "tolerance_for",
    "warmed_up",
]

# --- Two configurations: are they of one job, and what is changed to compare them? ---

SHARDING = ("fsdp_config", "parallelism_config", "tp_config")
"""blocks that may differ: the parity is of their difference"""

SHORT: Mapping[str, Any] = {
    "autoresume": False,
    "console_log_interval": "1ba",
    "eval_first": False,
    "eval_interval": 0,
    "log_config": False,
    "log_to_console": False,
    "loggers": None,
    "only_composer_checkpoint": False,
    "only_hf_checkpoint": False,
    "profiler": None,
    "progress_bar": False,
    "save_folder": None,
}
"""settings of both runs, with which they write nothing and evaluate nothing"""

WRITERS = (
    "async_eval",
    "env_logging",
    "eval_output_logging",
    "generate_callback",
    "hf_checkpointer",
    "memory_snapshot",
    "mono_checkpoint_saver",
    "run_timeout",
)
"""callbacks that write, evaluate or end a run, and change nothing in its training"""
MONITOR = "fsdp2_monitor"
"""our own, which a run without FSDP2 refuses"""

_START = "model.init_device"
_NO_INFLUENCE = frozenset(
    {
        *SHARDING,
        *SHORT,
        _START,
        f"callbacks.{MONITOR}",
        "eval_subset_num_batches",
        "metadata",
        "python_log_level",
        "run_name",
        "save_filename",
        "save_ignore_keys",
        "save_interval",
        "save_latest_filename",
        "save_num_checkpoints_to_keep",
        "save_overwrite",
        "save_weights_only",
    }
)
_RANKS_PER_CORE, _FEWEST = 8, 16
"""how many ranks without GPUs a machine is trusted with; each takes about a gigabyte"""
_SHOWN = 20
_DEFAULT_PRECISION = "amp_bf16"  # LLM Foundry's


class Job:
    """Holds one of the two runs.

    Args:
        name: what messages call it: 'old' or 'new'.
        config: the whole training configuration, interpolations included.
        kind: what shards it: 'FSDP1', 'FSDP2' or 'DDP'.
        block: path of its FSDP2 settings, where it has any.
    """

    def __init__(self, name: str, config: DictConfig, kind: str, block: str | None = None) -> None:
        self.name, self.config, self.kind, self.block = name, copy.deepcopy(config), kind, block
        self.precision = str(self.value("precision", _DEFAULT_PRECISION))

    def value(self, key: str, default: Any = None) -> Any:
        """Returns a setting, interpolations resolved; the default for a missing one and null."""
        setting = OmegaConf.select(self.config, key)
        return default if setting is None else setting

    def set(self, key: str, value: Any) -> None:
        """Changes a setting."""
        OmegaConf.update(self.config, key, value, merge=False, force_add=True)

    def shorten(self, algorithm: str, settings: Mapping[str, Any]) -> None:
        """Switches off saves, loggers and evaluation, and ends the run after some steps."""
        for key, value in SHORT.items():
            self.set(key, value)
        for name in (*WRITERS, MONITOR):
            if name in self.value("callbacks", {}):
                del self.config["callbacks"][name]
        self.set("algorithms", {**self.value("algorithms", {}), algorithm: dict(settings)})


# --- Is it one job? ---


def differences(old: DictConfig, new: DictConfig) -> dict[str, tuple[str, str]]:
    """Returns settings outside the sharding that differ and have an influence, as text."""
    try:
        read = [OmegaConf.to_container(config, resolve=True) for config in (old, new)]
    except OmegaConfBaseException:  # a resolver that `code_paths` registers
        read = [OmegaConf.to_container(config) for config in (old, new)]
    ours, theirs = (dict(_leaves(leaves)) for leaves in read)
    shown = {
        key: tuple(repr(leaves[key]) if key in leaves else "not set" for leaves in (ours, theirs))
        for key in (*ours, *theirs)
    }
    # 1 and 1.0 are the same to a run.
    return {k: (a, b) for k, (a, b) in shown.items() if ours.get(k, a) != theirs.get(k, b)}


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Finds every value that has an influence outside the sharding, by its dotted path."""
    for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
        name = f"{path}{key}"
        if name in _NO_INFLUENCE:
            continue
        if isinstance(value, Mapping | list) and value:
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def check_same(old: DictConfig, new: DictConfig, *, allow: bool = False) -> list[str]:
    """Refuses two configurations of different jobs.

    Args:
        old: the run before its migration.
        new: the run with FSDP2.
        allow: whether to return the settings that differ instead, as a note for the user.

    Raises:
        ConfigError: with the settings that differ.
    """
    changes = differences(old, new).items()
    lines = [f"  {key}: {before} -> {after}" for key, (before, after) in changes]
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"  and {len(lines) - _SHOWN} more"]
    told = "\n".join(["OLD and NEW are different jobs:", *lines])
    if lines and not allow:
        raise ConfigError(
            f"{told}\nTheir numbers would differ whatever shards the model. Make these settings "
            "equal, give the value for both as key=value, or compare them all the same with "
            "--allow-different."
        )
    return [told] if lines else []


def overrides_for(config: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Returns the overrides for one configuration: of a sharding block, only if it has that."""
    applied = []
    for item in overrides:
        path = item.partition("=")[0].split(".")
        block = ".".join(path[: 2 if path[0] == "parallelism_config" else 1])
        if path[0] not in SHARDING or OmegaConf.select(config, block) is not None:
            applied.append(item)
    return applied


# --- Changes of both. ---


def plan_jobs(old: Job, new: Job, *, cuda: bool, ranks: int) -> list[str]:
    """Changes both so that their numbers can be compared.

    Returns:
        What the user has to know about it, one sentence or two each.

    Raises:
        ConfigError: the comparison would say nothing.
    """
    if new.kind != "FSDP2":
        raise ConfigError(
            "NEW does not ask for FSDP2: it has no `parallelism_config.fsdp2`. There would be "
            "nothing to compare with. Let `composer-fsdp2 migrate OLD -o NEW` write it."
        )
    if ranks == 1:
        raise ConfigError(
            "There is one rank, on which LLM Foundry trains FSDP1's runs without it and FSDP2 "
            "shards nothing. The comparison would say nothing about sharding. Give -n 2; on a "
            "machine with one GPU, hide it with CUDA_VISIBLE_DEVICES= to compare on the CPU."
        )
    jobs = (old, new)
    notes = [] if cuda else _fit_cpu(jobs)
    if old.precision != new.precision:
        notes.append(
            f"Precision is {old.precision} in OLD and {new.precision} in NEW: the tolerance is "
            "that of the coarser one."
        )
    # See [Note: same start].
    meta = [job.name.upper() for job in jobs if job.value(_START) == "meta"]
    for job in jobs:
        if job.kind == "DDP" and job.value(_START) is not None:
            job.set(_START, "cpu")
        elif job.value(_START) == "meta":
            job.set(_START, "mixed")
    if meta:
        notes.append(
            f"{_START} is meta in {' and '.join(meta)}, which draws other weights under FSDP1, "
            "FSDP2 and DDP. Both runs start from those that rank 0 draws on the CPU."
        )
    reads = [bool(job.block and job.value(f"{job.block}.pretrained_weights")) for job in jobs]
    if reads == [False, True] and not old.value("model.pretrained"):
        notes.append(
            "NEW starts from pretrained_weights and OLD from other weights: the runs will differ."
        )
    return notes


def _fit_cpu(jobs: Sequence[Job]) -> list[str]:
    """Has both runs compute in fp32, and an FSDP1 run train as DDP; returns what was changed.

    FSDP1 does not run without CUDA; DDP computes the same from whole weights. Composer trains in
    fp32 alone on a CPU.
    """
    notes = [
        "No CUDA: the old configuration runs as DDP, whose numbers FSDP1's are."
        for job in jobs
        if job.kind == "FSDP1"
    ]
    lower = sorted({job.precision for job in jobs} - {"fp32"})
    if lower:
        notes.append(f"No CUDA: both runs compute in fp32, as {' and '.join(lower)} needs a GPU.")
    for job in jobs:
        if job.kind != "FSDP2":
            job.kind = "DDP"
            for key in SHARDING:
                job.config.pop(key, None)
        job.precision = "fp32"
        job.set("precision", "fp32")
        key = f"{job.block}.mixed_precision"
        if job.block is not None and isinstance(job.value(key), DictConfig):
            job.set(key, "FULL")
            notes.append(f"No CUDA: {key} is FULL here, as DDP has no such setting.")
    return notes


def check_room(ranks: int, gpus: int, cores: int) -> None:
    """Refuses more ranks than this machine can run, before any of them starts.

    Raises:
        ConfigError: with the most there can be.
    """
    most = gpus or max(_RANKS_PER_CORE * cores, _FEWEST)
    if ranks > most:
        have = f"{gpus} GPUs, one for each rank" if gpus else f"{cores} cores and no GPU"
        raise ConfigError(
            f"-n is {ranks}, and this machine has {have}. All ranks of a run start on this "
            f"machine, and so many would not. Give -n {most} or less."
        )


# --- Two records of steps. ---

QUANTITIES: Mapping[str, str] = {"loss": "loss", "gradient_norm": "gradient norm"}
"""attributes of `Step`, and what a reader calls them"""

# [Note: tolerances] fp32 is measured, on two ranks of a CPU: DDP and FSDP2 on the quickstart are
# 7e-8 apart within 10 steps, FSDP1 and FSDP2 on a small model 2e-7 within 100. It leaves room
# for more ranks and for kernels that add in no fixed order. The others are not measured on GPUs:
# they are a few times what one rounding of the format is worth. What a migration can get wrong (a
# sum for an average, another start, another learning rate) is mostly larger within ten steps.
TOLERANCES: Mapping[str, float] = {
    "fp32": 1e-5,
    "amp_bf16": 2e-2,
    "amp_fp16": 5e-3,
    "amp_fp8": 1e-1,
}
"""largest relative difference by precision"""

_ROWS, _EDGE = 40, 3
_RUNS = ("old", "new")
_PARTS = (*_RUNS, "relative_difference")
"""of a quantity in a step, as JSON and CSV name them"""


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step, over all ranks."""

    number: int
    loss: float
    gradient_norm: float
    """before clipping"""
    seconds: float = math.nan
    """from the end of the step before, the gradient norm included; NaN where nobody measured"""
    tokens: int = 0


WARM_UP = 3
"""first steps that speed leaves out, where there are more"""


def warmed_up(steps: Sequence[Step]) -> Sequence[Step]:
    """Returns the steps after the warm-up; of a shorter run, the last one."""
    return steps[min(WARM_UP, len(steps) - 1) :]


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a run is after its warm-up."""

    lower_quartile: float
    median: float
    upper_quartile: float
    tokens_per_second: float
    """of all ranks"""

    @staticmethod
    def of(steps: Sequence[Step]) -> Speed:
        """Measures steps after the warm-up."""
        timed = warmed_up(steps)
        seconds = [step.seconds for step in timed]
        quartiles = seconds * 3
        if len(seconds) > 1:
            quartiles = statistics.quantiles(seconds, n=4, method="inclusive")
        tokens = sum(step.tokens for step in timed) / sum(seconds)
        return Speed(*quartiles, tokens_per_second=tokens)


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The same steps of two runs.

    Args:
        old: steps of the old configuration, at least one.
        new: steps of the new one, as many and with the same numbers.
        tolerance: largest relative difference that passes.
        peak_bytes: most memory that each rank of the old run has held, and of the new run.
    """

    old: tuple[Step, ...]
    new: tuple[Step, ...]
    tolerance: float
    peak_bytes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def values(self, quantity: str) -> list[tuple[float, float, float]]:
        """Returns the old value, the new one and their relative difference of each step."""
        pairs = zip(self.old, self.new, strict=True)
        steps = ((getattr(old, quantity), getattr(new, quantity)) for old, new in pairs)
        return [(old, new, relative_difference(old, new)) for old, new in steps]

    def largest(self, quantity: str) -> tuple[float, int]:
        """Returns the largest difference of a quantity, and the first step that has it."""
        shares = [share for *_, share in self.values(quantity)]
        return max(shares), self.old[shares.index(max(shares))].number

    @property
    def within(self) -> bool:
        """Whether no difference is beyond the tolerance."""
        return all(self.largest(quantity)[0] <= self.tolerance for quantity in QUANTITIES)

    def table(self) -> list[str]:
        """Returns at most 100 columns; of a long run every nth step, both ends and the worst."""
        count = len(self.old)
        every = 1 if count <= _ROWS else math.ceil(count / (_ROWS - 2 * _EDGE))
        worst = {self.largest(quantity)[1] for quantity in QUANTITIES}
        heads = "".join(f"   {name:^35}" for name in QUANTITIES.values())
        names = f"   {'old':>12}{'new':>12}{'relative':>11}" * len(QUANTITIES)
        lines = [f"{'':5}{heads}".rstrip(), f"{'step':>5}{names}"]
        for index, step in enumerate(zip(*map(self.values, QUANTITIES), strict=True)):
            number = self.old[index].number
            is_edge = not _EDGE <= index < count - _EDGE
            if is_edge or index % every == 0 or number in worst:
                line = f"{number:5}"
                for old, new, share in step:
                    mark = "*" if share > self.tolerance else " "
                    line += f"   {old:#12.6g}{new:#12.6g}{share:10.1e}{mark}"
                lines.append(line.rstrip())
        if len(lines) - 2 < count:
            lines.append(f"{len(lines) - 2} of {count} steps are shown.")
        return lines

    @property
    def is_timed(self) -> bool:
        """Whether both runs measured their steps."""
        return all(step.seconds > 0 for step in (*self.old, *self.new))  # NaN is not

    def performance(self) -> list[str]:
        """Returns lines about speed and memory of both runs, and new divided by old.

        Neither counts for `within`.
        """
        old, new = Speed.of(self.old), Speed.of(self.new)
        skipped = len(self.old) - len(warmed_up(self.old))
        rows: list[tuple[str, ...]] = [("", *_RUNS, "new / old")]
        for name in ("median", "lower_quartile", "upper_quartile"):
            values = [getattr(speed, name) for speed in (old, new)]
            title = f"seconds a step, {name.replace('_', ' ')}"
            rows.append((title, *(f"{value:.4g}" for value in values), _ratio(*values)))
        rates = (old.tokens_per_second, new.tokens_per_second)
        rows.append(("tokens a second", *(f"{rate:,.0f}" for rate in rates), _ratio(*rates)))
        for rank, peaks in enumerate(zip(*self.peak_bytes, strict=True)):
            title = f"peak memory, rank {rank}"
            rows.append((title, *(size_text(peak) for peak in peaks), _ratio(*peaks)))
        lines = [f"{row[0]:34}" + "".join(f"{cell:>14}" for cell in row[1:]) for row in rows]
        return [f"Speed after {skipped} of {len(self.old)} steps, and memory:", *lines]

    def verdict(self, source: str) -> list[str]:
        """Returns sentences about the largest differences.

        Args:
            source: where the tolerance is from, for the reader.
        """
        largest_by_name = {name: self.largest(quantity) for quantity, name in QUANTITIES.items()}
        largest = ", ".join(
            f"{name} {v:.1e} at step {step}" for name, (v, step) in largest_by_name.items()
        )
        lines = [f"Largest relative difference: {largest}"]
        values = zip(*map(self.values, QUANTITIES), strict=True)
        steps = [
            step.number
            for step, step_values in zip(self.old, values, strict=True)
            if not all(math.isfinite(value) for old, new, _ in step_values for value in (old, new))
        ]
        if steps:
            lines.append(
                f"Values are not finite at {len(steps)} of the steps, first at {steps[0]}."
            )
        verdict = "Within" if self.within else "Beyond"
        return [*lines, f"{verdict} the tolerance of {self.tolerance:g} ({source})."]

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values; those that are not finite as text, since JSON has none."""
        largest = {quantity: self.largest(quantity) for quantity in QUANTITIES}
        steps: list[dict[str, Any]] = [{"step": step.number} for step in self.old]
        for quantity in QUANTITIES:
            for step, values in zip(steps, self.values(quantity), strict=True):
                step[quantity] = dict(zip(_PARTS, map(_plain, values), strict=True))
        for step, *pair in zip(steps, self.old, self.new, strict=True):
            step["seconds"] = {
                name: _plain(run.seconds) for name, run in zip(_RUNS, pair, strict=True)
            }
        speeds = {
            name: {key: _plain(value) for key, value in asdict(Speed.of(run)).items()}
            for name, run in zip(_RUNS, (self.old, self.new), strict=True)
        }
        return {
            "tolerance": self.tolerance,
            "within": self.within,
            "largest": {
                quantity: {"relative_difference": _plain(value), "step": step}
                for quantity, (value, step) in largest.items()
            },
            "warm_up_steps": len(self.old) - len(warmed_up(self.old)),
            "speed": speeds,
            "peak_bytes": dict(zip(_RUNS, map(list, self.peak_bytes), strict=True)),
            "steps": steps,
        }

    def write_csv(self, file: Path) -> None:
        """Writes one line per step, in full precision."""
        rows = zip(self.old, *map(self.values, QUANTITIES), strict=True)
        with file.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            writer.writerow(["step", *(f"{q}_{part}" for q in QUANTITIES for part in _PARTS)])
            for step, *cells in rows:
                writer.writerow([step.number, *(_plain(v) for values in cells for v in values)])


def relative_difference(old: float, new: float) -> float:
    """Returns the difference in relation to the larger of the two; never NaN.

    Infinite where only one of them is finite. Two values that are the same infinity, or both not a
    number, do not differ.
    """
    if old == new or (math.isnan(old) and math.isnan(new)):
        return 0.0
    if not (math.isfinite(old) and math.isfinite(new)):
        return math.inf
    return abs(old - new) / max(abs(old), abs(new))


def tolerance_for(precision: str) -> float:
    """Returns the default for a training precision.

    Raises:
        ConfigError: nothing is known about the precision.
    """
    if precision not in TOLERANCES:
        raise ConfigError(
            f"There is no default tolerance for precision '{precision}'. It could not be said "
            f"whether the runs agree. Give --tolerance, or one of {', '.join(TOLERANCES)}."
        )
    return TOLERANCES[precision]


def read_steps(file: Path) -> tuple[Step, ...]:
    """Reads the steps in a file of JSON lines, as far as they are written."""
    if not file.is_file():
        return ()
    lines = file.read_text(encoding="utf-8").split("\n")[:-1]  # the last may be half written
    return tuple(Step(**json.loads(line)) for line in lines)


def read_peaks(file: Path) -> tuple[int, ...]:
    """Reads the peak memory of each rank; empty where the run did not come to its end."""
    return tuple(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else ()


def _ratio(old: float, new: float) -> str:
    return f"{new / old:.3f}" if old else "-"


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
