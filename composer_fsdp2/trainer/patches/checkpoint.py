"""Rows of Composer's checkpoints: loading, saving, and executing nothing that is in one.

[Note: Composer's main branch] Two functions differ in the last commit of the main branch (640518880
of 29 April 2026, after 0.32.1): they unpickle with a list of allowed names. That source was read
and not run. `_read_file` replaces one of them whole, with the same arguments and what it needs of
the module. `_load_resumption` looks at the file and then calls the original, which refuses more
than it did.

[Note: runs without FSDP2] They load and save as Composer does, strictness and warnings included.
Only what would be executed is refused in every run, before the original reads it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from composer_fsdp2.trainer.patches.engine import CORE, Feature, PatchPoint, imported

__all__ = ["CHECKPOINT_ROWS", "load_checkpoint"]

_VERSIONS = "mosaicml 0.32.1"
_UPSTREAM = "https://github.com/mosaicml/composer/blob/v0.32.1/composer"
_CHECKPOINT = "composer.utils.checkpoint"
_SAVER = "composer.callbacks.checkpoint_saver:CheckpointSaver"
_SAVING = "composer_fsdp2.trainer.save"

_LOAD_FUNCTIONS = Feature(
    "Loading with the functions of composer.checkpoint",
    "Load with the Trainer's load_path, or with composer.utils.checkpoint.",
)
_ASYNC_SAVE = Feature(
    "async_save",
    "Leave async_save out of parallelism_config.fsdp2.",
    lambda given: bool(getattr(given.settings, "async_save", False)),
)


def load_checkpoint(original: Any, path: str, state: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `load_checkpoint`, under every name it has."""
    from composer_fsdp2.trainer.autoresume import load_newest_good

    if _uses_fsdp2(state) or _is_folder_for_one_process(path, state, *args, **kwargs):
        return load_newest_good(path, state, *args, **kwargs)
    return original(path, state, *args, **kwargs)


def _is_folder_for_one_process(
    path: str, state: Any, _logger: Any = None, object_store: Any = None, *_: Any, **_kwargs: Any
) -> bool:
    """Whether it is a folder of shards for a run without FSDP: Composer can read none there."""
    from pathlib import Path

    from composer.utils.misc import partial_format

    from composer_fsdp2.checkpoint.metadata import METADATA

    if state.fsdp_config is not None or object_store is not None:
        return False
    return (Path(partial_format(path, run_name=state.run_name)) / METADATA).is_file()


def _save_checkpoint(original: Any, state: Any, save_filename: str, **kwargs: Any) -> Any:
    from composer_fsdp2.trainer.save import save_checkpoint

    chosen = save_checkpoint if _uses_fsdp2(state) else original
    return chosen(state, save_filename, **kwargs)


def _uses_fsdp2(state: Any) -> bool:
    return state.fsdp_config_version == 2


def _read_file(_original: Any, checkpoint_filepath: Any, map_location: str) -> Any:
    from composer_fsdp2.trainer.safe_reading import read_file

    return read_file(checkpoint_filepath, map_location)


def _load_resumption(original: Any, state: Any, load_path: str) -> Any:
    from pathlib import Path

    from composer_fsdp2.checkpoint.pickles import vet_pickle

    vet_pickle(Path(load_path))
    return original(state, load_path)


def _read_metadata(original: Any, reader: Any) -> Any:
    from composer_fsdp2.trainer.safe_reading import read_folder_metadata

    return read_folder_metadata(original, reader)


def _read_data(original: Any, reader: Any, plan: Any, planner: Any) -> Any:
    from composer_fsdp2.trainer.safe_reading import read_folder_data

    return read_folder_data(original, reader, plan, planner)


def _download_checkpoint(original: Any, *args: Any, **kwargs: Any) -> Any:
    from composer_fsdp2.trainer.safe_reading import unpacking_safely

    with unpacking_safely():
        return original(*args, **kwargs)


def _apply_required_algorithms(
    original: Any, state: Any, state_dict: Any, *args: Any, **kwargs: Any
) -> None:
    from composer_fsdp2.trainer.extensions import check_required
    from composer_fsdp2.trainer.safe_reading import vet_evaluated_algorithms

    vet_evaluated_algorithms(state_dict, *args, **kwargs)
    check_required(state, state_dict, *args, **kwargs)
    original(state, state_dict, *args, **kwargs)


def _saver_init(original: Any, saver: Any, state: Any, logger: Any) -> None:
    from composer_fsdp2.trainer.save import make_save_folder

    if _uses_fsdp2(state):
        make_save_folder(original, saver, state, logger)
    else:
        original(saver, state, logger)


