"""Signs of other trainers: keys about sharding that no table has, and files that are no run."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path as File
from typing import TYPE_CHECKING, Any

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.tools.migrate.report import Path, value_at

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["check_is_converted", "check_is_run", "foreign_sign", "sharding_in"]

_BLOCKS = frozenset(
    {
        *("fsdp", "fsdp_config", "deepspeed", "deepspeed_config", "zero_optimization"),
        *("parallelism_config", "tp_config", "megatron_lm_config"),
    }
)
"""keys that trainers read settings of sharding from"""
_SIZES = re.compile(
    r"(tensor|sequence|context|pipeline|expert|data)_(model_)?parallel(ism)?_([a-z]+_)?(size|degree)"
    r"|(dp|hsdp|fsdp|tp|sp|cp|pp|ep)_([a-z]+_)?(size|degree)"
    r"|ulysses_([a-z]+_)?(size|degree)|fsdp_[a-z0-9_]+"
)
"""names of numbers of ranks, and keys of FSDP in front of which a trainer writes its name"""
_MEMORY = re.compile(r"fp8(_.+)?|activation_offloading|disable_gradient_checkpointing")
"""names of switches of fp8 and of what is kept for backward"""
_WRITTEN = re.compile(
    r"\b(fsdp_config|parallelism_config\.fsdp|sharding_strategy|zero_optimization|zero_stage)\b"
    r".{0,3}[:=.}]"
)
"""settings inside a text, such as a command that writes them to a file"""
_ENGINES = re.compile(
    r"([a-z0-9_.]*[._])?(fsdp|hsdp|fully_?shard|megatron|deepspeed|zero_?[123]|veomni|modelparallel)"
    r"[a-z0-9_.]*",
    re.IGNORECASE,
)
"""values that name what shards a run, as a word or the path of a class"""
_CHOICES = re.compile(
    r".*(strategy|backend|engine|plugin|parallel|distributed|dist_config|_target_|class_path).*"
)
"""keys that hold such a value, or a block that does"""
_FOREIGN = re.compile(
    r"parallelism|dist_config|dtensor_cfg|(.+_)?megatron(_.+)?|(use_|enable_)?fsdp(_.+)?|veomni"
    r"|.*_model_parallel_size|.*sharded_data_parallel.*|.*_parallel_(mode|dim)"
)
"""keys of other trainers' blocks and sizes, whatever they hold"""
_SERVERS = frozenset({"rollout", "vllm", "sglang", "inference", "generation", "actor_infer"})
"""blocks about engines that generate"""
_ALONE = (0, 1, "0", "1", "no", "none", "off")


def sharding_in(data: Mapping[str, Any], path: Path, value: Any, sites: Collection[Path]) -> str:
    """Says why a key that nothing was written for is about sharding all the same.

    Args:
        data: the whole file, parsed.
        path: keys that lead to `value`.
        value: its value, a list with all that is in it.
        sites: mappings that hold settings of sharding, whose other keys are read with them.

    Returns:
        A sentence, or "" where the key is about something else.
    """
    # Inside of what the other dialects become, keys are settings of FSDP2.
    versions = (
        value_at(data, (*path[:number], "version"))
        for number, name in enumerate(path, 1)
        if name == "fsdp_config"
    )
    is_ours = "fsdp2" in path or any(str(version) == "2" for version in versions)
    if is_ours or _is_empty(value):
        return ""
    within = (key for key, item in _inside(value) if not _is_empty(item))
    block = next((name for name in (*path, *within) if name in _BLOCKS), None)
    if block is not None:
        return f"`{block}` shards a run, and nothing was written for it where it stands"
    beside = [name for number, name in enumerate(path) if path[:number] in sites]
    if any(map(_SIZES.fullmatch, beside)) and value not in _ALONE:
        return "is about ranks, and is no key that this dialect is known to have"
    if any(map(_MEMORY.fullmatch, beside)):
        return "is about precision or memory, and is no key that this dialect is known to have"
    if isinstance(value, str) and (match := _WRITTEN.search(value)):
        return f"its text holds `{match[1]}`, and what is inside a text is not read"
    return ""


def foreign_sign(data: Mapping[str, Any], path: Path = ()) -> str:
    """Returns the first key that says how another trainer shards a run, with dots, or ""."""
    for key, value in data.items():
        here = (*path, key)
        if key in _SERVERS or _is_empty(value):
            continue
        name = key.lower().replace("-", "_")
        sized = _SIZES.fullmatch(name) is not None and value not in _ALONE
        word = isinstance(value, str) and _ENGINES.fullmatch(value) is not None
        chosen = any(_CHOICES.fullmatch(part.lower()) for part in here)
        if sized or _FOREIGN.fullmatch(name) or (word and chosen):
            return ".".join(here)
        if isinstance(value, Mapping) and (sign := foreign_sign(value, here)):
            return sign
    return ""


