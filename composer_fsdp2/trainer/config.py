"""Our settings as an object Composer accepts, and every form in which users write them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from composer.utils import dist
from composer.utils.parallelism import FSDP2Config as ComposerFSDP2Config
from composer.utils.parallelism import FSDPConfig, ParallelismConfig, TPConfig
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from composer_fsdp2.config.fsdp1 import FSDP1_KEYS
from composer_fsdp2.config.group_size import BESIDE, with_keys_inside
from composer_fsdp2.config.messages import ascii_repr, nearest
from composer_fsdp2.config.parallel import check_strategy
from composer_fsdp2.config.schema import FSDP2Config, known_settings, parse_config
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.plan.mesh_shape import MeshShape
from composer_fsdp2.prepare.settings import TrainerFSDP2Config, from_fsdp1, resolve_settings

__all__ = [
    "TRANSFORM",
    "concerns_fsdp2",
    "parse_parallelism_config",
    "read_evaluation",
    "without_foundry_keys",
]

TRANSFORM = "composer_fsdp2"
"""the name of `foundry.transform` in LLM Foundry's registry"""
_KEYS = ("fsdp", "fsdp2", "tp")


def parse_parallelism_config(
    config: ParallelismConfig | Mapping[str, Any] | None,
) -> ParallelismConfig | None:
    """Reads the Trainer's `parallelism_config`.

    Collective: no. `fsdp2` may be a mapping, ours, or Composer's object. `fsdp` with FSDP1 settings
    keeps meaning FSDP1, unless it says `version: 2` or Composer's switch `FSDP_VERSION=2` is set.

    Raises:
        ConfigError: for a misspelt key, both versions at once, and wrong values.
    """
    if config is None:
        return None
    if isinstance(config, ParallelismConfig):
        settings: dict[str, Any] = {"fsdp": config.fsdp, "fsdp2": config.fsdp2, "tp": config.tp}
    else:
        settings = {str(key): value for key, value in config.items()}
        # An empty `fsdp2:` in YAML is null, and asks for it with default settings.
        if "fsdp2" in settings and settings["fsdp2"] is None:
            settings["fsdp2"] = {}
        settings = with_keys_inside(settings)
    _check_known(
        settings,
        _KEYS,
        "parallelism_config",
        "The run would silently become plain data parallel.",
    )
    if settings.get("fsdp") is not None and settings.get("fsdp2") is not None:
        raise ConfigError(
            "parallelism_config has both 'fsdp' and 'fsdp2'. A model is sharded by one of them. "
            "Take out 'fsdp' to train with FSDP2, or 'fsdp2' to stay with FSDP1."
        )
    fsdp, fsdp2, tp = settings.get("fsdp"), settings.get("fsdp2"), settings.get("tp")
    means_fsdp2 = isinstance(fsdp, Mapping) and (
        _version(fsdp, "fsdp") == "2" if "version" in fsdp else _switched_to_fsdp2()
    )
    if means_fsdp2 or isinstance(fsdp, FSDP2Config | ComposerFSDP2Config):
        fsdp, fsdp2 = None, fsdp
    parsed: dict[str, Any] = {}
    if fsdp is not None:
        parsed["fsdp"] = fsdp if isinstance(fsdp, FSDPConfig) else _fsdp1(fsdp)
    if fsdp2 is not None:
        parsed["fsdp2"] = _fsdp2(fsdp2, tp)
    if tp is not None and fsdp2 is None:
        if not isinstance(tp, TPConfig):
            _check_mapping("tp", tp)
            names = [field.name for field in dataclasses.fields(TPConfig)]
            _check_known(tp, names, "parallelism_config.tp", "It would have no effect.")
            tp = TPConfig(**tp)
        parsed["tp"] = tp
    return ParallelismConfig(**parsed) if parsed else None


def read_evaluation(
    original: Callable[..., Any],
    cfg: Any,
    dataclass_constructor: Any,
    dataclass_fields: Any,
    transforms: Any = None,
    icl_tasks_required: bool = False,
) -> Any:
    """Replaces `make_dataclass_and_log_config` of LLM Foundry's evaluation script."""
    transforms = [TRANSFORM, *(transforms or ())]
    return original(cfg, dataclass_constructor, dataclass_fields, transforms, icl_tasks_required)


def concerns_fsdp2(config: Any) -> bool:
    """Whether anything in the Trainer's `parallelism_config` is about FSDP2, right or wrong.

    Composer reads the others itself, and says itself what is wrong with them. A misspelt `fsdp2`
    and settings that FSDP2 alone has are about FSDP2. Collective: no. It raises nothing.
    """
    if isinstance(config, ParallelismConfig):
        config = {"fsdp": config.fsdp} if config.fsdp2 is None else {"fsdp2": config.fsdp2}
    if not isinstance(config, Mapping):
        return False
    # Misplaced, they would have Composer train plain data parallel without a word.
    misplaced = {*BESIDE, *known_settings(), "fully_shard", "parallelism_config"}
    for key in map(str, config):
        is_ours = key in misplaced or "fsdp" in key.lower() or "'fsdp2'" in nearest(key, _KEYS)
        if key == "fsdp2" or (key not in _KEYS and is_ours):
            return True
    fsdp = config.get("fsdp")
    if not isinstance(fsdp, Mapping):
        return isinstance(fsdp, FSDP2Config | ComposerFSDP2Config)
    ours = {"version", *known_settings()} - FSDP1_KEYS
    return _switched_to_fsdp2() or not ours.isdisjoint(fsdp)


