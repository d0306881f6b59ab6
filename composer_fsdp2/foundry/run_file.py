"""A training run of LLM Foundry as a file: what is wrong with it before a process starts."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.foundry.findings import Finding, findings_of
from composer_fsdp2.foundry.transform import fsdp2_settings, parse_run_config, requests_fsdp2

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = [
    "NEEDED",
    "check_installed",
    "check_named",
    "check_ranks",
    "epochs_meant",
    "merge",
    "newest_checkpoint",
    "read_parallelism",
    "read_run",
    "read_setting",
    "read_yaml",
    "without_mistakes",
]

NEEDED = {
    "model": "{name: hf_causal_lm, pretrained_model_name_or_path: NAME}",
    "tokenizer": "{name: NAME}",
    "max_seq_len": "2048",
    "train_loader": "{name: finetuning, dataset: {hf_name: NAME, split: train}}",
    "global_train_batch_size": "64",
    "max_duration": "1ep",
    "optimizer": "{name: decoupled_adamw, lr: 1.0e-5}",
    "scheduler": "{name: linear_decay_with_warmup, t_warmup: 0ba}",
}
"""keys that a run of LLM Foundry cannot do without, each with a value to begin with"""
_BLOCKS = ("parallelism_config", "fsdp_config", "tp_config")
_INSIDE = "parameters"
"""where a job file of the platform holds the run that it starts"""


def read_run(path: Path, overrides: list[str], *, jobs: bool = True) -> DictConfig:
    """Reads a run and applies the overrides.

    Args:
        path: of a YAML file.
        overrides: key=value.
        jobs: whether it may be a job file. LLM Foundry itself cannot read one.

    Raises:
        ConfigError: one of them cannot be read.
    """
    return merge(read_yaml(path, jobs=jobs), overrides)


def check_named(path: Path, overrides: list[str]) -> None:
    """Checks a command line that names a run, and reads nothing.

    Raises:
        ConfigError: there is no such file, or an override is none.
    """
    if path.is_dir():
        raise ConfigError(
            f"'{path}' is a folder. A run is one YAML file. Write the path of the file in it."
        )
    if not path.is_file():
        raise ConfigError(
            f"There is no file '{path}'. Without it there is nothing to train. "
            f"Write the path of a training YAML, absolute or from {Path.cwd()}."
        )
    for item in overrides:
        _check_override(item)


def _check_override(item: str) -> None:
    key, equals, _ = item.partition("=")
    if not key or not equals:
        raise ConfigError(
            f"'{item}' is not an override. It would change nothing. "
            "Write key=value without spaces around '=', for example max_duration=100ba."
        )


def read_parallelism(cfg: DictConfig) -> dict[str, Any]:
    """Returns the parallelism settings of a run, checked, in LLM Foundry's keys.

    Raises:
        ConfigError: they ask for something impossible, or an interpolation in them leads nowhere.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        # Other blocks may need resolvers that `code_paths` will register.
        blocks = {key: cfg[key] for key in _BLOCKS if key in cfg}
        resolved = {
            key: OmegaConf.to_container(block, resolve=True)
            if OmegaConf.is_config(block)
            else block
            for key, block in blocks.items()
        }
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"An interpolation cannot be resolved: {_one_line(error)}. The parallelism settings "
            "depend on it. Correct the name between '${' and '}'."
        ) from None
    return parse_run_config(resolved)


def without_mistakes(cfg: DictConfig) -> tuple[DictConfig, list[Finding]]:
    """Returns a run with the settings of FSDP2 that can be read, and findings about other settings.

    So its other mistakes are found as well.
    """
    from omegaconf import OmegaConf

    from composer_fsdp2.config.schema import parse_config

    try:
        read_parallelism(cfg)
        return cfg, []
    except ConfigError as error:
        wrong = list(findings_of(error))
    plain: Any = OmegaConf.to_container(cfg, resolve=False)
    block = plain.get("parallelism_config")
    block = block if isinstance(block, Mapping) else {}
    written, right = block.get("fsdp2") or plain.get("fsdp_config"), dict[str, Any]()
    for key, value in written.items() if isinstance(written, Mapping) else ():
        with contextlib.suppress(ConfigError):
            parse_config({key: value})
            right[key] = value
    rest = {key: value for key, value in plain.items() if key not in _BLOCKS}
    beside = {key: value for key, value in block.items() if key not in ("fsdp", "fsdp2")}
    for settings in ({**beside, "fsdp2": right}, {"fsdp2": right}):
        cleaned: Any = OmegaConf.create({**rest, "parallelism_config": settings})
        with contextlib.suppress(ConfigError):
            read_parallelism(cleaned)
            return cleaned, wrong
    defaults: Any = OmegaConf.create({**rest, "parallelism_config": {"fsdp2": {}}})
    return defaults, wrong


