"""Keeps a run that begins anew from writing over the checkpoints of another one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from composer.callbacks import CheckpointSaver
from composer.core import State, Timestamp
from composer.utils import dist
from composer.utils.file_helpers import format_name_with_dist
from composer.utils.object_store import ObjectStore

from composer_fsdp2.checkpoint.source import open_checkpoint
from composer_fsdp2.errors import CheckpointError, ConfigError
from composer_fsdp2.ranks import on_all_ranks
from composer_fsdp2.trainer.checkpoint.autoresume import was_searched
from composer_fsdp2.trainer.checkpoint.names import COUNTS, pattern_of, saved_batch, without_times
from composer_fsdp2.trainer.override_attribute import override_attribute

__all__ = ["check_save_folder", "check_savers", "refuse_later_checkpoints"]


def check_savers(state: State) -> None:
    """Refuses two savers whose sharded checkpoints would have the same names. Collective: no.

    Raises:
        ConfigError: one would write over those of the other, or remove them.
    """
    config: Any = state.fsdp_config
    if config is None or config.state_dict_type != "sharded":
        return
    places: dict[tuple[str, str], CheckpointSaver] = {}
    for saver in state.callbacks:
        if not isinstance(saver, CheckpointSaver):
            continue
        folder, name = saver.folder, saver.filename.filename
        if saver.remote_uploader is not None and saver.remote_file_name is not None:
            folder, name = saver.remote_uploader.remote_folder, saver.remote_file_name.filename
        place = folder, str(PurePosixPath(name).parent)
        other = places.setdefault(place, saver)
        removes = saver.num_checkpoints_to_keep >= 0 or other.num_checkpoints_to_keep >= 0
        is_same = (saver.weights_only, saver.ignore_keys) == (other.weights_only, other.ignore_keys)
        if other is not saver and (removes or not is_same):
            raise ConfigError(
                f"Two CheckpointSavers save to '{folder}'. Sharded checkpoints are folders called "
                "as `sharded_ckpt_prefix_dir` says, whatever `filename` is, so one would write "
                "over those of the other or remove them. Give each a folder of its own."
            )


def refuse_later_checkpoints(
    original: Callable[..., None], saver: CheckpointSaver, state: State, logger: Any
) -> None:
    """Replaces `CheckpointSaver.fit_start`, which sees files alone, and in local folders.

    Collective: yes.

    Raises:
        CheckpointError: see `check_save_folder`; on every rank.
    """
    config: Any = state.fsdp_config
    prefix, name = config.sharded_ckpt_prefix_dir, saver.filename.filename
    if saver.remote_uploader is not None and was_searched(state) and int(state.timestamp.batch):
        # Later objects than autoresume has found are of uploads of this run that did not end.
        saver.overwrite = True

    def check() -> None:
        rest = prefix, state.run_name, state.timestamp
        if saver.overwrite:
            return
        if saver.remote_uploader is None or saver.remote_file_name is None:
            check_save_folder(saver.folder, name, *rest)
        elif dist.get_global_rank() == 0:
            uploader = saver.remote_uploader
            remote_name = saver.remote_file_name.filename
            check_save_folder(uploader.remote_folder, remote_name, *rest, uploader.remote_backend)

    on_all_ranks(check)
    with override_attribute(saver, "overwrite", True):  # what Composer would look for is not there
        original(saver, state, logger)


def check_save_folder(
    folder: str,
    filename: str,
    prefix: str,
    run_name: str,
    now: Timestamp,
    store: ObjectStore | None = None,
) -> None:
    """Refuses to save where checkpoints of a later time are. Collective: no.

    Args:
        folder: `save_folder`, with placeholders or without.
        filename: of a full checkpoint in it; with a store, of the object.
        prefix: of a folder of shards, which lies where the file would.
        run_name: Composer's `run_name`.
        now: when the run begins.
        store: where `folder` is, if it is remote.

    Raises:
        CheckpointError: such checkpoints are there, or the store cannot be asked.
    """
    folder = format_name_with_dist(folder, run_name)
    later: dict[str, tuple[int, ...]] = {}
    for name in (filename, str(PurePosixPath(filename).parent / prefix)):
        pattern = pattern_of(name, run_name)
        # In a store a folder is the beginning of names.
        path_pattern = re.compile(rf"(?<![^/]){pattern.pattern}(?=/|\Z)")
        constant = without_times(name, run_name).partition("{")[0]
        if store is not None:
            paths = _objects(store, constant, folder)
        else:  # paths that have as many parts as the name
            there = Path(folder).glob("/".join("*" * len(PurePosixPath(name).parts)))
            paths = [path.relative_to(folder).as_posix() for path in there]
        for match in filter(None, map(path_pattern.search, paths)):
            counts = {unit: int(text) for unit, text in match.groupdict().items()}
            path = None if store is not None else Path(folder, match[0])
            if _is_later(counts, now, path):
                later[match[0]] = tuple(counts.values())
    if not later:
        return
    names = sorted(later, key=lambda name: (later[name], name))
    several = "a checkpoint" if len(names) == 1 else f"{len(names)} checkpoints"
    shown = ", ".join(f"'{name}'" for name in names[-3:])
    raise CheckpointError(
        f"'{folder}' has {several} of a later time than this run begins at, which is batch "
        f"{int(now.batch)}; the latest: {shown}. save_overwrite is false, and the run would write "
        "over them and point to its own as the latest. Write autoresume: true (with the run_name) "
        "or load_path to go on from one of them, another run_name or save_folder to keep them, or "
        "save_overwrite: true."
    )


def _objects(store: ObjectStore, constant: str, folder: str) -> list[str]:
    """Returns names of objects: of the folder in which names begin with a constant text."""
    above, slash, _ = constant.rpartition("/")
    try:
        return store.list_objects(above + slash or constant)
    except FileNotFoundError:
        return []
    except Exception as error:  # each store has errors of its own
        raise CheckpointError(
            f"The objects in '{folder}' cannot be listed: {error}. The run could write over "
            "checkpoints of another one. Allow it to list them, or write save_overwrite: true."
        ) from error


def _is_later(counts: Mapping[str, int], now: Timestamp, path: Path | None) -> bool:
    """Compares as Composer's `ensure_folder_has_no_conflicting_files` does.

    A name without a count says nothing of a time. Then a local checkpoint does, and an object is
    not uploaded a second time under its name.
    """
    if not counts:
        if path is None:
            return True
        try:
            batch = saved_batch(open_checkpoint(path))
        except CheckpointError:
            return True
        return batch is None or batch > now.batch
    same_epoch = counts.get("epoch") == int(now.epoch)
    return any(
        count > int(getattr(now, unit))
        for unit, count in counts.items()
        if unit in COUNTS or same_epoch
    )
