"""Whether two configurations describe one job, and what is changed in both to compare them.

[Note: same start] `init_device: meta` draws a weight when its unit is made real, and FSDP1, FSDP2
and DDP do that in different orders: the same seed gives other weights. `cpu` and `mixed` draw all
of them in the order of the model, and rank 0's count. So `mixed` replaces `meta`, and `cpu`
for both where there is no FSDP, which LLM Foundry demands. Dropout needs nothing: the Trainer seeds
each rank again after the model is sharded, and activations are whole whatever shards the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from composer_fsdp2.errors import ConfigError

__all__ = [
    "Job",
    "check_room",
    "check_same",
    "describe_differences",
    "differences",
    "overrides_for",
    "plan_jobs",
]

SHARDING = ("fsdp_config", "parallelism_config", "tp_config")
"""what may differ: it is what is compared"""

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
"""settings of both runs: they write nothing and evaluate nothing"""

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
_BATCH = "global_train_batch_size"
_MANY = 64
_RANKS_PER_CORE, _FEWEST = 8, 16
"""how many ranks without GPUs a machine is trusted with; each takes about a gigabyte"""
_SHOWN = 20
_DEFAULT_PRECISION = "amp_bf16"  # LLM Foundry's


class Job:
    """One of the two runs.

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
        """A setting, interpolations resolved; the default for what is missing or null."""
        found = OmegaConf.select(self.config, key)
        return default if found is None else found

    def set(self, key: str, value: Any) -> None:
        """Changes a setting."""
        OmegaConf.update(self.config, key, value, merge=False, force_add=True)

    def shorten(self, algorithm: str, settings: Mapping[str, Any]) -> None:
        """Switches off what writes and evaluates, and names an algorithm last."""
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
    ours, theirs = ({key: repr(value) for key, value in _leaves(one)} for one in read)
    pairs = {key: (ours.get(key), theirs.get(key)) for key in (*ours, *theirs)}
    return {key: (a or "not set", b or "not set") for key, (a, b) in pairs.items() if a != b}


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


def check_same(old: DictConfig, new: DictConfig) -> None:
    """Refuses two configurations of different jobs.

    Raises:
        ConfigError: with the settings that differ.
    """
    found = differences(old, new)
    if found:
        raise ConfigError(
            f"OLD and NEW are different jobs:\n{describe_differences(found)}\nTheir numbers would "
            "differ whatever shards the model. Make these settings equal, give the value for both "
            "as key=value, or compare them all the same with --allow-different."
        )


def describe_differences(found: Mapping[str, tuple[str, str]]) -> str:
    """Returns one line per setting, and a count of those that are too many."""
    lines = [f"  {key}: {old} -> {new}" for key, (old, new) in found.items()]
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"  and {len(lines) - _SHOWN} more"]
    return "\n".join(lines)


def overrides_for(config: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Returns the overrides for one configuration: of a sharding block, only if it has that."""
    found = []
    for item in overrides:
        path = item.partition("=")[0].split(".")
        block = ".".join(path[: 2 if path[0] == "parallelism_config" else 1])
        if path[0] not in SHARDING or OmegaConf.select(config, block) is not None:
            found.append(item)
    return found


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
    for job in jobs:
        batch = job.value(_BATCH)
        if isinstance(batch, int) and batch % ranks:
            fit = [str(count) for count in range(2, min(batch, _MANY) + 1) if batch % count == 0]
            raise ConfigError(
                f"{_BATCH} is {batch} in {job.name.upper()}, which {ranks} ranks cannot share "
                "equally. LLM Foundry would refuse the run on every rank. Give -n "
                f"{' or '.join(fit) or 'a number that divides it'}, or {_BATCH} a multiple of "
                f"{ranks}."
            )
    notes = [] if cuda else _fit_cpu(jobs)
    if old.precision != new.precision:
        notes.append(
            f"Precision is {old.precision} in OLD and {new.precision} in NEW: the tolerance is "
            "that of the coarser one."
        )
    notes += _same_start(jobs)
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
    notes = []
    for job in jobs:
        if job.kind == "FSDP1":
            notes.append("No CUDA: the old configuration runs as DDP, whose numbers FSDP1's are.")
        if job.kind != "FSDP2":
            job.kind = "DDP"
            for key in SHARDING:
                job.config.pop(key, None)
    lower = sorted({job.precision for job in jobs} - {"fp32"})
    if lower:
        notes.append(f"No CUDA: both runs compute in fp32, as {' and '.join(lower)} needs a GPU.")
    for job in jobs:
        job.precision = "fp32"
        job.set("precision", "fp32")
        key = f"{job.block}.mixed_precision"
        if job.block is not None and isinstance(job.value(key), DictConfig):
            job.set(key, "FULL")
            notes.append(f"No CUDA: {key} is FULL here, as DDP has no such setting.")
    return notes


def _same_start(jobs: Sequence[Job]) -> list[str]:
    """Has both runs start from rank 0's weights; see [Note: same start]."""
    meta = [job.name.upper() for job in jobs if job.value(_START) == "meta"]
    for job in jobs:
        if job.kind == "DDP" and job.value(_START) is not None:
            job.set(_START, "cpu")
        elif job.value(_START) == "meta":
            job.set(_START, "mixed")
    if meta:
        return [
            f"{_START} is meta in {' and '.join(meta)}, which draws other weights under FSDP1, "
            "FSDP2 and DDP. Both runs start from those that rank 0 draws on the CPU."
        ]
    return []


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
