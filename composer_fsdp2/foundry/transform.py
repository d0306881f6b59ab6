"""LLM Foundry: makes `parallelism_config: {fsdp2: ...}` legal in a training YAML.

LLM Foundry finds `transform` by entry point (`llmfoundry_config_transforms`) and calls it on every
rank, before `torch.distributed` starts and before it rejects keys it does not know. So a run needs
nothing but the YAML.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.foundry.tensor_groups import (
    check_groups,
    move_tensor_parallel,
    same_data,
)

if TYPE_CHECKING:
    from composer_fsdp2.config.schema import FSDP2Config

__all__ = ["fsdp2_settings", "parse_run_config", "read_in_slices", "requests_fsdp2", "transform"]

# [Note: marker] LLM Foundry carries `fsdp_config` to Composer's Trainer as a plain dict (a config
# object would not survive its dataclass conversion) and reads FSDP1 names out of it on the way. The
# key `version` tells our Trainer that the dict is FSDP2's.
_MARKER = "version"
_BLOCK = "parallelism_config"
_PLACES = {"fsdp2": "fsdp_config", "fsdp": "fsdp_config", "tp": "tp_config"}
"""keys of `parallelism_config`, and where LLM Foundry keeps the same thing"""

# [Note: pretrained models] For `pretrained: true` LLM Foundry loads the whole model on every rank
# (`init_device: cpu`) or on rank 0 (`mixed`), and refuses `meta`. Where a local folder has all it
# takes, the model is built on meta everywhere instead and FSDP2 reads the folder. Only a plain
# causal language model in the folder's own shape is: what else `from_pretrained` does on the way
# (adapters, quantisation, new embedding rows, the text part of another model) stays with it.
_PRETRAINED = "pretrained_weights"
_NEEDS_FROM_PRETRAINED = (
    "allow_embedding_resizing",
    "load_in_8bit",
    "peft_config",
    "pretrained_lora_id_or_path",
)
_NOT_PLAIN = ("quantization_config", "text_config", "vision_config")
_WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")


def transform(cfg: dict[str, Any]) -> dict[str, Any]:
    """Moves the settings where LLM Foundry reads them, and prepares Composer for FSDP2.

    Collective: no. It depends on `cfg` alone, so all ranks raise the same error or none does.

    Args:
        cfg: the whole training config, plain values; stays as it is.

    Raises:
        ConfigError: the parallelism settings cannot be used.
        PatchError: FSDP2 is requested, and Composer is not a version that can be extended.
    """
    from composer_fsdp2.trainer.fetch import set_node_rank

    parsed = parse_run_config(cfg)
    if requests_fsdp2(parsed):
        set_node_rank()  # before Composer starts torch.distributed
        from composer_fsdp2.trainer.patches import check_one_rank, install

        install()
        if os.environ.get("WORLD_SIZE", "1") == "1":
            check_one_rank()
        parsed = _with_groups(read_in_slices(parsed))
    return parsed


def _with_groups(parsed: dict[str, Any]) -> dict[str, Any]:
    """Has the ranks of a group read the same, where there are any."""
    from composer_fsdp2.config.group_size import written_group_size

    degree = written_group_size(parsed["fsdp_config"])
    if degree == 1:
        return parsed
    from composer_fsdp2.trainer.patches import check_groups_in_runs

    check_groups_in_runs()
    check_groups(parsed, fsdp2_settings(parsed))
    return same_data(parsed, degree)


def parse_run_config(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Moves `parallelism_config` to LLM Foundry's keys and checks what it says about FSDP2.

    Raises:
        ConfigError: an unknown key, two places for one thing, or wrong FSDP2 settings.
    """
    parsed = _spread(cfg)
    if requests_fsdp2(parsed):
        parsed = move_tensor_parallel(parsed)
    block = parsed.get("fsdp_config")
    if isinstance(block, Mapping) and _MARKER in block:
        parsed["fsdp_config"] = _parse_versioned(block)
    return parsed


def requests_fsdp2(parsed: Mapping[str, Any]) -> bool:
    """Whether a config that `parse_run_config` returned asks for FSDP2."""
    block = parsed.get("fsdp_config")
    return isinstance(block, Mapping) and block.get(_MARKER) == 2


def fsdp2_settings(parsed: Mapping[str, Any]) -> FSDP2Config:
    """The FSDP2 settings of a config for which `requests_fsdp2` holds."""
    from composer_fsdp2.config.schema import parse_config

    return parse_config({k: v for k, v in parsed["fsdp_config"].items() if k != _MARKER})


