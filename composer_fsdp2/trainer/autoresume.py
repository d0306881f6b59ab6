"""Autoresume takes the newest checkpoint that is good, not the one a link happens to point to."""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer import Trainer
from composer.core import State
from composer.utils import dist
from composer.utils.file_helpers import format_name_with_dist, parse_uri

from composer_fsdp2.checkpoint.pickles import is_refusal
from composer_fsdp2.checkpoint.source import Checkpoint, open_checkpoint
from composer_fsdp2.checkpoint.staging import REPLACED
from composer_fsdp2.checkpoint.write import point_to
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.ranks import raise_on_all_ranks
from composer_fsdp2.trainer.compile_once import note_compiled_whole
from composer_fsdp2.trainer.fetch import set_node_rank
from composer_fsdp2.trainer.load import load_checkpoint

__all__ = ["load_newest_good", "note_autoresume", "settle_autoresume", "warn_of_shared_store"]

_ASKED = "_fsdp2_autoresume"
_CANDIDATES = "_fsdp2_candidates"
_PLACEHOLDER = re.compile(r"\\\{[^{}]*\\\}")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a run's checkpoints are."""

    folder: str
    filename: str
    latest: str


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Good ones, the newest first, and the link that is to point to the one that is taken."""

    link: Path
    paths: tuple[Path, ...]


def note_autoresume(original: Callable[..., None], trainer: Trainer, *args: Any, **kw: Any) -> None:
    """Replaces `Trainer.__init__`: remembers what only its arguments say."""
    set_node_rank()
    warn_of_shared_store()
    bound = inspect.signature(original).bind(trainer, *args, **kw)
    bound.apply_defaults()
    given = bound.arguments
    folder, latest = given["save_folder"], given["save_latest_filename"]
    if given["autoresume"] and folder is not None and latest is not None:
        place = _Place(str(folder), str(given["save_filename"]), str(latest))
        setattr(trainer, _ASKED, place)
    note_compiled_whole(trainer, given["model"], given["compile_config"])
    original(trainer, *args, **kw)


def warn_of_shared_store() -> None:
    """Tells what keeps ranks that torchrun starts again from meeting. Collective: no.

    Source: torch.distributed.elastic.rendezvous, whose handlers keep the store of the first attempt
    for all others; the ranks find the addresses of the dead in it (pytorch issue 135712).
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if shared and restarts != "0" and os.environ.get("RANK") == "0":
        warnings.warn(
            f"torchrun may start the ranks again {restarts} times, but lets all attempts share one "
            "store. Ranks then look for each other where those of the last attempt were, and hang "
            "or fail. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started, and "
            "start it with --rdzv-backend=c10d or --standalone: its default does not look at that.",
            stacklevel=2,
        )


def settle_autoresume(
    original: Callable[..., None], trainer: Trainer, model: Any, optimizers: Any
) -> None:
    """Replaces `Trainer._wrap_model_for_distributed`, the last step before autoresume.

    Collective: yes. Afterwards `latest` points to the newest complete checkpoint of the run, and
    what is newer and incomplete has been named in a warning.
    """
    original(trainer, model, optimizers)
    place: _Place | None = getattr(trainer, _ASKED, None)
    if place is None or parse_uri(place.folder)[0]:
        return
    folder = Path(format_name_with_dist(place.folder, trainer.state.run_name))
    link = folder / format_name_with_dist(place.latest, trainer.state.run_name)
    found: list[Any] = [()]
    error = None
    if dist.get_global_rank() == 0 and folder.is_dir():
        try:
            found = [tuple(_settle(folder, link, place, trainer.state))]
        except Exception as failed:  # the other ranks wait for what rank 0 finds
            error = CheckpointError(f"'{folder}' cannot be searched for checkpoints: {failed}")
    raise_on_all_ranks({}, error)
    dist.broadcast_object_list(found, src=0)
    setattr(trainer.state, _CANDIDATES, _Candidates(link, found[0]))


