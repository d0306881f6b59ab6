"""What of Composer and LLM Foundry is replaced while the plugin is installed: one table.

It is the only such place. Rows of LLM Foundry count once it has been imported: a run without it
does not need them, and `transform`, which every run with it calls, installs them. An evaluation
calls no `transform`; what `ask_for_install` wraps is the one thing replaced before.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from composer_fsdp2.errors import PatchError

__all__ = [
    "PATCHES",
    "TRANSFORM",
    "PatchPoint",
    "PatchState",
    "ask_for_install",
    "describe_patches",
    "install",
    "installed",
    "patch_states",
    "uninstall",
]


TRANSFORM = "composer_fsdp2"
"""the name of `foundry.transform` in LLM Foundry's registry"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchPoint:
    """One attribute of another package that is replaced."""

    target: str
    """`package.module:attribute` or `package.module:Class.attribute`"""
    replacement: Callable[..., Any]
    """gets the original as its first argument, before those of the call; for a module, it alone"""
    why: str
    fingerprints: frozenset[str] = frozenset()
    """of the sources it was read and tested for"""
    takes: frozenset[str] = frozenset()
    """or the arguments it needs, when the original still does the work"""
    versions: str
    """of the package, for the message when none fits"""
    source: str = ""
    """what was read, where that is not the target itself"""

    @property
    def package(self) -> str:
        """The package the target is in."""
        return self.target.partition(".")[0]


def _parse_parallelism_config(_original: Any, trainer: Any, parallelism_config: Any) -> Any:
    from composer_fsdp2.trainer.compiling import check_compiled_once
    from composer_fsdp2.trainer.config import parse_parallelism_config
    from composer_fsdp2.trainer.extensions import check_extensions

    parsed = parse_parallelism_config(parallelism_config)
    if parsed is not None and parsed.fsdp2 is not None:
        check_extensions(trainer)
        check_compiled_once(trainer, parsed.fsdp2)
    return parsed


def _parallelize_composer_model(
    _original: Any, composer_model: Any, optimizer: Any, config: Any, precision: Any = None
) -> None:
    from composer_fsdp2.trainer.prepare import prepare_fully_shard

    prepare_fully_shard(composer_model, optimizer, config, precision)


