"""LLM Foundry: makes `parallelism_config: {fsdp2: ...}` legal in a training YAML.

LLM Foundry finds `transform` by entry point (`llmfoundry_config_transforms`) and calls it on every
rank, before `torch.distributed` starts and before it rejects keys it does not know. So a run needs
nothing but the YAML.

[Note: groups in a run] LLM Foundry divides the global batch by the number of ranks, and its loaders
deal samples to ranks. Ranks of a tensor group compute one batch together. So the batch is divided
by the number of groups, and every loader is told how many ranks next to each other read the same
(`replication`).
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_fsdp2.config.messages import nearest
from composer_fsdp2.config.parallel import check_strategy
from composer_fsdp2.errors import ConfigError

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
# `from_pretrained` makes weights that the folder lacks and leaves out others, where a config asks
# for more or fewer. It refuses other shapes, as reading in slices does.
_CHANGES_WEIGHTS = re.compile("layer|tie|bias")
"""in a key of `config_overrides` whose number, flag or list adds or removes weights"""
_LOADERS = ("train_loader", "eval_loader", "eval_loaders")
_KNOWN = ("text", "finetuning", "contrastive_pairs")
"""loaders of LLM Foundry, which take `replication`"""
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
    from composer_fsdp2.config.group_size import written_group_size

    parsed = parse_run_config(cfg)
    if not requests_fsdp2(parsed):
        return parsed
    from composer_fsdp2 import patches

    patches.install()
    if os.environ.get("WORLD_SIZE", "1") == "1":
        patches.check_feature(patches.ONE_RANK)
        # The only call of the script's `dist.get_world_size` follows, and drops the settings.
        # https://github.com/mosaicml/llm-foundry/blob/v0.22.0/llmfoundry/command_utils/train.py#L320
        vars(importlib.import_module("llmfoundry.command_utils.train"))["dist"].keeps = True
    # Corrects a line of LLM Foundry's log, "changing autoresume default to True". It decides so,
    # and hands the Trainer what is written:
    # https://github.com/mosaicml/llm-foundry/blob/v0.22.0/llmfoundry/command_utils/train.py#L302
    named = parsed.get("run_name") or os.environ.get("RUN_NAME")
    written = ("autoresume", "save_overwrite", "save_weights_only")
    announced = named and parsed.get("save_folder") and not any(map(parsed.get, written))
    if announced and os.environ.get("RANK", "0") == "0":
        print(
            "FSDP2: autoresume is off, though LLM Foundry logs that it changes its default to "
            "True. Write autoresume: true for a run that goes on from the newest checkpoint in "
            "its save_folder when it is started again.",
            file=sys.stderr,
            flush=True,
        )
    parsed = read_in_slices(parsed)
    if written_group_size(parsed["fsdp_config"]) > 1:
        patches.check_feature(patches.GROUPS)
        parsed = _share_batches(parsed, fsdp2_settings(parsed))
    return parsed


def parse_run_config(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Moves `parallelism_config` to LLM Foundry's keys and checks what it says about FSDP2.

    Raises:
        ConfigError: an unknown key, two places for one thing, or wrong FSDP2 settings.
    """
    from composer_fsdp2.config.group_size import BESIDE, with_keys_inside

    parsed = {key: value for key, value in cfg.items() if key != _BLOCK}
    parallelism = {} if cfg.get(_BLOCK) is None else cfg[_BLOCK]
    if not isinstance(parallelism, Mapping):
        raise ConfigError(
            f"'{_BLOCK}' is {parallelism!r}, but it takes a mapping. Nothing in it could be "
            f"applied. Write {_BLOCK}: {{fsdp2: {{}}}} for FSDP2 with default settings."
        )
    unknown = [str(key) for key in parallelism if key not in (*_PLACES, *BESIDE)]
    if unknown:
        names = ", ".join(f"'{name}'" for name in unknown)
        hint = "".join(nearest(name, _PLACES) for name in unknown)
        raise ConfigError(
            f"{_BLOCK} does not know {names}. The run would train as if it were not there."
            f"{hint} Write {' or '.join(_PLACES)}."
        )
    parallelism = with_keys_inside(parallelism)
    for key, value in parallelism.items():
        if value is not None or key == "fsdp2":
            parsed[_PLACES[key]] = _moved(parsed, parallelism, key)
    if requests_fsdp2(parsed):
        parsed = _move_tensor_parallel(parsed)
    block = parsed.get("fsdp_config")
    if isinstance(block, Mapping) and _MARKER in block:
        # LLM Foundry takes a planner that is written for a mapping, null too.
        nothing = [name for name in ("load_planner", "save_planner") if block.get(name) is None]
        settings = {k: v for k, v in block.items() if k not in (_MARKER, *nothing)}
        if block[_MARKER] == 2:
            config = fsdp2_settings(parsed)
            # What LLM Foundry would otherwise decide itself is written out. It takes a missing
            # state_dict_type for `full` when it names the latest checkpoint.
            settings |= {_MARKER: 2, "state_dict_type": config.state_dict_type}
            divides = config.tensor_parallel is not None and config.tensor_parallel.degree > 1
            if config.state_dict_type == "sharded" or divides:
                # For `init_device: mixed` it would make this true, which only a full checkpoint
                # can follow, and a model that is whole on rank 0.
                settings["load_monolith_rank0_only"] = config.load_monolith_rank0_only
        elif block[_MARKER] != 1:  # FSDP1's loses the marker, which Composer does not know
            raise ConfigError(
                f"'fsdp_config.version' is {block[_MARKER]!r}, but there are only 1 and 2. The run "
                "would be sharded in another way than asked. Write version: 2 for FSDP2, 1 for "
                "FSDP1."
            )
        parsed["fsdp_config"] = settings
    return parsed


