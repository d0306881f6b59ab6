"""Goes through what a run goes through before its first batch, in the order of LLM Foundry.

[Note: rehearsal] Everything is built by LLM Foundry's own functions, so that a mistake is found by
what would fail at it: configuration, tokenizer, scheduler, loggers, callbacks, algorithms, loaders,
model, optimizer, plan. The model is on meta, as on a rank above 0 of `init_device: mixed`. No other
rank is there, nothing is downloaded and no logger hears about a run. Files in `code_paths` are
imported and config transforms are applied as in a run; those may write the data they are for.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import logging
import os
import sys
import warnings
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from composer_fsdp2.config.group_size import written_group_size
from composer_fsdp2.config.messages import ascii_repr
from composer_fsdp2.foundry.rehearsal import data, model, trainer
from composer_fsdp2.foundry.rehearsal.environment import LAUNCHED, environment_of
from composer_fsdp2.foundry.rehearsal.first_batch import check_first_batch
from composer_fsdp2.foundry.rehearsal.notes import Cluster, Mistake, Notes
from composer_fsdp2.foundry.run_arguments import unknown_arguments
from composer_fsdp2.foundry.run_keys import OUR_KEY, describe_unknown
from composer_fsdp2.foundry.transform import parse_run_config
from composer_fsdp2.plan.frozen import frozen_elements

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from composer_fsdp2.parallel.group_sizes import GroupSizes
    from composer_fsdp2.plan.wrap_plan import WrapPlan

__all__ = ["Rehearsal", "rehearse"]

_NEEDED_TOO = ("global_train_batch_size", "device_train_microbatch_size")
_COMPUTED = ("device_train_batch_size", "device_train_grad_accum", "n_gpus")
_BLOCKS = ("model", "tokenizer", "optimizer", "scheduler", "train_loader")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Result of a rehearsal."""

    mistakes: tuple[Mistake, ...]
    units: WrapPlan | None = None
    """of a run with FSDP2 whose model could be built"""
    sizes: GroupSizes | None = None
    """of a run whose layers are divided"""
    frozen: Mapping[str, int] = field(default_factory=dict[str, int])
    """elements that are not trained, by the first module of their unit"""
    builds_on_meta: bool | None = None
    """whether the model can be built with `init_device: meta`; `None` where that is not known"""


def rehearse(cfg: DictConfig, cluster: Cluster) -> Rehearsal:
    """Rehearses a run. Collective: no.

    Args:
        cfg: the run with its overrides, interpolations as they are written.
        cluster: where it would take place.
    """
    from llmfoundry.utils.registry_utils import save_registry

    from composer_fsdp2.foundry.registered import register
    from composer_fsdp2.trainer.patches import engine

    notes = Notes(cluster)
    # With no rows of its own it takes back what the config transform installs.
    with _undone(), _without_environment(), save_registry(), engine.installed(()):
        register()
        _import_code(notes, cfg)
        config, logged = _read_config(notes, cfg)
        if config is None:
            return Rehearsal(mistakes=tuple(notes.mistakes))
        return _Run(notes, config, logged).whole()


# --- Nothing of it stays. ---


@contextlib.contextmanager
def _undone() -> Generator[None]:
    """Keeps standard output clean, and leaves environment, warnings and logging as they were."""
    environment, disabled = dict(os.environ), logging.root.manager.disable
    try:
        logging.disable(logging.CRITICAL)
        with warnings.catch_warnings(), contextlib.redirect_stdout(_NoFile(sys.stderr)):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        os.environ.clear()
        os.environ.update(environment)


class _NoFile(io.TextIOBase):
    """Standard error for what user code prints, which asks for no file descriptor."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes on."""
        return self._stream.write(text)


@contextlib.contextmanager
def _without_environment() -> Generator[None]:
    """LLM Foundry's training reads no `oc.env`."""
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    had = OmegaConf.has_resolver("oc.env")
    OmegaConf.clear_resolver("oc.env")
    try:
        yield
    finally:
        if had:
            OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


# --- The configuration. ---


