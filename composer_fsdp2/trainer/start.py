"""Reads and checks the arguments of a Trainer with FSDP2, and shards its model.

The functions here replace methods of Composer's Trainer and State; see `patches.trainer`.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from composer import Trainer
from composer.callbacks import CheckpointSaver
from composer.core import State, Timestamp
from composer.utils import dist, ensure_tuple
from composer.utils.file_helpers import format_name_with_dist, parse_uri
from composer.utils.misc import partial_format
from composer.utils.object_store import ObjectStore

from composer_fsdp2.checkpoint.metadata import METADATA
from composer_fsdp2.checkpoint.pickles import is_refusal
from composer_fsdp2.checkpoint.source import Checkpoint, open_checkpoint
from composer_fsdp2.checkpoint.staging import REPLACED
from composer_fsdp2.checkpoint.write import point_to
from composer_fsdp2.config.schema import FSDP2Config
from composer_fsdp2.errors import CheckpointError, ConfigError
from composer_fsdp2.optim.lion_state import save_lions_as_text
from composer_fsdp2.ranks import of_rank0, raise_on_all_ranks
from composer_fsdp2.torch_private.tensors import is_compiled
from composer_fsdp2.trainer.config import concerns_fsdp2, parse_parallelism_config
from composer_fsdp2.trainer.extensions import check_extensions, items_of
from composer_fsdp2.trainer.load import load_checkpoint
from composer_fsdp2.trainer.override_attribute import override_attribute
from composer_fsdp2.trainer.prepare import TRANSFORMATIONS
from composer_fsdp2.trainer.save import check_saved_adapters, check_saved_names, note_start

__all__ = [
    "ARGUMENTS",
    "check_arguments",
    "check_save_folder",
    "fit",
    "init",
    "load_any_checkpoint",
    "refuse_later_checkpoints",
    "warn_of_shared_store",
    "wrap_model",
]


ARGUMENTS = "_fsdp2_arguments"
"""attribute of a Trainer that is being built: what it was given, by name"""
_candidates: WeakKeyDictionary[State, tuple[Path, tuple[Path, ...]]] = WeakKeyDictionary()
"""the link to the checkpoint that a run resumes from, and good checkpoints, the newest first"""
_resumed: WeakSet[State] = WeakSet()
"""runs that autoresume has moved to where they stopped, and that have not trained since"""
_PLACEHOLDER = re.compile(r"\\\{([^{}]*)\\\}")
_COUNTS = ("epoch", "batch", "sample", "token")
_COUNTS_IN_EPOCH = ("batch_in_epoch", "sample_in_epoch", "token_in_epoch")
"""counts that names of checkpoints may have, as Composer's `Timestamp` calls them"""


def init(original: Callable[..., None], trainer: Trainer, *args: Any, **kwargs: Any) -> None:
    """Replaces `Trainer.__init__`: knows what its arguments say before it is known what they mean.

    `device_train_microbatch_size: auto` is taken on a CPU too, where memory does not run out in a
    way that could be caught: a run can be tried there as it is.

    Raises:
        ConfigError: `auto` and a profiler.
    """
    try:
        given = inspect.signature(original).bind(trainer, *args, **kwargs)
    except TypeError:
        given = None  # Python says it about the original
    if given is None or not concerns_fsdp2(given.arguments.get("parallelism_config")):
        original(trainer, *args, **kwargs)
        return
    given.apply_defaults()
    asked = given.arguments
    warn_of_shared_store()
    with override_attribute(trainer, ARGUMENTS, dict(asked)):
        auto = asked["device_train_microbatch_size"] == "auto"
        if auto:
            parsed = parse_parallelism_config(asked["parallelism_config"])
            auto = parsed is not None and parsed.fsdp2 is not None
        if auto:
            if asked["profiler"] is not None:
                raise ConfigError(
                    "device_train_microbatch_size is 'auto' and there is a profiler. It would "
                    "record attempts that are thrown away. Find the size in a short run, and write "
                    "it here."
                )
            # Composer refuses `auto` beside fsdp2, and starts with the batch of a rank either way.
            asked["device_train_microbatch_size"] = None
        original(*given.args, **given.kwargs)
        if auto:
            trainer.state.auto_microbatching = True
    # Composer keeps what it has loaded there; with autoresume `load_path` is for the first start.
    if asked["autoresume"] and trainer.state.load_path not in (None, asked["load_path"]):
        _resumed.add(trainer.state)


