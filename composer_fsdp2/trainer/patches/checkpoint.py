"""Rows of Composer's checkpoints: loading, saving, and executing nothing that is in one.

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

from composer_fsdp2.trainer.patches.engine import CORE, Feature, PatchPoint

__all__ = ["CHECKPOINT_ROWS"]

_UPSTREAM = "https://github.com/mosaicml/composer/blob/v0.32.1/composer"
_CHECKPOINT = "composer.utils.checkpoint"
_SAVER = "composer.callbacks.checkpoint_saver:CheckpointSaver"
_row = functools.partial(PatchPoint, versions="mosaicml 0.32.1")

_LOAD_FUNCTIONS = Feature(
    "Loading with the functions of composer.checkpoint",
    "Load with the Trainer's load_path, or with composer.utils.checkpoint.",
)
_ASYNC_SAVE = Feature(
    "async_save",
    "Leave async_save out of parallelism_config.fsdp2.",
    lambda _items, _size, settings: bool(settings.async_save),
)


def _always(*_args: Any, **_kwargs: Any) -> bool:
    return True


def _is_with_fsdp2(*args: Any, **kwargs: Any) -> bool:
    return any(
        getattr(value, "fsdp_config_version", None) == 2 for value in (*args, *kwargs.values())
    )


CHECKPOINT_ROWS: tuple[PatchPoint, ...] = (
    _row(
        target=f"{_CHECKPOINT}:load_checkpoint",
        replacement="trainer.start:load_any_checkpoint",
        feature=CORE,
        why="takes the kind of a checkpoint from a setting, and loads some wrongly in silence",
        upstream=f"{_UPSTREAM}/utils/checkpoint.py#L406",
        fingerprints={"eb5a9a68a9cf7007"},
    ),
    _row(
        target=f"{_CHECKPOINT}:_save_checkpoint",
        replacement="trainer.save:save_checkpoint",
        feature=CORE,
        why="writes into the place of the last checkpoint, which is lost if the run dies meanwhile",
        upstream=f"{_UPSTREAM}/utils/checkpoint.py#L1023",
        fingerprints={"f8f92b97eb4cff40"},
        asks=_is_with_fsdp2,
    ),
    _row(
        target=f"{_CHECKPOINT}:_torch_load_with_validation",
        replacement="trainer.safe_reading:read_file",
        feature=CORE,
        why="executes code that a file contains",
        upstream=f"{_UPSTREAM}/utils/checkpoint.py#L111",
        fingerprints={"950333d5ddc66c05", "90dcbf1eebbb927e"},
    ),
    _row(
        target="composer.checkpoint.load:_torch_load_with_validation",
        replacement="trainer.safe_reading:read_file",
        feature=_LOAD_FUNCTIONS,
        why="executes code that a file contains (a second name of the same function)",
        upstream=f"{_UPSTREAM}/utils/checkpoint.py#L111",
        fingerprints={"950333d5ddc66c05", "90dcbf1eebbb927e"},
        asks=_always,
    ),
    _row(
        target="composer.checkpoint.load:load_resumption_checkpoint",
        replacement="trainer.safe_reading:load_resumption",
        feature=_LOAD_FUNCTIONS,
        why="executes code that a resumption.pkl contains",
        upstream=f"{_UPSTREAM}/checkpoint/load.py#L632",
        fingerprints={"0947da237203f9a8", "2f6caf961aa6656a"},
        asks=_always,
    ),
    _row(
        target=f"{_CHECKPOINT}:FileSystemReaderWithValidation.read_metadata",
        replacement="trainer.safe_reading:read_folder_metadata",
        feature=CORE,
        why="executes code that a .metadata contains",
        upstream=f"{_UPSTREAM}/utils/checkpoint.py#L191",
        fingerprints={"ed83ede26e7ab214"},
    ),
    _row(
        target=f"{_CHECKPOINT}:FileSystemReaderWithValidation.read_data",
        replacement="trainer.safe_reading:read_folder_data",
        feature=CORE,
        why="executes code that an entry contains, and under FSDP2 does not compare checksums",
        upstream=f"{_UPSTREAM}/utils/checkpoint.py#L176",
        fingerprints={"c64adb4f3f7ba2ac"},
    ),
    _row(
        target=f"{_CHECKPOINT}:download_checkpoint",
        replacement="trainer.safe_reading:download_checkpoint",
        feature=CORE,
        why="unpacks archives without looking where their members want to go",
        upstream=f"{_UPSTREAM}/utils/checkpoint.py#L723",
        fingerprints={"e24593d7626830ec"},
    ),
    _row(
        target="composer.core.state:State._apply_required_algorithms",
        replacement="trainer.extensions:apply_required_algorithms",
        feature=CORE,
        why="evaluates text that comes from the checkpoint",
        upstream=f"{_UPSTREAM}/core/state.py#L1092",
        fingerprints={"9cefb70c987ff4aa"},
    ),
    _row(
        target=f"{_SAVER}.init",
        replacement="trainer.save:make_save_folder",
        feature=CORE,
        why="raises on one rank, and leaves the others waiting, when the folder cannot be made",
        upstream=f"{_UPSTREAM}/callbacks/checkpoint_saver.py#L327",
        fingerprints={"692e66dc893a2141"},
        asks=_is_with_fsdp2,
    ),
    _row(
        target=f"{_SAVER}._save_checkpoint",
        replacement="trainer.save:save_in_background",
        feature=_ASYNC_SAVE,
        why="stops training until a checkpoint is written",
        upstream=f"{_UPSTREAM}/callbacks/checkpoint_saver.py#L436",
        fingerprints={"5e852ffaa2b752fb"},
    ),
    _row(
        target=f"{_SAVER}.fit_end",
        replacement="trainer.save:finish_at_fit_end",
        feature=_ASYNC_SAVE,
        why="does not wait for a checkpoint that is being written in the background",
        upstream=f"{_UPSTREAM}/callbacks/checkpoint_saver.py#L621",
        fingerprints={"86f047376e7fe399"},
    ),
    _row(
        target=f"{_SAVER}.post_close",
        replacement="trainer.save:leave_background_save",
        feature=_ASYNC_SAVE,
        why="does not wait for a checkpoint that is being written in the background",
        upstream=f"{_UPSTREAM}/callbacks/checkpoint_saver.py#L644",
        fingerprints={"a3096d62d1187483"},
    ),
)
