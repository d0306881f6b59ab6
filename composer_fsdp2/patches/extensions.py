"""Rows of Composer's algorithms and callbacks; each belongs to the one it is of."""

from __future__ import annotations

import functools
from typing import Any

from composer_fsdp2.patches.engine import Feature, PatchPoint, asked_by_class

__all__ = ["ALGORITHM_ROWS", "CALLBACK_ROWS", "HUGGINGFACE_ROWS"]


_UPSTREAM = "https://github.com/mosaicml/composer/blob/v0.32.1/composer"
_ALGORITHMS, _CALLBACKS = "composer.algorithms", "composer.callbacks"
_row = functools.partial(PatchPoint, versions="mosaicml 0.32.1")


def _feature(argument: str, module: str, name: str) -> Feature:
    return Feature(
        name,
        f"Leave {name} out of the Trainer's {argument}.",
        asked_by_class(f"composer.{argument}.{module}:{name}"),
    )


_CLIPPING = Feature(
    "GradientClipping with clipping_type adaptive",
    "Write clipping_type: norm.",
    asked_by_class(
        f"{_ALGORITHMS}.gradient_clipping.gradient_clipping:GradientClipping",
        when=lambda algorithm: algorithm.clipping_type == "adaptive",
    ),
)
_FREEZING = _feature("algorithms", "layer_freezing.layer_freezing", "LayerFreezing")
_EMA = _feature("algorithms", "ema.ema", "EMA")
_SWA = _feature("algorithms", "swa.swa", "SWA")
_SAM = _feature("algorithms", "sam.sam", "SAM")
_ACTIVATIONS = _feature("callbacks", "activation_monitor", "ActivationMonitor")

ALGORITHM_ROWS: tuple[PatchPoint, ...] = (
    _row(
        target=f"{_ALGORITHMS}.gradient_clipping.gradient_clipping:_apply_agc",
        replacement="trainer.extensions.algorithms:clip_adaptively",
        feature=_CLIPPING,
        why="takes a shard's norm for the whole",
        upstream=f"{_UPSTREAM}/algorithms/gradient_clipping/gradient_clipping.py#L66",
        fingerprints={"4aa29feaede39e77"},
    ),
    _row(
        target=f"{_ALGORITHMS}.gradient_clipping.gradient_clipping:apply_gradient_clipping",
        replacement="trainer.extensions.algorithms:clip_gradients",
        feature=_CLIPPING,
        why="clips through one DTensor operation after the other",
        upstream=f"{_UPSTREAM}/algorithms/gradient_clipping/gradient_clipping.py#L23",
        fingerprints={"b4014cc6206ef761"},
    ),
    _row(
        target=f"{_ALGORITHMS}.sam.sam:SAMOptimizer._grad_norm",
        replacement="trainer.extensions.algorithms:ascent_norm",
        feature=_SAM,
        why="reduces the norm of each gradient by itself",
        upstream=f"{_UPSTREAM}/algorithms/sam/sam.py#L110",
        fingerprints={"5f86e331bebb39d7"},
    ),
    _row(
        target=f"{_ALGORITHMS}.layer_freezing.layer_freezing:freeze_layers",
        replacement="trainer.extensions.algorithms:freeze_layers",
        feature=_FREEZING,
        why="freezes shards, while gradients of the gathered parameters go on",
        upstream=f"{_UPSTREAM}/algorithms/layer_freezing/layer_freezing.py#L25",
        fingerprints={"f8f689f2f0d508a8"},
    ),
    _row(
        target=f"{_ALGORITHMS}.ema.ema:get_model_context_manager",
        replacement="trainer.extensions.algorithms:weights_of",
        feature=_EMA,
        why="mixes shards with parameters that evaluation left gathered",
        upstream=f"{_UPSTREAM}/algorithms/ema/ema.py#L87",
        fingerprints={"b111ec835b312782"},
    ),
    _row(
        target=f"{_ALGORITHMS}.ema.ema:EMAParameters.__init__",
        replacement="trainer.extensions.algorithms:start_averages",
        feature=_EMA,
        why="forgets in which order tensor parallelism holds fused projections",
        upstream=f"{_UPSTREAM}/algorithms/ema/ema.py#L401",
        fingerprints={"ccdfecc4a7728427"},
    ),
    _row(
        target=f"{_ALGORITHMS}.ema.ema:EMA.state_dict",
        replacement="trainer.extensions.algorithms:save_ema",
        feature=_EMA,
        why="saves names with the wrappers of activation checkpointing in them",
        upstream=f"{_UPSTREAM}/algorithms/ema/ema.py#L307",
        fingerprints={"a6f400a9bab424a6"},
    ),
    _row(
        target=f"{_ALGORITHMS}.ema.ema:EMA.load_state_dict",
        replacement="trainer.extensions.algorithms:load_ema",
        feature=_EMA,
        why="puts whole tensors in the place of shards",
        upstream=f"{_UPSTREAM}/algorithms/ema/ema.py#L354",
        fingerprints={"425da29b69f1bf67"},
    ),
    # What Composer asks of torch's class decides whether ours can be in its place. Nothing of
    # torch's own is used for a sharded model, so its source, which changes often, does not matter.
    _row(
        target=f"{_ALGORITHMS}.swa.swa:AveragedModel",
        replacement="trainer.extensions.algorithms:average_weights",
        feature=_SWA,
        why="copies the modules, which those of FSDP2 refuse",
        upstream=f"{_UPSTREAM}/algorithms/swa/swa.py#L29",
        fingerprints={"48288bf0c9c07153"},
        source=f"{_ALGORITHMS}.swa.swa:SWA",
    ),
)

