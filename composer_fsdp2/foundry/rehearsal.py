"""Goes through what a run goes through before its first batch, in the order of LLM Foundry.

[Note: rehearsal] Everything is built by the functions that build it in the run: the configuration,
what has a name in a registry, the loaders and a batch of local data, the model on meta, the
optimizer and the plan. What they raise is what the run would raise. Little is checked besides: what
a run would find late or never. No other rank is there, no network is asked and no logger hears
about a run. Files of `code_paths` are imported and config transforms are applied as in a run; those
may write the data they are for.

[Note: plan only] A plan depends on the model, the optimizer, algorithms that change the model, and
the settings. Data, tokenizer, loggers and callbacks are not built for it, and a model whose
configuration is not here is built from sizes that are written in the run or known to the package.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import torch
from composer.algorithms import GradientClipping
from composer.algorithms.gradient_clipping import apply_gradient_clipping
from composer.core import Event, Precision, State, Timestamp, TimeUnit, ensure_time
from composer.devices import DeviceCPU, DeviceGPU
from composer.loggers import Logger
from composer.models import ComposerModel
from composer.utils import create_interval_scheduler, format_name_with_dist, get_device
from huggingface_hub import try_to_load_from_cache
from llmfoundry import registry
from llmfoundry.command_utils.train import validate_config
from llmfoundry.data.dataloader import build_dataloader
from llmfoundry.data.text_data import build_streams
from llmfoundry.models.layers import attention
from llmfoundry.utils import builders
from llmfoundry.utils.config_utils import (
    TRAIN_CONFIG_KEYS,
    TrainConfig,
    make_dataclass_and_log_config,
    process_init_device,
)
from llmfoundry.utils.registry_utils import import_file, save_registry
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue
from streaming import StreamingDataset
from torch import nn
from transformers import modeling_utils

from composer_fsdp2.checkpoint.contents import detect_kind
from composer_fsdp2.config.blocks import Float8Spec
from composer_fsdp2.config.messages import ascii_repr
from composer_fsdp2.config.schema import FSDP2Config, known_settings, parse_config
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.foundry.cluster import LAUNCHED, Cluster, environment
from composer_fsdp2.foundry.findings import Findings, findings_of
from composer_fsdp2.foundry.names import NAME, refuse_unknown, wrong_kinds
from composer_fsdp2.foundry.offline_model import fuse_attention, offline_config, without_flash
from composer_fsdp2.foundry.registered import register, register_names
from composer_fsdp2.foundry.run_file import NEEDED
from composer_fsdp2.parallel.parallelism import GroupSizes, Parallelism
from composer_fsdp2.patches import engine
from composer_fsdp2.plan.unit_size import frozen_elements
from composer_fsdp2.plan.wrap_plan import WrapPlan
from composer_fsdp2.prepare.model import TRANSFORMATIONS
from composer_fsdp2.prepare.plan import PreparePlan
from composer_fsdp2.shard.units import collector_paused
from composer_fsdp2.trainer.checkpoint.load import check_checkpoint
from composer_fsdp2.trainer.checkpoint.save import check_saved_adapters
from composer_fsdp2.trainer.checkpoint.save_folder import check_save_folder
from composer_fsdp2.trainer.config import without_foundry_keys
from composer_fsdp2.trainer.start import check_arguments

__all__ = ["Parts", "Rehearsal", "rehearse"]

_REACH_OUT = ("comet_ml", "mlflow", "mosaicml", "neptune", "remote_uploader_downloader")
"""loggers that speak with a server as soon as they are built"""
_LOCAL_FORMATS = ("json", "csv", "parquet", "text", "arrow", "pandas", "xml", "webdataset")
"""Hugging Face's names for local files of a format; the files are in `hf_kwargs`"""
_NEEDS_VALUES = (
    "Write init_device: cpu if weights need values, as for new rows of a larger tokenizer."
)
_TIME = "Write a number and a unit: 10ba, 1ep, 5000tok, 100sp."
# The first rank of a node reads weights, and fills a cache for the others.
_SECOND_RANK = {"RANK": "1", "LOCAL_RANK": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Holds a run whose units are planned, for a forecast of its step. The model is unchanged."""

    model: ComposerModel
    optimizer: torch.optim.Optimizer
    settings: FSDP2Config
    config: Any
    """LLM Foundry's, with batch sizes of a rank"""
    plan: PreparePlan
    notes: tuple[str, ...] = ()
    """differences between the run and the parts that were built"""


@dataclass(slots=True, kw_only=True)
class Rehearsal(Findings):
    """Findings about a run, and the parts of it that could be built."""

    units: WrapPlan | None = None
    """of a run with FSDP2 whose model could be built"""
    sizes: GroupSizes | None = None
    """of a run whose layers are divided"""
    frozen: Mapping[str, int] = field(default_factory=dict[str, int])
    """elements that are not trained, by the first module of their unit"""
    parts: Parts | None = None
    """of a run with FSDP2 that has an optimizer"""
    builds_on_meta: bool | None = None
    """whether a model with `init_device: mixed` can be built with meta; `None` for others"""
    notes: list[str] = field(default_factory=list[str])
    """notes of stand-ins for files that are not on this machine"""


def rehearse(cfg: DictConfig, cluster: Cluster, *, plan_only: bool = False) -> Rehearsal:
    """Rehearses a run. Collective: no.

    Args:
        cfg: the run with its overrides, interpolations as they are written.
        cluster: ranks, ranks per node and their devices.
        plan_only: builds what the plan depends on, without data and tokenizer: [Note: plan only].
    """
    rehearsal = Rehearsal()
    # With no rows of its own, this takes back the rows that the config transform installs.
    with save_registry(), engine.rows_installed(()):
        register()
        with rehearsal.step(
            "code_paths", f"Correct the file or its path, read from {os.getcwd()}."
        ):
            paths = cfg.get("code_paths")
            for path in paths if isinstance(paths, ListConfig) else ():
                import_file(path)
        register_names()  # after those of `code_paths`, which may take out keys of their own
        read = _read_config(rehearsal, cfg, cluster)
        for name in LAUNCHED:
            os.environ.pop(name, None)
        if read is not None:
            _build(rehearsal, *read, cluster, plan_only=plan_only)
    return rehearsal


# --- The configuration. ---


def _texts_of(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yields the texts in a configuration with their keys, joined by dots."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _texts_of(item, f"{path}.{key}" if path else str(key))


def _read_config(
    rehearsal: Rehearsal, cfg: DictConfig, cluster: Cluster
) -> tuple[dict[str, Any], Any] | None:
    """Reads the run as LLM Foundry does; returns the logged configuration and the parsed one."""
    transforms, run = [*registry.config_transforms.get_all()], cfg
    for path, value in _texts_of(OmegaConf.to_container(cfg, resolve=False), ""):
        if "${oc.env:" in value:
            rehearsal.add(
                f"{path} is {value}, and LLM Foundry's train script switches oc.env off: the run "
                "would stop with UnsupportedInterpolationType.",
                f"Give the value on the command line: {path}=...",
            )
    with rehearsal.step("The configuration"):
        read: Any = OmegaConf.to_container(cfg, resolve=True)
        for text in wrong_kinds("", TrainConfig, read):
            problem, _, advice = text.rpartition(". ")
            rehearsal.add(f"The configuration: {problem}.", advice)
    # Goes on with a batch that can be divided, then with known keys alone, to find other mistakes.
    for names in (transforms, transforms, [name for name in transforms if name != NAME]):
        with rehearsal.step("The configuration"), environment(cluster.first_rank()):
            try:
                return make_dataclass_and_log_config(
                    run, TrainConfig, TRAIN_CONFIG_KEYS, transforms=names
                )
            except MissingMandatoryValue:  # names the first key, and not what it may hold
                missing = [key for key in NEEDED if key not in cfg]
                for key in missing:
                    advice = f"Write `{key}: {NEEDED[key]}`, with values of your own."
                    rehearsal.add(f"The run has no `{key}`.", advice)
                if not missing:
                    raise
                break
        with rehearsal.step("The configuration"):
            plain: Any = OmegaConf.to_container(cfg, resolve=True)
            batch = plain.get("global_train_batch_size", 0)
            if not isinstance(batch, int) or batch % cluster.ranks:
                plain["global_train_batch_size"] = cluster.ranks
            if run is not cfg:
                valid = (*TRAIN_CONFIG_KEYS, "parallelism_config")
                plain = {key: value for key, value in plain.items() if key in valid}
            run = OmegaConf.create(plain)
    with rehearsal.step("The configuration"):
        container: Any = OmegaConf.to_container(cfg, resolve=True)
        refuse_unknown(container)  # a missing key may be misspelt
    return None


# --- The parts of the run, in the order of LLM Foundry. ---


def _build(
    rehearsal: Rehearsal, logged: dict[str, Any], config: Any, cluster: Cluster, *, plan_only: bool
) -> None:
    with rehearsal.step("The configuration"):
        validate_config(copy.deepcopy(config))
    algorithms = _build_each(rehearsal, "algorithms", config.algorithms, builders.build_algorithm)
    run_name = config.run_name or os.environ.get("RUN_NAME") or "rehearsal"
    trainer_args: dict[str, Any] = {"algorithms": algorithms, "callbacks": []}
    inputs, optimizer = _Inputs(), None
    if plan_only:
        inputs.tokenizer = _tokenizer_of_model(rehearsal, config)
    else:
        trainer_args["callbacks"] = _build_inputs(rehearsal, inputs, logged, config)
        _check_arguments(rehearsal, config, algorithms, run_name, cluster)
    model = _build_model(rehearsal, config, inputs.tokenizer, cluster, plan_only=plan_only)
    if model is None:
        return
    with rehearsal.step("optimizer"):
        settings = copy.deepcopy(dict(config.optimizer))
        if config.model.get("init_device", "cpu") == "cpu":
            settings.pop("fused", None)  # torch refuses it on meta alone
        optimizer = builders.build_optimizer(model, settings.pop("name"), settings)
    trainer_args["optimizers"] = optimizer
    with rehearsal.step("The Trainer"):
        state = State(
            model=model, rank_zero_seed=0, run_name=run_name, device=DeviceCPU(), **trainer_args
        )
        # As the Trainer starts: algorithms change the model, and the scheduler reads times.
        model.logger = logger = Logger(state, inputs.loggers)
        for algorithm in state.algorithms:
            with rehearsal.step(f"algorithms: {type(algorithm).__name__}"):
                if algorithm.match(Event.INIT, state):
                    algorithm.apply(Event.INIT, state, logger)
        with rehearsal.step("max_duration", _TIME):
            state.max_duration = ensure_time(config.max_duration, TimeUnit.EPOCH)
            if inputs.scheduler is not None and inputs.loader is not None:
                with rehearsal.step("scheduler"):
                    state.set_dataloader(inputs.loader, "train")
                    inputs.scheduler(state)
        if not plan_only:
            _check_load_path(rehearsal, config, run_name, state)
    if (config.fsdp_config or {}).get("version") == 2:
        if config.save_folder is not None:
            with rehearsal.step("save_folder"):
                check_saved_adapters(state)
        _plan(rehearsal, config, model, trainer_args, cluster)


@dataclass(slots=True)
class _Inputs:
    """Parts on which no plan depends."""

    tokenizer: Any = None
    scheduler: Any = None
    loader: Any = None
    loggers: list[Any] = field(default_factory=list[Any])


def _build_inputs(
    rehearsal: Rehearsal, inputs: _Inputs, logged: dict[str, Any], config: Any
) -> list[Any]:
    """Builds tokenizer, scheduler, loggers, callbacks and loaders; returns the callbacks."""
    if config.tokenizer:
        with rehearsal.step("tokenizer"):
            name, kwargs = config.tokenizer["name"], dict(config.tokenizer.get("kwargs") or {})
            is_registered = name in registry.tokenizers
            if is_registered or _is_here(rehearsal, "tokenizer.name", name):
                local = {} if is_registered else {"local_files_only": True}
                inputs.tokenizer = builders.build_tokenizer(name, kwargs | local)
    with rehearsal.step("scheduler"):
        settings = copy.deepcopy(dict(config.scheduler))
        inputs.scheduler = builders.build_scheduler(settings.pop("name"), settings)
    loggers = {n: block for n, block in (config.loggers or {}).items() if n not in _REACH_OUT}
    inputs.loggers = _build_each(rehearsal, "loggers", loggers, builders.build_logger)
    build_callback = functools.partial(builders.build_callback, train_config=logged)
    callbacks = _build_each(rehearsal, "callbacks", config.callbacks, build_callback)
    tokenizer, batch_size = inputs.tokenizer, config.device_train_batch_size
    inputs.loader = _build_loader(
        rehearsal, "train_loader", config.train_loader, tokenizer, batch_size
    )
    several = enumerate(config.eval_loaders or ())
    blocks = {f"eval_loader[{number}]": block for number, block in several}
    for where, block in {"eval_loader": config.eval_loader, **blocks}.items():
        _build_loader(rehearsal, where, block or {}, tokenizer, config.device_eval_batch_size)
    return callbacks


def _tokenizer_of_model(rehearsal: Rehearsal, config: Any) -> Any:
    """Builds the tokenizer where the model may depend on it: on its length, or in own code."""
    resizes = config.model.get("allow_embedding_resizing")
    if not resizes and not config.code_paths:
        return None
    name, kwargs = config.tokenizer.get("name"), dict(config.tokenizer.get("kwargs") or {})
    try:
        return builders.build_tokenizer(name, {**kwargs, "local_files_only": True})
    except Exception:  # whatever is missing; doctor says it
        if resizes:
            rehearsal.notes.append(
                f"tokenizer '{name}' is not on this machine: rows that allow_embedding_resizing "
                "would add for its tokens are not in these numbers"
            )
        return None


def _build_each(
    rehearsal: Rehearsal, where: str, blocks: Any, build: Callable[[str, dict[str, Any]], Any]
) -> list[Any]:
    built: list[Any] = []
    for name, settings in (blocks or {}).items():
        with rehearsal.step(f"{where}.{name}"):
            built.append(build(str(name), dict(copy.deepcopy(settings) or {})))
    return built


# --- Names of the Hugging Face hub, and data. ---


def _is_here(rehearsal: Rehearsal, where: str, name: str) -> bool:
    """Returns whether a model or tokenizer is a folder or in the local cache; asks no hub."""
    with rehearsal.step(
        where, f"There is no such folder in {os.getcwd()} either. Correct the path."
    ):
        if _has(name, "config.json", "tokenizer_config.json", "tokenizer.json"):
            return True
        rehearsal.add(
            f"{where}: '{name}' is no folder and not in the local cache of the Hugging Face hub, "
            "which is not asked. What depends on it is not checked.",
            "Correct the name, or download it first to have it checked here.",
            "warning",
        )
    return False


def _has(name: str, *files: str) -> bool:
    cached = (isinstance(try_to_load_from_cache(name, file), str) for file in files)
    return Path(name).is_dir() or any(cached)


def _build_loader(
    rehearsal: Rehearsal, where: str, block: Mapping[str, Any], tokenizer: Any, batch_size: Any
) -> Any | None:
    """Builds a loader and a batch where that needs neither the network nor minutes."""
    block = {key: value for key, value in copy.deepcopy(dict(block)).items() if key != "label"}
    dataset = block.get("dataset")
    if "://" in str(block) or not isinstance(dataset, dict):
        return None
    dataset.pop("replication", None)  # must divide the number of ranks, and here is one process
    with rehearsal.step(where, f"Correct it there; paths are read from {os.getcwd()}."):
        name, kwargs = dataset.get("hf_name"), dataset.get("hf_kwargs") or {}
        if name is not None:
            # Finds the files. LLM Foundry would go on to tokenize all of them.
            if name in _LOCAL_FORMATS or name.startswith((".", "/")) or Path(name).exists():
                data_dir, data_files = kwargs.get("data_dir"), kwargs.get("data_files")
                datasets.load_dataset_builder(name, data_dir=data_dir, data_files=data_files)
        elif tokenizer is not None:
            loader: Any = build_dataloader(block, tokenizer, batch_size).dataloader
            samples: Any = getattr(loader, "dataset", None)
            size = getattr(loader, "batch_size", None)
            # A loader of the run's own code may have neither samples by number nor a batch size.
            if isinstance(size, int) and hasattr(samples, "__len__"):
                loader.collate_fn([samples[n] for n in range(min(size, len(samples)))])
            return loader
        elif block.get("name") in ("text", "finetuning"):
            sources: dict[str, Any] = {k: dataset.get(k) for k in ("remote", "local", "split")}
            StreamingDataset(streams=build_streams(dataset.get("streams")), batch_size=1, **sources)
    return None


# --- The model. ---


def _build_model(
    rehearsal: Rehearsal, config: Any, tokenizer: Any, cluster: Cluster, *, plan_only: bool
) -> ComposerModel | None:
    """Builds the model without its weights."""
    init = config.model.get("init_device", "cpu")
    is_sharded = (config.fsdp_config or {}).get("version") == 2 or cluster.ranks > 1
    with rehearsal.step("model.init_device", "Write cpu, mixed or meta."):
        fsdp = copy.deepcopy(config.fsdp_config) if is_sharded else None
        process_init_device(copy.deepcopy(config.model), fsdp, config.tp_config)
    name, block = config.model.get("pretrained_model_name_or_path"), dict(config.model)
    where, model, has_flash = "model.pretrained_model_name_or_path", None, False
    if name is not None and not plan_only and not _is_here(rehearsal, where, name):
        return None
    with (
        rehearsal.step("model", _NEEDS_VALUES if init == "meta" else ""),
        tempfile.TemporaryDirectory() as folder,
    ):
        if plan_only:
            block, has_flash = without_flash(block)
        if plan_only and name is not None and not _has(name, "config.json"):
            shape, source = offline_config(name, block.get("config_overrides") or {})
            Path(folder, "config.json").write_text(json.dumps(shape), encoding="utf-8")
            block["pretrained_model_name_or_path"] = folder
            rehearsal.notes.append(
                f"the configuration of '{name}' is not on this machine: its sizes are {source}"
            )
        try:
            # What cpu builds on every rank, and mixed on the first, is built here as on the second.
            model = _on_meta(config, block, tokenizer, "meta" if init == "meta" else "mixed")
        except Exception as error:
            if init != "cpu" or re.search(r"\bmeta\b", str(error), re.IGNORECASE) is None:
                raise
            rehearsal.add(
                f"model: it cannot be built here, where weights have no values ({error}). The run "
                "builds it with values, and there is no plan to show.",
                "Nothing: init_device: cpu is right for it.",
                "warning",
            )
        if model is not None and init == "mixed" and not plan_only:
            quiet = Findings()
            with quiet.step("model"):
                _on_meta(config, block, tokenizer, "meta")
            rehearsal.builds_on_meta = not quiet.findings
    if model is None:
        return None
    if has_flash:
        fuse_attention(model)
        rehearsal.notes.append(
            "kernels of flash-attn are taken for torch's, which keep the same tensors"
        )
    flash = any(getattr(module, "attn_impl", None) == "flash" for module in model.modules())
    installed = attention.is_flash_v1_installed() or attention.is_flash_v2_installed()
    if flash and not installed:
        is_here = torch.cuda.is_available() or not cluster.on_gpus
        rehearsal.add(
            "model.attn_config.attn_impl is flash (LLM Foundry's default), and the package "
            "flash_attn is not installed. The first batch would stop with a NameError.",
            "Write attn_impl: torch, or install flash-attn.",
            "problem" if is_here else "warning",
        )
    return model


@collector_paused()
def _on_meta(config: Any, model: dict[str, Any], tokenizer: Any, init_device: str) -> ComposerModel:
    block = {**copy.deepcopy(model), "init_device": init_device}
    # Without FSDP `mixed` is refused, which has been asked for the device that is written.
    context = process_init_device(block, copy.deepcopy(config.fsdp_config or {}), None)
    dtype = block.pop("master_weights_dtype", None)
    # Weights on meta have no values: Transformers need not set them.
    no_values = getattr(modeling_utils, "no_init_weights", contextlib.nullcontext)
    # LLM Foundry logs what Transformers raised, and raises that there is an error in the log.
    logger, logged = logging.getLogger("llmfoundry.models.hf.hf_base"), list[Any]()

    def keep(record: logging.LogRecord) -> bool:
        logged.append(record.msg)
        return False

    logger.addFilter(keep)
    try:
        with environment(_SECOND_RANK), no_values():
            return builders.build_composer_model(
                name=block.pop("name"),
                cfg=block,
                tokenizer=tokenizer,
                init_context=context,
                master_weights_dtype=dtype,
            )
    except RuntimeError as error:
        errors = [message for message in logged if isinstance(message, Exception)]
        raise (errors[-1] if errors else error) from None
    finally:
        logger.removeFilter(keep)


# --- What the Trainer reads from text and numbers, and what it would find late or never. ---


def _check_arguments(
    rehearsal: Rehearsal, config: Any, algorithms: list[Any], run_name: str, cluster: Cluster
) -> None:
    intervals = (
        ["eval_interval"] if config.save_folder is None else ["eval_interval", "save_interval"]
    )
    for key in intervals:
        with rehearsal.step(key, _TIME):
            create_interval_scheduler(getattr(config, key))
    if cluster.on_gpus:
        with rehearsal.step(
            "precision", f"Write one of {', '.join(word.value for word in Precision)}."
        ):
            Precision(config.precision)
    if config.compile_config is not None:
        with rehearsal.step("compile_config"):
            torch.compile(nn.Identity(), **config.compile_config)  # compiles when it is called
    for algorithm in (item for item in algorithms if isinstance(item, GradientClipping)):
        kind, threshold = algorithm.clipping_type, algorithm.clipping_threshold
        with rehearsal.step("algorithms.gradient_clipping"):
            apply_gradient_clipping(nn.Linear(1, 1), kind, threshold, fsdp_enabled=False)
            if not threshold > 0:
                raise ValueError(
                    f"a clipping_threshold of {threshold} turns gradients round, or to 0"
                )
    _check_load_path(rehearsal, config, run_name)
    _check_save_folder(rehearsal, config, run_name)


def _check_save_folder(rehearsal: Rehearsal, config: Any, run_name: str) -> None:
    name = config.run_name or os.environ.get("RUN_NAME")
    for key, value in {"save_folder": config.save_folder, "run_name": name}.items():
        if config.autoresume and value is None:
            rehearsal.add(f"autoresume needs a {key}. The run would not start.", f"Write {key}.")
    folder = config.save_folder
    if folder is not None and "://" not in folder:
        path = Path(format_name_with_dist(folder, run_name)).absolute()
        there = next(part for part in (path, *path.parents) if part.exists())
        try:
            # The rights do not tell it of a system that is read-only, or to the superuser.
            os.rmdir(tempfile.mkdtemp(dir=there))
        except OSError as error:
            rehearsal.add(
                f"save_folder: '{there}' cannot be written: {error.strerror}. The first save would "
                "stop the run.",
                "Write another folder.",
            )
        fsdp2 = config.fsdp_config or {}
        begins_anew = config.load_path is None or config.load_weights_only
        keeps = not config.save_overwrite and not config.autoresume and begins_anew
        if fsdp2.get("version") == 2 and keeps:
            name = config.save_filename or "ep{epoch}-ba{batch}-rank{rank}.pt"  # LLM Foundry's
            default = known_settings()["sharded_ckpt_prefix_dir"].default
            prefix = fsdp2.get("sharded_ckpt_prefix_dir", default)
            with rehearsal.step("save_folder"):
                check_save_folder(folder, name, prefix, run_name, Timestamp())


def _check_load_path(
    rehearsal: Rehearsal, config: Any, run_name: str, state: State | None = None
) -> None:
    """Checks a checkpoint on this disk: its names and shapes too, once the model is built."""
    path, is_fsdp2 = config.load_path, (config.fsdp_config or {}).get("version") == 2
    if path is None or "://" in path or path.endswith(".symlink"):
        return
    folder = config.save_folder
    if config.autoresume and folder is not None:
        is_sharded = (config.fsdp_config or {}).get("state_dict_type") == "sharded"
        # LLM Foundry's names.
        default = "latest-sharded-rank{rank}" if is_sharded else "latest-rank{rank}.pt"
        latest = f"{folder}/{config.save_latest_filename or default}"
        # The run goes on from there, or may: an object store is not asked.
        if "://" in folder or Path(format_name_with_dist(latest, run_name)).exists():
            return
    with rehearsal.step("load_path", f"Correct the path; it is read from {os.getcwd()}."):
        local = Path(format_name_with_dist(path, run_name))
        try:
            detect_kind(local)
            if state is not None and is_fsdp2:
                check_checkpoint(
                    local,
                    state,
                    config.load_weights_only,
                    config.load_strict_model_weights,
                    config.load_ignore_keys,
                )
        except CheckpointError as error:
            for finding in findings_of(error):
                rehearsal.add(f"load_path: {finding.what}", finding.advice)


# --- The plan. ---


def _fsdp2_block(rehearsal: Rehearsal, config: Any) -> dict[str, Any]:
    """Returns the settings as LLM Foundry gives them to the Trainer."""
    fsdp = copy.deepcopy(config.fsdp_config)
    with contextlib.suppress(AssertionError):  # told where the model was built
        process_init_device(copy.deepcopy(config.model), fsdp, None)
    written, key = config.fsdp_config.get("mixed_precision"), "model.master_weights_dtype"
    values = written if isinstance(written, Mapping) else {"": written}
    lost = {k for k, v in values.items() if v is not None} - {"reduce_dtype", "buffer_dtype"}
    if fsdp.get("mixed_precision") != written and lost:
        rehearsal.add(
            f"mixed_precision of parallelism_config.fsdp2 is {ascii_repr(written)}, and LLM "
            f"Foundry replaces it for {key}: the run computes in the dtype of the weights.",
            f"Take mixed_precision out, or {key}.",
            "warning",
        )
    return fsdp


def _plan(
    rehearsal: Rehearsal,
    config: Any,
    model: ComposerModel,
    trainer_args: Mapping[str, Any],
    cluster: Cluster,
) -> None:
    """Decides how FSDP2 would shard the model, and changes nothing."""
    device: Any = get_device("cpu")
    has_gpu = torch.cuda.is_available()
    if cluster.on_gpus:
        # Building a GPU's device chooses the GPU, which may not be here.
        device = get_device("gpu") if has_gpu else object.__new__(DeviceGPU)
    with rehearsal.step("parallelism_config.fsdp2"), environment(cluster.first_rank()):
        settings = parse_config(without_foundry_keys(_fsdp2_block(rehearsal, config)))
        if settings.fp8 and cluster.on_gpus and not has_gpu:
            # Asks no GPU what it can do.
            spec = settings.fp8 if isinstance(settings.fp8, Float8Spec) else Float8Spec()
            settings = dataclasses.replace(settings, fp8=dataclasses.replace(spec, emulate=True))
        sizes = {
            key: getattr(config, key) for key in ("device_train_microbatch_size", "compile_config")
        }
        check_arguments({"model": model, **trainer_args, **sizes}, settings)
        plan = PreparePlan(
            model,
            trainer_args["optimizers"],
            settings,
            config.precision if cluster.on_gpus else "fp32",
            device,
            mesh=None,
            transformations=TRANSFORMATIONS,
        )
        for planned in plan.transformations:
            if isinstance(planned.step, Parallelism) and rehearsal.sizes is None:
                rehearsal.sizes = planned.step.sizes(
                    plan.tree, planned.plan, plan.units, plan.shape
                )
        if (uneven := plan.uneven_shards) is not None:
            rehearsal.add(*uneven, level="warning")
        rehearsal.units = plan.units
        if trainer_args["optimizers"] is not None:
            rehearsal.parts = Parts(
                model=model,
                optimizer=trainer_args["optimizers"],
                settings=settings,
                config=config,
                plan=plan,
                notes=tuple(rehearsal.notes),
            )
        rehearsal.frozen = frozen_elements(model, plan.units)