def _import_code(notes: Notes, cfg: DictConfig) -> None:
    from llmfoundry.utils.registry_utils import import_file

    paths: Any = ()
    with notes.step("code_paths"):
        paths = cfg.get("code_paths") or ()
        if isinstance(paths, str):
            notes.add(f"code_paths: {ascii_repr(paths)} is no list.", "Write a list of files.")
            paths = ()
    for path in paths:
        with notes.step("code_paths", f"Correct the file or its path, read from {os.getcwd()}."):
            import_file(path)


def _read_config(notes: Notes, cfg: DictConfig) -> tuple[Any, dict[str, Any]]:
    """LLM Foundry's own reading, with all keys that it does not know at once."""
    from llmfoundry.utils.config_utils import (
        TRAIN_CONFIG_KEYS,
        TrainConfig,
        make_dataclass_and_log_config,
    )
    from omegaconf import OmegaConf

    plain: Any = None
    with notes.step("The configuration", "Correct the name between '${' and '}'."):
        plain = OmegaConf.to_container(cfg, resolve=True)
    if not isinstance(plain, dict):
        return None, {}
    cut = _divisible(plain, notes.cluster.ranks)
    missing = _missing(cut)
    if missing:  # perhaps one of them is written in another way
        _known_part(notes, plain)
    for key in missing:
        notes.add(f"'{key}' is missing, which LLM Foundry needs.", f"Write {key}: ...")
    size = cut.get("device_train_microbatch_size")
    batch = cut.get("global_train_batch_size")
    if isinstance(batch, int) and batch < 0:
        notes.add(
            f"global_train_batch_size: {batch} is no number of samples.", "Write one above 0."
        )
    if size not in (None, "auto") and (isinstance(size, bool | str) or size <= 0):
        notes.add(
            f"device_train_microbatch_size: {ascii_repr(size)} is no number of samples.",
            "Write a number above 0, or auto.",
        )
        cut["device_train_microbatch_size"] = "auto"
    for key in _BLOCKS:
        if key in cut and not isinstance(cut[key], dict):
            notes.add(
                f"{key}: {ascii_repr(cut[key])} is no mapping.", f"Write {key}: {{name: ...}}."
            )
            missing.append(key)
    if not missing:
        # Last, as in a run: a config transform may take a key of its own out.
        own = (_known_part, _known_arguments)
        transforms = [*_registered_transforms(), *(functools.partial(one, notes) for one in own)]
        with notes.step("The configuration"), environment_of(notes.cluster):
            logged, config = make_dataclass_and_log_config(
                OmegaConf.create(cut), TrainConfig, TRAIN_CONFIG_KEYS, transforms=transforms
            )
            return config, logged
    _known_part(notes, plain)
    return None, {}


def _registered_transforms() -> list[Any]:
    from llmfoundry.registry import config_transforms

    return [config_transforms.get(name) for name in config_transforms.get_all()]


def _known_part(notes: Notes, cfg: dict[str, Any]) -> dict[str, Any]:
    from llmfoundry.utils.config_utils import TRAIN_CONFIG_KEYS

    return {key: value for key, value in cfg.items() if _is_known(notes, key, TRAIN_CONFIG_KEYS)}


def _known_arguments(notes: Notes, cfg: dict[str, Any]) -> dict[str, Any]:
    """Notes the arguments that no part takes, and takes them out: they hide what else is wrong."""
    cfg = copy.deepcopy(cfg)
    for found in list(unknown_arguments(cfg)):
        notes.add(found.what, found.advice)
        del found.block[found.key]
    return cfg


def _is_known(notes: Notes, key: Any, known: set[str]) -> bool:
    if key in known or key == OUR_KEY:
        return True
    advice = "Correct it, or put values of your own under `variables`."
    notes.add(describe_unknown(key, [*known, OUR_KEY]), advice)
    return False