def _settle(folder: Path, link: Path, place: _Place, state: State) -> Iterator[Path]:
    """Complete checkpoints, the newest first; `latest` points to the first of them."""
    for replaced in folder.glob(f"{REPLACED}*"):  # killed while another took its place
        place_of = folder / replaced.name.removeprefix(REPLACED)
        if not place_of.exists():
            replaced.rename(place_of)
    good: list[tuple[int, float, Path]] = []
    for path in _named_like_checkpoints(folder, place, state):
        try:
            batch = _batch_of(open_checkpoint(path))
        except CheckpointError as error:
            if is_refusal(error):  # whether to trust somebody is for the user to say
                raise
            _set_aside(path, str(error))
            continue
        if batch is not None:
            good.append((batch, path.stat().st_mtime, path))
    good.sort(reverse=True)
    for number, (_, _, path) in enumerate(good):
        if number == 0 and (not link.exists() or link.resolve() != path.resolve()):
            warnings.warn(
                f"Autoresume: '{link}' does not point to the newest complete checkpoint, which is "
                f"'{path}'. It does now.",
                stacklevel=2,
            )
            point_to(link, path)
        yield path


def _named_like_checkpoints(folder: Path, place: _Place, state: State) -> Iterator[Path]:
    """Folders and files that a save of this run may have written, complete or not."""
    config: Any = state.fsdp_config
    files = _pattern_of(place.filename, state)
    folders = None if config is None else _pattern_of(config.sharded_ckpt_prefix_dir, state)
    for path in sorted(folder.iterdir()):
        pattern = folders if path.is_dir() else files
        if pattern is not None and pattern.fullmatch(path.name) and not path.is_symlink():
            yield path


def _pattern_of(name: str, state: State) -> re.Pattern[str]:
    written = re.escape(format_name_with_dist(_keep_time(name), state.run_name))
    return re.compile(_PLACEHOLDER.sub("[0-9]+", written))


def _keep_time(name: str) -> str:
    """Doubles the braces of everything but the run's name and ranks, which stay the same."""
    same = "run_name|rank|local_rank|world_size|local_world_size|node_rank"
    return re.sub(rf"\{{(?!(?:{same})\}})([^{{}}]*)\}}", r"{{\1}}", name)


def _batch_of(saved: Checkpoint) -> int | None:
    """The batch a checkpoint was saved after; None if it holds weights only."""
    key = next((k for k in saved.under("state", "timestamp") if k.endswith(".batch")), None)
    batch = None if key is None else saved.object(key)
    if batch is not None and type(batch) is not int:
        raise CheckpointError(
            f"'{saved.path}' was saved after batch {ascii(batch)[:100]}, which is no number. Its "
            "timestamp is damaged. Take another checkpoint."
        )
    return batch


def _set_aside(path: Path, reason: str) -> None:
    """Keeps a damaged checkpoint, under a name that nobody resumes from or stumbles over."""
    aside = path.with_name(f"{path.name}.damaged")
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{number}")
    path.rename(aside)
    warnings.warn(
        f"Autoresume passes over '{path}', which is not good and is called '{aside.name}' now. "
        f"{reason}",
        stacklevel=2,
    )


def load_newest_good(path: str, state: State, *args: Any, **kwargs: Any) -> Any:
    """Loads a checkpoint; when autoresume found it and it is damaged, the next older one.

    Collective: yes. The arguments are those of `composer.utils.checkpoint.load_checkpoint`.

    Raises:
        CheckpointError: on every rank, when it cannot be loaded exactly.
    """
    candidates: _Candidates | None = getattr(state, _CANDIDATES, None)
    if candidates is None or not candidates.paths:
        return load_checkpoint(path, state, *args, **kwargs)
    if Path(path).resolve() not in (item.resolve() for item in candidates.paths):
        return load_checkpoint(path, state, *args, **kwargs)
    for candidate in candidates.paths:
        try:
            found = load_checkpoint(str(candidate), state, *args, **kwargs)
        except CheckpointError as error:
            if not _is_damaged(candidate):
                raise
            if dist.get_global_rank() == 0:
                _set_aside(candidate, str(error))
            continue
        if dist.get_global_rank() == 0 and candidate != candidates.paths[0]:
            point_to(candidates.link, candidate)
        return found
    raise CheckpointError(
        f"No checkpoint in '{candidates.link.parent}' is good. Starting anew would lose what was "
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
