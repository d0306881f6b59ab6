"""Rows of Composer's Trainer and State: settings, preparation, the step, evaluation."""

from __future__ import annotations

import functools
from typing import Any

from composer_fsdp2.trainer.patches.engine import CORE, Feature, PatchPoint, check_features

__all__ = ["TRAINER_ROWS", "parse_parallelism_config"]

_UPSTREAM = "https://github.com/mosaicml/composer/blob/v0.32.1/composer"
_TRAINER = "composer.trainer.trainer"
_row = functools.partial(PatchPoint, versions="mosaicml 0.32.1")

_AUTO = Feature(
    "device_train_microbatch_size: auto",
    "Write a number of samples for device_train_microbatch_size.",
    lambda _items, size, _settings: size == "auto",
)
_TENSOR = Feature(
    "tensor_parallel",
    "Take 'tp' out of parallelism_config.",
    lambda _items, _size, settings: (
        (settings.tensor_parallel, settings.sequence_parallel) != (None, None)
    ),
)
_EVALUATION = Feature(
    "Evaluation of a model sharded with FSDP2",
    "Save a checkpoint and evaluate without parallelism_config, and leave out eval_dataloader.",
)
_PREDICTION = Feature(
    "Trainer.predict with a model sharded with FSDP2",
    "Save a checkpoint and predict without parallelism_config.",
)


def parse_parallelism_config(original: Any, trainer: Any, parallelism_config: Any) -> Any:
    """Replaces `Trainer._parse_parallelism_config`. Collective: no.

    Raises:
        ConfigError: for wrong settings, and arguments of the Trainer that do not go with them.
        PatchError: for a feature that is switched off.
    """
    from composer_fsdp2.trainer import config
    from composer_fsdp2.trainer.extensions import items_of
    from composer_fsdp2.trainer.start import ARGUMENTS, check_arguments

    if not config.concerns_fsdp2(parallelism_config):
        return original(trainer, parallelism_config)
    parsed = config.parse_parallelism_config(parallelism_config)
    if parsed is not None and parsed.fsdp2 is not None:
        arguments = getattr(trainer, ARGUMENTS, {})
        check_arguments(arguments, config.resolve_settings(parsed.fsdp2))
        size = arguments.get("device_train_microbatch_size")
        check_features(items_of(arguments), size, parsed.fsdp2)
    return parsed


def _is_sharded(trainer: Any, *_args: Any, **_kwargs: Any) -> bool:
    from composer_fsdp2.step.run import run_of

    return run_of(trainer.state.model) is not None


def _is_with_fsdp2(trainer: Any, *_args: Any, **_kwargs: Any) -> bool:
    return trainer.state.fsdp_config_version == 2