def fit(original: Callable[..., None], trainer: Trainer, **kwargs: Any) -> None:
    """Replaces `Trainer.fit`: a run that autoresume finds at its end is complete, and no mistake.

    Collective: as the original.
    """
    state, length = trainer.state, trainer.state.max_duration
    resumed = state in _resumed
    _resumed.discard(state)
    goes_on = length is None or state.timestamp.get(length.unit) < length
    if not resumed or goes_on or kwargs.get("duration") is not None or kwargs.get("reset_time"):
        original(trainer, **kwargs)
    elif dist.get_global_rank() == 0:
        print(
            f"The run is complete: '{state.load_path}' is at the end of its max_duration, "
            f"{length}. Nothing was trained. Write a longer max_duration to go on.",
            file=sys.stderr,
            flush=True,
        )


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


def check_arguments(arguments: Mapping[str, Any], settings: FSDP2Config) -> None:
    """Refuses arguments of a Trainer that do not go with FSDP2. Collective: no.

    Raises:
        ConfigError: naming the first of them; the same on every rank.
    """
    items = items_of(arguments)
    check_extensions(items)
    for step in TRANSFORMATIONS:
        step.check_items(settings, items, arguments.get("device_train_microbatch_size"))
    whole = "the model is compiled already" if is_compiled(arguments.get("model")) else None
    if arguments.get("compile_config") is not None:
        whole = "compile_config is set"
    if settings.compile and whole is not None:
        raise ConfigError(
            f"parallelism_config.fsdp2.compile is set, and {whole}. Blocks would be compiled "
            "inside a graph that contains them. Take one of them out: blocks compile faster, and "
            "FSDP2's gathers break the graph of the whole model between them anyway."
        )


def wrap_model(
    original: Callable[..., None], trainer: Trainer, model: Any, optimizers: Any
) -> None:
    """Replaces `Trainer._wrap_model_for_distributed`, the last step before autoresume.

    Points `latest` to the newest complete checkpoint of a run that is to resume from it; what is
    newer and incomplete has been named in a warning then. Collective: yes.

    Raises:
        CheckpointError: on every rank, when the folder cannot be searched.
    """
    state: State = trainer.state
    note_start(state)
    save_lions_as_text(ensure_tuple(optimizers))
    check_saved_adapters(state)
    check_saved_names(state)
    original(trainer, model, optimizers)
    arguments: Mapping[str, Any] = getattr(trainer, ARGUMENTS, {})
    given, latest = arguments.get("save_folder"), arguments.get("save_latest_filename")
    asked = arguments.get("autoresume") and given is not None and latest is not None
    if not asked:
        return
    folder = Path(format_name_with_dist(str(given), state.run_name))
    link = folder / format_name_with_dist(str(latest), state.run_name)
    if parse_uri(str(given))[0]:
        # Composer fetches the newest file to a path that looks like its address, in the working
        # directory, and takes what an earlier resume has fetched there for the newest one:
        # https://github.com/mosaicml/composer/blob/v0.32.1/composer/trainer/trainer.py#L1890
        with contextlib.suppress(OSError):
            link.unlink()
        dist.barrier()
        _candidates[state] = link, ()
        return
    found, error = (), None
    if dist.get_global_rank() == 0 and folder.is_dir():
        try:
            found = _settle(folder, link, str(arguments["save_filename"]), state)
        except Exception as failed:  # the other ranks wait for what rank 0 finds
            error = CheckpointError(f"'{folder}' cannot be searched for checkpoints: {failed}")
    raise_on_all_ranks({}, error)
    _candidates[state] = link, of_rank0(found)


# --- Autoresume takes the newest checkpoint that is good, not the one a link points to. ---


def _settle(folder: Path, link: Path, filename: str, state: State) -> tuple[Path, ...]:
    """Returns complete checkpoints, the newest first; `latest` points to the first of them."""
    for replaced in folder.glob(f"{REPLACED}*"):  # killed while another took its place
        place_of = folder / replaced.name.removeprefix(REPLACED)
        if not place_of.exists():
            replaced.rename(place_of)
    config: Any = state.fsdp_config
    files = _pattern_of(filename, state.run_name)
    prefix = None if config is None else config.sharded_ckpt_prefix_dir
    folders = None if prefix is None else _pattern_of(prefix, state.run_name)
    good: list[tuple[int, float, Path]] = []
    for path in sorted(folder.iterdir()):
        pattern = folders if path.is_dir() else files
        if pattern is None or not pattern.fullmatch(path.name) or path.is_symlink():
            continue
        try:
            batch = _batch_of(open_checkpoint(path))
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


def _without_times(name: str, run_name: str) -> str:
    """Fills in what stays the same in names of a run, and leaves the placeholders of times."""
    # Their braces are doubled.
    same = "run_name|rank|local_rank|world_size|local_world_size|node_rank"
    name = re.sub(rf"\{{(?!(?:{same})\}})([^{{}}]*)\}}", r"{{\1}}", name)
    return format_name_with_dist(name, run_name)