CALLBACK_ROWS: tuple[PatchPoint, ...] = (
    _row(
        target=f"{_CALLBACKS}.load_checkpoint:load_checkpoint",
        replacement="trainer.checkpoint.autoresume:load_any_checkpoint",
        feature=_feature("callbacks", "load_checkpoint", "LoadCheckpoint"),
        why="takes the kind of a checkpoint from a setting (a second name of the same function)",
        upstream=f"{_UPSTREAM}/utils/checkpoint.py#L406",
        fingerprints={"eb5a9a68a9cf7007"},
    ),
    _row(
        target=f"{_CALLBACKS}.optimizer_monitor:OptimizerMonitor.batch_end",
        replacement="trainer.extensions.callbacks:log_optimizer",
        feature=_feature("callbacks", "optimizer_monitor", "OptimizerMonitor"),
        why="logs norms of the local shard",
        upstream=f"{_UPSTREAM}/callbacks/optimizer_monitor.py#L70",
        fingerprints={"ee826ea52bcf0ea1"},
    ),
    _row(
        target=f"{_CALLBACKS}.nan_monitor:NaNMonitor.after_loss",
        replacement="trainer.extensions.callbacks:check_loss",
        feature=_feature("callbacks", "nan_monitor", "NaNMonitor"),
        why="stops one rank and leaves the others waiting",
        upstream=f"{_UPSTREAM}/callbacks/nan_monitor.py#L18",
        fingerprints={"aba49752a7d72e7f"},
    ),
    _row(
        target=f"{_CALLBACKS}.early_stopper:EarlyStopper._get_monitored_metric",
        replacement="trainer.extensions.callbacks:agreed_metric",
        feature=_feature("callbacks", "early_stopper", "EarlyStopper"),
        why="stops some ranks when a metric is not the same on all",
        upstream=f"{_UPSTREAM}/callbacks/early_stopper.py#L106",
        fingerprints={"7b3797acd38e874e"},
    ),
    _row(
        target=f"{_CALLBACKS}.threshold_stopper:ThresholdStopper._get_monitored_metric",
        replacement="trainer.extensions.callbacks:agreed_metric",
        feature=_feature("callbacks", "threshold_stopper", "ThresholdStopper"),
        why="stops some ranks when a metric is not the same on all",
        upstream=f"{_UPSTREAM}/callbacks/threshold_stopper.py#L86",
        fingerprints={"7b3797acd38e874e"},
    ),
    _row(
        target=f"{_CALLBACKS}.activation_monitor:ActivationMonitor.create_module_names",
        replacement="trainer.extensions.callbacks:name_modules",
        feature=_ACTIVATIONS,
        why="logs names with the wrappers of activation checkpointing in them",
        upstream=f"{_UPSTREAM}/callbacks/activation_monitor.py#L225",
        fingerprints={"b98d17931ba704e0"},
    ),
    _row(
        target=f"{_CALLBACKS}.activation_monitor:ActivationMonitor.add_metrics",
        replacement="trainer.extensions.callbacks:measure_activation",
        feature=_ACTIVATIONS,
        why="adds to what checkpointed blocks save, and recomputing them then fails",
        upstream=f"{_UPSTREAM}/callbacks/activation_monitor.py#L213",
        fingerprints={"e0e7c7ad59ccb7eb"},
    ),
    _row(
        target=f"{_CALLBACKS}.memory_snapshot:MemorySnapshot.init",
        replacement="trainer.extensions.callbacks:record_memory",
        feature=_feature("callbacks", "memory_snapshot", "MemorySnapshot"),
        why="gives up when the weights are on the CPU, from where FSDP moves them",
        upstream=f"{_UPSTREAM}/callbacks/memory_snapshot.py#L98",
        fingerprints={"c3f3f6c5380e14ce"},
    ),
    _row(
        target=f"{_CALLBACKS}.oom_observer:OOMObserver.init",
        replacement="trainer.extensions.callbacks:record_memory",
        feature=_feature("callbacks", "oom_observer", "OOMObserver"),
        why="gives up when the weights are on the CPU, from where FSDP moves them",
        upstream=f"{_UPSTREAM}/callbacks/oom_observer.py#L118",
        fingerprints={"be71331175525c25"},
    ),
)