TRAINER_ROWS: tuple[PatchPoint, ...] = (
    _row(
        target=f"{_TRAINER}:Trainer._parse_parallelism_config",
        replacement="trainer.patches.trainer:parse_parallelism_config",
        feature=CORE,
        why="reads only the keys fsdp and tp, so that fsdp2 and a misspelt key become plain DDP",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L3750",
        fingerprints={"510a4ea0ad5762b0"},
    ),
    _row(
        target="composer.distributed.prepare_distributed:parallelize_composer_model",
        replacement="trainer.prepare:parallelize_composer_model",
        feature=CORE,
        why="wraps without the root, refuses ties, drops optimizer state and knows only CUDA",
        upstream=f"{_UPSTREAM}/distributed/prepare_distributed.py#L198",
        fingerprints={"19c74c0eabbbbc2f"},
    ),
    _row(
        target=f"{_TRAINER}:Trainer.__init__",
        replacement="trainer.start:init",
        feature=CORE,
        why="refuses `device_train_microbatch_size: auto` and tells nobody of autoresume",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L1003",
        fingerprints={"033af637c4b54cb2"},
    ),
    _row(
        target=f"{_TRAINER}:Trainer._wrap_model_for_distributed",
        replacement="trainer.start:wrap_model",
        feature=CORE,
        why="lets autoresume, which comes next, follow a link that may point to a damaged file",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L1775",
        fingerprints={"2435a98fc7f5dec4"},
        asks=_is_with_fsdp2,
    ),
    _row(
        target="composer.core.state:State._apply_fsdp",
        replacement="trainer.start:apply_fsdp",
        feature=CORE,
        why="leaves averages of weights with whole tensors when the model is sharded",
        upstream=f"{_UPSTREAM}/core/state.py#L1338",
        fingerprints={"41fdeca275a7b6f1"},
    ),
    _row(
        target=f"{_TRAINER}:Trainer._train_loop",
        replacement="trainer.step:train_loop",
        feature=CORE,
        why="lets ranks run different numbers of microbatches, and wait for each other for ever",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L2383",
        fingerprints={"71c0fc0ce3b828a4"},
        asks=_is_sharded,
    ),
    _row(
        target=f"{_TRAINER}:Trainer._iter_dataloader",
        replacement="trainer.step:iterate",
        feature=CORE,
        why="says nothing of data left out because that of another rank has ended",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L3594",
        fingerprints={"05e8c2ab73c107bd"},
        asks=_is_sharded,
    ),
    _row(
        target="composer.core.state:_create_device_mesh",
        replacement="trainer.groups:create_mesh",
        feature=_TENSOR,
        why="builds a mesh without the axis of tensor parallelism",
        upstream=f"{_UPSTREAM}/core/state.py#L175",
        takes={"device", "fsdp_config", "tp_config"},
    ),
    _row(
        target=f"{_TRAINER}:Trainer._accumulate_time_across_ranks",
        replacement="trainer.groups:counted_once",
        feature=_TENSOR,
        why="counts samples and tokens once for each rank of a tensor group",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L2347",
        takes={"num_samples", "num_tokens"},
    ),
    _row(
        target="composer.core.state:State.set_dataloader",
        replacement="trainer.groups:set_dataloader",
        feature=_TENSOR,
        why="takes data that a sampler dealt to single ranks for that of groups",
        upstream=f"{_UPSTREAM}/core/state.py#L1614",
        takes={"dataloader"},
    ),
    _row(
        target=f"{_TRAINER}:dist",
        replacement="trainer.groups:CountsGroups",
        feature=_TENSOR,
        why="takes samples that a sampler repeated off single ranks of a tensor group",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L1",
        fingerprints={"960e706755b76e86"},
        source=_TRAINER,
    ),
    _row(
        target=f"{_TRAINER}:Trainer._train_microbatches",
        replacement="trainer.step:train_microbatches",
        feature=CORE,
        why="leaves gradients of a batch that failed half way to the next one",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L2779",
        takes={"microbatches"},
        asks=_is_sharded,
    ),
    _row(
        target=f"{_TRAINER}:Trainer._train_microbatch",
        replacement="trainer.step:train_microbatch",
        feature=CORE,
        why="tells only DDP which microbatch is the last one",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L2870",
        takes={"is_final_microbatch"},
        asks=_is_sharded,
    ),
    _row(
        target=f"{_TRAINER}:Trainer._eval_loop",
        replacement="trainer.step:eval_loop",
        feature=_EVALUATION,
        why="gathers as training does, and leaves ranks waiting for one that runs out of memory",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L3314",
        takes={"evaluator"},
        asks=_is_sharded,
    ),
    _row(
        target=f"{_TRAINER}:Trainer.predict",
        replacement="trainer.step:predict",
        feature=_PREDICTION,
        why="has no other choice between memory and gathers than training has",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L3016",
        takes={"dataloader"},
        asks=_is_sharded,
    ),
    _row(
        target=f"{_TRAINER}:Trainer._train_batch",
        replacement="trainer.step:train_batch",
        feature=_AUTO,
        why="leaves ranks waiting for one that runs out of memory under FSDP2",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L2636",
        fingerprints={"79220c70cf066a13"},
    ),
)