def _pattern_of(name: str, run_name: str) -> re.Pattern[str]:
    """Returns a pattern of the names that saves of a run give, with a group for each count."""
    groups = set[str]()

    def number(placeholder: re.Match[str]) -> str:
        unit = re.split("[:!]", placeholder[1])[0]  # of `batch:06d`
        if unit in groups or unit not in (*_COUNTS, *_COUNTS_IN_EPOCH):
            return "[0-9]+"
        groups.add(unit)
        return f"(?P<{unit}>[0-9]+)"

    return re.compile(_PLACEHOLDER.sub(number, re.escape(_without_times(name, run_name))))


def _batch_of(saved: Checkpoint) -> int | None:
    """Returns the batch a checkpoint was saved after; None if it holds weights only."""
    key = next((k for k in saved.under("state", "timestamp") if k.endswith(".batch")), None)
    batch = None if key is None else saved.object(key)
    if batch is not None and type(batch) is not int:
        raise CheckpointError(
            f"'{saved.path}' was saved after batch {ascii(batch)[:100]}, which is no number. Its "
            "timestamp is damaged. Take another checkpoint."
        )
    return batch


# --- A run that begins anew does not write over the checkpoints of another. ---


def refuse_later_checkpoints(
    original: Callable[..., None], saver: CheckpointSaver, state: State, logger: Any
) -> None:
    """Replaces `CheckpointSaver.fit_start`, which sees files alone, and in local folders.

    Collective: yes.

    Raises:
        CheckpointError: see `check_save_folder`; on every rank.
    """
    config: Any = state.fsdp_config
    name, prefix, error = saver.filename.filename, config.sharded_ckpt_prefix_dir, None
    if saver.remote_uploader is not None and state in _candidates and int(state.timestamp.batch):
        # Later objects than autoresume has found are of uploads of this run that did not end.
        saver.overwrite = True
    try:
        if saver.overwrite:
            pass
        elif saver.remote_uploader is None or saver.remote_file_name is None:
            check_save_folder(saver.folder, name, prefix, state.run_name, state.timestamp)
        elif dist.get_global_rank() == 0:
            folder, name = saver.remote_uploader.remote_folder, saver.remote_file_name.filename
            store = saver.remote_uploader.remote_backend
            check_save_folder(folder, name, prefix, state.run_name, state.timestamp, store)
    except CheckpointError as failed:
        error = failed
    raise_on_all_ranks({}, error)
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
        folder: of the run's checkpoints.
        filename: of a full checkpoint in it; with a store, of the object.
        prefix: of a folder of shards, which lies where the file would.
        run_name: of the run.
        now: when the run begins.
        store: where `folder` is, if it is remote.

    Raises:
        CheckpointError: such checkpoints are there, or the store cannot be asked.
    """
    folder = format_name_with_dist(folder, run_name)
    later: dict[str, tuple[int, ...]] = {}
    for name in (filename, str(PurePosixPath(filename).parent / prefix)):
        pattern = _pattern_of(name, run_name)
        # In a store a folder is the beginning of names.
        whole = re.compile(rf"(?<![^/]){pattern.pattern}(?=/|\Z)")
        constant = _without_times(name, run_name).partition("{")[0]
        found = _local_names(folder, name) if store is None else _objects(store, constant, folder)
        for match in filter(None, map(whole.search, found)):
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


def _local_names(folder: str, name: str) -> list[str]:
    """Returns what lies as deep in a folder as the name, relative to it."""
    found = Path(folder).glob("/".join("*" * len(PurePosixPath(name).parts)))
    return [path.relative_to(folder).as_posix() for path in found]


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
            batch = _batch_of(open_checkpoint(path))
        except CheckpointError:
            return True
        return batch is None or batch > now.batch
    same_epoch = counts.get("epoch") == int(now.epoch)
    return any(
        count > int(getattr(now, unit))
        for unit, count in counts.items()
        if unit in _COUNTS or same_epoch
    )


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
    """Replaces `load_checkpoint`; of what autoresume has found and is damaged, takes the next one.

    Collective: yes. Runs without FSDP2 keep Composer's own loading, but for folders of shards,
    which Composer cannot read without FSDP.

    Raises:
        CheckpointError: on every rank, when it cannot be loaded exactly.
    """
    given = (state, logger, object_store, *args)
    folder = Path(partial_format(path, run_name=state.run_name))
    alone = state.fsdp_config is None and object_store is None and (folder / METADATA).is_file()
    if state.fsdp_config_version != 2 and not alone:
        return original(path, *given, **kwargs)
    link, paths = _candidates.get(state, (Path(), ()))
    if not paths or Path(path).resolve() not in (item.resolve() for item in paths):
        return load_checkpoint(path, *given, **kwargs)
    for number, candidate in enumerate(paths):
        try:
            states = load_checkpoint(str(candidate), *given, **kwargs)
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