# Rows of transformers, PEFT and torch: functions that get a sharded model from their user.


_INSTEAD = "Convert a checkpoint with `composer-fsdp2 checkpoint convert RUN FOLDER --to hf`."

_SAVE = Feature("save_pretrained of a sharded model", _INSTEAD)
_SAVE_ADAPTERS = Feature("save_pretrained of a sharded PEFT model", _INSTEAD)
_GENERATE = Feature(
    "generate of a sharded model", "Generate from a saved model that is not sharded."
)
_RESIZE = Feature(
    "resize_token_embeddings of a sharded model", "Resize before the model is prepared."
)
_SUMMON = Feature(
    "FullyShardedDataParallel.summon_full_params of a sharded model",
    "Use composer_fsdp2.summon_full_params.",
)


def _holds_shards(*args: Any, **kwargs: Any) -> bool:
    from composer_fsdp2.shard.summon import holds_shards

    model = args[0] if args else kwargs.get("module")  # FSDP1's name of it
    return model is not None and holds_shards(model)


def _resizes_shards(model: Any, new_num_tokens: int | None = None, *_: Any, **named: Any) -> bool:
    # Without a number it returns the embedding, and `pad_to_multiple_of` may round one up.
    return _holds_shards(model) and (new_num_tokens, named.get("pad_to_multiple_of")) != (None,) * 2


HUGGINGFACE_ROWS: tuple[PatchPoint, ...] = (
    PatchPoint(
        target="transformers.modeling_utils:PreTrainedModel.save_pretrained",
        replacement="trainer.extensions.hugging_face:save_pretrained",
        feature=_SAVE,
        why="crashes on shards, and writes the name of the class FSDP2 gave the model",
        upstream="https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/modeling_utils.py#L3199",
        takes={"save_directory", "is_main_process", "state_dict"},
        versions="transformers 4.51.3",
        asks=_holds_shards,
    ),
    PatchPoint(
        target="peft.peft_model:PeftModel.save_pretrained",
        replacement="trainer.extensions.hugging_face:save_pretrained",
        feature=_SAVE_ADAPTERS,
        why="crashes on adapters that are shards, on the rank that writes them",
        upstream="https://github.com/huggingface/peft/blob/v0.16.0/src/peft/peft_model.py#L178",
        takes={"save_directory", "is_main_process"},
        versions="peft 0.16.0",
        asks=_holds_shards,
    ),
    PatchPoint(
        target="transformers.generation.utils:GenerationMixin.generate",
        replacement="trainer.extensions.hugging_face:generate",
        feature=_GENERATE,
        why="repeats a step that does not fit any more when other ranks generate for longer",
        upstream="https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/generation/utils.py#L2112",
        takes={"synced_gpus"},
        versions="transformers 4.51.3",
        asks=_holds_shards,
    ),
    PatchPoint(
        target="transformers.modeling_utils:PreTrainedModel.resize_token_embeddings",
        replacement="trainer.extensions.hugging_face:resize_token_embeddings",
        feature=_RESIZE,
        why="puts unsharded weights in the place of shards, or ends in an error of torch",
        upstream="https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/modeling_utils.py#L2620",
        takes={"new_num_tokens"},
        versions="transformers 4.51.3",
        asks=_resizes_shards,
    ),
    PatchPoint(
        target="torch.distributed.fsdp:FullyShardedDataParallel.summon_full_params",
        replacement="trainer.extensions.hugging_face:summon_shards",
        feature=_SUMMON,
        why="knows only FSDP1 and shows the shards of FSDP2 without a word",
        upstream="https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/fully_sharded_data_parallel.py#L861",
        takes={"recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads"},
        versions="torch 2.7.0 to 2.15.0",
        asks=_holds_shards,
    ),
)
