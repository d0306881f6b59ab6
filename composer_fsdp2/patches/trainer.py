"""Rows of Composer's Trainer and State, and of its checkpoints.

Settings, preparation, the step, evaluation and nodes; loading, saving, and executing nothing that
is in a checkpoint.

[Note: Composer's main branch] Two functions differ in the last commit of the main branch (640518880
of 29 April 2026, after 0.32.1): they unpickle with a list of allowed names. That source was read
and not run. `read_file` replaces one of them whole, with the same arguments and what it needs of
the module. `load_resumption` looks at the file and then calls the original, which refuses more than
it did. Rows of both have two fingerprints.

[Note: runs without FSDP2] They load and save as Composer does, strictness and warnings included.
Only what would be executed is refused in every run, before the original reads it.
"""

from __future__ import annotations

import functools
from typing import Any

from composer_fsdp2.patches.engine import CORE, Feature, PatchPoint, always

__all__ = ["CHECKPOINT_ROWS", "TRAINER_ROWS"]

_UPSTREAM = "https://github.com/mosaicml/composer/blob/v0.32.1/composer"
_TRAINER = "composer.trainer.trainer"
_CHECKPOINT = "composer.utils.checkpoint"
_SAVER = "composer.callbacks.checkpoint_saver:CheckpointSaver"
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
_LOAD_FUNCTIONS = Feature(
    "Loading with the functions of composer.checkpoint",
    "Load with the Trainer's load_path, or with composer.utils.checkpoint.",
)
_ASYNC_SAVE = Feature(
    "async_save",
    "Leave async_save out of parallelism_config.fsdp2.",
    lambda _items, _size, settings: bool(settings.async_save),
)


def _is_sharded(trainer: Any, *_args: Any, **_kwargs: Any) -> bool:
    from composer_fsdp2.step.run import run_of

    return run_of(trainer.state.model) is not None


def _is_with_fsdp2(trainer: Any, *_args: Any, **_kwargs: Any) -> bool:
    return trainer.state.fsdp_config_version == 2


def _gets_state_of_fsdp2(*args: Any, **kwargs: Any) -> bool:
    return any(
        getattr(value, "fsdp_config_version", None) == 2 for value in (*args, *kwargs.values())
    )