def _saver_fit_end(original: Any, saver: Any, state: Any, logger: Any) -> None:
    from composer.callbacks import CheckpointSaver

    from composer_fsdp2.trainer.save import finish_background_save

    # Composer's own method, which `functools.wraps` keeps in `__wrapped__` of the replacement.
    finish_background_save(inspect.unwrap(CheckpointSaver._save_checkpoint), saver, logger)
    original(saver, state, logger)


def _saver_post_close(original: Any, saver: Any) -> None:
    from composer_fsdp2.trainer.save import leave_background_save

    leave_background_save(saver)
    original(saver)


def _always(*_args: Any, **_kwargs: Any) -> bool:
    return True


def _row(
    target: str,
    replacement: Callable[..., Any],
    fingerprint: str,
    why: str,
    lines: str,
    feature: Feature = CORE,
    *,
    main: str = "",
    refused: Callable[..., bool] | None = None,
) -> PatchPoint:
    """One row; `main` is the fingerprint in the main branch where it differs."""
    return PatchPoint(
        target=target,
        replacement=replacement,
        feature=feature,
        why=why,
        upstream=f"{_UPSTREAM}/{lines}",
        fingerprints=frozenset({fingerprint, main} - {""}),
        versions=_VERSIONS,
        refused=refused,
    )


CHECKPOINT_ROWS: tuple[PatchPoint, ...] = (
    _row(
        f"{_CHECKPOINT}:load_checkpoint",
        load_checkpoint,
        "eb5a9a68a9cf7007",
        "takes the kind of a checkpoint from a setting, and loads some kinds wrongly in silence",
        "utils/checkpoint.py#L406",
    ),
    _row(
        f"{_CHECKPOINT}:_save_checkpoint",
        _save_checkpoint,
        "f8f92b97eb4cff40",
        "writes into the place of the last checkpoint, which is lost if the run dies meanwhile",
        "utils/checkpoint.py#L1023",
    ),
    _row(
        f"{_CHECKPOINT}:_torch_load_with_validation",
        _read_file,
        "950333d5ddc66c05",
        "executes code that a file contains",
        "utils/checkpoint.py#L111",
        main="90dcbf1eebbb927e",
    ),
    _row(
        "composer.checkpoint.load:_torch_load_with_validation",
        _read_file,
        "950333d5ddc66c05",
        "executes code that a file contains (a second name of the same function)",
        "utils/checkpoint.py#L111",
        _LOAD_FUNCTIONS,
        main="90dcbf1eebbb927e",
        refused=_always,
    ),
    _row(
        "composer.checkpoint.load:load_resumption_checkpoint",
        _load_resumption,
        "0947da237203f9a8",
        "executes code that a resumption.pkl contains",
        "checkpoint/load.py#L632",
        _LOAD_FUNCTIONS,
        main="2f6caf961aa6656a",
        refused=_always,
    ),
    _row(
        f"{_CHECKPOINT}:FileSystemReaderWithValidation.read_metadata",
        _read_metadata,
        "ed83ede26e7ab214",
        "executes code that a .metadata contains",
        "utils/checkpoint.py#L191",
    ),
    _row(
        f"{_CHECKPOINT}:FileSystemReaderWithValidation.read_data",
        _read_data,
        "c64adb4f3f7ba2ac",
        "executes code that an entry contains, and under FSDP2 does not compare checksums",
        "utils/checkpoint.py#L176",
    ),
    _row(
        f"{_CHECKPOINT}:download_checkpoint",
        _download_checkpoint,
        "e24593d7626830ec",
        "unpacks archives without looking where their members want to go",
        "utils/checkpoint.py#L723",
    ),
    _row(
        "composer.core.state:State._apply_required_algorithms",
        _apply_required_algorithms,
        "9cefb70c987ff4aa",
        "evaluates text that comes from the checkpoint",
        "core/state.py#L1092",
    ),
    _row(
        f"{_SAVER}.init",
        _saver_init,
        "692e66dc893a2141",
        "raises on one rank, and leaves the others waiting, when the folder cannot be made",
        "callbacks/checkpoint_saver.py#L327",
    ),
    _row(
        f"{_SAVER}._save_checkpoint",
        imported(_SAVING, "save_in_background"),
        "5e852ffaa2b752fb",
        "stops training until a checkpoint is written",
        "callbacks/checkpoint_saver.py#L436",
        _ASYNC_SAVE,
    ),
    _row(
        f"{_SAVER}.fit_end",
        _saver_fit_end,
        "86f047376e7fe399",
        "does not wait for a checkpoint that is being written in the background",
        "callbacks/checkpoint_saver.py#L621",
        _ASYNC_SAVE,
    ),
    _row(
        f"{_SAVER}.post_close",
        _saver_post_close,
        "a3096d62d1187483",
        "does not wait for a checkpoint that is being written in the background",
        "callbacks/checkpoint_saver.py#L644",
        _ASYNC_SAVE,
    ),
)