def requests_fsdp2(parsed: Mapping[str, Any]) -> bool:
    """Returns whether a config that `parse_run_config` returned asks for FSDP2."""
    block = parsed.get("fsdp_config")
    return isinstance(block, Mapping) and block.get(_MARKER) == 2


def fsdp2_settings(parsed: Mapping[str, Any]) -> FSDP2Config:
    """Returns the FSDP2 settings of a config for which `requests_fsdp2` holds."""
    from composer_fsdp2.config.schema import parse_config

    return parse_config({k: v for k, v in parsed["fsdp_config"].items() if k != _MARKER})


def _moved(parsed: Mapping[str, Any], block: Mapping[str, Any], key: str) -> Any:
    """Returns a setting for its place, where none may be yet: either could win without a word.

    A block of FSDP2's is marked, see [Note: marker].
    """
    setting, value = _PLACES[key], block[key]
    if key == "fsdp2" and block.get("fsdp") is not None:
        raise ConfigError(
            f"{_BLOCK} has both 'fsdp' and 'fsdp2'. A model is sharded by one of them. "
            "Remove 'fsdp' to train with FSDP2, or 'fsdp2' to stay with FSDP1."
        )
    if parsed.get(setting) is not None:
        raise ConfigError(
            f"'{_BLOCK}.{key}' and '{setting}' are both set. A run follows one of them and would "
            f"ignore the other. Move what you need to '{_BLOCK}.{key}' and remove '{setting}'."
        )
    if key != "fsdp2":
        return value
    # An empty `fsdp2:` is null in YAML, and asks for default settings.
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


def read_in_slices(parsed: Mapping[str, Any]) -> dict[str, Any]:
    """Has FSDP2 read the weights of a pretrained model in slices; see [Note: pretrained models].

    Collective: no. It looks at the local disk and at the environment of the launcher. An explicit
    `pretrained_weights`, null too, is followed as it is.
    """
    model, block = parsed.get("model"), parsed["fsdp_config"]
    if _PRETRAINED in block or not isinstance(model, Mapping):
        return dict(parsed)
    folder = _sliceable_folder(model)
    if folder is None:
        return dict(parsed)
    sliced = {**block, _PRETRAINED: str(folder)}
    try:
        fsdp2_settings({"fsdp_config": sliced})
    except ConfigError:  # not all settings go with it
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
        "fsdp_config": sliced,
    }


def _sliceable_folder(model: Mapping[str, Any]) -> Path | None:
    """Returns the folder of a pretrained model that needs nothing else of `from_pretrained`.

    A name of the hub is looked up in the local cache, without asking the hub, and only where all
    ranks are on one node: another node's cache may hold something else.
    """
    from huggingface_hub import snapshot_download

    name: Any = model.get("pretrained_model_name_or_path")
    is_plain = (
        model.get("name") == "hf_causal_lm"
        and model.get("pretrained", True) is True
        and model.get("init_device") in ("meta", "mixed")
        and isinstance(name, str)
        and not any(model.get(key) for key in _NEEDS_FROM_PRETRAINED)
    )
    if not is_plain:
        return None
    folder = Path(name)
    if not folder.is_dir() and os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        return None
    try:
        if not folder.is_dir():
            folder = Path(snapshot_download(name, local_files_only=True))
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the hub's too, for no such name and for one not in the cache
        return None  # transformers says it better
    # The folder's weights are those of the model its config describes.
    plain = isinstance(config, dict) and not any(config.get(key) for key in _NOT_PLAIN)
    has_weights = any((folder / file).is_file() for file in _WEIGHT_FILES)
    if not plain or not has_weights:
        return None
    overrides = model.get("config_overrides")
    changed = overrides.items() if isinstance(overrides, Mapping) else ()
    other_weights = any(
        isinstance(value, int | list) and _CHANGES_WEIGHTS.search(str(key))
        for key, value in changed
        if value != config.get(key)
    )
    return None if other_weights else folder