TRAINER_ROWS: tuple[PatchPoint, ...] = (
    _row(
        target=f"{_TRAINER}:Trainer._parse_parallelism_config",
        replacement="trainer.start:settle_parallelism",
        feature=CORE,
        why="reads only the keys fsdp and tp, so that fsdp2 and a misspelt key become plain DDP",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L3750",
        fingerprints={"510a4ea0ad5762b0"},
    ),
    _row(
        target="composer.distributed.prepare_distributed:parallelize_composer_model",
        replacement="prepare.model:parallelize_composer_model",
        feature=CORE,
        why="wraps without the root, refuses ties, drops optimizer state and knows only CUDA",
        upstream=f"{_UPSTREAM}/distributed/prepare_distributed.py#L198",
        fingerprints={"19c74c0eabbbbc2f"},
    ),
    _row(
        target=f"{_TRAINER}:Trainer.__init__",
        replacement="trainer.start:init_trainer",
        feature=CORE,
        why="refuses `device_train_microbatch_size: auto` and tells nobody of autoresume",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L1003",
        fingerprints={"033af637c4b54cb2"},
    ),
    _row(
        target=f"{_TRAINER}:Trainer.fit",
        replacement="trainer.start:fit_trainer",
        feature=CORE,
        why="asks for an argument of its own where autoresume finds that a run is complete",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L1933",
        takes={"duration", "reset_time"},
        asks=_is_with_fsdp2,
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
        replacement="trainer.extensions.algorithms:apply_fsdp",
        feature=CORE,
        why="leaves averages of weights with whole tensors when the model is sharded",
        upstream=f"{_UPSTREAM}/core/state.py#L1338",
        fingerprints={"41fdeca275a7b6f1"},
    ),
    _row(
        target=f"{_TRAINER}:Trainer._train_loop",
        replacement="trainer.loop.step:train_loop",
        feature=CORE,
        why="lets ranks run different numbers of microbatches, and wait for each other for ever",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L2383",
        fingerprints={"71c0fc0ce3b828a4"},
        asks=_is_sharded,
    ),
    _row(
        target=f"{_TRAINER}:Trainer._iter_dataloader",
        replacement="trainer.loop.step:iterate",
        feature=CORE,
        why="says nothing of data left out because that of another rank has ended",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L3594",
        fingerprints={"05e8c2ab73c107bd"},
        asks=_is_sharded,
    ),
    _row(
        target="composer.core.state:_create_device_mesh",
        replacement="trainer.loop.groups:create_mesh",
        feature=_TENSOR,
        why="builds a mesh without the axis of tensor parallelism",
        upstream=f"{_UPSTREAM}/core/state.py#L175",
        takes={"device", "fsdp_config", "tp_config"},
    ),
    _row(
        target=f"{_TRAINER}:Trainer._accumulate_time_across_ranks",
        replacement="trainer.loop.groups:counted_once",
        feature=_TENSOR,
        why="counts samples and tokens once for each rank of a tensor group",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L2347",
        takes={"num_samples", "num_tokens"},
    ),
    _row(
        target="composer.core.state:State.set_dataloader",
        replacement="trainer.loop.groups:set_dataloader",
        feature=_TENSOR,
        why="takes data that a sampler dealt to single ranks for that of groups",
        upstream=f"{_UPSTREAM}/core/state.py#L1614",
        takes={"dataloader"},
    ),
    _row(
        target=f"{_TRAINER}:dist",
        replacement="trainer.dist_views:CountsGroups",
        feature=_TENSOR,
        why="takes samples that a sampler repeated off single ranks of a tensor group",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L1",
        fingerprints={"960e706755b76e86"},
        source=_TRAINER,
    ),
    _row(
        target=f"{_TRAINER}:Trainer._train_microbatches",
        replacement="trainer.loop.step:train_microbatches",
        feature=CORE,
        why="leaves gradients of a batch that failed half way to the next one",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L2779",
        takes={"microbatches"},
        asks=_is_sharded,
    ),
    _row(
        target=f"{_TRAINER}:Trainer._train_microbatch",
        replacement="trainer.loop.step:train_microbatch",
        feature=CORE,
        why="tells only DDP which microbatch is the last one",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L2870",
        takes={"is_final_microbatch"},
        asks=_is_sharded,
    ),
    _row(
        target=f"{_TRAINER}:Trainer._eval_loop",
        replacement="trainer.loop.step:eval_loop",
        feature=_EVALUATION,
        why="gathers as training does, and leaves ranks waiting for one that runs out of memory",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L3314",
        takes={"evaluator"},
        asks=_is_sharded,
    ),
    _row(
        target=f"{_TRAINER}:Trainer.predict",
        replacement="trainer.loop.step:predict",
        feature=_PREDICTION,
        why="has no other choice between memory and gathers than training has",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L3016",
        takes={"dataloader"},
        asks=_is_sharded,
    ),
    _row(
        target=f"{_TRAINER}:Trainer._train_batch",
        replacement="trainer.loop.step:train_batch",
        feature=_AUTO,
        why="leaves ranks waiting for one that runs out of memory under FSDP2",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L2636",
        fingerprints={"79220c70cf066a13"},
    ),
    _row(
        target="composer.utils.dist:get_node_rank",
        replacement="trainer.nodes:node_rank",
        feature=CORE,
        why="knows the number of a node only from NODE_RANK, which torchrun and srun do not set",
        upstream=f"{_UPSTREAM}/utils/dist.py#L263",
        fingerprints={"7755633765c2f271"},
    ),
    _row(
        target="composer.utils.dist:get_node_signal_file_name",
        replacement="trainer.nodes:signal_file_name",
        feature=CORE,
        why="returns rank 0's name on all nodes, which then remove one file of a shared folder",
        upstream=f"{_UPSTREAM}/utils/dist.py#L628",
        takes={"rng"},
    ),
)