def _init(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
    from composer_fsdp2.trainer.autoresume import note_autoresume
    from composer_fsdp2.trainer.microbatching import note_auto

    with note_auto(original, trainer, args, kwargs) as given:
        note_autoresume(original, *given.args, **given.kwargs)


def _wrap_model(original: Any, trainer: Any, model: Any, optimizers: Any) -> None:
    from composer_fsdp2.trainer.autoresume import settle_autoresume
    from composer_fsdp2.trainer.lions import save_lions_as_text
    from composer_fsdp2.trainer.saving import check_saved_adapters

    save_lions_as_text(optimizers)
    if trainer.state.fsdp_config_version == 2:
        check_saved_adapters(trainer.state)
    settle_autoresume(original, trainer, model, optimizers)


def _train_microbatches(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    from composer_fsdp2.trainer.sharding import sharding_of
    from composer_fsdp2.trainer.unequal import train_microbatches

    sharding = sharding_of(trainer.state.model)
    with sharding.accumulation.batch() if sharding else contextlib.nullcontext():
        return train_microbatches(original, trainer, *args, **kwargs)


def _train_microbatch(
    original: Any,
    trainer: Any,
    use_grad_scaling: bool,
    current_batch_size: Any,
    is_final_microbatch: bool,
) -> Any:
    from composer_fsdp2.trainer.sharding import sharding_of
    from composer_fsdp2.trainer.unequal import train_microbatch

    sharding = sharding_of(trainer.state.model)
    last = contextlib.nullcontext()
    if sharding is not None:
        last = sharding.accumulation.microbatch(last=is_final_microbatch)
    with last:
        return train_microbatch(
            original, trainer, use_grad_scaling, current_batch_size, is_final_microbatch
        )


def _evaluate(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    from composer_fsdp2.trainer.sharding import sharding_of

    sharding = sharding_of(trainer.state.model)
    with sharding.evaluating() if sharding else contextlib.nullcontext():
        return original(trainer, *args, **kwargs)


def _eval_loop(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    from composer_fsdp2.trainer import microbatching, unequal

    even = functools.partial(unequal.evaluate, original)
    return _evaluate(functools.partial(microbatching.evaluate, even), trainer, *args, **kwargs)


def _load_checkpoint(original: Any, path: str, state: Any, *args: Any, **kwargs: Any) -> Any:
    from composer_fsdp2.trainer.autoresume import load_newest_good

    if _uses_fsdp1(state):
        return original(path, state, *args, **kwargs)
    return load_newest_good(path, state, *args, **kwargs)


def _save_checkpoint(original: Any, state: Any, save_filename: str, **kwargs: Any) -> Any:
    from composer_fsdp2.trainer.saving import save_checkpoint

    if _uses_fsdp1(state):
        return original(state, save_filename, **kwargs)
    return save_checkpoint(state, save_filename, **kwargs)


def _uses_fsdp1(state: Any) -> bool:
    from composer.utils.parallelism import FSDPConfig

    return isinstance(state.fsdp_config, FSDPConfig)


def _write_checkpoint_file(original: Any, state_dict: Any, filename: str) -> None:
    from composer_fsdp2.trainer.saving import write_whole_file

    write_whole_file(original, state_dict, filename)


def _read_file(_original: Any, checkpoint_filepath: Any, map_location: str) -> Any:
    from composer_fsdp2.trainer.loading import read_file

    return read_file(checkpoint_filepath, map_location)


def _load_resumption(original: Any, state: Any, load_path: str) -> Any:
    from pathlib import Path

    from composer_fsdp2.checkpoint.pickles import check_pickle

    check_pickle(Path(load_path))
    return original(state, load_path)


def _read_metadata(_original: Any, reader: Any) -> Any:
    from composer_fsdp2.trainer.loading import read_folder_metadata

    return read_folder_metadata(reader)


def _read_data(_original: Any, reader: Any, plan: Any, planner: Any) -> Any:
    from composer_fsdp2.trainer.loading import read_folder_data

    return read_folder_data(reader, plan, planner)


def _dist_cp_load(
    _original: Any, state_dict: Any, storage_reader: Any, load_planner: Any = None
) -> None:
    from composer_fsdp2.trainer.loading import load_sharded_safely

    load_sharded_safely(state_dict, storage_reader, load_planner)


def _download_checkpoint(original: Any, *args: Any, **kwargs: Any) -> Any:
    from composer_fsdp2.trainer.loading import unpacking_safely

    with unpacking_safely():
        return original(*args, **kwargs)


def _apply_required_algorithms(
    original: Any, state: Any, state_dict: Any, *args: Any, **kwargs: Any
) -> None:
    from composer_fsdp2.trainer.extensions import check_required
    from composer_fsdp2.trainer.loading import vet_algorithms

    vet_algorithms(state_dict)
    check_required(state, state_dict, *args, **kwargs)
    original(state, state_dict, *args, **kwargs)


def _saver_save(original: Any, saver: Any, state: Any, logger: Any) -> None:
    from composer_fsdp2.trainer.saving import save_in_background

    save_in_background(original, saver, state, logger)


def _saver_fit_end(original: Any, saver: Any, state: Any, logger: Any) -> None:
    from composer_fsdp2.trainer.saving import finish_background_save

    finish_background_save(_originals[_SAVER_SAVE], saver, logger)
    original(saver, state, logger)


def _saver_post_close(original: Any, saver: Any) -> None:
    from composer_fsdp2.trainer.saving import leave_background_save

    leave_background_save(saver)
    original(saver)


def _read_evaluation(
    original: Any,
    cfg: Any,
    dataclass_constructor: Any,
    dataclass_fields: Any,
    transforms: Any = None,
    icl_tasks_required: bool = False,
) -> Any:
    asked = [TRANSFORM, *(transforms or ())]
    return original(cfg, dataclass_constructor, dataclass_fields, asked, icl_tasks_required)


def _freeze_layers(original: Any, callback: Any, state: Any, logger: Any) -> None:
    from composer_fsdp2.trainer.llm_foundry import freeze_layers

    freeze_layers(original, callback, state, logger)


def _save_monolith(original: Any, saver: Any, state: Any, logger: Any) -> None:
    from composer_fsdp2.trainer.llm_foundry import save_monolith

    save_monolith(original, saver, state, logger)


def _keep_learning_rates(original: Any, optimizer: Any, optimizer_metrics: Any) -> Any:
    rates = {k: v for k, v in optimizer_metrics.items() if k.startswith("layerwise_lr")}
    return {**original(optimizer, optimizer_metrics), **rates}


def _training_dist(original: Any) -> Any:
    from composer_fsdp2.trainer.llm_foundry import SharesAlone

    return SharesAlone(original)


def _lion_dist(original: Any) -> Any:
    from composer_fsdp2.trainer.llm_foundry import ReducedNorms

    return ReducedNorms(original)


def _outlier_detector(original: Any, *args: Any, **kwargs: Any) -> Any:
    detector = original(*args, **kwargs)
    detector.get_slow_mva = detector.get_delayed_mva
    return detector


def _summon_full_params(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    from composer_fsdp2.core.summon import holds_shards, summon_full_params

    chosen = summon_full_params if holds_shards(module) else original
    return chosen(module, *args, **kwargs)


def _save_pretrained(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    from composer_fsdp2.trainer.exporting import save_pretrained

    return save_pretrained(original, model, *args, **kwargs)


def _generate(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    from composer_fsdp2.trainer.generating import generate

    return generate(original, model, *args, **kwargs)


def _apply_fsdp(original: Any, state: Any) -> None:
    from composer_fsdp2.trainer.algorithms import move_averages
    from composer_fsdp2.trainer.callbacks import start_memory_records

    original(state)
    if not _uses_fsdp1(state):
        move_averages(state)
        start_memory_records(state)


def _microbatching(name: str) -> Callable[..., Any]:
    return _stand_in("microbatching", name)


def _unequal(name: str) -> Callable[..., Any]:
    return _stand_in("unequal", name)


def _algorithm(name: str) -> Callable[..., Any]:
    return _stand_in("algorithms", name)


def _callback(name: str) -> Callable[..., Any]:
    return _stand_in("callbacks", name)


def _stand_in(module: str, name: str) -> Callable[..., Any]:
    """The function of one of our modules, which is imported when it is called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        found = importlib.import_module(f"composer_fsdp2.trainer.{module}")
        return getattr(found, name)(*args, **kwargs)

    return call


_CHECKPOINT = "composer.utils.checkpoint"
_SAVER = "composer.callbacks.checkpoint_saver:CheckpointSaver"
_SAVER_SAVE = f"{_SAVER}._save_checkpoint"
_READ = {"composer": "mosaicml 0.32.1", "llmfoundry": "llm-foundry 0.22.0"}
_TRAIN = "llmfoundry.command_utils.train"


def _point(
    target: str, replacement: Callable[..., Any], fingerprint: str, why: str, source: str = ""
) -> PatchPoint:
    return PatchPoint(
        target=target,
        replacement=replacement,
        why=why,
        fingerprints=frozenset({fingerprint}),
        versions=_READ[target.partition(".")[0]],
        source=source,
    )


PATCHES: tuple[PatchPoint, ...] = (
    _point(
        "composer.trainer.trainer:Trainer._parse_parallelism_config",
        _parse_parallelism_config,
        "7042fa346599943f",
        "reads only the keys fsdp and tp, so that fsdp2 and a misspelt key become plain DDP",
    ),
    _point(
        "composer.distributed.prepare_distributed:parallelize_composer_model",
        _parallelize_composer_model,
        "dc721528ec14d5a0",
        "wraps without the root, refuses ties, drops optimizer state and knows only CUDA",
    ),
    _point(
        "composer.trainer.trainer:Trainer.__init__",
        _init,
        "9cb451145a150898",
        "refuses `device_train_microbatch_size: auto` and tells nobody of autoresume",
    ),
    _point(
        "composer.trainer.trainer:Trainer._wrap_model_for_distributed",
        _wrap_model,
        "dc2164ce81ec821e",
        "is the last step before autoresume follows a link that may point to a damaged checkpoint",
    ),
    _point(
        "composer.trainer.trainer:Trainer._train_loop",
        _unequal("train_loop"),
        "1dffbf6b9c51bcaa",
        "lets ranks run different numbers of microbatches, and wait for each other for ever",
    ),
    _point(
        "composer.trainer.trainer:Trainer._iter_dataloader",
        _unequal("iterate"),
        "970ae649c7dcbe0a",
        "says nothing of data left out because that of another rank has ended",
    ),
    PatchPoint(
        target="composer.trainer.trainer:Trainer._train_microbatches",
        replacement=_train_microbatches,
        why="leaves gradients of a batch that failed half way to the next one",
        takes=frozenset({"microbatches"}),
        versions=_READ["composer"],
    ),
    PatchPoint(
        target="composer.trainer.trainer:Trainer._train_microbatch",
        replacement=_train_microbatch,
        why="tells only DDP which microbatch is the last one",
        takes=frozenset({"is_final_microbatch"}),
        versions=_READ["composer"],
    ),
    PatchPoint(
        target="composer.trainer.trainer:Trainer._eval_loop",
        replacement=_eval_loop,
        why="gathers as training does, and leaves ranks waiting for one that runs out of memory",
        takes=frozenset({"evaluator"}),
        versions=_READ["composer"],
    ),
    PatchPoint(
        target="composer.trainer.trainer:Trainer.predict",
        replacement=_evaluate,
        why="has no other choice between memory and gathers than training has",
        takes=frozenset({"dataloader"}),
        versions=_READ["composer"],
    ),
    _point(
        f"{_CHECKPOINT}:load_checkpoint",
        _load_checkpoint,
        "e399245a5531caa7",
        "takes the kind of a checkpoint from a setting, and loads some kinds wrongly in silence",
    ),
    _point(
        f"{_CHECKPOINT}:_save_checkpoint",
        _save_checkpoint,
        "d1acbd0a8dc88793",
        "writes into the place of the last checkpoint, which is lost if the run dies meanwhile",
    ),
    _point(
        f"{_CHECKPOINT}:_write_checkpoint_file",
        _write_checkpoint_file,
        "527c2b767751f3c6",
        "writes under the final name, so that a killed run leaves half a file to resume from",
    ),
    _point(
        f"{_CHECKPOINT}:_torch_load_with_validation",
        _read_file,
        "61e2e6db892a6bb2",
        "executes code that a file contains",
    ),
    _point(
        "composer.checkpoint.load:_torch_load_with_validation",
        _read_file,
        "61e2e6db892a6bb2",
        "executes code that a file contains (a second name of the same function)",
    ),
    _point(
        "composer.checkpoint.load:load_resumption_checkpoint",
        _load_resumption,
        "266c4978add1ca4a",
        "executes code that a resumption.pkl contains",
    ),
    _point(
        f"{_CHECKPOINT}:FileSystemReaderWithValidation.read_metadata",
        _read_metadata,
        "8b55e1977dc3a705",
        "executes code that a .metadata contains",
    ),
    _point(
        f"{_CHECKPOINT}:FileSystemReaderWithValidation.read_data",
        _read_data,
        "9e3e2260a6d6a7b3",
        "executes code that an entry contains, and does not compare checksums",
    ),
    _point(
        f"{_CHECKPOINT}:dist_cp_load",
        _dist_cp_load,
        "1d34a881ba414fae",
        "meets one missing key with a second try in which any key may be missing",
    ),
    _point(
        f"{_CHECKPOINT}:download_checkpoint",
        _download_checkpoint,
        "89aee44e9b52ec3b",
        "unpacks archives without looking where their members want to go",
    ),
    _point(
        "composer.core.state:State._apply_required_algorithms",
        _apply_required_algorithms,
        "d36696ae3338309a",
        "evaluates text that comes from the checkpoint",
    ),
    _point(
        _SAVER_SAVE,
        _saver_save,
        "2f1b5899b0e325bd",
        "stops training until a checkpoint is written",
    ),
    _point(
        f"{_SAVER}.fit_end",
        _saver_fit_end,
        "997a8a59b4107a15",
        "does not wait for a checkpoint that is being written in the background",
    ),
    _point(
        f"{_SAVER}.post_close",
        _saver_post_close,
        "dc6f64dc9974189d",
        "does not wait for a checkpoint that is being written in the background",
    ),
    _point(
        f"{_TRAIN}:dist",
        _training_dist,
        "41967a86b4cbe905",
        "is asked for the number of ranks, to train without FSDP when there is one",
        source=f"{_TRAIN}:train",
    ),
    PatchPoint(
        target="llmfoundry.command_utils.eval:make_dataclass_and_log_config",
        replacement=_read_evaluation,
        why="refuses parallelism_config without asking the transform of any plugin",
        takes=frozenset({"transforms"}),
        versions=_READ["llmfoundry"],
    ),
    _point(
        "llmfoundry.optim.adaptive_lion:dist",
        _lion_dist,
        "71be62d62987c0b0",
        "adds up the ranks' norms, which of a DTensor are whole and no plain tensors",
        source="llmfoundry.optim.adaptive_lion",
    ),
    _point(
        "llmfoundry.optim.adaptive_lion:OutlierDetector",
        _outlier_detector,
        "77419277620eb1c9",
        "lacks the method that clip_lion calls at the first outlier, under its new name",
    ),
    _point(
        "llmfoundry.optim.lion:dist",
        _lion_dist,
        "897bbe043432f297",
        "adds up the ranks' norms, which of a DTensor are whole and no plain tensors",
        source="llmfoundry.optim.lion",
    ),
    _point(
        "llmfoundry.optim.adaptive_lion:DecoupledAdaLRLion.pre_reduce_metrics",
        _keep_learning_rates,
        "64b932d8fe7d282b",
        "squares the learning rates it reports together with the norms",
    ),
    _point(
        "llmfoundry.callbacks.resumption_callbacks:LayerFreezing.fit_start",
        _freeze_layers,
        "b4f56b3d95daaf9a",
        "does not find a parameter by its plain name under activation checkpointing",
    ),
    _point(
        "llmfoundry.callbacks.monolithic_ckpt_callback:MonolithicCheckpointSaver._save_checkpoint",
        _save_monolith,
        "5d5124fcbfd339c2",
        "gathers whole weights with functions that know FSDP1 alone",
    ),
    PatchPoint(
        target="torch.distributed.fsdp:FullyShardedDataParallel.summon_full_params",
        replacement=_summon_full_params,
        why="knows only FSDP1 and shows the shards of FSDP2 without a word",
        takes=frozenset({"recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads"}),
        versions="torch 2.7.0 or 2.13.0",
    ),
    PatchPoint(
        target="transformers.modeling_utils:PreTrainedModel.save_pretrained",
        replacement=_save_pretrained,
        why="crashes on shards, and writes the name of the class FSDP2 gave the model",
        takes=frozenset({"save_directory", "is_main_process", "state_dict"}),
        versions="transformers 4.51.3",
    ),
    PatchPoint(
        target="peft.peft_model:PeftModel.save_pretrained",
        replacement=_save_pretrained,
        why="crashes on adapters that are shards, on the rank that writes them",
        takes=frozenset({"save_directory", "is_main_process"}),
        versions="peft 0.16.0",
    ),
    PatchPoint(
        target="transformers.generation.utils:GenerationMixin.generate",
        replacement=_generate,
        why="repeats a step that does not fit any more when other ranks generate for longer",
        takes=frozenset({"synced_gpus"}),
        versions="transformers 4.51.3",
    ),
    _point(
        "composer.core.state:State._apply_fsdp",
        _apply_fsdp,
        "57c1e9a68a711a3f",
        "leaves averages of weights with whole tensors, and does not start to record memory",
    ),
    _point(
        "composer.callbacks.load_checkpoint:load_checkpoint",
        _load_checkpoint,
        "e399245a5531caa7",
        "takes the kind of a checkpoint from a setting (a second name of the same function)",
    ),
    _point(
        "composer.trainer.trainer:Trainer._train_batch",
        _microbatching("train_batch"),
        "787aff3a7f538299",
        "leaves ranks waiting for one that runs out of memory under FSDP2",
    ),
    _point(
        "composer.trainer.trainer:_readd_fsdp_sync_hooks",
        _microbatching("guard_again"),
        "9afc34d754ed0e0b",
        "keeps the ranks of FSDP1 together alone",
    ),
    _point(
        "composer.trainer.trainer:patch_unshard_for_automicrobatching",
        _microbatching("restore_unshard"),
        "30c71ee685fc7b50",
        "restores a function of FSDP1 which it keeps on older torch alone",
    ),
    _point(
        "composer.trainer.trainer:_clear_incomplete_train_states",
        _microbatching("clear_attempt"),
        "ed5928905bb6c8e3",
        "leaves an aborted FSDP2 step, the optimizer's state and random states as they are",
    ),
    _point(
        "composer.callbacks.optimizer_monitor:OptimizerMonitor.batch_end",
        _callback("log_optimizer"),
        "66fd3b347d3e54ad",
        "logs norms of the local shard",
    ),
    _point(
        "composer.callbacks.nan_monitor:NaNMonitor.after_loss",
        _callback("check_loss"),
        "d504d38a7be81dbf",
        "stops one rank and leaves the others waiting",
    ),
    _point(
        "composer.callbacks.early_stopper:EarlyStopper._get_monitored_metric",
        _callback("agreed_metric"),
        "7631ed68c11e2fb9",
        "stops some ranks when a metric is not the same on all",
    ),
    _point(
        "composer.callbacks.threshold_stopper:ThresholdStopper._get_monitored_metric",
        _callback("agreed_metric"),
        "7631ed68c11e2fb9",
        "stops some ranks when a metric is not the same on all",
    ),
    _point(
        "composer.callbacks.activation_monitor:ActivationMonitor.create_module_names",
        _callback("name_modules"),
        "43c47293dec7fe99",
        "logs names with the wrappers of activation checkpointing in them",
    ),
    _point(
        "composer.callbacks.activation_monitor:ActivationMonitor.add_metrics",
        _callback("measure_activation"),
        "5c9e2bef7ce3c6f0",
        "adds to what checkpointed blocks save, and recomputing them then fails",
    ),
    _point(
        "composer.callbacks.memory_snapshot:MemorySnapshot.init",
        _callback("record_memory"),
        "15aa0b9e5ff805a8",
        "gives up when the weights are on the CPU, from where FSDP moves them",
    ),
    _point(
        "composer.callbacks.oom_observer:OOMObserver.init",
        _callback("record_memory"),
        "f028ddebec904277",
        "gives up when the weights are on the CPU, from where FSDP moves them",
    ),
    _point(
        "composer.algorithms.gradient_clipping.gradient_clipping:_apply_agc",
        _algorithm("clip_adaptively"),
        "a4485ca26aacd2ad",
        "takes a shard's norm for the whole",
    ),
    _point(
        "composer.algorithms.layer_freezing.layer_freezing:freeze_layers",
        _algorithm("freeze_layers"),
        "bad0a05b4ea9db37",
        "freezes shards, while gradients of the gathered parameters go on",
    ),
    _point(
        "composer.algorithms.ema.ema:get_model_context_manager",
        _algorithm("weights_of"),
        "dabe85cc52c600cd",
        "mixes shards with parameters that evaluation left gathered",
    ),
    _point(
        "composer.algorithms.ema.ema:EMA.state_dict",
        _algorithm("save_ema"),
        "81f658e7a7cbca2b",
        "saves names with the wrappers of activation checkpointing in them",
    ),
    _point(
        "composer.algorithms.ema.ema:EMA.load_state_dict",
        _algorithm("load_ema"),
        "18acfbe0a0305198",
        "puts whole tensors in the place of shards",
    ),
    PatchPoint(
        target="composer.algorithms.swa.swa:AveragedModel",
        replacement=_algorithm("average_weights"),
        why="copies the modules, which those of FSDP2 refuse",
        fingerprints=frozenset({"689529585a48ce5c", "a3e7fa2d9698e5cc"}),
        versions=f"{_READ['composer']}, torch 2.7.0 and 2.13.0",
    ),
)

_originals: dict[str, Any] = {}


def install() -> None:
    """Replaces every target of the table, or none.

    Calling it again does nothing, or what has become possible since: see the head of this file.

    Collective: no.

    Raises:
        PatchError: when a target's source is not one the replacement was written for.
    """
    wanted = [p for p in PATCHES if _is_wanted(p) and p.target not in _originals]
    found = [(point, *_locate(point.target)) for point in wanted]
    for point, _owner, _name in found:
        _check(point)
    for point, owner, name in found:
        original = inspect.getattr_static(owner, name)
        _originals[point.target] = original
        setattr(owner, name, _replaced(point, original))


def ask_for_install(evaluation: Any) -> None:
    """Has LLM Foundry's evaluation install the table for a config with `parallelism_config`.

    Args:
        evaluation: its module, just imported. Any other config goes the way it always did.
    """
    evaluate = evaluation.evaluate

    @functools.wraps(evaluate)
    def call(cfg: Any, *args: Any, **kwargs: Any) -> Any:
        if "parallelism_config" in cfg:
            install()
        return evaluate(cfg, *args, **kwargs)

    evaluation.evaluate = call


def _is_wanted(point: PatchPoint) -> bool:
    match point.package:
        case "llmfoundry":
            return "llmfoundry" in sys.modules
        case "peft":  # Composer imports it where it is installed
            return importlib.util.find_spec("peft") is not None
        case _:
            return True


def _replaced(point: PatchPoint, original: Any) -> Any:
    if inspect.ismodule(original):
        return point.replacement(original)
    static = isinstance(original, staticmethod)
    function = original.__func__ if static else original

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return point.replacement(function, *args, **kwargs)

    return staticmethod(call) if static else call


def uninstall() -> None:
    """Puts every original back. Without `install()` before it, it does nothing."""
    _restore(set(_originals))


def _restore(targets: Set[str]) -> None:
    for target in targets:
        owner, name = _locate(target)
        setattr(owner, name, _originals.pop(target))


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Installs for the duration of a block, and leaves things as they were."""
    before = set(_originals)
    install()
    try:
        yield
    finally:
        _restore(_originals.keys() - before)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchState:
    """What has become of one row of the table."""

    target: str
    why: str
    versions: str
    state: Literal["installed", "fits", "does not fit"]
    problem: str | None = None
    """why it cannot be installed"""


def patch_states() -> tuple[PatchState, ...]:
    """The state of every row whose package there is. It imports them and changes nothing.

    Collective: no.
    """
    here = {name: importlib.util.find_spec(name) for name in {p.package for p in PATCHES}}
    return tuple(_state(point) for point in PATCHES if here[point.package] is not None)


def describe_patches(states: Sequence[PatchState] | None = None) -> str:
    """The table with the state of every row.

    Args:
        states: what `patch_states` returned; looked up when not given.
    """
    shown = {"installed": "installed", "fits": "fits, not installed"}
    lines: list[str] = []
    for row in patch_states() if states is None else states:
        state = shown.get(row.state, f"cannot be installed: {row.problem}")
        lines += [row.target, f"  {state}", f"  because it {row.why}"]
    return "\n".join(lines)


def _state(point: PatchPoint) -> PatchState:
    row = {"target": point.target, "why": point.why, "versions": point.versions}
    if point.target in _originals:
        return PatchState(**row, state="installed")
    try:
        _check(point)
    except (ImportError, PatchError) as error:
        return PatchState(**row, state="does not fit", problem=str(error))
    return PatchState(**row, state="fits")


def _locate(target: str) -> tuple[Any, str]:
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    if not hasattr(owner, name):
        raise PatchError(f"'{target}' does not exist in this version. {_advice(target)}")
    return owner, name


def _check(point: PatchPoint) -> None:
    owner, name = _locate(point.target)
    read: Any = inspect.getattr_static(owner, name)
    if point.takes:
        missing = point.takes - inspect.signature(getattr(owner, name)).parameters.keys()
        if missing:
            raise PatchError(
                f"'{point.target}' takes no {', '.join(sorted(missing))}, which the replacement "
                f"was written for ({point.versions}). It would not do what was asked. "
                f"{_advice(point.target)}"
            )
        return
    if point.source:
        module, _, name = point.source.partition(":")
        read = importlib.import_module(module)
        read = getattr(read, name) if name else read
    fingerprint = _fingerprint(read)
    if fingerprint not in point.fingerprints:
        raise PatchError(
            f"The source of '{point.target}' (fingerprint {fingerprint}) is not one the "
            f"replacement was written for ({point.versions}: {', '.join(point.fingerprints)}). "
            f"Replacing it could change the run in ways nobody tested. "
            f"{_advice(point.target)}"
        )


def _advice(target: str) -> str:
    module = target.partition(".")[0]
    package = _READ.get(module, module).partition(" ")[0]
    version = importlib.metadata.version(package)
    return f"Installed is {package} {version}; install a version this package was tested with."


@functools.cache
def _fingerprint(original: Any) -> str:
    """Of the source; finding the sources takes most of the time of an installation."""
    return hashlib.sha256(inspect.getsource(original).encode()).hexdigest()[:16]