def _missing(cfg: Mapping[str, Any]) -> list[str]:
    """Keys without which LLM Foundry ends in a KeyError or less."""
    from llmfoundry.utils.config_utils import TrainConfig
    from omegaconf import MISSING

    fields = dataclasses.fields(TrainConfig)
    needed = [f.name for f in fields if f.default == MISSING and f.name not in _COMPUTED]
    return [key for key in (*needed, *_NEEDED_TOO) if cfg.get(key) in (None, MISSING)]


def _divisible(cfg: dict[str, Any], ranks: int) -> dict[str, Any]:
    """`doctor` says itself that a batch cannot be divided, and goes on."""
    batch = cfg.get("global_train_batch_size")
    if isinstance(batch, int) and batch % max(ranks // _degree(cfg), 1):
        return {**cfg, "global_train_batch_size": -(-batch // ranks) * ranks}
    return cfg


def _degree(cfg: dict[str, Any]) -> int:
    """Ranks that read one batch; 1 where that cannot be read, which the run says better."""
    quiet, block = Notes(Cluster(ranks=1, ranks_per_node=1, on_gpus=False, is_here=False)), {}
    with quiet.step(OUR_KEY):
        block = parse_run_config(copy.deepcopy(cfg)).get("fsdp_config")
    return written_group_size(block) if not quiet.mistakes else 1


# --- The run. ---


class _Run:
    """The parts of one run, in order."""

    def __init__(self, notes: Notes, config: Any, logged: dict[str, Any]) -> None:
        self.notes = notes
        self.config = config
        self.logged = logged
        self.name = config.run_name or os.environ.get("RUN_NAME") or "rehearsal"
        block = config.fsdp_config or {}
        self.fsdp2 = block.get("version") == 2

    def whole(self) -> Rehearsal:
        """Builds everything and plans."""
        from llmfoundry.command_utils.train import validate_config

        for name in LAUNCHED:
            os.environ.pop(name, None)
        notes, config = self.notes, self.config
        with notes.step("The configuration"):
            validate_config(copy.deepcopy(config))
        tokenizer = data.rehearse_tokenizer(notes, config.tokenizer)
        parts = trainer.build_parts(notes, config, self.logged)
        loader = data.rehearse_loader(
            notes, "train_loader", config.train_loader, tokenizer, config.device_train_batch_size
        )
        self._eval_loaders(tokenizer)
        data.check_paths_of_run(notes, config, self.name)
        trainer.check_arguments(notes, config)
        built = model.build(notes, config, tokenizer)
        parts.optimizer = model.build_optimizer(notes, config, built)
        check_first_batch(notes, config, parts, built.model, loader, self.name)
        units, sizes, frozen = None, None, {}
        if built.model is not None:
            trainer.start(notes, config, parts, built.model, loader, self.name)
            if self.fsdp2:
                units, sizes = trainer.plan(notes, config, parts, built.model)
        if units is not None and built.model is not None:
            frozen = frozen_elements(built.model, units)
        return Rehearsal(
            mistakes=tuple(notes.mistakes),
            units=units,
            sizes=sizes,
            frozen=frozen,
            builds_on_meta=built.on_meta,
        )

    def _eval_loaders(self, tokenizer: Any) -> None:
        config, notes = self.config, self.notes
        blocks = {"eval_loader": config.eval_loader} if config.eval_loader else {}
        several: list[Any] = config.eval_loaders or []
        for number, block in enumerate(several):
            blocks[f"eval_loader[{number}]"] = {k: v for k, v in block.items() if k != "label"}
        for where, block in blocks.items():
            data.rehearse_loader(notes, where, block, tokenizer, config.device_eval_batch_size)
        places = {"icl_tasks": config.icl_tasks_str, "eval_gauntlet": config.eval_gauntlet_str}
        for number, task in enumerate(config.icl_tasks or ()):
            places[f"icl_tasks[{number}].dataset_uri"] = task.get("dataset_uri")
        for where, path in places.items():
            if isinstance(path, str) and not data.is_remote(path) and not os.path.exists(path):
                notes.add(
                    f"{where}: there is no '{path}'.",
                    f"Correct the path; it is read from {os.getcwd()}.",
                )