CHECKPOINT_ROWS: tuple[PatchPoint, ...] = (
    _row(
        target=f"{_CHECKPOINT}:load_checkpoint",
        replacement="trainer.checkpoint.autoresume:load_any_checkpoint",
        feature=CORE,
        why="takes the kind of a checkpoint from a setting, and loads some wrongly in silence",
        upstream=f"{_UPSTREAM}/utils/checkpoint.py#L406",
        fingerprints={"eb5a9a68a9cf7007"},
    ),
    _row(
        target=f"{_CHECKPOINT}:_save_checkpoint",
        replacement="trainer.checkpoint.save:save_checkpoint",
        feature=CORE,
        why="writes into the place of the last checkpoint, which is lost if the run dies meanwhile",
        upstream=f"{_UPSTREAM}/utils/checkpoint.py#L1023",
        fingerprints={"f8f92b97eb4cff40"},
        asks=_gets_state_of_fsdp2,
    ),
    _row(
        target=f"{_CHECKPOINT}:_torch_load_with_validation",
        replacement="trainer.checkpoint.safe_reading:read_file",
        feature=CORE,
        why="executes code that a file contains",
        upstream=f"{_UPSTREAM}/utils/checkpoint.py#L111",
        fingerprints={"950333d5ddc66c05", "90dcbf1eebbb927e"},
    ),
    _row(
        target="composer.checkpoint.load:_torch_load_with_validation",
        replacement="trainer.checkpoint.safe_reading:read_file",
        feature=_LOAD_FUNCTIONS,
        why="executes code that a file contains (a second name of the same function)",
        upstream=f"{_UPSTREAM}/utils/checkpoint.py#L111",
        fingerprints={"950333d5ddc66c05", "90dcbf1eebbb927e"},
        asks=always,
    ),
    _row(
        target="composer.checkpoint.load:load_resumption_checkpoint",
        replacement="trainer.checkpoint.safe_reading:load_resumption",
        feature=_LOAD_FUNCTIONS,
        why="executes code that a resumption.pkl contains",
        upstream=f"{_UPSTREAM}/checkpoint/load.py#L632",
        fingerprints={"0947da237203f9a8", "2f6caf961aa6656a"},
        asks=always,
    ),
    _row(
        target=f"{_CHECKPOINT}:FileSystemReaderWithValidation.read_metadata",
        replacement="trainer.checkpoint.safe_reading:read_folder_metadata",
        feature=CORE,
        why="executes code that a .metadata contains",
        upstream=f"{_UPSTREAM}/utils/checkpoint.py#L191",
        fingerprints={"ed83ede26e7ab214"},
    ),
    _row(
        target=f"{_CHECKPOINT}:FileSystemReaderWithValidation.read_data",
        replacement="trainer.checkpoint.safe_reading:read_folder_data",
        feature=CORE,
        why="executes code that an entry contains, and under FSDP2 does not compare checksums",
        upstream=f"{_UPSTREAM}/utils/checkpoint.py#L176",
        fingerprints={"c64adb4f3f7ba2ac"},
    ),
    _row(
        target=f"{_CHECKPOINT}:download_checkpoint",
        replacement="trainer.checkpoint.safe_reading:download_checkpoint",
        feature=CORE,
        why="unpacks archives without looking where their members want to go",
        upstream=f"{_UPSTREAM}/utils/checkpoint.py#L723",
        fingerprints={"e24593d7626830ec"},
    ),
    _row(
        target="composer.core.state:State._apply_required_algorithms",
        replacement="trainer.extensions.table:apply_required_algorithms",
        feature=CORE,
        why="evaluates text that comes from the checkpoint",
        upstream=f"{_UPSTREAM}/core/state.py#L1092",
        fingerprints={"9cefb70c987ff4aa"},
    ),
    _row(
        target=f"{_SAVER}.init",
        replacement="trainer.checkpoint.save:make_save_folder",
        feature=CORE,
        why="raises on one rank, and leaves the others waiting, when the folder cannot be made",
        upstream=f"{_UPSTREAM}/callbacks/checkpoint_saver.py#L327",
        fingerprints={"692e66dc893a2141"},
        asks=_gets_state_of_fsdp2,
    ),
    _row(
        target=f"{_SAVER}.batch_end",
        replacement="trainer.checkpoint.uploads:upload_link",
        feature=CORE,
        why="raises on one rank, and leaves the others waiting, when an upload has failed",
        upstream=f"{_UPSTREAM}/callbacks/checkpoint_saver.py#L591",
        takes={"state"},
        asks=_gets_state_of_fsdp2,
    ),
    _row(
        target=f"{_SAVER}.fit_start",
        replacement="trainer.checkpoint.save_folder:refuse_later_checkpoints",
        feature=CORE,
        why="lets a run that begins anew write over sharded checkpoints of another",
        upstream=f"{_UPSTREAM}/callbacks/checkpoint_saver.py#L360",
        fingerprints={"2e0568341d5c1179"},
        asks=_gets_state_of_fsdp2,
    ),
    _row(
        target=f"{_SAVER}._save_checkpoint",
        replacement="trainer.checkpoint.save:save_in_background",
        feature=_ASYNC_SAVE,
        why="stops training until a checkpoint is written",
        upstream=f"{_UPSTREAM}/callbacks/checkpoint_saver.py#L436",
        fingerprints={"5e852ffaa2b752fb"},
    ),
    _row(
        target=f"{_SAVER}.fit_end",
        replacement="trainer.checkpoint.save:finish_at_fit_end",
        feature=_ASYNC_SAVE,
        why="does not wait for a checkpoint that is being written in the background",
        upstream=f"{_UPSTREAM}/callbacks/checkpoint_saver.py#L621",
        fingerprints={"86f047376e7fe399"},
    ),
    _row(
        target=f"{_SAVER}.post_close",
        replacement="trainer.checkpoint.save:leave_background_save",
        feature=_ASYNC_SAVE,
        why="does not wait for a checkpoint that is being written in the background",
        upstream=f"{_UPSTREAM}/callbacks/checkpoint_saver.py#L644",
        fingerprints={"a3096d62d1187483"},
    ),
    _row(
        target="composer.callbacks.checkpoint_saver:dist",
        replacement="trainer.checkpoint.uploads:GathersErrors",
        feature=_ASYNC_SAVE,
        why="leaves ranks waiting for the file names of one that failed after a save",
        upstream=f"{_UPSTREAM}/callbacks/checkpoint_saver.py#L1",
        fingerprints={"5c1fffdbf9db96cf"},
        source="composer.callbacks.checkpoint_saver",
    ),
)
