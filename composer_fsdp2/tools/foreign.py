"""A file of another trainer where a training run of LLM Foundry belongs: says what it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_fsdp2.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["check_is_run"]

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
    "a configuration of verl": frozenset(
        {
            "actor_rollout_ref",
            "algorithm",
            "critic",
            "custom_reward_function",
            "data",
            "engine",
            "optim",
            "reward_model",
            "trainer",
            "ulysses_sequence_parallel_size",
        }
    ),
    "a configuration of axolotl": frozenset(
        {"adapter", "base_model", "datasets", "micro_batch_size", "sequence_len", "val_set_size"}
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


def check_is_run(path: Path, cfg: DictConfig) -> None:
    """Refuses a file that another trainer reads, and says which command is for it.

    Raises:
        ConfigError: it is one.
    """
    from omegaconf import OmegaConf

    data: Any = OmegaConf.to_container(cfg, resolve=False)
    if not isinstance(data, dict) or _OF_A_RUN & data.keys():
        return
    inside = data.get("parameters")
    if isinstance(inside, dict) and _OF_A_RUN & inside.keys():
        raise ConfigError(
            f"'{path}' is a job of mcli: the run is under its key 'parameters', where LLM Foundry "
            "does not look for it. Put what is under 'parameters' into a file of its own."
        )
    kind = max(_SIGNS, key=lambda kind: len(_SIGNS[kind] & data.keys()))
    if _SIGNS[kind] & data.keys():
        raise ConfigError(
            f"'{path}' is {kind}, not a training run of LLM Foundry: it has no train_loader and "
            f"no max_duration. Run `composer-fsdp2 migrate {path}`, which converts what it says "
            "about sharding, and put that into a run, such as yamls/quickstart.yaml."
        )