def _spread(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Moves every key of `parallelism_config` to its place, FSDP2's with the marker."""
    from composer_fsdp2.config.group_size import with_keys_inside

    parsed = {key: value for key, value in cfg.items() if key != _BLOCK}
    block = {} if cfg.get(_BLOCK) is None else cfg[_BLOCK]
    _check_block(block)
    block = with_keys_inside(block)
    for key, value in block.items():
        if value is None and key != "fsdp2":
            continue
        _check_free(parsed, block, key)
        parsed[_PLACES[key]] = _marked(value) if key == "fsdp2" else value
    return parsed


def _check_block(block: Any) -> None:
    if not isinstance(block, Mapping):
        raise ConfigError(
            f"'{_BLOCK}' is {block!r}, but it takes a mapping. Nothing in it could be applied. "
            f"Write {_BLOCK}: {{fsdp2: {{}}}} for FSDP2 with default settings."
        )
    from composer_fsdp2.config.group_size import BESIDE

    unknown = [str(key) for key in block if key not in (*_PLACES, *BESIDE)]
    if unknown:
        from composer_fsdp2.config.messages import nearest

        names = ", ".join(f"'{name}'" for name in unknown)
        hint = "".join(nearest(name, _PLACES) for name in unknown)
        raise ConfigError(
            f"{_BLOCK} does not know {names}. The run would train as if it were not there."
            f"{hint} Write {' or '.join(_PLACES)}."
        )


def _check_free(parsed: Mapping[str, Any], block: Mapping[str, Any], key: str) -> None:
    """Refuses two places for one thing: either could win without a word."""
    place = _PLACES[key]
    if key == "fsdp2" and block.get("fsdp") is not None:
        raise ConfigError(
            f"{_BLOCK} has both 'fsdp' and 'fsdp2'. A model is sharded by one of them. "
            "Remove 'fsdp' to train with FSDP2, or 'fsdp2' to stay with FSDP1."
        )
    if parsed.get(place) is not None:
        raise ConfigError(
            f"'{_BLOCK}.{key}' and '{place}' are both set. A run follows one of them and would "
            f"ignore the other. Move what you need to '{_BLOCK}.{key}' and remove '{place}'."
        )


def _marked(value: Any) -> dict[str, Any]:
    """An empty `fsdp2:` is null in YAML, and asks for default settings."""
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"'{_BLOCK}.fsdp2' is {value!r}, but it takes a mapping. It is not clear whether FSDP2 "
            "is wanted. Write fsdp2: {} for default settings, or remove the key to do without."
        )
    if str(value.get(_MARKER, 2)) != "2":
        raise ConfigError(
            f"'{_BLOCK}.fsdp2.{_MARKER}' is {value[_MARKER]!r}. The run would use another FSDP "
            f"than it says. Write version: 2, or leave it out; FSDP1 belongs to {_BLOCK}.fsdp."
        )
    return {**value, _MARKER: 2}


def _parse_versioned(block: Mapping[str, Any]) -> dict[str, Any]:
    """Checks a block with a marker; FSDP1's loses the marker, which Composer does not know."""
    settings = {key: value for key, value in block.items() if key != _MARKER}
    match block[_MARKER]:
        case 1:
            return settings
        case 2:
            return _parse_fsdp2(settings)
        case other:
            raise ConfigError(
                f"'fsdp_config.version' is {other!r}, but there are only 1 and 2. The run would be "
                "sharded in another way than asked. Write version: 2 for FSDP2, 1 for FSDP1."
            )


def _parse_fsdp2(settings: dict[str, Any]) -> dict[str, Any]:
    """Checks FSDP2 settings and writes out what LLM Foundry would otherwise decide itself."""
    from composer_fsdp2.config.schema import parse_config

    config = parse_config(settings)
    # It takes a missing state_dict_type for `full` when it names the latest checkpoint.
    explicit: dict[str, Any] = {"state_dict_type": config.state_dict_type}
    divides = config.tensor_parallel is not None and config.tensor_parallel.degree > 1
    if config.state_dict_type == "sharded" or divides:
        # For `init_device: mixed` it would make this true, which only a full checkpoint can follow,
        # and a model that is whole on rank 0.
        explicit["load_monolith_rank0_only"] = config.load_monolith_rank0_only
    return {**settings, **explicit, _MARKER: 2}


def read_in_slices(parsed: Mapping[str, Any]) -> dict[str, Any]:
    """Has a pretrained model read by FSDP2 where it can be; see [Note: pretrained models].

    Collective: no. It looks at the local disk and at the environment of the launcher. An explicit
    `pretrained_weights`, null too, is followed as it is.
    """
    model, block = parsed.get("model"), parsed["fsdp_config"]
    if _PRETRAINED in block or not isinstance(model, Mapping):
        return dict(parsed)
    folder = _sliceable_folder(model)
    if folder is None or not _goes_with(block, folder):
        return dict(parsed)
    if os.environ.get("RANK", "0") == "0":
        print(
            f"FSDP2: every rank reads only its shards of '{folder}'. The model is built with "
            f"pretrained: false and init_device: meta for that; write {_PRETRAINED}: null in "
            "parallelism_config.fsdp2 to keep LLM Foundry's own loading.",
            file=sys.stderr,
            flush=True,
        )
    return {
        **parsed,
        "model": {**model, "pretrained": False, "init_device": "meta"},
        "fsdp_config": {**block, _PRETRAINED: str(folder)},
    }


def _goes_with(block: Mapping[str, Any], folder: Path) -> bool:
    """Whether the other settings allow it: not all have been tried with tensor parallelism."""
    try:
        fsdp2_settings({"fsdp_config": {**block, _PRETRAINED: str(folder)}})
    except ConfigError:
        return False
    return True


def _sliceable_folder(model: Mapping[str, Any]) -> Path | None:
    """The folder of a pretrained model that needs nothing else of `from_pretrained`."""
    name = model.get("pretrained_model_name_or_path")
    wanted = (
        model.get("name") == "hf_causal_lm"
        and model.get("pretrained", True) is True
        and model.get("init_device") in ("meta", "mixed")
        and isinstance(name, str)
        and not any(model.get(key) for key in _NEEDS_FROM_PRETRAINED)
    )
    if not wanted:
        return None
    assert isinstance(name, str)
    folder = Path(name) if Path(name).is_dir() else _cached(name)
    if folder is None or not any((folder / file).is_file() for file in _WEIGHT_FILES):
        return None
    return folder if _is_plain(folder) else None


def _is_plain(folder: Path) -> bool:
    """Whether the folder's weights are those of the model its config describes."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # transformers says it better
    return isinstance(config, dict) and not any(config.get(key) for key in _NOT_PLAIN)


def _cached(name: str) -> Path | None:
    """The folder of a name of the hub that is in the local cache, without asking the hub.

    Only where all ranks are on one node: another node's cache may hold something else.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        return None
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None
