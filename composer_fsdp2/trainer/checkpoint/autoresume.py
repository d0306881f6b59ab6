"""Resumes from the newest checkpoint that is good, not from the one that a link points to."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from composer.callbacks import CheckpointSaver
from composer.core import State
from composer.utils import dist
from composer.utils.file_helpers import format_name_with_dist, parse_uri
from composer.utils.misc import partial_format

from composer_fsdp2.checkpoint.metadata import METADATA
from composer_fsdp2.checkpoint.pickles import is_refusal
from composer_fsdp2.checkpoint.source import open_checkpoint
from composer_fsdp2.checkpoint.staging import REPLACED
from composer_fsdp2.checkpoint.write import point_to
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.ranks import of_rank0, on_all_ranks
from composer_fsdp2.trainer.checkpoint.load import load_checkpoint
from composer_fsdp2.trainer.checkpoint.names import pattern_of, saved_batch

__all__ = ["load_any_checkpoint", "search_save_folder", "was_searched"]

_candidates: WeakKeyDictionary[State, tuple[Path, tuple[Path, ...]]] = WeakKeyDictionary()
"""the link to the checkpoint that a run resumes from, and good checkpoints, the newest first"""


def search_save_folder(state: State, arguments: Mapping[str, Any]) -> None:
    """Finds the checkpoints that a run with `autoresume` may go on from, the newest first.

    Points `latest` to the newest complete one; what is newer and incomplete has been named in a
    warning then. Collective: yes.

    Args:
        state: Composer's state of the run.
        arguments: name -> argument of the Trainer.

    Raises:
        CheckpointError: on every rank, when the folder cannot be searched.
    """
    save_folder, latest = arguments.get("save_folder"), arguments.get("save_latest_filename")
    filename = arguments.get("save_filename")
    savers = (callback for callback in state.callbacks if isinstance(callback, CheckpointSaver))
    if save_folder is None and (saver := next(savers, None)) is not None:
        if saver.remote_uploader is not None:
            return  # Composer looks into its temporary folder, and not into the store
        # Composer resumes from the folder of a saver among the callbacks too.
        save_folder, filename = saver.folder, saver.filename.filename
        latest = saver.latest_filename and saver.latest_filename.filename
    resumes = arguments.get("autoresume") and save_folder is not None and latest is not None
    if not resumes:
        return
    folder = Path(format_name_with_dist(str(save_folder), state.run_name))
    link = folder / format_name_with_dist(str(latest), state.run_name)
    if parse_uri(str(save_folder))[0]:
        # Composer fetches the newest file to a path that looks like its address, in the working
        # directory, and takes what an earlier resume has fetched there for the newest one:
        # https://github.com/mosaicml/composer/blob/v0.32.1/composer/trainer/trainer.py#L1890
        with contextlib.suppress(OSError):
            link.unlink()
        dist.barrier()
        _candidates[state] = link, ()
        return
    searches = dist.get_global_rank() == 0 and folder.is_dir()
    paths = on_all_ranks(
        lambda: _settle(folder, link, str(filename), state) if searches else (),
        lambda error: CheckpointError(f"'{folder}' cannot be searched for checkpoints: {error}"),
    )
    _candidates[state] = link, of_rank0(paths)


def was_searched(state: State) -> bool:
    """Says whether the folder of a run was searched. Collective: no."""
    return state in _candidates


def _settle(folder: Path, link: Path, filename: str, state: State) -> tuple[Path, ...]:
    """Returns complete checkpoints, the newest first; `latest` points to the first of them."""
    for replaced in folder.glob(f"{REPLACED}*"):  # killed while another took its place
        place_of = folder / replaced.name.removeprefix(REPLACED)
        if not place_of.exists():
            replaced.rename(place_of)
    config: Any = state.fsdp_config
    files = pattern_of(filename, state.run_name)
    prefix = None if config is None else config.sharded_ckpt_prefix_dir
    folders = None if prefix is None else pattern_of(prefix, state.run_name)
    good: list[tuple[int, float, Path]] = []
    for path in sorted(folder.iterdir()):
        pattern = folders if path.is_dir() else files
        if pattern is None or not pattern.fullmatch(path.name) or path.is_symlink():
            continue
        try:
            batch = saved_batch(open_checkpoint(path))
        except CheckpointError as error:
            if is_refusal(error):  # whether to trust somebody is for the user to say
                raise
            _set_aside(path, str(error))
            continue
        if batch is not None:
            good.append((batch, path.stat().st_mtime, path))
    paths = tuple(path for *_, path in sorted(good, reverse=True))
    if paths and (not link.exists() or link.resolve() != paths[0].resolve()):
        warnings.warn(
            f"Autoresume: '{link}' does not point to the newest complete checkpoint, which is "
            f"'{paths[0]}'. It does now.",
            stacklevel=2,
        )
        point_to(link, paths[0])
    return paths


def _set_aside(path: Path, reason: str) -> None:
    """Keeps a damaged checkpoint, under a name that nobody resumes from or stumbles over."""
    aside, number = path.with_name(f"{path.name}.damaged"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{number}")
    path.rename(aside)
    warnings.warn(
        f"Autoresume passes over '{path}', which is not good and is called '{aside.name}' now. "
        f"{reason}",
        stacklevel=2,
    )


def load_any_checkpoint(
    original: Callable[..., Any],
    path: str,
    state: State,
    logger: Any,
    object_store: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces `load_checkpoint`; where autoresume's checkpoint is damaged, takes the next one.

    Collective: yes. Runs without FSDP2 keep Composer's own loading, but for folders of shards,
    which Composer cannot read without FSDP.

    Raises:
        CheckpointError: on every rank, when it cannot be loaded exactly.
    """
    arguments = (state, logger, object_store, *args)
    folder = Path(partial_format(path, run_name=state.run_name))
    alone = state.fsdp_config is None and object_store is None and (folder / METADATA).is_file()
    if state.fsdp_config_version != 2 and not alone:
        return original(path, *arguments, **kwargs)
    link, paths = _candidates.get(state, (Path(), ()))
    if not paths or Path(path).resolve() not in (item.resolve() for item in paths):
        return load_checkpoint(path, *arguments, **kwargs)
    for number, candidate in enumerate(paths):
        try:
            states = load_checkpoint(str(candidate), *arguments, **kwargs)
        except CheckpointError as error:
            if not _is_damaged(candidate):
                raise
            if dist.get_global_rank() == 0:
                _set_aside(candidate, str(error))
            continue
        if dist.get_global_rank() == 0 and number > 0:
            point_to(link, candidate)
        return states
    raise CheckpointError(
        f"No checkpoint in '{link.parent}' is good. Starting anew would lose what was "
        "trained. Restore one of them, or start the run in another save_folder."
    )


def _is_damaged(path: Path) -> bool:
    """Whether any byte is wrong; ranks divide the work. Collective: yes."""
    damaged = False
    try:
        open_checkpoint(path).check((dist.get_global_rank(), dist.get_world_size()))
    except CheckpointError as error:
        # Whether to trust somebody is for the user to say, and no older checkpoint helps.
        damaged = not is_refusal(error)
    return any(dist.all_gather_object(damaged))