# --- Ranks that compute one batch together. ---


def _move_tensor_parallel(parsed: Mapping[str, Any]) -> dict[str, Any]:
    """Makes `tp_config` a setting of FSDP2, which LLM Foundry carries to the Trainer untouched.

    Its own handling takes strategies alone, and drops the block on one rank.

    Raises:
        ConfigError: a strategy, or two places for one thing.
    """
    from composer_fsdp2.config.group_size import TENSOR_KEY

    others = {key: value for key, value in parsed.items() if key != "tp_config"}
    tp, block = parsed.get("tp_config"), parsed["fsdp_config"]
    check_strategy(tp)
    check_strategy(block.get(TENSOR_KEY))
    if not tp:
        return others
    if block.get(TENSOR_KEY) is not None:
        raise ConfigError(
            f"Tensor parallelism is set twice: as '{TENSOR_KEY}' of FSDP2, and as 'tp' of "
            "parallelism_config or 'tp_config'. One of them would have no effect. Take one out."
        )
    return {**others, "fsdp_config": {**block, TENSOR_KEY: tp}}


def _share_batches(parsed: Mapping[str, Any], settings: FSDP2Config) -> dict[str, Any]:
    """Has the ranks of a group read the same samples; see [Note: groups in a run].

    Loaders of other names stay as they are: ranks compare what they read in the first step.
    Collective: no. The launcher has set the number of ranks.

    Raises:
        ConfigError: the degrees do not multiply to the ranks, the groups cannot share a batch, or a
            loader has another `replication`.
    """
    from composer_fsdp2.config.group_size import ranks_of_a_batch
    from composer_fsdp2.plan.mesh_shape import MeshShape

    ranks, size = int(os.environ.get("WORLD_SIZE", "1")), ranks_of_a_batch(settings)
    shape = MeshShape.resolve(settings, ranks)
    batch, groups = parsed.get("global_train_batch_size"), ranks // size
    if isinstance(batch, int) and batch % groups:
        raise ConfigError(
            f"global_train_batch_size is {batch}, which the {groups} groups of {shape.describe()} "
            f"cannot share: the {size} ranks of a group read the same samples. Use a "
            f"multiple of {groups}, for example {-(-batch // groups) * groups}."
        )
    if "device_train_batch_size" in parsed:
        raise ConfigError(
            "LLM Foundry has divided the batch by the number of ranks before this package could "
            "divide it by the number of groups. Every rank would read too little. Install "
            "composer_fsdp2 with pip, so that LLM Foundry finds it first."
        )
    changed = dict(parsed)
    for key in _LOADERS:
        loaders = parsed.get(key)
        if isinstance(loaders, list):
            changed[key] = [
                _replicated(f"{key}[{n}]", loader, size) for n, loader in enumerate(loaders)
            ]
        elif isinstance(loaders, Mapping):
            changed[key] = _replicated(key, loaders, size)
    if isinstance(batch, int):
        # LLM Foundry divides it by the number of ranks. `trainer.loop.groups: show_batch` follows.
        changed["global_train_batch_size"] = batch * size
    return changed


def _replicated(where: str, loader: Any, degree: int) -> Any:
    if not isinstance(loader, Mapping) or loader.get("name") not in _KNOWN:
        return loader
    dataset = loader.get("dataset")
    if not isinstance(dataset, Mapping):
        return loader  # LLM Foundry says it better
    blocks: dict[str, Any] = {f"{where}.dataset": dataset}
    if isinstance(streams := dataset.get("streams"), Mapping):
        blocks |= {f"{where}.dataset.streams.{name}": stream for name, stream in streams.items()}
    for block_name, block in blocks.items():
        replication = block.get("replication") if isinstance(block, Mapping) else None
        if replication not in (None, degree):
            raise ConfigError(
                f"{block_name}.replication is {replication!r}, and {degree} ranks read one batch. "
                "Ranks of a group would read different samples, or groups the same. Leave it out: "
                "it is set to the number of ranks that read one batch."
            )
    return {**loader, "dataset": {**dataset, "replication": degree}}