def _is_empty(value: Any) -> bool:
    return value is False or value in (None, "", {}, [])


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields all keys at any depth, without recursion: files may be nested deeply."""
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, Mapping):
            yield from item.items()
            todo += item.values()
        elif isinstance(item, list):
            todo += item


# --- A file of another trainer where a training run of LLM Foundry belongs. ---

_OF_A_RUN = {
    "device_train_microbatch_size",
    "global_train_batch_size",
    "max_duration",
    "models",
    "train_loader",
}
"""Any of these is LLM Foundry's."""

# What a file is -> keys that no run of LLM Foundry has at its top.
_SIGNS: Mapping[str, frozenset[str]] = {
    "a configuration of DeepSpeed": frozenset(
        {
            "gradient_clipping",
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "zero_optimization",
        }
    ),
    "a configuration of ROLL": frozenset(
        {
            "actor_infer",
            "actor_train",
            "pretrain",
            "reference",
            "reward_pretrain",
            "rollout_batch_size",
        }
    ),
    "a configuration of Accelerate": frozenset(
        {
            "compute_environment",
            "deepspeed_config",
            "distributed_type",
            "machine_rank",
            "main_process_port",
            "num_machines",
            "num_processes",
        }
    ),
    "a file of Hugging Face's TrainingArguments": frozenset(
        {
            "deepspeed",
            "fsdp",
            "gradient_accumulation_steps",
            "learning_rate",
            "model_name_or_path",
            "num_train_epochs",
            "output_dir",
            "per_device_train_batch_size",
        }
    ),
}


# Trainers whose files are not converted -> keys that, together in one mapping, only they have.
_UNCONVERTED: Mapping[str, tuple[frozenset[str], ...]] = {
    "verl": (
        *(frozenset({key}) for key in ("actor_rollout_ref", "partial_pretrain", "param_offload")),
        frozenset({"ulysses_sequence_parallel_size"}),
    ),
    "axolotl": (frozenset({"base_model", "datasets"}), frozenset({"base_model", "sequence_len"})),
    "LLaMA-Factory": (frozenset({"finetuning_type"}), frozenset({"stage", "template"})),
    "TRL": (
        *(frozenset({key}) for key in ("accelerate_config", "dataset_text_field")),
        *(frozenset({key}) for key in ("completion_only_loss", "max_completion_length")),
    ),
}


def check_is_converted(name: str, data: Mapping[str, Any]) -> None:
    """Refuses a file of a trainer that `migrate` has no table for.

    Args:
        name: of the file, in the error message.
        data: the file, parsed.

    Raises:
        ConfigError: it is one.
    """
    if _OF_A_RUN & data.keys():
        return
    mappings = [data, *(item for _, item in _inside(data) if isinstance(item, Mapping))]
    for trainer, signs in _UNCONVERTED.items():
        if any(sign <= mapping.keys() for sign in signs for mapping in mappings):
            raise ConfigError(
                f"'{name}' is a file of {trainer}, which is not converted. What it says about "
                "sharding would be lost. Write it by hand into a run of LLM Foundry, such as "
                "yamls/quickstart.yaml, under `parallelism_config: {fsdp2: {...}}`."
            )


def check_is_run(path: File, cfg: DictConfig, *, trains: bool = True) -> None:
    """Refuses a file that another trainer or another command reads, and says which command.

    Args:
        path: of the file, in the error message.
        cfg: the file, parsed.
        trains: whether it has to be a training run, and no evaluation.

    Raises:
        ConfigError: it is one.
    """
    from omegaconf import OmegaConf

    data: Any = OmegaConf.to_container(cfg, resolve=False)
    if trains and isinstance(data, dict) and "models" in data and "train_loader" not in data:
        raise ConfigError(
            f"'{path}' is an evaluation of LLM Foundry: it has `models` and no train_loader. There "
            f"is nothing to train. Run `composer-fsdp2 eval {path}`."
        )
    if not isinstance(data, dict) or _OF_A_RUN & data.keys():
        return
    check_is_converted(str(path), data)
    kind = max(_SIGNS, key=lambda kind: len(_SIGNS[kind] & data.keys()))
    if _SIGNS[kind] & data.keys():
        raise ConfigError(
            f"'{path}' is {kind}, not a training run of LLM Foundry: it has no train_loader and "
            f"no max_duration. Run `composer-fsdp2 migrate {path}`, which converts what it says "
            "about sharding, and put that into a run, such as yamls/quickstart.yaml."
        )