def newest_checkpoint(cfg: DictConfig) -> Path | None:
    """Returns the target of the newest link in the run's `save_folder`; `None` without a link.

    A run that resumes by itself goes on from there. Without `run_name` its folder is not known, nor
    is what an object store holds.
    """
    folder = read_setting(cfg, "save_folder")
    run_name = read_setting(cfg, "run_name") or os.environ.get("RUN_NAME")
    if not isinstance(folder, str) or "://" in folder:
        return None
    links = Path(folder.replace("{run_name}", str(run_name))).rglob("*")
    links = [path for path in links if path.is_symlink() and path.exists()]
    newest = max(links, key=lambda path: path.lstat().st_mtime, default=None)
    return None if newest is None else Path(os.path.relpath(newest.resolve()))


def check_ranks(parsed: Mapping[str, Any], ranks: int) -> None:
    """Checks the degrees of a run before its ranks start.

    Raises:
        ConfigError: they do not multiply to the number of ranks.
    """
    from composer_fsdp2.plan.mesh_shape import MeshShape

    if requests_fsdp2(parsed):
        MeshShape.resolve(fsdp2_settings(parsed), ranks)


def read_setting(cfg: DictConfig, key: str) -> Any:
    """Returns the setting under a dotted key; `None` if it is missing or cannot be resolved yet."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.select(cfg, key)
    except OmegaConfBaseException:
        return None


def epochs_meant(cfg: DictConfig) -> tuple[str, str] | None:
    """Returns a sentence about a duration without a unit, and advice; `None` with a unit."""
    length = read_setting(cfg, "max_duration")
    if isinstance(length, bool) or not isinstance(length, int):
        return None
    return (
        f"max_duration is {length} without a unit, which is {length} epochs to Composer.",
        f"Write {length}ep, or {length}ba for batches.",
    )


def check_installed() -> None:
    """Checks that LLM Foundry can be imported, without doing so.

    Raises:
        ConfigError: a package is missing.
    """
    if importlib.util.find_spec("llmfoundry") is None:
        raise ConfigError(
            "LLM Foundry is not installed. Its training script is what runs. "
            "Install it with: pip install 'composer-fsdp2[foundry]'"
        )
    if importlib.util.find_spec("pkg_resources") is None:
        raise ConfigError(
            "The module 'pkg_resources' is missing. LLM Foundry imports it, and setuptools has it "
            "only before version 81. Install it with: pip install 'setuptools<81'"
        )


def read_yaml(path: Path, *, jobs: bool = True) -> DictConfig:
    """Reads a run, interpolations as they are written; of a job file the run inside it.

    Raises:
        ConfigError: there is no such file, it holds no settings, or it is a job file and may not.
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    check_named(path, [])
    try:
        cfg = OmegaConf.load(path)
        repr(cfg)  # a ValueError for numbers of thousands of digits, which nobody could show
    except (YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"'{path}' is not valid YAML: {_one_line(error)}. None of it can be used. "
            "Correct it at that place."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"'{path}' cannot be read: {error.strerror}. None of it can be used. "
            "Give a file that you may read."
        ) from None
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"'{path}' holds an interpolation that cannot be read: {_one_line(error)}. Its value "
            "would be unknown. Close it with '}', or write '\\${' for the characters themselves."
        ) from None
    if not isinstance(cfg, DictConfig) or not cfg:
        raise ConfigError(
            f"'{path}' holds no settings. A run needs keys such as model and train_loader. "
            "Write them, or start from yamls/quickstart.yaml."
        )
    is_run = any(key in cfg for key in ("model", *_BLOCKS))
    if is_run or not isinstance(read_setting(cfg, _INSIDE), DictConfig):
        return cfg
    if not jobs:
        raise ConfigError(
            f"'{path}' is a job file: its run stands under '{_INSIDE}'. LLM Foundry reads a run at "
            f"the top of a file, and would find none. Write what is under '{_INSIDE}' to a file of "
            "its own and give that."
        )
    # The platform hands it on as a file, in which `${...}` start from its own top.
    run: Any = OmegaConf.create(OmegaConf.to_container(cfg[_INSIDE], resolve=False))
    return run


def merge(cfg: DictConfig, overrides: list[str]) -> DictConfig:
    """Applies the overrides one by one, so that an error can name the override.

    Raises:
        ConfigError: one of them cannot be applied.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    for item in overrides:
        _check_override(item)
        try:
            cfg.merge_with(OmegaConf.from_cli([item]))
        except (OmegaConfBaseException, YAMLError) as error:
            raise ConfigError(
                f"The override '{item}' cannot be applied: {_one_line(error)}. The run would not "
                "be the one asked for. Correct the key, or the value, which has to be YAML."
            ) from None
    return cfg


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