def _check_known(keys: Iterable[str], valid: Collection[str], where: str, effect: str) -> None:
    for key in keys:
        if key not in valid:
            hint = nearest(key, valid) or f" Valid keys: {', '.join(valid)}."
            if key in known_settings() and "fsdp2" in valid:
                hint = " Settings of FSDP2 go under 'fsdp2'."
            raise ConfigError(f"'{key}' is not a key of {where}. {effect}{hint}")


def _check_mapping(key: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"'{key}' of parallelism_config is {ascii_repr(value)}. No setting can be read from "
            f"it. Write a mapping, or take '{key}' out."
        )


def _switched_to_fsdp2() -> bool:
    """Composer's switch, which makes FSDP1 settings mean FSDP2."""
    return os.environ.get("FSDP_VERSION", "1") == "2"


def _version(config: Mapping[str, Any], key: str) -> str:
    """Returns the version a mapping says it is written for; only `fsdp` may say 1 or 2."""
    version = ascii_repr(config["version"]).strip("'")
    possible = ("1", "2") if key == "fsdp" else ("2",)
    if version not in possible:
        raise ConfigError(
            f"'version' of parallelism_config.{key} is {ascii_repr(config['version'])}. The run "
            f"would use another FSDP than it says. Write version: {' or '.join(possible)}, or "
            "take it out."
        )
    return version


def _fsdp1(fsdp: Mapping[str, Any]) -> FSDPConfig:
    """Parses settings of FSDP1, which itself takes a misspelt key without a word."""
    _check_mapping("fsdp", fsdp)
    values = {key: value for key, value in fsdp.items() if key != "version"}
    for key in values:
        if key not in FSDP1_KEYS:
            choices = [] if key in known_settings() else sorted(FSDP1_KEYS)
            hint = nearest(key, choices) or " FSDP2 settings go under 'fsdp2'."
            raise ConfigError(
                f"'{key}' is not a key of parallelism_config.fsdp. It would have no effect.{hint}"
            )
    return FSDPConfig(**values)


def _fsdp2(fsdp2: Any, tp: Any) -> TrainerFSDP2Config:
    if isinstance(fsdp2, bool):
        raise ConfigError(
            f"'fsdp2' of parallelism_config is {ascii_repr(fsdp2)}. It takes settings, and is no "
            "switch. Write fsdp2: {} for FSDP2 with default settings, or take 'fsdp2' out to train "
            "without it."
        )
    if isinstance(fsdp2, Mapping):
        fsdp2 = without_foundry_keys(fsdp2)
        # Keys that FSDP1 alone has are only possible through `FSDP_VERSION=2`.
        old = FSDP1_KEYS - known_settings().keys()
        is_fsdp1 = _switched_to_fsdp2() and not old.isdisjoint(fsdp2)
        converted = from_fsdp1(fsdp2) if is_fsdp1 else parse_config(fsdp2)
    else:
        converted = resolve_settings(fsdp2)
    if tp:
        converted = _with_tensor_parallel(converted, tp)
    for key in ("load_planner", "save_planner"):
        if isinstance(getattr(converted, key), Mapping):
            raise ConfigError(
                f"'{key}' is {ascii_repr(getattr(converted, key))}. Only LLM Foundry makes a "
                f"planner of a name. Give the Trainer the object: {key}=MyPlanner(...)."
            )
    # Composer's State builds the mesh; its own checks of the degrees name no numbers.
    MeshShape.resolve(converted, dist.get_world_size()).check_reshard(
        converted.reshard_after_forward, "the run"
    )
    return TrainerFSDP2Config.of(converted)


def without_foundry_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Takes out the mark of our config transform and what LLM Foundry adds.

    Its additions ask for what always happens: rank 0's weights are the run's, and gradients are as
    low as `master_weights_dtype`.
    """
    if "version" not in config:
        return dict(config)
    _version(config, "fsdp2")
    values = {key: value for key, value in config.items() if key != "version"}
    if values.pop("sync_module_states", False) and values.get("state_dict_type") != "full":
        values.pop("load_monolith_rank0_only", None)
    precision = values.get("mixed_precision")
    if isinstance(precision, Mapping):
        # For `master_weights_dtype`. Gradients have the dtype of the weights, as it asks.
        values["mixed_precision"] = {
            k: v for k, v in precision.items() if k != "keep_low_precision_grads"
        }
    return values


# --- `parallelism_config.tp`, which is the setting `tensor_parallel` under FSDP2 ---


def _with_tensor_parallel(settings: FSDP2Config, tp: Any) -> FSDP2Config:
    if settings.tensor_parallel is not None:
        raise ConfigError(
            "Both 'tp' and 'fsdp2.tensor_parallel' of parallelism_config are set. They are the "
            "same setting, and one of them would have no effect. Take one of them out."
        )
    if isinstance(tp, TPConfig):
        if tp.device_mesh is not None:
            raise ConfigError(
                "TPConfig has a device_mesh. FSDP2 and tensor parallelism need axes of one mesh, "
                "which is built from the degrees. Leave device_mesh out."
            )
        tp = {"degree": tp.tensor_parallel_degree, "layer_plan": tp.layer_plan}
    check_strategy(tp)
    plan = tp.get("layer_plan") if isinstance(tp, Mapping) else None
    if isinstance(plan, Mapping):
        # Styles of torch with default arguments have a word; other styles stay as they are.
        styles = {
            "colwise": ColwiseParallel(),
            "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
            "rowwise": RowwiseParallel(),
        }
        words = dict(plan)
        for name, style in plan.items():
            kind = type(style)
            same = (w for w, s in styles.items() if kind is type(s) and vars(style) == vars(s))
            words[name] = next(same, style)
        tp = {**tp, "layer_plan": words}
    parsed = parse_config({"tensor_parallel": tp}).tensor_parallel
    return dataclasses.replace(settings, tensor_parallel=parsed)
